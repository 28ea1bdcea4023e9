//! The resources of Istio's discovery, decoded, and the mesh that they make.
//!
//! A workload may come before its service, and a service without workloads: the builder joins
//! them. Of several services with one hostname it lets the canonical one answer. A resource that
//! is rejected leaves its last good version where it was.

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
    /// The hostnames and ports of clusters that export a service.
    exports: BTreeSet<(String, u16)>,
    exports_changed: bool,
}

impl Store {
    /// The mesh, if it has changed since this was called last.
    pub fn take_change(&mut self) -> Option<Mesh> {
        mem::take(&mut self.changed).then(|| self.mesh())
    }

    /// The export set, if it has changed since this was called last.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        let exports = self.exports.iter();
        let exports = exports.map(|(host, port)| (host.as_str(), *port));
        mem::take(&mut self.exports_changed).then(|| exports.collect())
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
                    self.changed = true;
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
                let (scope, dry_run) = covers.unwrap_or((Scope::Global, false));
                (
                    authorization::stand_in(&resource.name, scope, dry_run),
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
            let policy = authorization::stand_in(name, Scope::Global, false);
            self.put_policy(name, Some(policy));
        }
        self.has_stand_in(type_url, name)
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
                self.changed |= self.services.remove(name).is_some();
            }
            AUTHORIZATION => self.put_policy(name, None),
            _ => {}
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::authorization::Action;

    fn resource(name: &str, body_type: &str, message: &impl Message) -> Resource {
        Resource {
            name: name.into(),
            version: "1".into(),
            body: Some(message.encode_to_vec().into()),
            body_type: body_type.into(),
            ..Resource::default()
        }
    }

    fn workload(uid: &str, node: &str) -> Resource {
        let list = proto::PortList {
            ports: vec![proto::Port {
                service_port: 80,
                target_port: 8080,
                app_protocol: 0,
            }],
        };
        let workload = proto::Workload {
            uid: uid.into(),
            namespace: "app".into(),
            node: node.into(),
            services: [("app/echo.app".to_owned(), list)].into(),
            ..proto::Workload::default()
        };
        let message = proto::Address {
            r#type: Some(proto::address::Type::Workload(workload)),
        };
        resource(uid, ADDRESS, &message)
    }

    fn service(namespace: &str, canonical: bool) -> Resource {
        let service = proto::Service {
            name: "echo".into(),
            namespace: namespace.into(),
            hostname: "Echo.app".into(),
            canonical,
            ..proto::Service::default()
        };
        let message = proto::Address {
            r#type: Some(proto::address::Type::Service(service)),
        };
        resource(&format!("{namespace}/Echo.app"), ADDRESS, &message)
    }

    fn policy(scope: i32, port: u32) -> Resource {
        let one = security::Match {
            destination_ports: vec![port],
            ..security::Match::default()
        };
        let clause = security::Clause { matches: vec![one] };
        let message = security::Authorization {
            name: "p".into(),
            namespace: "app".into(),
            scope,
            rules: vec![security::Rule {
                clauses: vec![clause],
            }],
            dry_run: port == 0,
            ..security::Authorization::default()
        };
        resource("app/p", AUTHORIZATION, &message)
    }

    fn uids(mesh: &Mesh) -> Vec<&str> {
        let workloads = mesh.workloads.sorted().into_iter();
        workloads.map(|one| &*one.uid).collect()
    }

    #[test]
    fn the_mesh_is_given_once_for_each_change_in_the_order_of_names() {
        let mut store = Store::default();
        assert_eq!(store.take_change(), None);
        for one in [workload("b", ""), workload("a", ""), service("app", false)] {
            store.upsert(ADDRESS, &one).unwrap();
        }
        let mesh = store.take_change().unwrap();
        assert_eq!(uids(&mesh), ["a", "b"]);
        assert_eq!(&*mesh.services.sorted()[0].hostname, "echo.app");
        assert!(mesh.hbone_only);
        store.upsert(ADDRESS, &workload("a", "")).unwrap();
        store.remove(ADDRESS, "c");
        assert_eq!(store.take_change(), None, "nothing is different");
        store.upsert(ADDRESS, &workload("a", "n")).unwrap();
        let next = store.take_change().unwrap();
        assert_eq!(&*next.workloads.sorted()[0].node, "n");
        assert!(
            Arc::ptr_eq(next.workloads.sorted()[1], mesh.workloads.sorted()[1]),
            "shared"
        );
    }

    #[test]
    fn resources_go_by_uid_and_by_namespace_and_hostname() {
        let mut store = Store::default();
        store.told_policies();
        store.upsert(ADDRESS, &workload("a", "")).unwrap();
        store.upsert(ADDRESS, &service("app", false)).unwrap();
        store.upsert(ADDRESS, &service("other", true)).unwrap();
        store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap();
        let mesh = store.take_change().unwrap();
        let sizes = (mesh.workloads.len(), mesh.services.len());
        assert_eq!((sizes, store.take_policies().unwrap().len()), ((1, 2), 1));
        store.remove(ADDRESS, "a");
        assert!(store.take_change().unwrap().workloads.is_empty());
        store.remove(ADDRESS, "app/Echo.app");
        let mesh = store.take_change().unwrap();
        assert_eq!(&*mesh.services.sorted()[0].namespace, "other");
        store.remove(AUTHORIZATION, "app/p");
        assert!(store.take_policies().unwrap().is_empty());
        assert_eq!(
            store.take_change(),
            None,
            "policies are no part of the mesh"
        );
    }

    #[test]
    fn what_all_resources_make_together_is_bounded_and_what_goes_makes_room() {
        let mut store = Store::default();
        store.upsert(ADDRESS, &workload("a", "")).unwrap();
        store.endpoints = ENDPOINTS_MAX;
        let why = store.upsert(ADDRESS, &workload("b", "")).unwrap_err();
        let want = "workload.services: 4000001 endpoints with these, and at most 4000000 are taken";
        assert_eq!(why, want);
        store.upsert(ADDRESS, &workload("a", "changed")).unwrap();
        store.remove(ADDRESS, "a");
        store.upsert(ADDRESS, &workload("b", "")).unwrap();
        store.policy_parts = POLICY_PARTS_MAX;
        let why = store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap_err();
        let want = "authorization.rules: 1000004 rules, clauses, matches and entries with these, \
                    and at most 1000000 are taken";
        assert_eq!(why, want);
        let long = Resource {
            body: Some(vec![0; BODY_BYTES_MAX + 1].into()),
            ..workload("c", "")
        };
        let why = store.upsert(ADDRESS, &long).unwrap_err();
        assert_eq!(
            why,
            "resource: 2097153 bytes, and at most 2097152 are taken"
        );
    }

    #[test]
    fn what_was_a_service_and_is_a_workload_is_only_that() {
        let mut store = Store::default();
        store.upsert(ADDRESS, &service("app", false)).unwrap();
        store
            .upsert(ADDRESS, &workload("app/Echo.app", ""))
            .unwrap();
        let mesh = store.take_change().unwrap();
        assert_eq!((mesh.services.len(), mesh.workloads.len()), (0, 1));
        store.upsert(ADDRESS, &service("app", false)).unwrap();
        let mesh = store.take_change().unwrap();
        assert_eq!((mesh.services.len(), mesh.workloads.len()), (1, 0));
    }

    #[test]
    fn a_rejected_resource_says_why_and_leaves_its_last_good_version() {
        let mut store = Store::default();
        store.upsert(ADDRESS, &workload("a", "good")).unwrap();
        store.take_change().unwrap();
        let named = |name: &str, one: Resource| Resource {
            name: name.into(),
            ..one
        };
        let without_body = Resource {
            body: None,
            ..workload("a", "")
        };
        let of_another_type = Resource {
            body_type: AUTHORIZATION.into(),
            ..workload("a", "")
        };
        let cut_off = Resource {
            body: Some(vec![0x0a, 0x7f].into()),
            ..workload("a", "")
        };
        let table = [
            (
                named("a", workload("b", "")),
                "workload.uid: `b` is named `a`",
            ),
            (
                named("a", service("app", true)),
                "service.hostname: `app/Echo.app` is named `a`",
            ),
            (without_body, "resource: missing"),
            (
                of_another_type,
                "resource.type_url: `type.googleapis.com/istio.security.Authorization`, want \
                 `type.googleapis.com/istio.workload.Address`",
            ),
            (
                resource("a", ADDRESS, &proto::Address::default()),
                "address.type: neither workload nor service",
            ),
        ];
        for (one, want) in table {
            assert_eq!(store.upsert(ADDRESS, &one), Err(want.to_owned()));
        }
        let why = store.upsert(ADDRESS, &cut_off).unwrap_err();
        assert!(why.contains("Address"), "{why}");
        let why = store.upsert("x", &workload("a", "")).unwrap_err();
        assert_eq!(why, "resources of type x are not kept here");
        assert_eq!(store.take_change(), None);
        assert_eq!(&*store.mesh().workloads.sorted()[0].node, "good");
    }

    #[test]
    fn a_policy_that_was_never_readable_refuses_what_it_covers() {
        const NAMESPACE: i32 = 1;
        let mut store = Store::default();
        let mut judge = |one: &Resource| {
            let result = store.upsert(AUTHORIZATION, one);
            let policies = store.policies();
            let policy = policies.iter().next().unwrap();
            (result.is_ok(), Policy::clone(policy))
        };
        let broken = Resource {
            body: Some(vec![0xff].into()),
            ..policy(NAMESPACE, 80)
        };
        for (one, scope, dry_run) in [
            (policy(NAMESPACE, 65536), Scope::Namespace, false),
            (policy(NAMESPACE, 0), Scope::Namespace, true),
            (policy(9, 80), Scope::Global, false),
            (broken.clone(), Scope::Global, false),
        ] {
            let (is_good, stands_in) = judge(&one);
            assert!(!is_good && stands_in.unreadable);
            assert_eq!((stands_in.scope, stands_in.dry_run), (scope, dry_run));
            assert_eq!(stands_in.action, Action::Deny);
            assert_eq!((&*stands_in.namespace, &*stands_in.name), ("app", "p"));
        }
        let another = Resource {
            name: "app/other".into(),
            ..policy(NAMESPACE, 80)
        };
        assert!(store.upsert(AUTHORIZATION, &another).is_err());
        let stands_in = &store.policies["app/other"];
        assert_eq!(
            stands_in.scope,
            Scope::Global,
            "nobody knows what selects it"
        );
        store.remove(AUTHORIZATION, "app/other");
        let mut judge = |one: &Resource| {
            let result = store.upsert(AUTHORIZATION, one);
            (result.is_ok(), Policy::clone(&store.policies["app/p"]))
        };
        let (is_good, first) = judge(&policy(NAMESPACE, 80));
        assert!(is_good && !first.unreadable);
        assert_eq!(judge(&broken), (false, first), "the last good one stays");
    }
    #[test]
    fn what_the_machine_rejects_itself_is_stood_in_for_if_it_is_a_policy() {
        let mut store = Store::default();
        store.told_policies();
        assert_eq!(store.take_policies().unwrap().len(), 0);
        assert!(!store.rejected(ADDRESS, "a") && store.take_policies().is_none());
        assert!(store.rejected(AUTHORIZATION, "app/p"));
        let policy = Policy::clone(&store.policies["app/p"]);
        assert!(policy.unreadable && policy.scope == Scope::Global && !policy.dry_run);
        assert_eq!(store.take_policies().unwrap().len(), 1);
        store.upsert(AUTHORIZATION, &self::policy(1, 80)).unwrap();
        assert!(
            !store.rejected(AUTHORIZATION, "app/p"),
            "the good one stays"
        );
        assert!(!store.policies["app/p"].unreadable);
    }

    #[test]
    fn a_field_of_tomorrow_makes_a_policy_unreadable() {
        let good = policy(1, 80);
        let body = good.body.unwrap();
        let newer = Resource {
            body: Some([&*body, &[0x98, 0x06, 0x01]].concat().into()),
            ..policy(1, 80)
        };
        let mut store = Store::default();
        let why = store.upsert(AUTHORIZATION, &newer).unwrap_err();
        assert_eq!(why, "authorization: field 99 is not understood");
        let policy = &store.policies["app/p"];
        assert!(policy.unreadable && policy.scope == Scope::Namespace);
    }

    #[test]
    fn policies_are_told_once_though_there_is_none() {
        let mut store = Store::default();
        store.upsert(AUTHORIZATION, &policy(0, 80)).unwrap();
        store.remove(AUTHORIZATION, "app/p");
        assert!(store.take_policies().is_none(), "they may not be all");
        store.told_policies();
        assert!(store.take_policies().unwrap().is_empty());
        store.told_policies();
        assert!(store.take_policies().is_none());
    }
}
