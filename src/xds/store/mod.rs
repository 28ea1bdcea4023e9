//! The resources of Istio's discovery, decoded, and the mesh that they make.
//!
//! A workload may come before its service, and a service without workloads: the builder joins
//! them. Of several services with one hostname it lets the canonical one answer. A resource that
//! is rejected leaves its last good version where it was.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use prost::Message;

use super::client::{Resource, ResourceStore, Response};
use super::count::Count;
use super::exports::{self, Exports};
use super::words::Words;
use super::{authorization, wds};
use crate::grpc::{security, workload as proto};
use crate::snapshot::authorization::{Policy, PolicyScope};
use crate::snapshot::mesh::{Mesh, Service, Workload};
use crate::snapshot::{ExportSet, Policies, Shards};

/// The type of services and workloads.
pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
/// The type of authorization policies.
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// The type of clusters, of which only the names are read: under Istio they are the export set.
pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// The largest body of one resource: Kubernetes takes objects of 1.5 MiB.
pub(super) const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
/// What all lists of services and workloads have, of some 40 bytes each.
const ENDPOINTS_MAX: usize = 4_000_000;
/// Rules, clauses, matches and entries of lists of all policies; the largest, a match, has some 300
/// bytes.
const POLICY_PARTS_MAX: usize = 1_000_000;

/// What discovery has told, by the names of the resources.
#[derive(Debug, Default)]
pub struct Store {
    services: Shards<Arc<str>, Arc<Service>>,
    workloads: Shards<Arc<str>, Arc<Workload>>,
    policies: BTreeMap<Arc<str>, Arc<Policy>>,
    /// How much they are, for the limits.
    endpoints: usize,
    policy_parts: usize,
    words: Words,
    changed: bool,
    policies_changed: bool,
    policies_told: bool,
    exports: Exports,
}

impl Store {
    /// The mesh, if it has changed since this was called last.
    pub fn take_change(&mut self) -> Option<Mesh> {
        mem::take(&mut self.changed).then(|| self.mesh())
    }

    /// The export set, if it has changed since this was called last.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        self.exports.take_change()
    }

    /// The policies, if they were told and have changed since this was called last. Those of a
    /// response that left the type pending would pass for all there are.
    pub fn take_policies(&mut self) -> Option<Policies> {
        let changed = self.policies_told && mem::take(&mut self.policies_changed);
        changed.then(|| self.policies())
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
                let workload = wds::workload(&resource.name, from, &mut self.words)?;
                self.put_workload(workload)?;
            }
            Some(proto::address::Type::Service(from)) => {
                let name = format!("{}/{}", from.namespace, from.hostname);
                let service = wds::service(from)?;
                is_named(resource, "service.hostname", &name)?;
                let old = self.services.get(&resource.name);
                if old.is_none_or(|old| **old != service) {
                    self.count(
                        "service.ports",
                        self.counted(&resource.name),
                        service.count(),
                    )?;
                    self.workloads.remove(&resource.name);
                    // Workloads name their services by the same word.
                    let name = self.words.share_arc(&resource.name);
                    self.services.insert(name, Arc::new(service));
                    self.changed = true;
                }
            }
            None => return Err("address.type: neither workload nor service".to_owned()),
        }
        Ok(())
    }

    fn put_workload(&mut self, workload: Workload) -> Result<(), String> {
        let old = self.workloads.get(&workload.uid);
        if old.is_some_and(|old| **old == workload) {
            return Ok(());
        }
        let counted = match old {
            Some(old) => old.count(),
            None => self
                .services
                .get(&workload.uid)
                .map_or(0, |old| old.count()),
        };
        self.count("workload.services", counted, workload.count())?;
        self.services.remove(&workload.uid);
        self.workloads
            .insert(Arc::clone(&workload.uid), Arc::new(workload));
        self.changed = true;
        Ok(())
    }

    /// Notes what the lists of a service or workload have, in place of what is known by the name.
    fn count(&mut self, field: &str, old: usize, new: usize) -> Result<(), String> {
        let all = self.endpoints - old + new;
        if all > ENDPOINTS_MAX && all > self.endpoints {
            return Err(format!(
                "{field}: {all} endpoints with these, and at most {ENDPOINTS_MAX} are taken"
            ));
        }
        self.endpoints = all;
        Ok(())
    }

    fn counted(&self, name: &str) -> usize {
        let workload = self.workloads.get(name).map(|old| old.count());
        let service = self.services.get(name).map(|old| old.count());
        workload.or(service).unwrap_or(0)
    }

    fn remove_address(&mut self, name: &str) {
        self.endpoints -= self.counted(name);
        self.changed |= self.workloads.remove(name).is_some();
        self.changed |= self.services.remove(name).is_some();
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
            let scope = authorization::scope(message.scope).unwrap_or(PolicyScope::Global);
            (scope, message.dry_run)
        });
        let policy = message.and_then(|message| {
            let name = format!("{}/{}", message.namespace, message.name);
            authorization::reject_unknown_fields(resource.body.as_deref().unwrap_or_default())?;
            let policy = authorization::policy(message)?;
            is_named(resource, "authorization.name", &name)?;
            let old = self.policies.get(&resource.name);
            let others = self.policy_parts - old.map_or(0, |old| old.size());
            let parts = others + policy.size();
            match parts > POLICY_PARTS_MAX {
                true => Err(format!(
                    "authorization.rules: {parts} rules, clauses, matches and entries with these, \
                     and at most {POLICY_PARTS_MAX} are taken"
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
                let (scope, dry_run) = covers.unwrap_or((PolicyScope::Global, false));
                (
                    authorization::deny_all_placeholder(&resource.name, scope, dry_run),
                    Err(why),
                )
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
        let [before, after] = [&old, &new].map(|one| one.as_deref().map_or(0, Policy::size));
        self.policy_parts = self.policy_parts - before + after;
        if old.as_ref().map(Arc::as_ptr) != new.as_ref().map(Arc::as_ptr) {
            self.policies_changed = true;
        }
        self.policies.extend(new.map(|new| (name.into(), new)));
    }
}

impl ResourceStore for Store {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        match type_url {
            ADDRESS => self.upsert_address(resource),
            AUTHORIZATION => self.upsert_policy(resource),
            CLUSTER => {
                self.exports.insert(&resource.name);
                Ok(())
            }
            _ => Err(format!("resources of type {type_url} are not kept here")),
        }
    }

    /// A policy that was sent without a body, say, covers nobody knows what.
    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        if type_url == AUTHORIZATION && !self.policies.contains_key(name) {
            let policy = authorization::deny_all_placeholder(name, PolicyScope::Global, false);
            self.put_policy(name, Some(policy));
        }
        self.has_stand_in(type_url, name)
    }

    /// Clusters have large bodies, and only their names count.
    fn uses_bodies(&self, type_url: &str) -> bool {
        type_url != CLUSTER
    }

    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        type_url == CLUSTER && exports::is_whole(response)
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        match type_url {
            CLUSTER => self.exports.remove(name),
            ADDRESS => self.remove_address(name),
            AUTHORIZATION => self.put_policy(name, None),
            _ => {}
        }
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
pub(super) fn is_named(resource: &Resource, field: &str, name: &str) -> Result<(), String> {
    if *resource.name == *name {
        return Ok(());
    }
    let (name, own) = (wds::shown(name), wds::shown(&resource.name));
    Err(format!("{field}: {name} is named {own}"))
}
