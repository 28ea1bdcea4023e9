//! The pure builder: an old snapshot and a change make the next snapshot.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::endpoint::States;
use super::mesh::{self, Mesh, Protocol};
use super::{
    Endpoint, EndpointSet, EndpointState, ExportSet, ExposureTable, Service, Snapshot, TrustSet,
};
use crate::status::WorkloadLabels;

/// The port of HBONE (contract 0.3): endpoints that speak it are dialled there.
pub const HBONE_PORT: u16 = 15008;

/// What may change at once; what is none stays as it was.
#[derive(Debug, Default)]
pub struct Change {
    /// The mesh, and the network whose endpoints are local.
    pub mesh: Option<(Mesh, Arc<str>)>,
    /// The trust set.
    pub trust: Option<TrustSet>,
    /// The exposure table.
    pub exposure: Option<ExposureTable>,
    /// What the control plane exports.
    pub exports: Option<ExportSet>,
    /// Whether there are TLS listeners. It takes effect with the mesh of the same change.
    pub direct: Option<bool>,
}

/// Makes the next snapshot. Endpoints that stay keep their state.
pub fn build(old: &Snapshot, change: Change) -> Snapshot {
    let trust = replaced(&old.trust, change.trust);
    let exposure = replaced(&old.exposure, change.exposure);
    let exports = replaced(&old.exports, change.exports);
    let moved = trust != old.trust || exposure != old.exposure || exports != old.exports;
    let mut next = Snapshot {
        version: old.version + 1,
        generation: old.generation + u64::from(moved),
        trust,
        exposure,
        exports,
        direct: change.direct.unwrap_or(old.direct),
        ..Snapshot::default()
    };
    match change.mesh {
        Some((mesh, network)) => {
            let endpoints = Endpoints::of(&mesh, &network, next.direct, &old.endpoints);
            (next.services, next.vips) = services(&mesh, &network, &endpoints);
            next.endpoints = endpoints.states;
            next.mesh = Arc::new(mesh);
        }
        None => {
            next.services.clone_from(&old.services);
            next.vips.clone_from(&old.vips);
            next.endpoints.clone_from(&old.endpoints);
            next.mesh = Arc::clone(&old.mesh);
        }
    }
    next
}

/// The services of a mesh with the endpoints that `network` could dial, for whoever only looks.
pub fn services_of(mesh: &Mesh, network: &str) -> HashMap<Arc<str>, Arc<Service>> {
    let endpoints = Endpoints::of(mesh, network, true, &States::new());
    services(mesh, network, &endpoints).0
}

fn replaced<T: PartialEq>(old: &Arc<T>, new: Option<T>) -> Arc<T> {
    match new {
        Some(new) if new != **old => Arc::new(new),
        _ => Arc::clone(old),
    }
}

/// An endpoint and the workload that it belongs to.
type Served<'a> = (&'a mesh::Workload, Arc<Endpoint>);

/// The local endpoints by service, and their states.
struct Endpoints<'a> {
    /// By (`namespace/hostname`, service port).
    by_service: ByService<'a>,
    /// The same at their target ports, if that is wanted.
    direct: Option<ByService<'a>>,
    states: States,
}

type ByService<'a> = HashMap<(&'a str, u16), Vec<Served<'a>>>;

impl<'a> Endpoints<'a> {
    fn of(mesh: &'a Mesh, network: &str, direct: bool, old: &States) -> Self {
        let mut endpoints = Self {
            by_service: HashMap::new(),
            direct: direct.then(HashMap::new),
            states: States::new(),
        };
        let local = |workload: &&'a Arc<mesh::Workload>| is_local(workload, network);
        for workload in mesh.workloads.iter().filter(local) {
            if let Some(&ip) = workload.addresses.first() {
                endpoints.add(workload, ip.to_canonical(), mesh.hbone_only, old);
            }
        }
        endpoints
    }

    fn add(&mut self, workload: &'a mesh::Workload, ip: IpAddr, hbone_only: bool, old: &States) {
        let endpoint = EndpointOf {
            uid: workload.uid.as_str().into(),
            labels: Arc::new(labels(workload)),
            pod: workload.name.as_str().into(),
            workload,
        };
        let is_hbone = workload.protocol == Protocol::Hbone;
        for (service, ports) in &workload.services {
            for (&port, &target) in ports {
                let key = (service.as_str(), port);
                let mut at = |port, protocol| {
                    let address = SocketAddr::new(ip, port);
                    endpoint.at(address, protocol, &mut self.states, old)
                };
                let direct = self.direct.as_mut().map(|direct| {
                    let endpoint = at(target, Protocol::Tcp);
                    let set = direct.entry(key).or_default();
                    set.push((workload, Arc::clone(&endpoint)));
                    endpoint
                });
                let tunnelled = match direct {
                    _ if is_hbone => at(HBONE_PORT, Protocol::Hbone),
                    _ if hbone_only => continue,
                    Some(endpoint) => endpoint,
                    None => at(target, Protocol::Tcp),
                };
                let set = self.by_service.entry(key).or_default();
                set.push((workload, tunnelled));
            }
        }
    }
}

/// What all endpoints of a workload share.
struct EndpointOf<'a> {
    uid: Arc<str>,
    labels: Arc<WorkloadLabels>,
    pod: Arc<str>,
    workload: &'a mesh::Workload,
}

impl EndpointOf<'_> {
    /// The endpoint at an address, with the state that it had.
    fn at(
        &self,
        address: SocketAddr,
        protocol: Protocol,
        states: &mut States,
        old: &States,
    ) -> Arc<Endpoint> {
        let key = (Arc::clone(&self.uid), address);
        let state = states.entry(key).or_insert_with_key(|key| {
            old.get(key)
                .cloned()
                .unwrap_or_else(|| Arc::new(EndpointState::new()))
        });
        Arc::new(Endpoint {
            uid: Arc::clone(&self.uid),
            address,
            protocol,
            weight: self.workload.capacity,
            locality: self.workload.locality.clone(),
            workload: Arc::clone(&self.labels),
            pod: Arc::clone(&self.pod),
            state: Arc::clone(state),
        })
    }
}

/// Whether a workload can be dialled from `network` (contract 8.3): never a record that stands
/// for another network's gateway, and never what has no address.
fn is_local(workload: &mesh::Workload, network: &str) -> bool {
    (workload.network.is_empty() || workload.network == network)
        && workload.network_gateway.is_none()
        && !workload.uid.starts_with("NetworkGateway/")
        && !workload.uid.contains("/SplitHorizonWorkload/")
}

fn labels(workload: &mesh::Workload) -> WorkloadLabels {
    WorkloadLabels {
        workload: workload.workload_name.clone(),
        namespace: workload.namespace.clone(),
        principal: format!(
            "spiffe://{}/ns/{}/sa/{}",
            workload.trust_domain, workload.namespace, workload.service_account
        ),
        cluster: workload.cluster.clone(),
        canonical_name: workload.canonical_name.clone(),
        canonical_revision: workload.canonical_revision.clone(),
        region: workload.locality.region.clone(),
        zone: workload.locality.zone.clone(),
    }
}

type Tables = (
    HashMap<Arc<str>, Arc<Service>>,
    HashMap<IpAddr, Arc<Service>>,
);

fn services(mesh: &Mesh, network: &str, endpoints: &Endpoints<'_>) -> Tables {
    let mut by_name: HashMap<Arc<str>, (&mesh::Service, Arc<Service>)> = HashMap::new();
    let mut by_vip = HashMap::new();
    for service in &mesh.services {
        let key = format!("{}/{}", service.namespace, service.hostname);
        let sets = |from: &ByService<'_>| {
            let set = |&port| {
                let found = from.get(&(key.as_str(), port));
                let set = endpoint_set(service, found.map_or(&[], Vec::as_slice));
                (port, Arc::new(set))
            };
            service.ports.keys().map(set).collect()
        };
        let hostname: Arc<str> = service.hostname.to_ascii_lowercase().into();
        let built = Arc::new(Service {
            name: service.name.as_str().into(),
            namespace: service.namespace.as_str().into(),
            hostname: Arc::clone(&hostname),
            ports: sets(&endpoints.by_service),
            direct: endpoints.direct.as_ref().map(sets).unwrap_or_default(),
        });
        // Of two services with one hostname the canonical one answers to it (contract 3).
        if service.canonical || !by_name.contains_key(&hostname) {
            by_name.insert(hostname, (service, built));
        }
    }
    // Exposure goes by hostname: a namesake that does not answer to it has no VIP here either.
    for (service, built) in by_name.values() {
        let here = service.vips.iter();
        for (_, vip) in here.filter(|(of, _)| of.is_empty() || of == network) {
            by_vip.insert(vip.to_canonical(), Arc::clone(built));
        }
    }
    let by_name = by_name.into_iter();
    let by_name = by_name.map(|(name, (_, built))| (name, built)).collect();
    (by_name, by_vip)
}

/// The endpoints of one service port that may be dialled.
///
/// A service behind a waypoint has none: to go past the waypoint would skip the policies that it
/// enforces. Nor has a pass-through service, which names no endpoint at all.
fn endpoint_set(service: &mesh::Service, endpoints: &[Served<'_>]) -> EndpointSet {
    if !service.waypoints.is_empty() || service.passthrough {
        return EndpointSet::default();
    }
    let usable = |workload: &mesh::Workload| workload.healthy || service.allow_unhealthy;
    EndpointSet::new(
        endpoints
            .iter()
            .filter(|(workload, endpoint)| usable(workload) && endpoint.address.port() != 0)
            .map(|(_, endpoint)| Arc::clone(endpoint))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(uid: &str, ip: &str) -> mesh::Workload {
        mesh::Workload {
            uid: uid.into(),
            addresses: vec![ip.parse().expect("an address")],
            protocol: Protocol::Hbone,
            healthy: true,
            capacity: 1,
            services: [("app/echo.app".to_owned(), [(80, 8080)].into())].into(),
            ..mesh::Workload::default()
        }
    }

    fn mesh(workloads: Vec<mesh::Workload>) -> Mesh {
        let service = mesh::Service {
            name: "echo".into(),
            namespace: "app".into(),
            hostname: "echo.app".into(),
            vips: vec![
                ("east".into(), "240.0.0.1".parse().expect("an address")),
                ("west".into(), "240.0.0.2".parse().expect("an address")),
            ],
            ports: [(80, 8080)].into(),
            ..mesh::Service::default()
        };
        Mesh {
            services: vec![Arc::new(service)],
            workloads: workloads.into_iter().map(Arc::new).collect(),
            ..Mesh::default()
        }
    }

    fn service(mesh: &mut Mesh) -> &mut mesh::Service {
        Arc::get_mut(&mut mesh.services[0]).expect("a service of our own")
    }

    fn gateway() -> mesh::GatewayAddress {
        mesh::GatewayAddress {
            place: mesh::Place::Name("app/gateway.app".into()),
            port: HBONE_PORT,
        }
    }

    fn built(old: &Snapshot, mesh: Mesh) -> Snapshot {
        build(
            old,
            Change {
                mesh: Some((mesh, "east".into())),
                ..Change::default()
            },
        )
    }

    fn addresses(snapshot: &Snapshot) -> Vec<String> {
        let set = &snapshot.services["echo.app"].ports[&80];
        set.endpoints
            .iter()
            .map(|endpoint| endpoint.address.to_string())
            .collect()
    }

    #[test]
    fn only_local_healthy_undrained_workloads_are_endpoints() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut remote = workload("remote", "10.0.0.3");
        remote.network = "west".into();
        let mut unhealthy = workload("unhealthy", "10.0.0.4");
        unhealthy.healthy = false;
        let mut drained = workload("drained", "10.0.0.5");
        drained.capacity = 0;
        let mut here = workload("here", "10.0.0.6");
        here.network = "east".into();
        let mut through = workload("through", "10.0.0.7");
        through.network_gateway = Some(gateway());
        let mut nowhere = workload("nowhere", "10.0.0.8");
        nowhere.addresses.clear();
        let workloads = vec![
            workload("hbone", "10.0.0.1"),
            plain,
            remote,
            unhealthy,
            drained,
            here,
            through,
            nowhere,
            workload("NetworkGateway/east/10.0.0.9/15008", "10.0.0.9"),
            workload(
                "east/SplitHorizonWorkload/gw/gw/10.0.0.9/app/echo.app",
                "10.0.0.9",
            ),
        ];
        let snapshot = built(&Snapshot::default(), mesh(workloads));
        assert_eq!(
            addresses(&snapshot),
            ["10.0.0.1:15008", "10.0.0.2:8080", "10.0.0.6:15008"]
        );
    }

    #[test]
    fn tls_listeners_dial_every_endpoint_at_its_target_port_and_judge_it_by_that() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut mesh = mesh(vec![workload("hbone", "10.0.0.1"), plain]);
        mesh.hbone_only = true;
        let change = |direct| Change {
            mesh: Some((mesh.clone(), "east".into())),
            direct,
            ..Change::default()
        };
        let without = build(&Snapshot::default(), change(None));
        assert!(without.services["echo.app"].direct.is_empty());
        let first = build(&without, change(Some(true)));
        let direct = |snapshot: &Snapshot| {
            let set = &snapshot.services["echo.app"].direct[&80];
            set.endpoints.clone()
        };
        let dialled: Vec<_> = direct(&first).iter().map(|one| one.address).collect();
        let wanted = ["10.0.0.1:8080", "10.0.0.2:8080"].map(|text| text.parse().expect("one"));
        assert_eq!(dialled, wanted);
        assert_eq!(addresses(&first), ["10.0.0.1:15008"]);
        let tunnelled = &first.services["echo.app"].ports[&80].endpoints[0];
        assert!(!Arc::ptr_eq(&tunnelled.state, &direct(&first)[0].state));
        let next = build(&first, change(None));
        assert!(Arc::ptr_eq(
            &direct(&next)[0].state,
            &direct(&first)[0].state
        ));
    }

    #[test]
    fn endpoints_without_hbone_are_passed_over_where_the_source_says_so() {
        let mut plain = workload("plain", "10.0.0.2");
        plain.protocol = Protocol::Tcp;
        let mut mesh = mesh(vec![workload("hbone", "10.0.0.1"), plain]);
        mesh.hbone_only = true;
        let snapshot = built(&Snapshot::default(), mesh);
        assert_eq!(addresses(&snapshot), ["10.0.0.1:15008"]);
    }

    #[test]
    fn unhealthy_endpoints_serve_where_the_service_allows_it() {
        let mut unhealthy = workload("unhealthy", "10.0.0.4");
        unhealthy.healthy = false;
        let mut mesh = mesh(vec![unhealthy]);
        service(&mut mesh).allow_unhealthy = true;
        assert_eq!(
            addresses(&built(&Snapshot::default(), mesh)),
            ["10.0.0.4:15008"]
        );
    }

    #[test]
    fn a_namesake_of_a_canonical_service_has_neither_its_name_nor_a_vip() {
        let mut mesh = mesh(vec![workload("a", "10.0.0.1")]);
        let mut namesake = mesh::Service::clone(&mesh.services[0]);
        namesake.namespace = "zeta".into();
        namesake
            .vips
            .push((String::new(), "240.0.0.9".parse().expect("an address")));
        service(&mut mesh).canonical = true;
        mesh.services.push(Arc::new(namesake));
        let snapshot = built(&Snapshot::default(), mesh);
        let namespaces = snapshot.vips.values().map(|service| &*service.namespace);
        assert_eq!(namespaces.collect::<Vec<_>>(), ["app"]);
        assert_eq!(&*snapshot.services["echo.app"].namespace, "app");
    }

    #[test]
    fn nothing_goes_past_a_waypoint() {
        let mut mesh = mesh(vec![workload("a", "10.0.0.1")]);
        service(&mut mesh).waypoints = vec![mesh::Waypoint {
            gateway: gateway(),
            weight: 1,
        }];
        assert!(addresses(&built(&Snapshot::default(), mesh)).is_empty());
    }

    #[test]
    fn state_follows_uid_and_address_and_a_reused_address_starts_fresh() {
        let first = built(&Snapshot::default(), mesh(vec![workload("a", "10.0.0.1")]));
        let state = |snapshot: &Snapshot| {
            Arc::clone(&snapshot.services["echo.app"].ports[&80].endpoints[0].state)
        };
        let kept = built(&first, mesh(vec![workload("a", "10.0.0.1")]));
        assert!(Arc::ptr_eq(&state(&first), &state(&kept)));
        let reused = built(&kept, mesh(vec![workload("b", "10.0.0.1")]));
        assert!(!Arc::ptr_eq(&state(&kept), &state(&reused)));
        assert_eq!(reused.endpoints.len(), 1);
    }

    #[test]
    fn only_vips_of_this_network_are_kept() {
        let snapshot = built(&Snapshot::default(), mesh(vec![]));
        let vips: Vec<_> = snapshot.vips.keys().map(ToString::to_string).collect();
        assert_eq!(vips, ["240.0.0.1"]);
    }

    #[test]
    fn the_generation_moves_with_trust_and_exposure_only() {
        let first = built(&Snapshot::default(), mesh(vec![]));
        assert_eq!((first.version, first.generation), (1, 0));
        let trust = || Some(TrustSet::new([("west.local", "west")]));
        let second = build(
            &first,
            Change {
                trust: trust(),
                ..Change::default()
            },
        );
        assert_eq!((second.version, second.generation), (2, 1));
        let same = build(
            &second,
            Change {
                trust: trust(),
                ..Change::default()
            },
        );
        assert_eq!((same.version, same.generation), (3, 1));
        assert!(same.services.contains_key("echo.app"));
    }
}
