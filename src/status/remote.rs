//! State of the connections to a gateway of another network.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::rfc3339;
use crate::labels::labelled;

labelled! {
    /// Result of a probe of a gateway. Its label is also the metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ProbeResult {
        /// The gateway has acknowledged a PING, and answered 200 to the CONNECT if there was one.
        Healthy = "healthy",
        /// The gateway has failed, and is ejected.
        Failed = "failed",
        /// No failure of the gateway is proved: this one lacked descriptors or its share of the
        /// connections, must not dial the address, or is granted no stream.
        Skipped = "skipped",
    }
}

/// Gateway of another network, with its connections.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayRow {
    pub address: SocketAddr,
    pub network: String,
    /// Cluster that its certificate has to belong to; empty if any.
    pub cluster: String,
    /// `ready`, `connecting`, `silent`, `ejected`, `failed`, `idle` or, for
    /// three intervals after a probe without a connection, `healthy`.
    pub state: String,
    pub connections: usize,
    pub sources: usize,
    pub tunnels: usize,
    /// Least round trip time of the PINGs of the last five minutes.
    pub rtt: Option<String>,
    pub rtt_microseconds: Option<u128>,
    pub share: String,
    /// Factor of its weights by its round trip time, in percent.
    pub share_percent: u32,
    /// Number of ejections since the start.
    pub ejections: u64,
    /// Cause of the last failure or of the last end of a connection; empty if none.
    pub error: String,
    pub identity: Option<Arc<str>>,
    /// First expiry in the chain of its certificate.
    #[serde(with = "rfc3339::option")]
    pub expires: Option<SystemTime>,
}

impl GatewayRow {
    /// Returns the row of a gateway of a network and cluster that no tunnel has used yet.
    pub fn new(
        address: SocketAddr,
        [network, cluster]: [&str; 2],
        rtt: Option<Duration>,
        share_percent: u32,
    ) -> Self {
        Self {
            address,
            network: network.to_owned(),
            cluster: cluster.to_owned(),
            state: "idle".to_owned(),
            connections: 0,
            sources: 0,
            tunnels: 0,
            rtt: rtt.map(|rtt| humantime::format_duration(rtt).to_string()),
            rtt_microseconds: rtt.map(|rtt| rtt.as_micros()),
            share: format!("{share_percent}%"),
            share_percent,
            ejections: 0,
            error: String::new(),
            identity: None,
            expires: None,
        }
    }
}
