//! Identities of the workloads of each service, by which a waypoint of a service is recognized.
//!
//! Only workloads in the service's own namespace count. A pod label or a WorkloadEntry of another
//! namespace therefore grants no waypoint identity. `subjectAltNames` of a service do not count
//! either, because tenants write them. The cost of a mesh change depends on the workloads that it
//! touches.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Shards;
use super::mesh;

/// Identities (`spiffe://…`) by service (`namespace/hostname`), each with its number of workloads.
#[derive(Clone, Debug, Default)]
pub(super) struct Identities(pub(super) Shards<Arc<str>, Arc<Counts>>);

/// Number of workloads by identity.
pub(super) type Counts = BTreeMap<Arc<str>, usize>;

/// Identities that services gain and lose, each with the change of its number of workloads.
#[derive(Debug, Default)]
pub(super) struct Edits(HashMap<Arc<str>, BTreeMap<Arc<str>, Edit>>);

#[derive(Debug, Default)]
struct Edit {
    come: usize,
    gone: usize,
}

impl Edits {
    /// Counts added and removed workloads, all with the template and the services of `like`.
    /// Workloads that cannot be dialled count too, because they may be of another network. A
    /// source without service accounts has no identities.
    pub(super) fn change(&mut self, like: &mesh::Workload, come: usize, gone: usize) {
        if like.service_account.is_empty() || come == gone {
            return;
        }
        let is_own = |service: &&Arc<str>| {
            let namespace = service.split_once('/').map(|(namespace, _)| namespace);
            namespace == Some(&*like.namespace)
        };
        let mut own = like.services.keys().filter(is_own).peekable();
        if own.peek().is_none() {
            return;
        }
        let principal: Arc<str> = like.principal().concat().into();
        for service in own {
            let edits = self.0.entry(Arc::clone(service)).or_default();
            let edit = edits.entry(Arc::clone(&principal)).or_default();
            edit.come += come;
            edit.gone += gone;
        }
    }
}

impl Identities {
    /// Applies the edits. Returns the services that have lost an identity, waypoints or not.
    pub(super) fn apply(&mut self, edits: Edits) -> Vec<Arc<str>> {
        let mut losers = Vec::new();
        for (service, edits) in edits.0 {
            if edits.values().all(|edit| edit.come == edit.gone) {
                continue;
            }
            let old = self.0.get(&service);
            let mut is_lost = false;
            let mut counts = old.map_or_else(Counts::new, |old| Counts::clone(old));
            for (principal, edit) in edits {
                let count = counts.get(&principal).copied().unwrap_or(0);
                match (count + edit.come).saturating_sub(edit.gone) {
                    0 => is_lost |= counts.remove(&principal).is_some(),
                    count => drop(counts.insert(principal, count)),
                }
            }
            if is_lost {
                losers.push(Arc::clone(&service));
            }
            let counts = (!counts.is_empty()).then(|| counts.into());
            self.0.set(service, counts);
        }
        losers
    }
}

#[cfg(test)]
mod tests {
    use super::super::Snapshot;
    use super::super::builder::{Change, build};
    use super::super::mesh::{GatewayAddress, Mesh, Place, Waypoint};
    use super::*;

    const SAN: &str = "spiffe://west.local/ns/app/sa/said";
    const OWN: &str = "spiffe://east.local/ns/app/sa/own";
    const OTHER: &str = "spiffe://east.local/ns/shop/sa/own";

    fn service(name: &str, waypoints: &[Place]) -> mesh::Service {
        let waypoint = |place: &Place| Waypoint {
            gateway: GatewayAddress { place: place.clone(), port: 15008 },
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

    /// Returns a workload that cannot be dialled: unhealthy, in another network, without an
    /// address.
    fn workload(uid: &str, namespace: &str, service: &str) -> mesh::Workload {
        mesh::Workload {
            uid: uid.into(),
            services: [(service.into(), [(80, 80)].into())].into(),
            template: mesh::Template {
                network: "west".into(),
                trust_domain: "east.local".into(),
                namespace: namespace.into(),
                service_account: "own".into(),
                ..mesh::Template::default()
            }
            .into(),
            ..mesh::Workload::default()
        }
    }

    /// Returns a mesh where `echo` has these waypoints, with workloads by uid, namespace and
    /// service.
    fn mesh(waypoints: &[Place], workloads: &[(&str, &str, &str)]) -> Mesh {
        let workloads = workloads.iter();
        let workloads =
            workloads.map(|(uid, space, of)| workload(uid, space, &format!("app/{of}.app")));
        let services = [service("echo", waypoints), service("w", &[]), service("other", &[])];
        Mesh::new(services, workloads)
    }

    #[test]
    fn only_workloads_of_the_namespace_of_a_waypoint_give_it_an_identity() {
        let name = |name: &str| Place::Name(format!("app/{name}.app"));
        let at = |network: &str, last| Place::Address(network.to_owned(), [240, 0, 0, last].into());
        let own = || mesh(&[name("w")], &[("a", "app", "w")]);
        // Successive meshes, and whether the workload's own identity is trusted.
        let steps = [
            (mesh(&[], &[("a", "app", "w")]), false),
            (own(), true),
            (mesh(&[name("w")], &[("a", "app", "w"), ("b", "app", "w")]), true),
            (mesh(&[name("w")], &[("b", "app", "w")]), true),
            (mesh(&[name("w")], &[("b", "app", "other")]), false),
            (mesh(&[name("w")], &[("b", "shop", "w")]), false),
            (mesh(&[name("gone")], &[("b", "app", "w")]), false),
            (mesh(&[name("other"), name("w")], &[("b", "app", "w")]), true),
            (mesh(&[at("east", 1)], &[("b", "app", "w")]), true),
            (mesh(&[at("", 1)], &[("b", "app", "w")]), true),
            (mesh(&[at("west", 1)], &[("b", "app", "w")]), false),
            (mesh(&[at("east", 2)], &[("b", "app", "w")]), false),
            (Mesh::default(), false),
        ];
        let mut snapshot = Snapshot::default();
        for (index, (mesh, want)) in steps.into_iter().enumerate() {
            let echo = mesh.services.get("app/echo.app").cloned();
            let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
            snapshot = build(&snapshot, change);
            let trusted = |principal| {
                let echo = echo.as_ref();
                echo.is_some_and(|echo| snapshot.is_waypoint_of(principal, echo))
            };
            let got = [SAN, OTHER, OWN].map(trusted);
            assert_eq!(got, [false, false, want], "step {index}");
        }
        assert!(snapshot.index.identities.0.is_empty(), "nothing is left");
    }

    fn generations(snapshot: &mut Snapshot, mesh: Mesh, has_passthrough: bool) -> u64 {
        let change = Change {
            mesh: Some((mesh, "east".into())),
            has_passthrough: Some(has_passthrough),
            ..Change::default()
        };
        let before = snapshot.generation;
        *snapshot = build(snapshot, change);
        snapshot.generation - before
    }

    fn name(name: &str) -> Place {
        Place::Name(format!("app/{name}.app"))
    }

    #[test]
    fn the_generation_moves_when_a_waypoint_loses_the_last_workload_of_an_identity() {
        let at = Place::Address("east".to_owned(), [240, 0, 0, 1].into());
        for (waypoint, is_used) in [(Some(name("w")), true), (Some(at), true), (None, false)] {
            // Successive meshes, and whether open tunnels are authorized again.
            let steps = [
                (&[("a", "app", "w")][..], false),
                (&[("a", "app", "w"), ("b", "app", "w")], false),
                (&[("b", "app", "w")], false),
                (&[("c", "app", "w")], false),
                (&[("c", "app", "other")], is_used),
                (&[("c", "app", "w")], false),
                (&[], is_used),
                (&[("b", "shop", "w")], false),
                (&[("d", "app", "other")], false),
                (&[], false),
            ];
            let mut snapshot = Snapshot::default();
            let waypoints: Vec<_> = waypoint.into_iter().collect();
            generations(&mut snapshot, mesh(&waypoints, &[]), false);
            for (index, (workloads, want)) in steps.into_iter().enumerate() {
                let moved = generations(&mut snapshot, mesh(&waypoints, workloads), false);
                assert_eq!(moved, u64::from(want), "{waypoints:?}, step {index}");
            }
        }
    }

    #[test]
    fn only_waypoints_that_a_change_touches_are_looked_at() {
        let at = Place::Address(String::new(), [240, 0, 0, 1].into());
        let mapped: std::net::Ipv6Addr = "::ffff:240.0.0.1".parse().expect("an address");
        let mapped = Place::Address(String::new(), mapped.into());
        let waypoints = [name("w"), mapped, name("other"), name("gone")];
        let mut before = Snapshot::default();
        generations(&mut before, mesh(&waypoints, &[]), false);
        let mut after = before.clone();
        let mut gone = mesh(&waypoints, &[]);
        gone.services.remove("app/w.app");
        generations(&mut after, gone, false);
        let places =
            |host| -> Vec<_> { after.named_waypoints(&before, [host].into_iter()).collect() };
        assert_eq!(places("echo.app"), []);
        assert_eq!(places("gone.app"), []);
        assert_eq!(places("w.app"), [at, name("w")], "it was there before");
        let both = [name("other"), name("other")];
        assert_eq!(places("other.app"), both, "before and after");
        generations(&mut after, mesh(&[], &[]), false);
        assert_eq!(after.named_waypoints(&before, ["w.app"].into_iter()).count(), 0);
    }

    #[test]
    fn the_generation_moves_when_a_waypoint_goes_or_another_service_takes_its_place() {
        let vip: std::net::IpAddr = [240, 0, 0, 1].into();
        let at = Place::Address("east".to_owned(), vip);
        for (place, is_named) in [(name("w"), true), (at, false)] {
            let workloads = &[("a", "app", "w")];
            let own = || mesh(std::slice::from_ref(&place), workloads);
            let mut gone = own();
            gone.services.remove("app/w.app");
            let mut other = own();
            let moved = mesh::Service { vips: Vec::new(), ..service("w", &[]) };
            other.services.insert("app/w.app".into(), Arc::new(moved));
            let mut taken = own();
            let rival =
                mesh::Service { namespace: "shop".into(), canonical: true, ..service("w", &[]) };
            taken.services.insert("shop/w.app".into(), Arc::new(rival));
            for (what, next, want) in [
                ("the same", own(), false),
                ("gone", gone, true),
                ("without its VIP", other, !is_named),
                ("its hostname and VIP are another's", taken, true),
            ] {
                for has_passthrough in [false, true] {
                    let mut snapshot = Snapshot::default();
                    generations(&mut snapshot, own(), false);
                    let moved = generations(&mut snapshot, next.clone(), has_passthrough);
                    assert_eq!(moved, u64::from(want), "{place}, {what}, {has_passthrough}");
                }
            }
        }
    }
}
