//! Gateways of other networks.

use std::net::SocketAddr;
use std::sync::Arc;

use super::mesh::Workload;
pub use crate::config::ExpectedWorkloads;

/// Prefix of the uids of records that represent the gateway of a network
/// (docs/wire-contract.md 3.3).
pub(super) const GATEWAY_RECORD: &str = "NetworkGateway/";

/// Cluster of records whose source names none (docs/wire-contract.md 3.2).
pub(super) const UNNAMED_CLUSTER: &str = "Kubernetes";

/// Gateway of another network, through which an endpoint is reached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteGateway {
    pub network: Arc<str>,
    /// Cluster that the issuer or trust domain of the gateway's certificate must lead to; empty if
    /// unknown. Without identities, no certificate is then accepted.
    pub cluster: Arc<str>,
    /// Identities (`spiffe://…`) of which the gateway must have one; empty if unknown.
    pub identities: Box<[Arc<str>]>,
    /// Addresses besides that of the endpoint, in the order in which they are tried.
    pub other_addresses: Box<[SocketAddr]>,
}

impl RemoteGateway {
    /// Returns whether a certificate can prove to be that of the gateway.
    pub fn is_verifiable(&self) -> bool {
        !(self.cluster.is_empty() && self.identities.is_empty())
    }
}

/// Returns the network whose gateway a record represents; `None` for any other workload.
pub(super) fn gateway_network(workload: &Workload) -> Option<&str> {
    let rest = workload.uid.strip_prefix(GATEWAY_RECORD)?;
    Some(match &*workload.network {
        "" => rest.split_once('/').map_or("", |(network, _)| network),
        network => network,
    })
}
