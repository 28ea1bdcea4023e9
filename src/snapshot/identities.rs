//! Identities of the workloads of each service, by which a waypoint of a service is recognized.
//!
//! Only workloads in the service's own namespace count: a pod label or a WorkloadEntry of another
//! namespace gives nobody the identity of a waypoint. What a service is said to have
//! (`subjectAltNames`) does not count either, as tenants write it. A change of the mesh costs what
//! it touches.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::mesh;
use super::{Shards, Snapshot};

/// Identities (`spiffe://…`) by service (`namespace/hostname`), each with its number of workloads.
#[derive(Clone, Debug, Default)]
pub(super) struct Identities(Shards<Arc<str>, Arc<Counts>>);

type Counts = BTreeMap<Arc<str>, usize>;

/// Identities that services gain and lose, each with the change of its number of workloads.
#[derive(Debug, Default)]
pub(super) struct Edits(HashMap<Arc<str>, BTreeMap<Arc<str>, isize>>);

impl Edits {
    /// Notes a workload that comes, or that goes, whether it can be dialled or not: it may be of
    /// another network. A source that knows no service accounts tells no identity.
    pub(super) fn workload(&mut self, workload: &mesh::Workload, comes: bool) {
        if workload.service_account.is_empty() {
            return;
        }
        let is_own = |service: &&Arc<str>| {
            let namespace = service.split_once('/').map(|(namespace, _)| namespace);
            namespace == Some(&*workload.namespace)
        };
        let principal = || -> Arc<str> { workload.principal().concat().into() };
        let mut own = workload.services.keys().filter(is_own).peekable();
        let Some(principal) = own.peek().map(|_| principal()) else {
            return;
        };
        for service in own {
            let edits = self.0.entry(Arc::clone(service)).or_default();
            let count = edits.entry(Arc::clone(&principal)).or_default();
            *count += if comes { 1 } else { -1 };
        }
    }
}

impl Identities {
    /// Makes the edits. Returns whether a service has lost an identity: its tunnels that went past
    /// a waypoint may be open still.
    pub(super) fn apply(&mut self, edits: Edits) -> bool {
        let mut is_lost = false;
        for (service, edits) in edits.0 {
            if edits.values().all(|by| *by == 0) {
                continue;
            }
            let old = self.0.get(&service);
            let mut counts = old.map_or_else(Counts::new, |old| Counts::clone(old));
            for (principal, by) in edits {
                let count = counts.get(&principal).copied().unwrap_or(0);
                match count.saturating_add_signed(by) {
                    0 => is_lost |= counts.remove(&principal).is_some(),
                    count => drop(counts.insert(principal, count)),
                }
            }
            match counts.is_empty() {
                true => drop(self.0.remove(&service)),
                false => drop(self.0.insert(service, counts.into())),
            }
        }
        is_lost
    }
}

impl Snapshot {
    /// Returns whether this is an identity (`spiffe://…`) of a workload of one of the waypoints
    /// that `service` has.
    pub fn is_waypoint_of(&self, principal: &str, service: &mesh::Service) -> bool {
        service.waypoints.iter().any(|waypoint| {
            let waypoint = self.waypoint(&waypoint.gateway);
            waypoint.is_some_and(|of| {
                let name = format!("{}/{}", of.namespace, of.hostname);
                let identities = self.index.identities.0.get(&*name);
                identities.is_some_and(|of| of.contains_key(principal))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::builder::{Change, build};
    use super::super::mesh::{GatewayAddress, Mesh, Place, Waypoint};
    use super::*;

    const SAN: &str = "spiffe://west.local/ns/app/sa/said";
    const OWN: &str = "spiffe://east.local/ns/app/sa/own";
    const OTHER: &str = "spiffe://east.local/ns/shop/sa/own";

    fn service(name: &str, waypoints: &[Place]) -> mesh::Service {
        let waypoint = |place: &Place| Waypoint {
            gateway: GatewayAddress {
                place: place.clone(),
                port: 15008,
            },
            weight: 0,
        };
        let vips = match name {
            "w" => vec![("east".into(), [240, 0, 0, 1].into())],
            _ => Vec::new(),
        };
        mesh::Service {
            namespace: "app".into(),
            hostname: format!("{name}.app").into(),
            vips,
            subject_alt_names: vec![SAN.to_owned()],
            waypoints: waypoints.iter().map(waypoint).collect(),
            ..mesh::Service::default()
        }
    }

    /// A workload that nobody can dial: it is not healthy, in another network, without an address.
    fn workload(uid: &str, namespace: &str, service: &str) -> mesh::Workload {
        mesh::Workload {
            uid: uid.into(),
            network: "west".into(),
            trust_domain: "east.local".into(),
            namespace: namespace.into(),
            service_account: "own".into(),
            services: [(service.into(), [(80, 80)].into())].into(),
            ..mesh::Workload::default()
        }
    }

    /// A mesh where `echo` has these waypoints, with workloads by uid, namespace and service.
    fn mesh(waypoints: &[Place], workloads: &[(&str, &str, &str)]) -> Mesh {
        let workloads = workloads.iter();
        let workloads =
            workloads.map(|(uid, space, of)| workload(uid, space, &format!("app/{of}.app")));
        let services = [
            service("echo", waypoints),
            service("w", &[]),
            service("other", &[]),
        ];
        Mesh::new(services, workloads)
    }

    #[test]
    fn only_workloads_of_the_namespace_of_a_waypoint_give_it_an_identity() {
        let name = |name: &str| Place::Name(format!("app/{name}.app"));
        let at = |network: &str, last| Place::Address(network.to_owned(), [240, 0, 0, last].into());
        let own = || mesh(&[name("w")], &[("a", "app", "w")]);
        // One mesh after the other, and whether the workload's own identity is believed.
        let steps = [
            (mesh(&[], &[("a", "app", "w")]), false),
            (own(), true),
            (
                mesh(&[name("w")], &[("a", "app", "w"), ("b", "app", "w")]),
                true,
            ),
            (mesh(&[name("w")], &[("b", "app", "w")]), true),
            (mesh(&[name("w")], &[("b", "app", "other")]), false),
            (mesh(&[name("w")], &[("b", "shop", "w")]), false),
            (mesh(&[name("gone")], &[("b", "app", "w")]), false),
            (
                mesh(&[name("other"), name("w")], &[("b", "app", "w")]),
                true,
            ),
            (mesh(&[at("east", 1)], &[("b", "app", "w")]), true),
            (mesh(&[at("", 1)], &[("b", "app", "w")]), true),
            (mesh(&[at("west", 1)], &[("b", "app", "w")]), false),
            (mesh(&[at("east", 2)], &[("b", "app", "w")]), false),
            (Mesh::default(), false),
        ];
        let mut snapshot = Snapshot::default();
        for (index, (mesh, want)) in steps.into_iter().enumerate() {
            let echo = mesh.services.get("app/echo.app").cloned();
            let change = Change {
                mesh: Some((mesh, "east".into())),
                ..Change::default()
            };
            snapshot = build(&snapshot, change);
            let believed = |principal| {
                let echo = echo.as_ref();
                echo.is_some_and(|echo| snapshot.is_waypoint_of(principal, echo))
            };
            let got = [SAN, OTHER, OWN].map(believed);
            assert_eq!(got, [false, false, want], "step {index}");
        }
        assert!(snapshot.index.identities.0.is_empty(), "nothing is left");
    }

    #[test]
    fn the_generation_moves_when_a_service_loses_the_last_workload_of_an_identity() {
        // One mesh after the other, and whether open tunnels are judged anew.
        let steps = [
            (&[("a", "app", "w")][..], 0),
            (&[("a", "app", "w"), ("b", "app", "w")], 0),
            (&[("b", "app", "w")], 0),
            (&[("c", "app", "w")], 0),
            (&[("c", "app", "other")], 1),
            (&[], 1),
            (&[("b", "shop", "w")], 0),
            (&[], 0),
        ];
        let mut snapshot = Snapshot::default();
        for (index, (workloads, want)) in steps.into_iter().enumerate() {
            let change = Change {
                mesh: Some((mesh(&[], workloads), "east".into())),
                ..Change::default()
            };
            let before = snapshot.generation;
            snapshot = build(&snapshot, change);
            assert_eq!(snapshot.generation - before, want, "step {index}");
        }
    }
}
