//! The mesh: uids of 60 bytes, names of 30, at most 10,000 services.

use prost::Message as _;
use strait::grpc::workload::{
    Address, Locality, NetworkAddress, Port, PortList, Service, TunnelProtocol, Workload, address,
};

/// Services of the largest mesh.
const SERVICES_MAX: usize = 10_000;
/// Workloads of a service, where there are fewer.
const WORKLOADS_EACH: usize = 10;
/// Nodes that they run on.
const NODES: usize = 1_000;

/// A mesh by its number of workloads.
#[derive(Clone, Copy, Debug)]
pub struct Mesh {
    pub workloads: usize,
}

impl Mesh {
    /// How many services it has.
    pub fn services(self) -> usize {
        (self.workloads / WORKLOADS_EACH).clamp(1, SERVICES_MAX)
    }

    /// All resources, by name, and their bodies.
    pub fn resources(self) -> Vec<(String, Vec<u8>)> {
        let services = (0..self.services()).map(service);
        let workloads = (0..self.workloads).map(|index| self.workload(index, 1));
        services.chain(workloads).collect()
    }

    /// A workload with a weight.
    pub fn workload(self, index: usize, weight: u32) -> (String, Vec<u8>) {
        let of = index % self.services();
        let service = format!("app/{}", hostname(of));
        let [.., a, b, c] = index.to_be_bytes();
        let mut workload = workload(index, &service, vec![10, a, b, c]);
        workload.capacity = Some(weight);
        workload.workload_name = format!("service-{of:05}");
        workload.canonical_name = format!("service-{of:05}");
        let uid = workload.uid.clone();
        (uid, encoded(address::Type::Workload(workload)))
    }
}

/// A workload of a service that can be dialled at an address.
pub fn workload(index: usize, service: &str, address: Vec<u8>) -> Workload {
    let ports = PortList {
        ports: vec![port()],
    };
    let locality = Locality {
        region: "eu-central-1".into(),
        zone: "eu-central-1a".into(),
        ..Locality::default()
    };
    Workload {
        uid: format!("east//Pod/app/{index:046}"),
        name: format!("{index:030}"),
        namespace: "app".into(),
        addresses: vec![address.into()],
        network: "east".into(),
        cluster_id: "east".into(),
        tunnel_protocol: TunnelProtocol::Hbone.into(),
        trust_domain: "east.local".into(),
        service_account: "default".into(),
        node: format!("node-{:04}.eu-central-1.internal", index % NODES),
        canonical_revision: "v1".into(),
        locality: Some(locality),
        services: [(service.to_owned(), ports)].into(),
        ..Workload::default()
    }
}

/// A service, by its name as a resource.
pub fn named(name: &str, hostname: &str, vip: Vec<u8>) -> (String, Vec<u8>) {
    let service = Service {
        name: name.into(),
        namespace: "app".into(),
        hostname: hostname.into(),
        addresses: vec![NetworkAddress {
            network: "east".into(),
            address: vip.into(),
            ..NetworkAddress::default()
        }],
        ports: vec![port()],
        ..Service::default()
    };
    let body = encoded(address::Type::Service(service));
    (format!("app/{hostname}"), body)
}

fn service(index: usize) -> (String, Vec<u8>) {
    let [.., a, b] = index.to_be_bytes();
    named(
        &format!("{index:030}"),
        &hostname(index),
        vec![240, 1, a, b],
    )
}

fn hostname(index: usize) -> String {
    format!("service-{index:05}.app.svc.cluster.local")
}

fn port() -> Port {
    Port {
        service_port: 80,
        target_port: 8080,
        ..Port::default()
    }
}

/// A resource as it is sent.
pub fn encoded(of: address::Type) -> Vec<u8> {
    Address { r#type: Some(of) }.encode_to_vec()
}
