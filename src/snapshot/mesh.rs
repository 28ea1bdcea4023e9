//! The mesh as a discovery source tells it, before it is turned into what the data path reads.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::Serialize;

/// Everything that a discovery source knows.
///
/// What is in it is shared: a source that tells of changes keeps what it knows beside each mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mesh {
    /// The services.
    pub services: Vec<Arc<Service>>,
    /// The workloads, local and remote.
    pub workloads: Vec<Arc<Workload>>,
    /// Whether endpoints without HBONE are passed over, as under Istio (contract 10, Dialling):
    /// there a peer's bytes are for a ztunnel and mean nothing to the application.
    pub hbone_only: bool,
}

/// A service (Istio's WDS `Service`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// The service's name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its hostname.
    pub hostname: String,
    /// Its virtual addresses by network.
    pub vips: Vec<(String, IpAddr)>,
    /// Service port to target port; target 0 means that each workload names its own.
    pub ports: BTreeMap<u16, u16>,
    /// Identities to accept at the endpoints besides the workloads' own.
    pub subject_alt_names: Vec<String>,
    /// The waypoints that traffic has to go through, if there are any.
    pub waypoints: Vec<Waypoint>,
    /// Whether traffic that comes from an ingress gateway has to do so too.
    pub ingress_use_waypoint: bool,
    /// What endpoints are preferred for, the first preference first; empty where the mode of
    /// balancing ranks nothing.
    pub preferences: Vec<Scope>,
    /// Whether endpoints that miss a preference are not used at all (mode STRICT), instead of
    /// only when there is no other.
    pub strict: bool,
    /// Whether unhealthy endpoints may be used (`healthPolicy: AllowAll`).
    pub allow_unhealthy: bool,
    /// Whether the service only passes original destinations through.
    pub passthrough: bool,
    /// Whether this definition wins over others of the same hostname.
    pub canonical: bool,
    /// Whether only clients of its namespace see it.
    pub private: bool,
}

/// A waypoint of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waypoint {
    /// Where it is.
    pub gateway: GatewayAddress,
    /// Its share of the sum of all; 0 is never picked.
    pub weight: u32,
}

/// A gateway or a waypoint: where it is, and its port of HBONE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayAddress {
    /// Where it is.
    pub place: Place,
    /// Its port of HBONE.
    pub port: u16,
}

/// Where a gateway is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// At a service or at a workload with a DNS name: `namespace/hostname`.
    Name(String),
    /// At an address in a network.
    Address(String, IpAddr),
}

/// What a gateway and an endpoint can have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The region.
    Region,
    /// The zone.
    Zone,
    /// The subzone.
    Subzone,
    /// The node.
    Node,
    /// The cluster.
    Cluster,
    /// The network.
    Network,
}

/// A workload (Istio's WDS `Workload`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// The unique id within the mesh.
    pub uid: String,
    /// The workload's name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its service account.
    pub service_account: String,
    /// Its trust domain.
    pub trust_domain: String,
    /// The cluster that it runs in.
    pub cluster: String,
    /// The network that its addresses belong to; empty means ours.
    pub network: String,
    /// The node that it runs on.
    pub node: String,
    /// A DNS name instead of an address.
    pub hostname: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// How it is dialled.
    pub protocol: Protocol,
    /// Whether it is ready.
    pub healthy: bool,
    /// Its weight; 0 drains it.
    pub capacity: u32,
    /// Where it runs.
    pub locality: Locality,
    /// The name of the Deployment, Job or the like that made it.
    pub workload_name: String,
    /// The kind of what made it.
    pub workload_type: String,
    /// `service.istio.io/canonical-name`.
    pub canonical_name: String,
    /// `service.istio.io/canonical-revision`.
    pub canonical_revision: String,
    /// Whether it shares its node's address.
    pub host_network: bool,
    /// The gateway of another network through which it is reached.
    pub network_gateway: Option<GatewayAddress>,
    /// The names, `namespace/name`, of the policies that select it.
    pub policies: Vec<String>,
    /// For each `namespace/hostname`, service port to target port.
    pub services: BTreeMap<String, BTreeMap<u16, u16>>,
}

/// How an endpoint is dialled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// Plain TCP at the target port.
    #[default]
    Tcp,
    /// HBONE at port 15008; the inner CONNECT, which we do not see, names the target port.
    Hbone,
}

/// Where something runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Locality {
    /// The region, such as `us-east-2`.
    pub region: String,
    /// The zone, such as `us-east-2a`.
    pub zone: String,
    /// The subzone, such as a rack.
    pub subzone: String,
}
