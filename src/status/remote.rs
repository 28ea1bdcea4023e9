//! State of the connections to a gateway of another network.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::labels::labelled;

labelled! {
    /// Result of a probe of a gateway. Its label is also the metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ProbeResult {
        /// The gateway has acknowledged a PING.
        Healthy = "healthy",
        /// The gateway has failed, and is ejected.
        Failed = "failed",
        /// No failure of the gateway is proved: this one lacked descriptors or its share of the
        /// connections, must not dial the address, or is granted no stream.
        Skipped = "skipped",
    }
}

/// Gateway of another network, with its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteGatewayStatus {
    pub address: SocketAddr,
    pub network: Arc<str>,
    /// Cluster that its certificate has to belong to; empty if any.
    pub cluster: Arc<str>,
    /// `ready`, `connecting`, `silent`, `ejected`, `failed`, `idle` or, for
    /// three intervals after a probe without a connection, `healthy`.
    pub state: &'static str,
    pub connections: usize,
    pub sources: usize,
    pub streams: usize,
    /// Least round trip time of the PINGs of the last five minutes.
    pub rtt: Option<Duration>,
    /// Factor of its weights by its round trip time, in percent.
    pub share_percent: u32,
    /// Number of ejections since the start.
    pub ejections: u64,
    /// Cause of the last failure or of the last end of a connection; empty if none.
    pub last_error: String,
    pub identity: Option<Arc<str>>,
    /// First expiry in the chain of its certificate.
    pub not_after: Option<SystemTime>,
}

impl RemoteGatewayStatus {
    /// Returns the state of a gateway that no tunnel has used yet.
    pub fn unused(address: SocketAddr, network: &Arc<str>, cluster: &Arc<str>) -> Self {
        Self {
            address,
            network: Arc::clone(network),
            cluster: Arc::clone(cluster),
            state: "idle",
            connections: 0,
            sources: 0,
            streams: 0,
            rtt: None,
            share_percent: 100,
            ejections: 0,
            last_error: String::new(),
            identity: None,
            not_after: None,
        }
    }
}
