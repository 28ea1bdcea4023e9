//! Hostnames that need resolution: those of workloads that a reachable service would dial. A mesh
//! has many more, of gateways of other networks and of services that are not exposed.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use super::exclusion::workload_exclusion;
use super::mesh::{self, Workload};
use super::remote::gateway_network;
use super::{ExclusionReason, Host, Snapshot};

impl Snapshot {
    /// Returns the hostnames whose addresses tunnels may need. The cost is linear in the workloads
    /// with a hostname and the routes of TLS listeners. If such a workload is in no reachable
    /// service, it is also linear in the services with waypoints.
    pub fn wanted_hosts(&self) -> BTreeMap<Arc<str>, WantedHost> {
        let pass = WantedHosts::new(self);
        let wanted = self.hosts.known.iter().filter_map(|(name, host)| {
            let dialled = self.hosts.workloads(host).filter(|workload| pass.would_dial(workload));
            let owner = |workload: &Arc<Workload>| match gateway_network(workload) {
                Some(_) => Arc::default(),
                None => Arc::clone(&workload.namespace),
            };
            let owners: BTreeSet<_> = dialled.map(owner).collect();
            let wanted = WantedHost { host: Arc::clone(host), owners };
            (!wanted.owners.is_empty()).then(|| (Arc::clone(name), wanted))
        });
        wanted.collect()
    }
}

/// Hostname whose addresses tunnels may need.
#[derive(Debug)]
pub struct WantedHost {
    pub host: Arc<Host>,
    /// Namespaces of its workloads. One is empty if it is that of a gateway of another network.
    pub owners: BTreeSet<Arc<str>>,
}

/// Single pass over all hostnames, with the state that each of them needs.
struct WantedHosts<'a> {
    snapshot: &'a Snapshot,
    /// Names that routes of TLS listeners expose to anyone, with the targets of their aliases: the
    /// stem of a family, or as `Err` a name outside all families.
    passthrough_names: HashSet<Result<&'a str, &'a str>>,
    /// Waypoints of reachable services, as `namespace/hostname`.
    waypoints: OnceCell<HashSet<String>>,
}

impl<'a> WantedHosts<'a> {
    fn new(snapshot: &'a Snapshot) -> Self {
        let names = &snapshot.names;
        let hosts = snapshot.exposure.passthrough_hosts().flat_map(|name| {
            let targets = names.aliases_of(name).iter().flat_map(|alias| &alias.to);
            let hosts = targets.map(|target| &*target.host);
            hosts.chain(snapshot.exposure.hosts_with_alias(name)).chain([name])
        });
        let passthrough_names = hosts.map(|host| names.stem(host).ok_or(host)).collect();
        Self { snapshot, passthrough_names, waypoints: OnceCell::new() }
    }

    /// Returns whether a tunnel may be dialled to a workload once it has an address.
    fn would_dial(&self, workload: &'a Workload) -> bool {
        let snapshot = self.snapshot;
        if let Some(network) = gateway_network(workload) {
            let is_other = *network != *snapshot.network();
            let is_used = snapshot.exposure.has_transit || snapshot.networks.has_bindings;
            return is_other && workload.capacity > 0 && is_used;
        }
        let hbone_only = snapshot.mesh.hbone_only && !snapshot.has_passthrough;
        let unused = workload_exclusion(workload, snapshot.network(), hbone_only);
        let is_dialled =
            matches!(unused, None | Some(ExclusionReason::NoAddress)) && workload.capacity > 0;
        let mut services = workload.services.iter();
        is_dialled
            && services.any(|(service, ports)| {
                let ports = ports.keys().copied();
                let name = service.split_once('/');
                name.is_some_and(|(namespace, host)| self.is_reachable(namespace, host, ports))
                    || self.reachable_waypoints().contains(&**service)
            })
    }

    /// Returns whether a peer may reach the service `namespace/hostname`, or anyone may by a TLS
    /// listener.
    fn is_reachable(
        &self,
        namespace: &str,
        host: &'a str,
        ports: impl Iterator<Item = u16>,
    ) -> bool {
        let snapshot = self.snapshot;
        if self.passthrough_names.contains(&snapshot.names.stem(host).ok_or(host)) {
            return true;
        }
        if snapshot.is_cluster_local(host) || !snapshot.may_answer(host, namespace) {
            return false;
        }
        snapshot.clusters_by_link(host).next().is_some()
            || snapshot.is_exposed_to_any(host, ports, |entry| !entry.to.is_empty())
    }

    fn reachable_waypoints(&self) -> &HashSet<String> {
        let is_reached = |service: &&'a Arc<mesh::Service>| {
            let ports = service.ports.keys().copied();
            self.is_reachable(&service.namespace, &service.hostname, ports)
        };
        self.waypoints.get_or_init(|| {
            let services = self.snapshot.mesh.services.values();
            let behind = services.filter(|service| !service.waypoints.is_empty());
            let waypoints = behind.filter(is_reached).flat_map(|of| &of.waypoints);
            let waypoints =
                waypoints.filter_map(|waypoint| self.snapshot.waypoint(&waypoint.gateway.place));
            waypoints.map(|of| of.key()).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::builder::{Change, build};
    use super::super::mesh::Template;
    use super::super::mesh::{GatewayAddress, Mesh, Place, Protocol, Service, Waypoint};
    use super::super::{Alias, Audience, ExportSet, ExposureTable, NameTable};
    use super::*;
    use crate::snapshot::tests::{alias, entry, samples};

    fn service(name: &str, behind: Option<&str>) -> Service {
        let waypoint = |name: &str| Waypoint {
            gateway: GatewayAddress { place: Place::Name(format!("app/{name}.app")), port: 15008 },
            weight: 1,
        };
        let waypoints = behind.map(waypoint).into_iter().collect();
        Service { waypoints, ..samples::service(name) }
    }

    /// Returns a workload of the service `name`, whose hostname is also `name`.
    fn workload(name: &str, change: impl FnOnce(&mut Workload)) -> Workload {
        let template =
            Template { hostname: name.into(), protocol: Protocol::Hbone, ..Template::default() };
        let mut workload = samples::workload(&format!("uid-{name}"), name, template);
        change(&mut workload);
        workload
    }

    fn plain(name: &str) -> Workload {
        workload(name, |_| ())
    }

    fn mesh() -> Mesh {
        let of_echo = |hostname: &str, change: fn(&mut Workload)| {
            workload("echo", |workload| {
                workload.uid = hostname.into();
                workload.hostname = hostname.into();
                change(workload);
            })
        };
        let mut mesh = Mesh::new(
            [
                service("echo", Some("waypoint")),
                service("waypoint", None),
                service("exported", None),
                service("hidden", Some("unused")),
                service("unused", None),
                service("routed", None),
            ],
            [
                plain("echo"),
                plain("waypoint"),
                plain("exported"),
                plain("hidden"),
                plain("unused"),
                plain("routed"),
                of_echo("plain", |workload| workload.protocol = Protocol::Tcp),
                of_echo("west", |workload| workload.network = "west".into()),
                of_echo("drained", |workload| workload.capacity = 0),
                of_echo("NetworkGateway/west/gateway/15008", |_| ()),
            ],
        );
        mesh.hbone_only = true;
        mesh
    }

    fn exposure(to: Vec<Audience>) -> ExposureTable {
        let mut table = ExposureTable::new(false);
        table.add(entry("echo.app", to));
        table
    }

    fn wanted(change: Change) -> Vec<String> {
        let change = Change { mesh: Some((mesh(), "east".into())), ..change };
        let snapshot = build(&Snapshot::default(), change);
        let wanted = snapshot.wanted_hosts();
        wanted.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn only_hostnames_that_a_service_within_reach_would_dial_are_wanted() {
        let anyone = Audience { anyone: true, ..Audience::default() };
        let of = |exposure, exported: Option<u16>| Change {
            exposure: Some(exposure),
            exports: exported.map(|port| [("exported.app", port)].into_iter().collect()),
            ..Change::default()
        };
        let none = [""; 0];
        assert_eq!(wanted(of(ExposureTable::default(), None)), none);
        assert_eq!(wanted(of(exposure(Vec::new()), Some(81))), none);
        let exported = of(exposure(Vec::new()), Some(80));
        assert_eq!(wanted(exported), ["exported"]);
        let exposed = of(exposure(vec![anyone.clone()]), None);
        assert_eq!(wanted(exposed), ["echo", "waypoint"]);
        let mut routed = exposure(vec![anyone]);
        routed.add_passthrough_hosts(["routed.app"]);
        let change = Change { has_passthrough: Some(true), ..of(routed, None) };
        assert_eq!(wanted(change), ["echo", "plain", "routed", "waypoint"]);
        let all = wanted(of(ExposureTable::new(true), None));
        let want = ["echo", "exported", "hidden", "routed", "unused", "waypoint"];
        assert_eq!(all, want);
    }

    #[test]
    fn hostnames_of_a_workload_that_changes_are_looked_at_again() {
        let change = |mesh: Mesh| Change {
            mesh: Some((mesh, "east".into())),
            exposure: Some(ExposureTable::new(true)),
            exports: Some(ExportSet::default()),
            ..Change::default()
        };
        let first = build(&Snapshot::default(), change(mesh()));
        let mut mesh = first.mesh.clone();
        let west = workload("echo", |workload| workload.network = "west".into());
        mesh.workloads.insert(Arc::clone(&west.uid), Arc::new(west));
        let second = build(&first, change(mesh));
        assert!(second.hosts.version > first.hosts.version);
        assert!(first.wanted_hosts().contains_key("echo"));
        assert!(!second.wanted_hosts().contains_key("echo"));
    }
    fn all(mesh: Mesh) -> Change {
        Change {
            mesh: Some((mesh, "east".into())),
            exports: Some([("echo.app", 80)].into_iter().collect()),
            ..Change::default()
        }
    }

    #[test]
    fn a_service_that_comes_behind_a_waypoint_has_its_hostnames_looked_at() {
        let at = |address: [u8; 4]| Place::Address("east".to_owned(), address.into());
        for place in [Place::Name("app/waypoint.app".into()), at([240, 0, 0, 1])] {
            let mut echo = service("echo", Some("waypoint"));
            echo.waypoints[0].gateway.place = place;
            let mut waypoint = service("waypoint", None);
            waypoint.vips = vec![("east".into(), [240, 0, 0, 1].into())];
            let other = service("other", None);
            let workloads = Mesh::new([], [plain("waypoint")]).workloads;
            let mesh = |services: &[&Service]| {
                let services = services.iter().copied().cloned();
                Mesh { workloads: workloads.clone(), ..Mesh::new(services, []) }
            };
            // Meshes in sequence, each with whether hostnames are reviewed and whether the
            // waypoint's is wanted.
            let steps = [
                (mesh(&[&waypoint]), true, false),
                (mesh(&[&waypoint, &other]), false, false),
                (mesh(&[&waypoint, &other, &echo]), true, true),
                (mesh(&[&waypoint, &echo]), false, true),
                (mesh(&[&echo]), true, false),
                (mesh(&[&waypoint, &echo]), true, true),
                (mesh(&[&waypoint]), true, false),
            ];
            let mut snapshot = Snapshot::default();
            for (index, (mesh, looked, wanted)) in steps.into_iter().enumerate() {
                let next = build(&snapshot, all(mesh));
                let is_wanted = next.wanted_hosts().contains_key("waypoint");
                assert_eq!(is_wanted, wanted, "{:?}, step {index}", echo.waypoints);
                let (old, new) = (&snapshot, &next);
                let moved = old.hosts.version != new.hosts.version;
                assert_eq!(moved, looked, "{:?}, step {index}", echo.waypoints);
                snapshot = next;
            }
        }
    }

    #[test]
    fn a_route_leads_to_the_family_of_a_name_and_of_its_aliases() {
        let named = |name: &str| {
            let mut routed = exposure(Vec::new());
            routed.add_passthrough_hosts([name]);
            let alias = Alias::new(alias("alias", &["echo.app.one"]), None);
            let mut mesh = mesh();
            let service = "app/echo.app.two";
            let two = workload("two", |of| {
                of.services = [(service.into(), [(80, 80)].into())].into();
            });
            mesh.workloads.insert(Arc::clone(&two.uid), Arc::new(two));
            let change = Change {
                mesh: Some((mesh, "east".into())),
                exposure: Some(routed),
                exports: Some(ExportSet::default()),
                names: Some(NameTable::new(["one", "two"], [("alias", alias)])),
                ..Change::default()
            };
            let wanted = build(&Snapshot::default(), change).wanted_hosts();
            wanted.contains_key("two")
        };
        let names = ["echo.app.one", "echo.app.two", "alias", "echo.app", "else"];
        assert_eq!(names.map(named), [true, true, true, false, false]);
    }
}
