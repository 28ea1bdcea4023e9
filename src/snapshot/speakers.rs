//! Whose word about waypoints is believed: who has an identity of a service that is used as one.
//!
//! It is asked of each tunnel that says such a word, so identities are looked up and not searched
//! for. A change of the mesh costs what it touches.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use super::mesh::{self, Place};
use super::{Shards, Snapshot};

/// What is known of identities, and of what is used as a waypoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Speakers {
    /// Of an identity, the services (`namespace/hostname`) that are said to have it or of which a
    /// workload has it, dialled or not, and how many times.
    services: Shards<Arc<str>, Arc<Counts>>,
    /// How many services name this one as their waypoint,
    by_name: Shards<Arc<str>, usize>,
    /// and how many this address.
    by_address: Shards<(Arc<str>, IpAddr), usize>,
}

type Counts = BTreeMap<Arc<str>, usize>;

/// What comes and goes of the services of each identity.
#[derive(Debug, Default)]
pub(super) struct Edits(HashMap<String, BTreeMap<Arc<str>, isize>>);

impl Edits {
    /// A workload comes, or goes.
    pub(super) fn workload(&mut self, workload: &mesh::Workload, comes: bool) {
        self.note(
            workload.principal().concat(),
            workload.services.keys(),
            comes,
        );
    }

    fn note<'a>(
        &mut self,
        principal: String,
        services: impl IntoIterator<Item = &'a Arc<str>>,
        comes: bool,
    ) {
        let counts = self.0.entry(principal).or_default();
        for service in services {
            let count = counts.entry(Arc::clone(service)).or_default();
            *count += if comes { 1 } else { -1 };
        }
    }
}

impl Speakers {
    /// A service comes, or goes: the identities that it is said to have, and what it uses.
    pub(super) fn service(&mut self, service: &mesh::Service, comes: bool, edits: &mut Edits) {
        let name: Arc<str> = format!("{}/{}", service.namespace, service.hostname).into();
        for principal in &service.subject_alt_names {
            edits.note(principal.clone(), [&name], comes);
        }
        for waypoint in &service.waypoints {
            match &waypoint.gateway.place {
                Place::Name(name) => count(&mut self.by_name, name.as_str().into(), comes),
                Place::Address(network, ip) => {
                    let place = (network.as_str().into(), ip.to_canonical());
                    count(&mut self.by_address, place, comes);
                }
            }
        }
    }

    /// Makes the edits.
    pub(super) fn apply(&mut self, edits: Edits) {
        for (principal, edits) in edits.0 {
            if edits.values().all(|by| *by == 0) {
                continue;
            }
            let old = self.services.get(&*principal);
            let mut services = old.map_or_else(Counts::new, |old| Counts::clone(old));
            for (service, by) in edits {
                let count = services.get(&service).copied().unwrap_or(0);
                match count.saturating_add_signed(by) {
                    0 => drop(services.remove(&service)),
                    count => drop(services.insert(service, count)),
                }
            }
            match services.is_empty() {
                true => drop(self.services.remove(&*principal)),
                false => drop(self.services.insert(principal.into(), services.into())),
            }
        }
    }
}

impl Snapshot {
    /// Whether this is an identity (`spiffe://…`) of a service that some service has for its
    /// waypoint: one that it is said to have, or one of its workloads, which may be those of
    /// another network and those that are not healthy.
    pub fn is_of_waypoint(&self, principal: &str) -> bool {
        let speakers = &self.index.speakers;
        let services = speakers.services.get(principal);
        let mut services = services.into_iter().flat_map(|services| services.keys());
        services.any(|name| speakers.by_name.contains_key(name) || self.is_used_by_address(name))
    }

    /// Whether a service is named as a waypoint by an address of this network.
    fn is_used_by_address(&self, name: &str) -> bool {
        let used = &self.index.speakers.by_address;
        if used.is_empty() {
            return false;
        }
        let service = name.split_once('/').and_then(|(namespace, hostname)| {
            let service = self.services.get(hostname)?;
            (*service.namespace == *namespace).then_some(service)
        });
        let vips = service.map(|service| &service.definition.vips);
        let mut vips = vips.into_iter().flatten();
        vips.any(|(network, vip)| {
            let at = |network: &str| used.contains_key(&(network.into(), vip.to_canonical()));
            self.is_local(network) && (at(network) || at("") || at(self.network()))
        })
    }
}

fn count<K: Eq + std::hash::Hash + Clone>(counts: &mut Shards<K, usize>, key: K, comes: bool) {
    let old = counts.get(&key).copied().unwrap_or(0);
    let new = if comes {
        old + 1
    } else {
        old.saturating_sub(1)
    };
    match new {
        0 => drop(counts.remove(&key)),
        new => drop(counts.insert(key, new)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::builder::{Change, build};
    use super::super::mesh::{GatewayAddress, Mesh, Waypoint};
    use super::*;

    const SAN: &str = "spiffe://west.local/ns/app/sa/said";
    const OWN: &str = "spiffe://east.local/ns/app/sa/own";

    fn service(name: &str, waypoints: &[Place]) -> mesh::Service {
        let waypoint = |place: &Place| Waypoint {
            gateway: GatewayAddress {
                place: place.clone(),
                port: 15008,
            },
            weight: 0,
        };
        mesh::Service {
            namespace: "app".into(),
            hostname: format!("{name}.app").into(),
            vips: vec![("east".into(), [240, 0, 0, 1].into())],
            waypoints: waypoints.iter().map(waypoint).collect(),
            ..mesh::Service::default()
        }
    }

    fn said(waypoint: mesh::Service) -> mesh::Service {
        mesh::Service {
            subject_alt_names: vec![SAN.to_owned()],
            ..waypoint
        }
    }

    /// A workload that nobody can dial: it is not healthy, in another network, without an address.
    fn workload(uid: &str, service: &str) -> mesh::Workload {
        mesh::Workload {
            uid: uid.into(),
            network: "west".into(),
            trust_domain: "east.local".into(),
            namespace: "app".into(),
            service_account: "own".into(),
            services: [(service.into(), [(80, 80)].into())].into(),
            ..mesh::Workload::default()
        }
    }

    /// A mesh where `echo` has these waypoints, and `w` has the said identity or none.
    fn mesh(waypoints: &[Place], is_said: bool, workloads: &[(&str, &str)]) -> Mesh {
        let plain = service("w", &[]);
        let waypoint = if is_said { said(plain) } else { plain };
        let workloads = workloads.iter();
        let workloads = workloads.map(|(uid, of)| workload(uid, &format!("app/{of}.app")));
        Mesh::new([service("echo", waypoints), waypoint], workloads)
    }

    #[test]
    fn who_speaks_for_a_waypoint_follows_the_mesh() {
        let name = |name: &str| Place::Name(format!("app/{name}.app"));
        let at = |network: &str, last| Place::Address(network.into(), [240, 0, 0, last].into());
        let w = || vec![name("w")];
        // One mesh after the other, and whether the said identity and the workloads' are believed.
        let steps = [
            (vec![], true, &[("a", "w")][..], [false, false]),
            (w(), true, &[("a", "w")], [true, true]),
            (w(), false, &[("a", "w"), ("b", "w")], [false, true]),
            (w(), false, &[("b", "w")], [false, true]),
            (w(), false, &[("b", "other")], [false, false]),
            (
                vec![name("w"), name("w")],
                true,
                &[("b", "w")],
                [true, true],
            ),
            (w(), true, &[], [true, false]),
            (vec![name("gone")], true, &[("b", "w")], [false, false]),
            (vec![at("east", 1)], true, &[("b", "w")], [true, true]),
            (vec![at("", 1)], true, &[("b", "w")], [true, true]),
            (vec![at("west", 1)], true, &[("b", "w")], [false, false]),
            (vec![at("east", 2)], true, &[("b", "w")], [false, false]),
        ];
        let steps = steps
            .into_iter()
            .map(|(waypoints, is_said, workloads, want)| {
                (mesh(&waypoints, is_said, workloads), want)
            });
        let mut snapshot = Snapshot::default();
        for (index, (mesh, want)) in steps.chain([(Mesh::default(), [false; 2])]).enumerate() {
            let change = Change {
                mesh: Some((mesh, "east".into())),
                ..Change::default()
            };
            snapshot = build(&snapshot, change);
            let got = [SAN, OWN].map(|principal| snapshot.is_of_waypoint(principal));
            assert_eq!(got, want, "step {index}");
        }
        let speakers = &snapshot.index.speakers;
        assert!(speakers.services.is_empty() && speakers.by_name.is_empty());
        assert!(speakers.by_address.is_empty(), "nothing is left behind");
    }
}
