//! Meshes of any size, exposed to cluster west.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use strait::config::{ExposedService, HostPort, SUFFIXES};
use strait::snapshot::builder::{Change, build};
use strait::snapshot::mesh::{Mesh, Protocol, Service, Template, Workload};
use strait::snapshot::{
    Audience, Endpoint, EndpointSet, EndpointState, ExposureTable, NameTable, Snapshot, TrustSet,
};

/// Cluster and network of the gateway.
pub const NETWORK: &str = "east";

/// Returns the hostname of a service.
pub fn hostname(index: usize) -> String {
    format!("service-{index}.app.svc.cluster.local")
}

/// Returns `services` services of port 80, each with `each` workloads, and VIPs from 240.0.0.0 on.
pub fn mesh(services: usize, each: usize) -> Mesh {
    let workloads = (0..services * each).map(|index| workload(index, index / each.max(1)));
    Mesh::new((0..services).map(service), workloads)
}

/// Returns an address counted from `base`.
pub fn address(base: [u8; 4], index: usize) -> IpAddr {
    let index = u32::try_from(index).expect("a small mesh");
    Ipv4Addr::from_bits(Ipv4Addr::from(base).to_bits() + index).into()
}

fn service(index: usize) -> Service {
    Service {
        name: format!("service-{index}").into(),
        namespace: "app".into(),
        hostname: hostname(index).into(),
        vips: vec![(NETWORK.into(), address([240, 0, 0, 0], index))],
        ports: [(80, 8080)].into(),
        ..Service::default()
    }
}

fn workload(index: usize, service: usize) -> Workload {
    Workload {
        uid: format!("east//Pod/app/workload-{index}").into(),
        own_name: Some(format!("workload-{index}").into()),
        addresses: [address([10, 0, 0, 1], index)].into(),
        healthy: true,
        capacity: weight(index),
        services: [(format!("app/{}", hostname(service)).into(), [(80, 8080)].into())].into(),
        template: Template {
            namespace: "app".into(),
            service_account: "default".into(),
            trust_domain: "east.local".into(),
            cluster: "east".into(),
            network: NETWORK.into(),
            protocol: Protocol::Hbone,
            workload_name: format!("service-{service}").into(),
            canonical_name: format!("service-{service}").into(),
            canonical_revision: "v1".into(),
            ..Template::default()
        }
        .into(),
        ..Workload::default()
    }
}

/// Returns a weight from 1 to 5.
fn weight(index: usize) -> u32 {
    1 + u32::try_from(index % 5).expect("less than five")
}

/// Returns the mesh with every service exposed to cluster west, and each under an alias too.
pub fn snapshot(mesh: Mesh) -> Snapshot {
    let mut exposure = ExposureTable::new(false);
    for index in 0..mesh.services.len() {
        let alias = format!("service-{index}.global");
        exposure.add(ExposedService { names: vec![host(&alias)], ..to_west(&hostname(index)) });
    }
    let trust = TrustSet::new([("west.local", "west"), ("north.local", "north")]);
    let change = Change {
        mesh: Some((mesh, NETWORK.into())),
        trust: Some(trust),
        exposure: Some(exposure),
        names: Some(NameTable::new(SUFFIXES, [])),
        ..Change::default()
    };
    build(&Snapshot::default(), change)
}

/// Returns an exposure to two other audiences, and then to the requesting one.
pub fn to_west(service: &str) -> ExposedService {
    let audience = |cluster: &str, namespace: &str| Audience {
        cluster: Some(cluster.into()),
        namespaces: vec![namespace.into()],
        ..Audience::default()
    };
    let to = vec![audience("north", "shop"), audience("west", "other"), audience("west", "shop")];
    ExposedService { to, ..ExposedService::new(host(service)) }
}

/// Returns a name without a port.
pub fn host(name: &str) -> HostPort {
    HostPort::parse(name).expect("a name")
}

/// Returns a set of endpoints without tunnels in flight.
pub fn endpoints(count: usize) -> EndpointSet {
    let endpoint = |index| {
        Arc::new(Endpoint {
            address: (address([10, 0, 0, 1], index), 15008).into(),
            protocol: Protocol::Hbone,
            definition: Arc::new(workload(index, 0)),
            remote: None,
            weight: weight(index),
            state: Arc::new(EndpointState::default()),
        })
    };
    EndpointSet::new((0..count).map(endpoint))
}
