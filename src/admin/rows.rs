//! Rows of the admin pages that the running gateway supplies.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::config::Listener;

/// Listener of the running gateway.
#[derive(Clone, Debug, Serialize)]
pub struct ListenerRow {
    /// Listener in the configuration, or in the last one that contained it.
    #[serde(flatten)]
    pub listener: Listener,
    /// Address, with the port that the kernel assigned.
    pub address: SocketAddr,
    /// State.
    pub state: ListenerState,
    /// Error, in the state [`ListenerState::Failed`].
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

/// Issuer of peers' certificates.
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
