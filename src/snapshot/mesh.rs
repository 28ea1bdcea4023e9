//! The mesh as a discovery source tells it, before it is turned into what the data path reads.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Serialize;

/// Everything that a discovery source knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Mesh {
    /// The services.
    pub services: Vec<Service>,
    /// The workloads, local and remote.
    pub workloads: Vec<Workload>,
    /// How many authorization policies the source has.
    pub policies: usize,
}

/// A service (Istio's WDS `Service`).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
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
    /// Whether traffic has to go through a waypoint.
    pub waypoint: bool,
    /// Whether unhealthy endpoints may be used (`healthPolicy: AllowAll`).
    pub allow_unhealthy: bool,
    /// Whether the service only passes original destinations through.
    pub passthrough: bool,
    /// Whether this definition wins over others of the same hostname.
    pub canonical: bool,
}

/// A workload (Istio's WDS `Workload`).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
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
    /// Whether it is reached through another network's gateway.
    pub network_gateway: bool,
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
