//! Rows of the listeners.

use std::fmt;
use std::net::SocketAddr;

use serde::Serialize;

use crate::admin::text::join;
use crate::config::{Listener, ListenerProtocol, SniRoute, TlsRouting};

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

impl fmt::Display for ListenerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "waits for a certificate",
            Self::Open => "open",
            Self::Draining => "draining",
            Self::Failed => "failed, see Problems",
        })
    }
}

/// Services that are reachable through a listener.
pub(super) struct ReachableRow<'a> {
    pub(super) listener: &'a str,
    pub(super) asked: String,
    pub(super) reached: String,
    pub(super) peers: String,
}

impl ListenerRow {
    /// Returns true if the listener accepts connections now or after the first certificate.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self.state, ListenerState::Open | ListenerState::Waiting)
    }

    pub(super) fn protocol(&self) -> &'static str {
        match &self.listener.protocol {
            ListenerProtocol::Hbone { .. } => "hbone",
            ListenerProtocol::Tls(_) => "tls",
        }
    }

    pub(super) fn routing(&self) -> String {
        match &self.listener.protocol {
            ListenerProtocol::Hbone { route_by } => format!("by {route_by}"),
            ListenerProtocol::Tls(TlsRouting::Istio { routing }) => (*routing).to_owned(),
            ListenerProtocol::Tls(TlsRouting::Routes { .. }) => "by its routes".to_owned(),
        }
    }

    /// Returns the rows of the services that are reachable through the listener.
    pub(super) fn reachable_services(&self) -> Vec<ReachableRow<'_>> {
        let listener = &self.listener;
        let from = sources(listener).map_or_else(String::new, |from| format!(" from {from}"));
        let row = |asked: &str, reached: &str, peers: &str| ReachableRow {
            listener: &listener.name,
            asked: asked.to_owned(),
            reached: reached.to_owned(),
            peers: format!("{peers}{from}"),
        };
        if !self.is_in_use() {
            return Vec::new();
        }
        match &listener.protocol {
            ListenerProtocol::Hbone { .. } => {
                let reached = "services by their exposure";
                vec![row("any authority", reached, "the trust set")]
            }
            ListenerProtocol::Tls(TlsRouting::Istio { .. }) => {
                let asked = "outbound_.PORT_._.HOST";
                vec![row(asked, "services exposed to anyone", "anyone")]
            }
            ListenerProtocol::Tls(TlsRouting::Routes { routes }) => {
                let route = |route: &SniRoute| row(&names(route), &route.to.to_string(), "anyone");
                routes.iter().map(route).collect()
            }
        }
    }
}

/// Returns the permitted networks of the listener's peers; none if every address may connect.
pub(super) fn sources(listener: &Listener) -> Option<String> {
    let sources = &listener.sources;
    (!sources.is_empty()).then(|| join(sources, ", "))
}

/// Returns the server names of a route.
pub(super) fn names(route: &SniRoute) -> String {
    join(&route.sni, ", ")
}
