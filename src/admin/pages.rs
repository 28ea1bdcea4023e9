//! Pages `/status`, `/peers` and `/refusals`, as the gateway answers with them and as the commands
//! read them. The keys are documented in `docs/operations.md`; scripts depend on them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::config::Listener;
use crate::status::{Discovery, HeldRemovals, HostnameStatuses, LinkUsage, ResourceUsage, rfc3339};
pub use crate::status::{GatewayRow, ReloadRow};

/// State of the gateway. `L` is the listener: the commands read a part of [`ListenerRow`].
#[derive(Debug, Deserialize, Serialize)]
pub struct StatusPage<L = ListenerRow> {
    pub version: String,
    #[serde(with = "rfc3339")]
    pub at: SystemTime,
    pub ready: bool,
    /// Conditions that readiness waits for.
    pub pending: Vec<String>,
    /// Problems, which exist even if the gateway is ready.
    pub problems: Vec<String>,
    pub cluster: String,
    pub network: String,
    pub locality: LocalityRow,
    pub snapshot: u64,
    pub mesh: MeshCounts,
    pub source: SourceRow,
    /// Regions that an operator has evacuated, in their configuration syntax.
    pub evacuated: Vec<String>,
    pub drained: Vec<DrainedRow>,
    pub certificates: Vec<CertificateRow>,
    pub crls: Vec<CrlRow>,
    /// Issuers of peers' certificates, with the busiest first.
    pub issuers: Vec<IssuerRow>,
    pub gateways: Vec<GatewayRow>,
    pub reloads: Vec<ReloadRow>,
    pub hosts: HostnameStatuses,
    pub listeners: Vec<L>,
    pub shares: Vec<ResourceUsage>,
    pub services: ServiceRows,
}

/// Gateways of other networks, and links between this cluster and others.
#[derive(Debug, Deserialize, Serialize)]
pub struct PeersPage {
    pub cluster: String,
    pub network: String,
    pub links: Vec<LinkRow>,
    pub budgets: Vec<LinkUsage>,
    /// Identities of gateways with a connection or tunnels. Replicas share an identity.
    pub peers: Vec<PeerTunnels>,
    pub gateways: Vec<GatewayRow>,
    pub loads: Vec<LoadRow>,
}

/// Last refusals of tunnels and connections.
#[derive(Debug, Deserialize, Serialize)]
pub struct RefusalsPage {
    /// Kinds of refusals, with the most frequent first.
    pub refusals: Vec<RefusalRow>,
}

/// Event of `/dashboard/events`.
#[derive(Debug, Deserialize, Serialize)]
pub struct DashboardEvent<L = ListenerRow> {
    pub status: StatusPage<L>,
    pub peers: PeersPage,
    pub refusals: RefusalsPage,
}

/// Refusals with the same reason, peer and requested name.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RefusalRow {
    /// Reason of a tunnel or handshake, or limit of a connection.
    pub reason: String,
    pub count: u64,
    #[serde(with = "rfc3339")]
    pub last: SystemTime,
    pub identity: Option<Arc<str>>,
    pub cluster: Option<String>,
    /// Identity of the first peer behind a gateway.
    pub first_peer: Option<String>,
    /// Address of the peer, as this and `error` were at the last refusal.
    pub address: IpAddr,
    pub listener: Option<String>,
    pub authority: Option<String>,
    pub sni: Option<String>,
    pub error: Option<String>,
    pub explain: Option<String>,
}

impl<L> StatusPage<L> {
    /// Returns true if the source has sent nothing yet.
    pub fn has_no_mesh(&self) -> bool {
        let mut pending = self.pending.iter();
        let MeshCounts { services, workloads, .. } = self.mesh;
        pending.any(|what| what.starts_with("discovery")) && services == 0 && workloads == 0
    }
}

/// Part of the mesh, or listener, that an operator has drained.
#[derive(Debug, Deserialize, Serialize)]
pub struct DrainedRow {
    /// `region`, `cluster`, `endpoint`, `gateway`, `service` or `listener`.
    pub kind: String,
    pub name: String,
    #[serde(with = "rfc3339")]
    pub since: SystemTime,
    /// True if a restart keeps it.
    #[serde(default)]
    pub persisted: bool,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct LocalityRow {
    pub region: String,
    pub zone: String,
    pub subzone: String,
    /// Key, variable, label or record that contains it; empty if unknown.
    pub origin: String,
}

#[derive(Debug, Deserialize, Serialize)]
pub struct MeshCounts {
    pub services: usize,
    pub workloads: usize,
    pub policies: usize,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceRow {
    /// `file`, `istio` or `envoy`.
    pub kind: String,
    /// File or address.
    pub place: String,
    /// State of the stream to a control plane.
    pub stream: Option<Discovery>,
    /// Description of the objects restored from disk, until an API server has listed all kinds.
    #[serde(default)]
    pub objects_from_disk: Option<String>,
    /// Removals by an API server that are held.
    #[serde(default)]
    pub hold: Option<HeldRemovals>,
}

/// Certificate of an identity of the gateway, or the first root of a trust domain that expires.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateRow {
    pub identity: String,
    pub state: String,
    pub serial: String,
    /// RFC 3339; empty without a certificate.
    pub expires: String,
    pub renewal_problem: Option<String>,
}

/// Certificate revocation list.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CrlRow {
    pub issuer: String,
    pub number: Option<String>,
    pub file: String,
    #[serde(with = "rfc3339")]
    pub next_update: SystemTime,
    pub stale: bool,
}

/// Services of the mesh, up to the limit.
#[derive(Debug, Deserialize, Serialize)]
pub struct ServiceRows {
    /// Number of requested services.
    pub total: usize,
    pub list: Vec<ServiceRow>,
}

/// Service of the mesh.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRow {
    /// `NAMESPACE/HOSTNAME`.
    pub service: String,
    pub ports: Vec<u16>,
    /// Workloads that are used for at least one port, out of `total`.
    pub used: usize,
    pub total: usize,
    pub tunnels: u32,
    /// Peers that may reach it, and by which rule.
    pub exposed_to: Vec<String>,
    /// Endpoints, if the service was requested by name.
    pub endpoints: Vec<ServiceEndpointRow>,
    /// Number of further endpoints beyond the limit.
    pub more: usize,
}

/// Endpoint of a service port.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ServiceEndpointRow {
    pub port: u16,
    pub uid: String,
    pub address: Option<SocketAddr>,
    pub weight: u32,
    pub tunnels: u32,
    /// Reason why it is not used.
    pub unused: Option<String>,
}

/// Link from one cluster to another.
#[derive(Debug, Deserialize, Serialize)]
pub struct LinkRow {
    pub from: String,
    pub to: String,
    pub linked: bool,
    #[serde(flatten)]
    pub traffic: LinkTraffic,
}

/// Traffic of a link, by its direction.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum LinkTraffic {
    /// From this cluster: gateways of the other one.
    Outbound { gateways: usize, ready: usize, tunnels: usize },
    /// To this cluster: handshakes, known only if the issuers determine the clusters.
    Inbound { accepted: Option<u64>, refused: Option<u64> },
}

/// Open tunnels between this gateway and one identity.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct PeerTunnels {
    pub identity: Arc<str>,
    /// Tunnels that the identity has opened here.
    #[serde(rename = "in")]
    pub inbound: usize,
    /// Tunnels through gateways with the identity.
    #[serde(rename = "out")]
    pub outbound: usize,
}

/// Service behind a gateway that tunnels have used lately.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadRow {
    pub gateway: SocketAddr,
    pub service: String,
    /// Instances behind the gateway.
    pub counted: u32,
    /// Free capacity that the gateway reports, in instances.
    pub free: Option<f64>,
    pub dial: String,
    pub dial_milliseconds: u32,
    pub factor: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct ListenerRow {
    /// Listener in the configuration, or in the last one that contained it.
    #[serde(flatten)]
    pub listener: Listener,
    /// Address, with the port that the kernel assigned.
    pub address: SocketAddr,
    /// State.
    pub state: ListenerState,
    /// Error of the address that the configuration has.
    pub error: Option<String>,
}

/// State of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerState {
    /// Waits for the first certificate and accepts no connections.
    Waiting,
    /// Accepts connections.
    Open,
    /// Accepts no new connections; open tunnels continue.
    Draining,
    /// Could not be opened.
    Failed,
}

impl ListenerRow {
    /// Returns true if the listener accepts connections now or after the first certificate.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self.state, ListenerState::Open | ListenerState::Waiting)
    }
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct IssuerRow {
    /// SHA-256 of the SubjectPublicKeyInfo.
    pub spki: String,
    /// Subject.
    pub subject: String,
    /// Cluster by `trust.clusters`; none without that key, or if the issuer is refused.
    pub cluster: Option<String>,
    /// Number of connections accepted since the start.
    pub accepted: u64,
    /// Number of handshakes refused because of the issuer.
    pub refused: u64,
}
