//! Gateways of other networks.

use std::sync::Arc;

/// Gateway of another network, through which an endpoint is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteGateway {
    /// Network behind the gateway.
    pub network: Arc<str>,
    /// Cluster that the issuer or trust domain of the gateway's certificate must lead to; empty if
    /// any cluster of the trust set may serve the network.
    pub cluster: Arc<str>,
    /// Identities (`spiffe://…`) of which the gateway must have one; empty if unknown.
    pub identities: Box<[Arc<str>]>,
}
