//! The resources of Istio's discovery, decoded, and the mesh that they make.
//!
//! A workload may come before its service, and a service without workloads: the builder joins
//! them. Of several services with one hostname it lets the canonical one answer. A resource that
//! is rejected leaves its last good version where it was.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use prost::Message;

use super::client::{Resource, Resources};
use super::names::normal_hostname;
use super::words::Words;
use super::{authorization, wds};
use crate::grpc::{security, workload as proto};
use crate::snapshot::authorization::{Policy, Scope};
use crate::snapshot::mesh::{Mesh, Ports, Service, Workload};
use crate::snapshot::{ExportSet, Policies, Shards};

/// The type of services and workloads.
pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
/// The type of authorization policies.
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// The type of clusters, of which only the names are read: under Istio they are the export set.
pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// The largest body of one resource: Kubernetes takes objects of 1.5 MiB.
const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Endpoints of all workloads: each of their ports for each of their services, of some 40 bytes.
const ENDPOINTS_MAX: usize = 4_000_000;
/// Matches of all policies, of some 300 bytes.
const MATCHES_MAX: usize = 1_000_000;

/// What discovery has told, by the names of the resources.
#[derive(Debug, Default)]
pub struct Store {
    services: Shards<Arc<str>, Arc<Service>>,
    workloads: Shards<Arc<str>, Arc<Workload>>,
    policies: BTreeMap<Arc<str>, Arc<Policy>>,
    /// How much they are, for the limits.
    endpoints: usize,
    matches: usize,
    words: Words,
    changed: bool,
    services_changed: bool,
    policies_changed: bool,
    policies_told: bool,
    /// The hostnames and ports of clusters that export a service.
    exports: BTreeSet<(String, u16)>,
    exports_changed: bool,
}

impl Store {
    /// The mesh, if it has changed since this was called last.
    pub fn take_change(&mut self) -> Option<Mesh> {
        mem::take(&mut self.changed).then(|| self.mesh())
    }

    /// Whether a service has changed since this was called last.
    pub fn take_services_changed(&mut self) -> bool {
        mem::take(&mut self.services_changed)
    }

    /// The export set, if it has changed since this was called last.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        let exports = || {
            self.exports
                .iter()
                .map(|(host, port)| (host.as_str(), *port))
        };
        mem::take(&mut self.exports_changed).then(|| exports().collect())
    }

    /// The policies, if they have changed since this was called last.
    pub fn take_policies(&mut self) -> Option<Policies> {
        mem::take(&mut self.policies_changed).then(|| self.policies())
    }

    /// The policies.
    pub fn policies(&self) -> Policies {
        self.policies.values().cloned().collect()
    }

    /// The control plane has told its policies, be it that there is none.
    pub fn told_policies(&mut self) {
        self.policies_changed |= !mem::replace(&mut self.policies_told, true);
    }

    /// The mesh.
    pub fn mesh(&self) -> Mesh {
        Mesh {
            services: self.services.clone(),
            workloads: self.workloads.clone(),
            hbone_only: true,
        }
    }

    /// Whether what is known by this name only stands in for a policy that cannot be read.
    pub fn has_stand_in(&self, type_url: &str, name: &str) -> bool {
        let policy = self.policies.get(name);
        type_url == AUTHORIZATION && policy.is_some_and(|policy| policy.unreadable)
    }

    fn upsert_address(&mut self, resource: &Resource) -> Result<(), String> {
        let address: proto::Address = decode(ADDRESS, resource)?;
        match address.r#type {
            Some(proto::address::Type::Workload(from)) => {
                is_named(resource, "workload.uid", &from.uid)?;
                let workload = wds::workload(from, &mut self.words)?;
                self.put_workload(resource, workload)?;
            }
            Some(proto::address::Type::Service(from)) => {
                let name = format!("{}/{}", from.namespace, from.hostname);
                let service = wds::service(from)?;
                is_named(resource, "service.hostname", &name)?;
                self.remove_workload(&resource.name);
                let old = self.services.get(&resource.name);
                if old.is_none_or(|old| **old != service) {
                    let name = Arc::clone(&resource.name);
                    self.services.insert(name, Arc::new(service));
                    (self.changed, self.services_changed) = (true, true);
                }
            }
            None => return Err("address.type: neither workload nor service".to_owned()),
        }
        Ok(())
    }

    fn put_workload(&mut self, resource: &Resource, mut workload: Workload) -> Result<(), String> {
        workload.uid = Arc::clone(&resource.name);
        let old = self.workloads.get(&workload.uid);
        if old.is_some_and(|old| **old == workload) {
            return Ok(());
        }
        let count = |workload: &Workload| workload.services.values().map(Ports::len).sum::<usize>();
        let others = self.endpoints - old.map_or(0, |old| count(old));
        let all = others + count(&workload);
        if all > ENDPOINTS_MAX && all > self.endpoints {
            return Err(format!(
                "workload.services: {all} endpoints with these, and at most {ENDPOINTS_MAX} are \
                 taken"
            ));
        }
        self.endpoints = all;
        self.services.remove(&workload.uid);
        self.workloads
            .insert(Arc::clone(&workload.uid), Arc::new(workload));
        self.changed = true;
        Ok(())
    }

    fn remove_workload(&mut self, name: &str) {
        if let Some(old) = self.workloads.remove(name) {
            self.endpoints -= old.services.values().map(Ports::len).sum::<usize>();
            self.changed = true;
        }
    }

    /// A policy that cannot be read and has no last good version is known by what stands in for
    /// it, which refuses all that it covers: everything, where not even that can be read.
    fn upsert_policy(&mut self, resource: &Resource) -> Result<(), String> {
        let message = decode::<security::Authorization>(AUTHORIZATION, resource);
        // Under another name than its own, nobody can say what selects it.
        let own = |message: &security::Authorization| {
            format!("{}/{}", message.namespace, message.name) == *resource.name
        };
        let covers = message.as_ref().ok().filter(|message| own(message));
        let covers = covers.map(|message| {
            let scope = authorization::scope(message.scope).unwrap_or(Scope::Global);
            (scope, message.dry_run)
        });
        let policy = message.and_then(|message| {
            let name = format!("{}/{}", message.namespace, message.name);
            authorization::known_fields(resource.body.as_deref().unwrap_or_default())?;
            let policy = authorization::policy(message)?;
            is_named(resource, "authorization.name", &name)?;
            let old = self.policies.get(&resource.name);
            let others = self.matches - old.map_or(0, |old| old.matches_held());
            let matches = others + policy.matches_held();
            match matches > MATCHES_MAX {
                true => Err(format!(
                    "authorization.rules: {matches} matches with these, and at most {MATCHES_MAX} \
                     are taken"
                )),
                false => Ok(policy),
            }
        });
        let has_good = || {
            let known = self.policies.get(&resource.name);
            known.is_some_and(|known| !known.unreadable)
        };
        let (policy, result) = match policy {
            Ok(policy) => (policy, Ok(())),
            Err(why) if has_good() => return Err(why),
            Err(why) => {
                let (scope, dry_run) = covers.unwrap_or((Scope::Global, false));
                (stand_in(&resource.name, scope, dry_run), Err(why))
            }
        };
        self.put_policy(&resource.name, Some(policy));
        result
    }

    /// Puts a policy in, or takes it out.
    fn put_policy(&mut self, name: &str, policy: Option<Policy>) {
        let old = self.policies.remove(name);
        let new = policy.map(|new| match &old {
            Some(old) if **old == new => Arc::clone(old),
            _ => Arc::new(new),
        });
        let [before, after] =
            [&old, &new].map(|one| one.as_deref().map_or(0, Policy::matches_held));
        self.matches = self.matches - before + after;
        if old.as_ref().map(Arc::as_ptr) != new.as_ref().map(Arc::as_ptr) {
            self.policies_changed = true;
        }
        self.policies.extend(new.map(|new| (name.into(), new)));
    }
}

impl Resources for Store {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        match type_url {
            ADDRESS => self.upsert_address(resource),
            AUTHORIZATION => self.upsert_policy(resource),
            CLUSTER => {
                // Clusters that export nothing, as the one for what is blocked, are no concern.
                let export = exported(&resource.name);
                self.exports_changed |= export.is_some_and(|export| self.exports.insert(export));
                Ok(())
            }
            _ => Err(format!("resources of type {type_url} are not kept here")),
        }
    }

    /// A policy that was sent without a body, say, covers nobody knows what.
    fn rejected(&mut self, type_url: &'static str, name: &str) -> bool {
        if type_url == AUTHORIZATION && !self.policies.contains_key(name) {
            let policy = stand_in(name, Scope::Global, false);
            self.put_policy(name, Some(policy));
        }
        self.has_stand_in(type_url, name)
    }

    /// A workload is wanted with each of its services.
    fn members_of(&self, type_url: &'static str, name: &str) -> Vec<Arc<str>> {
        let workload = self.workloads.get(name).filter(|_| type_url == ADDRESS);
        let services = workload.into_iter().flat_map(|one| one.services.keys());
        services.cloned().collect()
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        if type_url == CLUSTER {
            let export = exported(name);
            self.exports_changed |= export.is_some_and(|export| self.exports.remove(&export));
            return;
        }
        match type_url {
            ADDRESS => {
                self.remove_workload(name);
                if self.services.remove(name).is_some() {
                    (self.changed, self.services_changed) = (true, true);
                }
            }
            AUTHORIZATION => self.put_policy(name, None),
            _ => {}
        }
    }
}

/// What refuses all that a policy of this name would cover.
fn stand_in(name: &str, scope: Scope, dry_run: bool) -> Policy {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    Policy::unreadable(namespace.to_owned(), name.to_owned(), scope, dry_run)
}

/// What a cluster exports by its name, `inbound-vip|PORT|tcp|HOST` (contract 2.5).
fn exported(name: &str) -> Option<(String, u16)> {
    let mut parts = name.split('|');
    let parts = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
    match parts {
        ["inbound-vip", port, "tcp", host] => Some((normal_hostname(host)?, port.parse().ok()?)),
        _ => None,
    }
}

fn decode<T: Message + Default>(wanted: &str, resource: &Resource) -> Result<T, String> {
    if resource.body_type != wanted {
        let got = wds::shown(&resource.body_type);
        return Err(format!("resource.type_url: {got}, want `{wanted}`"));
    }
    let body = resource.body.clone().ok_or("resource: missing")?;
    if body.len() > BODY_BYTES_MAX {
        let bytes = body.len();
        return Err(format!(
            "resource: {bytes} bytes, and at most {BODY_BYTES_MAX} are taken"
        ));
    }
    T::decode(body).map_err(|error| error.to_string())
}

/// A resource is removed by its name, so the name has to be that of what is in it.
fn is_named(resource: &Resource, field: &str, name: &str) -> Result<(), String> {
    if *resource.name == *name {
        return Ok(());
    }
    let (name, own) = (wds::shown(name), wds::shown(&resource.name));
    Err(format!("{field}: {name} is named {own}"))
}
