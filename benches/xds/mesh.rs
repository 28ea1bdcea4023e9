//! Meshes as a control plane sends them.

use prost::Message as _;
use strait::grpc::workload::{
    Address, GatewayAddress, Locality, NetworkAddress, Port, PortList, Service, TunnelProtocol,
    Workload, WorkloadType, address, gateway_address,
};

/// Number of services of the largest mesh.
const SERVICES_MAX: usize = 10_000;
/// Number of workloads of a service, in smaller meshes.
const WORKLOADS_EACH: usize = 10;
/// Number of nodes that they run on.
const NODES: usize = 1_000;
/// Clusters whose east-west gateways have a split-horizon record of each service.
const REMOTE: [&str; 3] = ["west", "north", "south"];
/// Interval of the services that are exported.
const EXPORTED_EACH: usize = 10;
/// Clusters that istiod sends to each east-west gateway besides those of services.
const STATIC: [&str; 4] = ["main_internal", "encap", "forward_inner_connect", "BlackHoleCluster"];
/// Size of a cluster in bytes, without its name.
const CLUSTER_BYTES: usize = 2_500;

/// Kind of mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// uids of 60 bytes, names of 30, at most 10,000 services. A change alters a weight.
    Short,
    /// As istiod sends it: names of 120 bytes, labels, SANs, clusters of the exported services, and
    /// split-horizon records of three remote clusters among the workloads.
    Istiod,
    /// One service, with the names of [`Shape::Istiod`], in a rolling update. A change replaces one
    /// of its pods by a new one.
    Rolling,
}

impl Shape {
    /// Name on the command line and in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Istiod => "istiod",
            Self::Rolling => "rolling",
        }
    }
}

/// Mesh, by its shape and its number of workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub shape: Shape,
    pub workloads: usize,
}

/// Resource: name and body.
pub type Resource = (String, Vec<u8>);

/// Change of one workload.
pub struct Change {
    pub put: Resource,
    /// Name of the resource that it removes.
    pub removed: Option<String>,
}

impl Mesh {
    /// Returns the number of services.
    pub fn services(self) -> usize {
        match self.shape {
            Shape::Rolling => 1,
            Shape::Short | Shape::Istiod => {
                (self.workloads / WORKLOADS_EACH).clamp(1, SERVICES_MAX)
            }
        }
    }

    /// Number of workloads that are split-horizon records, which come last.
    fn remotes(self) -> usize {
        match self.shape {
            Shape::Istiod if self.workloads > REMOTE.len() => REMOTE.len() * self.services(),
            Shape::Short | Shape::Istiod | Shape::Rolling => 0,
        }
    }

    /// Number of workloads that are pods.
    fn pods(self) -> usize {
        self.workloads - self.remotes()
    }

    /// Returns all services and workloads.
    pub fn resources(self) -> Vec<Resource> {
        let services = (0..self.services()).map(|index| self.service(index));
        let pods = (0..self.pods()).map(|index| self.pod(index, 1));
        let remotes = (0..self.remotes()).map(|index| self.remote(index));
        services.chain(pods).chain(remotes).collect()
    }

    /// Returns all clusters, as istiod sends them with each push.
    pub fn clusters(self) -> Vec<Resource> {
        if self.shape == Shape::Short {
            return Vec::new();
        }
        let exported = (0..self.services()).step_by(EXPORTED_EACH);
        let exported = exported.map(|of| format!("inbound-vip|80|tcp|{}", self.hostname(of)));
        let names = STATIC.map(str::to_owned).into_iter().chain(exported);
        let body = |name: String| {
            let body = [name.as_bytes(), &[b'x'; CLUSTER_BYTES]].concat();
            (name, body)
        };
        names.map(body).collect()
    }

    /// Returns one of a series of changes, each of which differs from the previous state.
    pub fn change(self, index: usize) -> Change {
        match self.shape {
            Shape::Rolling => {
                Change { put: self.pod(self.workloads + index, 1), removed: Some(self.uid(index)) }
            }
            Shape::Short | Shape::Istiod => {
                let (of, lap) = (index * 7919 % self.pods(), index / self.pods());
                let weight = u32::try_from(lap % 2).unwrap_or_default() + 2;
                Change { put: self.pod(of, weight), removed: None }
            }
        }
    }

    fn uid(self, index: usize) -> String {
        match self.shape {
            Shape::Short => format!("east//Pod/app/{index:046}"),
            Shape::Istiod | Shape::Rolling => format!("east//Pod/app/{index:0>106}"),
        }
    }

    fn pod(self, index: usize, weight: u32) -> Resource {
        let of = index % self.services();
        let service = format!("app/{}", self.hostname(of));
        let [.., a, b, c] = index.to_be_bytes();
        let mut workload = workload(self.uid(index), &service);
        workload.addresses = vec![vec![10, a, b, c].into()];
        workload.name = match self.shape {
            Shape::Short => format!("{index:030}"),
            Shape::Istiod | Shape::Rolling => format!("{index:0>106}"),
        };
        workload.node = format!("node-{:04}.eu-central-1.internal", index % NODES);
        workload.capacity = Some(weight);
        workload.workload_name = format!("service-{of:05}");
        workload.canonical_name = format!("service-{of:05}");
        if self.shape != Shape::Short {
            workload.workload_type = WorkloadType::Deployment.into();
            workload.workload_name = format!("{of:0>63}");
            workload.canonical_name = format!("{of:0>63}");
            workload.canonical_revision = format!("{:0>63}", "v1");
            workload.service_account = format!("{of:0>63}");
        }
        (workload.uid.clone(), encoded(address::Type::Workload(workload)))
    }

    /// Returns the record for the endpoints of a service in a remote cluster.
    fn remote(self, index: usize) -> Resource {
        let (of, cluster) = (index / REMOTE.len(), REMOTE[index % REMOTE.len()]);
        let service = format!("app/{}", self.hostname(of));
        let uid = format!("{cluster}/SplitHorizonWorkload/istio-gateways/eastwest/{service}");
        let mut workload = workload(uid.clone(), &service);
        workload.name.clone_from(&uid);
        workload.workload_type = WorkloadType::Pod.into();
        workload.network = cluster.into();
        workload.cluster_id = cluster.into();
        workload.capacity = Some(5);
        let gateway = vip(cluster, vec![203, 0, 113, 1]);
        workload.network_gateway = Some(GatewayAddress {
            destination: Some(gateway_address::Destination::Address(gateway)),
            hbone_mtls_port: 15008,
        });
        (uid, encoded(address::Type::Workload(workload)))
    }

    fn service(self, index: usize) -> Resource {
        let [.., a, b] = index.to_be_bytes();
        let mut service = service(&format!("{index:030}"), &self.hostname(index));
        service.addresses = vec![vip("east", vec![240, 1, a, b])];
        if self.shape != Shape::Short {
            let each = REMOTE.iter().zip(2..);
            let vips = each.map(|(network, first)| vip(network, vec![240, first, a, b]));
            service.addresses.extend(vips);
            let account = |of| format!("spiffe://cluster.local/ns/app/sa/{index:0>60}-{of}");
            service.subject_alt_names = (0..2).map(account).collect();
        }
        let name = format!("app/{}", service.hostname);
        (name, encoded(address::Type::Service(service)))
    }

    fn hostname(self, index: usize) -> String {
        match self.shape {
            Shape::Short => format!("service-{index:05}.app.svc.cluster.local"),
            // A DNS label has at most 63 bytes.
            Shape::Istiod | Shape::Rolling => {
                format!("service-{index:055}.{:a<34}.svc.cluster.local", "app")
            }
        }
    }
}

/// Returns a workload of a service, without an address.
pub fn workload(uid: String, service: &str) -> Workload {
    let ports = PortList { ports: vec![port()] };
    let locality = Locality {
        region: "eu-central-1".into(),
        zone: "eu-central-1a".into(),
        ..Locality::default()
    };
    Workload {
        uid,
        namespace: "app".into(),
        network: "east".into(),
        cluster_id: "east".into(),
        tunnel_protocol: TunnelProtocol::Hbone.into(),
        trust_domain: "east.local".into(),
        service_account: "default".into(),
        canonical_revision: "v1".into(),
        locality: Some(locality),
        services: [(service.to_owned(), ports)].into(),
        ..Workload::default()
    }
}

/// Returns a service without an address.
pub fn service(name: &str, hostname: &str) -> Service {
    Service {
        name: name.into(),
        namespace: "app".into(),
        hostname: hostname.into(),
        ports: vec![port()],
        ..Service::default()
    }
}

/// Returns a virtual address.
pub fn vip(network: &str, address: Vec<u8>) -> NetworkAddress {
    NetworkAddress { network: network.into(), address: address.into(), ..NetworkAddress::default() }
}

fn port() -> Port {
    Port { service_port: 80, target_port: 8080, ..Port::default() }
}

/// Encodes a resource.
pub fn encoded(of: address::Type) -> Vec<u8> {
    Address { r#type: Some(of) }.encode_to_vec()
}
