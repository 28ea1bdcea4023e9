//! Lookup of the waypoints of services and of their identities, for the data path, which dials
//! them, and for the status page, which reports missing ones.

use std::collections::HashSet;
use std::sync::Arc;

use crate::snapshot::members::Member;
use crate::snapshot::mesh::{self, GatewayAddress, Place};
use crate::snapshot::{EndpointSet, LazySet, Protocol, Service, Snapshot};

impl Snapshot {
    /// Returns the places at which services name a waypoint and that lead to one of these
    /// hostnames, now or in `before`. The cost is proportional to the number of hostnames.
    pub(in crate::snapshot) fn named_waypoints<'a>(
        &'a self,
        before: &'a Self,
        hosts: impl Iterator<Item = &'a str>,
    ) -> impl Iterator<Item = Place> {
        let named = &self.index.waypoints;
        let services = hosts.filter(|_| !named.is_empty()).flat_map(move |host| {
            [before, self].map(|of| of.services.get(host)).into_iter().flatten()
        });
        let places = services.flat_map(|service| self.waypoint_places(&service.definition));
        places.filter(|place| named.contains_key(place))
    }

    /// Returns the places by which services can name this service as a waypoint.
    fn waypoint_places(&self, service: &mesh::Service) -> Vec<Place> {
        let vips = self.index.vips(service).into_iter().flat_map(|vip| {
            let networks = ["", self.network()];
            networks.map(|network| Place::Address(network.to_owned(), vip))
        });
        let name = service.key();
        vips.chain([Place::Name(name)]).collect()
    }

    /// Returns the endpoints of a waypoint: those of the named port, or else those of the lowest
    /// port.
    /// They are dialled at the HBONE port regardless of the service port, so sets with endpoints
    /// without HBONE do not qualify.
    pub fn waypoint_endpoints(&self, gateway: &GatewayAddress) -> Option<&Arc<EndpointSet>> {
        let speaks_hbone = |set: &&LazySet| {
            let endpoints = &set.endpoints;
            let hbone = |protocol| protocol == Protocol::Hbone;
            !endpoints.is_empty() && endpoints.iter().all(|one| hbone(one.protocol))
        };
        let ports = &self.waypoint(&gateway.place)?.ports;
        let named = ports.get(&gateway.port).filter(speaks_hbone);
        named.or_else(|| ports.values().find(speaks_hbone)).map(LazySet::get)
    }

    /// Returns the service of a waypoint, by its name or by one of its addresses in this network.
    pub fn waypoint(&self, place: &Place) -> Option<&Arc<Service>> {
        match place {
            Place::Name(name) => {
                let (namespace, hostname) = name.split_once('/')?;
                let service = self.services.get(hostname)?;
                (*service.namespace == *namespace).then_some(service)
            }
            Place::Address(network, ip) if self.is_local(network) => {
                self.service_by_vip(ip.to_canonical())
            }
            Place::Address(..) => None,
        }
    }

    /// Returns the waypoints of a service that can take tunnels, with their endpoints.
    pub fn usable_waypoints<'a>(
        &'a self,
        service: &'a mesh::Service,
    ) -> impl Iterator<Item = (&'a mesh::Waypoint, &'a Arc<EndpointSet>)> {
        service.waypoints.iter().filter(|waypoint| waypoint.weight > 0).filter_map(|waypoint| {
            let endpoints = self.waypoint_endpoints(&waypoint.gateway)?;
            Some((waypoint, endpoints))
        })
    }

    /// Returns whether tunnels to a service go to a waypoint and no waypoint can take them.
    pub fn lacks_waypoint(&self, service: &mesh::Service) -> bool {
        !service.waypoints.is_empty() && self.usable_waypoints(service).next().is_none()
    }

    /// Returns true if this is an identity (`spiffe://…`) of a workload of one of the waypoints of
    /// `service`. The cost is linear in these workloads.
    pub fn is_waypoint_of(&self, principal: &str, service: &mesh::Service) -> bool {
        service.waypoints.iter().any(|waypoint| {
            let mut workloads = self.waypoint_workloads(&waypoint.gateway.place);
            workloads.any(|one| {
                let mut parts = one.principal().into_iter();
                parts.try_fold(principal, |rest, part| rest.strip_prefix(part)) == Some("")
            })
        })
    }

    /// Returns true if the waypoint at one of these places has lost an identity since `old`: its
    /// last workload with the identity is gone, the waypoint is gone, or another service has its
    /// hostname or VIP. Tunnels that bypassed the waypoint may still be open.
    pub(in crate::snapshot) fn has_lost_waypoint_identity(
        &self,
        old: &Self,
        places: &[Place],
    ) -> bool {
        places.iter().any(|place| {
            let now: HashSet<_> =
                self.waypoint_workloads(place).map(|one| one.principal()).collect();
            let mut before = old.waypoint_workloads(place);
            before.any(|one| !now.contains(&one.principal()))
        })
    }

    /// Returns the workloads that give identities to the waypoint at a place: those that are
    /// dialled, and instances in other networks. Only workloads in the service's own namespace
    /// count. A pod label or a WorkloadEntry of another namespace therefore grants no waypoint
    /// identity. `subjectAltNames` of a service do not count either, because tenants write them.
    /// A source without service accounts has no identities.
    fn waypoint_workloads(&self, place: &Place) -> impl Iterator<Item = &Arc<mesh::Workload>> {
        let service = self.waypoint(place);
        let workloads = service.map(|of| {
            let name = of.key();
            let members = self.index.members_of(&name).iter().map(Member::workload);
            let remote = self.index.remote.services.get(&*name).into_iter();
            let all = members.chain(remote.flat_map(|of| of.list.iter()));
            all.filter(|one| one.namespace == of.namespace && !one.service_account.is_empty())
        });
        workloads.into_iter().flatten()
    }
}

impl Place {
    /// Returns the place with its address in canonical form, as VIPs are stored.
    pub(in crate::snapshot) fn canonical(&self) -> Self {
        match self {
            Self::Name(name) => Self::Name(name.clone()),
            Self::Address(network, ip) => Self::Address(network.clone(), ip.to_canonical()),
        }
    }
}

impl mesh::Service {
    /// Returns the names of the waypoints, separated by commas, for display.
    pub fn waypoint_names(&self) -> String {
        let names: Vec<_> = self.waypoints.iter().map(|of| of.gateway.place.to_string()).collect();
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{Mesh, Waypoint};

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
        assert!(snapshot.index.remote.services.is_empty(), "nothing is left");
    }

    #[test]
    fn a_workload_of_the_own_network_gives_an_identity_if_it_can_be_dialled() {
        for (addresses, want) in [(&[[10, 0, 0, 1].into()][..], true), (&[], false)] {
            let remote = workload("a", "app", "app/w.app");
            let template = mesh::Template {
                network: "east".into(),
                ..mesh::Template::clone(&remote.template)
            };
            let local =
                mesh::Workload { addresses: addresses.into(), template: template.into(), ..remote };
            let mut mesh = mesh(&[name("w")], &[]);
            mesh.workloads.insert("a".into(), Arc::new(local));
            let echo = mesh.services.get("app/echo.app").cloned().expect("a service");
            let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
            let snapshot = build(&Snapshot::default(), change);
            assert_eq!(snapshot.is_waypoint_of(OWN, &echo), want, "{addresses:?}");
        }
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
