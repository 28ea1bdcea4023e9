//! Store of decoded resources from Istio's discovery, and source of the mesh built from them.
//!
//! Resources arrive in any order: a workload may precede its service. The builder joins them, and
//! prefers the canonical one of several services with one hostname. A rejected resource keeps its
//! last good version in force.

#[cfg(test)]
mod tests;

mod address;
mod ahead;
mod alike;

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::sync::Arc;

use prost::Message as _;

use self::address::{Address, body, read_address};
use self::ahead::Ahead;
use super::authorization;
use super::client::{Resource, ResourceStore, Response};
use super::convert::At as _;
use super::interner::Interner;
use super::tables::{MeshStore, Tables, has_all_clusters};
use crate::grpc::security;
use crate::snapshot::Policies;
use crate::snapshot::authorization::{Policy, PolicyScope};
use crate::snapshot::mesh::{Service, Workload};

pub use self::address::ADDRESS;
pub(super) use self::address::{BODY_BYTES_MAX, is_named, is_workload};

pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// Type URL of clusters. Only their names are read: under Istio they are the export set.
pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

/// Limit of the list entries of all services and workloads, about 40 bytes each.
const ENDPOINTS_MAX: usize = 4_000_000;
/// Limit of the rules, clauses, matches and list entries of all policies. A match, the largest,
/// takes about 300 bytes. A namespace has at most half of what the others leave.
const POLICY_PARTS_MAX: usize = 1_000_000;

/// Resources received from discovery, by resource name.
#[derive(Debug)]
pub struct Store {
    /// Services, workloads and exports.
    pub tables: Tables,
    policies: BTreeMap<Arc<str>, Arc<Policy>>,
    /// Number of list entries, compared with the limit.
    endpoints: usize,
    /// Number of parts of the policies of each namespace, and of all.
    policy_parts: HashMap<String, usize>,
    all_policy_parts: usize,
    /// Of addresses; `ahead` has it while that decodes.
    interner: Interner,
    ahead: Option<Ahead>,
    policies_changed: bool,
    policies_received: bool,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            tables: Tables::new(true),
            policies: BTreeMap::new(),
            endpoints: 0,
            policy_parts: HashMap::new(),
            all_policy_parts: 0,
            interner: Interner::default(),
            ahead: None,
            policies_changed: false,
            policies_received: false,
        }
    }
}

impl Store {
    pub fn policies(&self) -> Policies {
        self.policies.values().cloned().collect()
    }

    fn upsert_address(&mut self, resource: &Resource) -> Result<(), String> {
        let (name, body) = (&resource.name, body(ADDRESS, resource)?);
        let address = match self.ahead.as_mut().and_then(|ahead| ahead.take(name)) {
            Some(address) => address,
            None => {
                self.finish_ahead();
                read_address(name, body.clone(), &mut self.interner)
            }
        };
        match address? {
            Address::Workload(workload) => {
                let old = self.tables.workloads.get(&workload.uid);
                if old.is_some_and(|old| **old == workload) {
                    return Ok(());
                }
                let is_service = old.is_none() && self.tables.services.contains_key(name);
                let old = match (old, is_service) {
                    (Some(old), _) => workload_entries(old),
                    (None, true) => self.counted(name),
                    (None, false) => 0,
                };
                self.count(old, workload_entries(&workload)).at("workload.services")?;
                if is_service {
                    self.tables.remove_service(name);
                }
                self.tables.insert_workload(workload);
            }
            Address::Service(interned, service) => {
                let old = self.tables.services.get(name);
                if old.is_some_and(|old| **old == service) {
                    return Ok(());
                }
                self.count(self.counted(name), service_entries(&service)).at("service.ports")?;
                self.tables.remove_workload(name);
                self.tables.put_service(interned, service);
            }
        }
        Ok(())
    }

    fn finish_ahead(&mut self) {
        if let Some(ahead) = self.ahead.take() {
            self.interner = ahead.finish();
        }
    }

    /// Replaces the number of list entries of a resource, `old`, in the total.
    ///
    /// # Errors
    /// The total exceeds its limit and grows.
    fn count(&mut self, old: usize, new: usize) -> Result<(), String> {
        let all = self.endpoints - old + new;
        if all > ENDPOINTS_MAX && all > self.endpoints {
            return Err(format!("{all} endpoints with these, want at most {ENDPOINTS_MAX}"));
        }
        self.endpoints = all;
        Ok(())
    }

    fn counted(&self, name: &str) -> usize {
        let workload = self.tables.workloads.get(name);
        let service = || self.tables.services.get(name);
        workload
            .map(|old| workload_entries(old))
            .or_else(|| service().map(|old| service_entries(old)))
            .unwrap_or(0)
    }

    fn remove_address(&mut self, name: &str) {
        self.endpoints -= self.counted(name);
        self.tables.remove_workload(name);
        self.tables.remove_service(name);
    }

    /// Stores a policy. One that cannot be read and has no last good version is replaced by a
    /// placeholder that denies all that it covers. The placeholder covers everything if its scope
    /// is unreadable too.
    fn upsert_policy(&mut self, resource: &Resource) -> Result<(), String> {
        let message = body(AUTHORIZATION, resource).and_then(|body| {
            security::Authorization::decode(&**body).map_err(|error| error.to_string())
        });
        let body = resource.body.as_deref().unwrap_or_default();
        let covers = authorization::covered(body, &resource.name);
        let policy = message.and_then(|message| {
            let name = format!("{}/{}", message.namespace, message.name);
            authorization::reject_unknown_fields(body)?;
            let policy = authorization::policy(message)?;
            is_named(&resource.name, "authorization.name", &name)?;
            self.check_policy_parts(&resource.name, &policy)?;
            Ok(policy)
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
                (authorization::deny_all_placeholder(&resource.name, scope, dry_run), Err(why))
            }
        };
        self.put_policy(&resource.name, Some(policy));
        result
    }

    /// Checks that a namespace leaves as many parts free as its policies have, so that those of one
    /// tenant do not take all.
    fn check_policy_parts(&self, name: &str, policy: &Policy) -> Result<(), String> {
        let old = self.policies.get(name).map_or(0, |old| old.size());
        let own = self.policy_parts.get(&policy.namespace).copied().unwrap_or_default();
        let others = self.all_policy_parts - own;
        let parts = own.saturating_sub(old) + policy.size();
        let most = POLICY_PARTS_MAX.saturating_sub(others) / 2;
        if parts > most && policy.size() > old {
            return Err(format!(
                "authorization.rules: {parts} rules, clauses, matches and entries with those of \
                 the namespace, want at most {most}"
            ));
        }
        Ok(())
    }

    fn put_policy(&mut self, name: &str, policy: Option<Policy>) {
        let old = self.policies.remove(name);
        let new = policy.map(|new| match &old {
            Some(old) if **old == new => Arc::clone(old),
            _ => Arc::new(new),
        });
        if let Some(old) = &old {
            self.all_policy_parts -= old.size();
            if let Some(parts) = self.policy_parts.get_mut(&old.namespace) {
                *parts -= old.size();
                if *parts == 0 {
                    self.policy_parts.remove(&old.namespace);
                }
            }
        }
        if let Some(new) = &new {
            self.all_policy_parts += new.size();
            *self.policy_parts.entry(new.namespace.clone()).or_default() += new.size();
        }
        if old.as_ref().map(Arc::as_ptr) != new.as_ref().map(Arc::as_ptr) {
            self.policies_changed = true;
        }
        self.policies.extend(new.map(|new| (name.into(), new)));
    }
}

impl ResourceStore for Store {
    fn announce_upserts(&mut self, type_url: &'static str, resources: &[&Resource]) {
        if type_url == ADDRESS {
            self.finish_ahead();
            self.tables.workloads.reserve(resources.len());
            self.ahead = Ahead::start(&mut self.interner, resources);
        }
    }

    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        match type_url {
            ADDRESS => self.upsert_address(resource),
            AUTHORIZATION => self.upsert_policy(resource),
            CLUSTER => {
                self.tables.add_export(&resource.name);
                Ok(())
            }
            _ => Err(format!("unsupported type {type_url}")),
        }
    }

    /// Installs a deny-all placeholder of global scope for a policy of unknown scope, such as one
    /// without a body.
    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        if type_url == AUTHORIZATION && !self.policies.contains_key(name) {
            let policy = authorization::deny_all_placeholder(name, PolicyScope::Global, false);
            self.put_policy(name, Some(policy));
        }
        self.has_placeholder(type_url, name)
    }

    /// Returns false for clusters: their bodies are large, and only their names are used.
    fn uses_bodies(&self, type_url: &str) -> bool {
        type_url != CLUSTER
    }

    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        type_url == CLUSTER && has_all_clusters(response)
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        match type_url {
            CLUSTER => self.tables.remove_export(name),
            ADDRESS => self.remove_address(name),
            AUTHORIZATION => self.put_policy(name, None),
            _ => {}
        }
    }
}

impl MeshStore for Store {
    fn tables(&mut self) -> &mut Tables {
        &mut self.tables
    }

    /// Returns none for a partial set, from a response that left the type pending.
    fn take_policies(&mut self) -> Option<Policies> {
        let changed = self.policies_received && mem::take(&mut self.policies_changed);
        changed.then(|| self.policies())
    }

    fn set_policies_received(&mut self) {
        self.policies_changed |= !mem::replace(&mut self.policies_received, true);
        self.tables.add_new();
    }

    fn await_policies(&mut self) -> bool {
        if self.policies_received {
            self.tables.keep_back();
        }
        self.policies_received
    }

    fn has_placeholder(&self, type_url: &str, name: &str) -> bool {
        let policy = self.policies.get(name);
        type_url == AUTHORIZATION && policy.is_some_and(|policy| policy.unreadable)
    }
}

/// Returns the number of policies and endpoints of a workload: its ports per service, or one for a
/// service without ports.
fn workload_entries(workload: &Workload) -> usize {
    let endpoints = workload.services.values().map(|ports| ports.len().max(1));
    endpoints.sum::<usize>() + workload.policies.len()
}

/// Returns the number of ports, addresses, identities and waypoints of a service.
fn service_entries(service: &Service) -> usize {
    let names = service.subject_alt_names.len() + service.waypoints.len();
    service.ports.len() + service.vips.len() + names
}
