//! Listeners on the status page, and the access that TLS listeners grant in addition to
//! `exposure`.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use crate::config::{Listener, ListenerProtocol, SniRoute, TlsRouting};
use crate::snapshot::{Caller, ExposureVerdict, MatchedBy, Snapshot, mesh};
use crate::wire::{Authority, Host};

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

/// Source of the listeners: a function of the running gateway.
#[derive(Clone)]
pub struct ListenerSource(Arc<dyn Fn() -> Vec<ListenerRow> + Send + Sync>);

impl ListenerSource {
    /// Wraps the function that returns the listeners.
    pub fn new(rows: impl Fn() -> Vec<ListenerRow> + Send + Sync + 'static) -> Self {
        Self(Arc::new(rows))
    }

    pub(super) fn rows(&self) -> Vec<ListenerRow> {
        (self.0)()
    }
}

impl fmt::Debug for ListenerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listeners")
    }
}

impl ListenerRow {
    /// Returns true if the listener accepts connections now or after the first certificate.
    fn is_in_use(&self) -> bool {
        matches!(self.state, ListenerState::Open | ListenerState::Waiting)
    }

    /// Returns the columns of the listener.
    pub(super) fn columns(&self) -> [String; 6] {
        let listener = &self.listener;
        let (protocol, routing) = match &listener.protocol {
            ListenerProtocol::Hbone { route_by } => ("hbone", format!("by {route_by}")),
            ListenerProtocol::Tls(TlsRouting::Istio { routing }) => ("tls", (*routing).to_owned()),
            ListenerProtocol::Tls(TlsRouting::Routes { .. }) => ("tls", "by its routes".to_owned()),
        };
        let state = match self.state {
            ListenerState::Waiting => "waits for a certificate",
            ListenerState::Open => "open",
            ListenerState::Draining => "draining",
            ListenerState::Failed => "failed, see Problems",
        };
        let sources = sources(listener).unwrap_or_else(|| "every address".to_owned());
        [
            listener.name.clone(),
            self.address.to_string(),
            protocol.to_owned(),
            routing,
            sources,
            state.to_owned(),
        ]
    }

    /// Returns the columns of the services that are reachable through the listener.
    pub(super) fn reachable_services(&self) -> Vec<[String; 4]> {
        let listener = &self.listener;
        let row = |asked: &str, opened: &str, who: &str| {
            let from = sources(listener).map(|sources| format!(" from {sources}"));
            let who = format!("{who}{}", from.unwrap_or_default());
            [listener.name.clone(), asked.into(), opened.into(), who]
        };
        match (&listener.protocol, self.is_in_use()) {
            (_, false) => Vec::new(),
            (ListenerProtocol::Hbone { .. }, true) => {
                vec![row(
                    "any authority",
                    "services by their exposure",
                    "the trust set",
                )]
            }
            (ListenerProtocol::Tls(TlsRouting::Istio { .. }), true) => {
                let asked = "outbound_.PORT_._.HOST";
                vec![row(asked, "services exposed to anyone", "anyone")]
            }
            (ListenerProtocol::Tls(TlsRouting::Routes { routes }), true) => {
                let route = |route: &SniRoute| row(&names(route), &route.to.to_string(), "anyone");
                routes.iter().map(route).collect()
            }
        }
    }
}

/// Returns the permitted networks of the listener's peers; none if every address may connect.
fn sources(listener: &Listener) -> Option<String> {
    let sources: Vec<_> = listener.sources.iter().map(ToString::to_string).collect();
    (!sources.is_empty()).then(|| sources.join(", "))
}

fn names(route: &SniRoute) -> String {
    let names: Vec<_> = route.sni.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Access to services through TLS listeners, whose peers have no verified identity.
pub(super) struct AnonymousAccess<'a> {
    snapshot: &'a Snapshot,
    /// By the hostnames of the services that the routes lead to.
    by_route: HashMap<&'a str, Vec<String>>,
    /// Listeners with Istio's names.
    istio: Vec<&'a Listener>,
}

impl<'a> AnonymousAccess<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, rows: &'a [ListenerRow]) -> Self {
        let mut by_route: HashMap<_, Vec<_>> = HashMap::new();
        let in_use = || rows.iter().filter(|row| row.is_in_use());
        let listeners = in_use().map(|row| &row.listener);
        for listener in listeners.clone() {
            for route in listener.routes() {
                for (host, port) in targets_of(snapshot, route) {
                    let asked = format!("sni {}", names(route));
                    let line = line(listener, &port.to_string(), &asked);
                    by_route.entry(host).or_default().push(line);
                }
            }
        }
        let is_istio = |listener: &&Listener| {
            let protocol = &listener.protocol;
            matches!(protocol, ListenerProtocol::Tls(TlsRouting::Istio { .. }))
        };
        Self {
            snapshot,
            by_route,
            istio: listeners.filter(is_istio).collect(),
        }
    }

    /// Returns a line for each way in which peers without an identity reach the service.
    pub(super) fn of(&self, service: &mesh::Service) -> Vec<String> {
        if !service.waypoints.is_empty() {
            // A service with a waypoint has no endpoints on TLS listeners.
            return Vec::new();
        }
        let host = &*service.hostname;
        let mut lines = self.by_route.get(host).cloned().unwrap_or_default();
        let ports = service.ports.keys();
        let ports = ports.filter(|port| self.is_open(host, **port));
        let ports: Vec<_> = ports.map(ToString::to_string).collect();
        if !ports.is_empty() {
            let istio = self.istio.iter();
            let ports = ports.join(", ");
            lines.extend(
                istio.map(|listener| line(listener, &ports, "server name in Istio's format")),
            );
        }
        lines
    }

    /// Returns true if `exposure` permits peers without an identity on a port.
    fn is_open(&self, host: &str, port: u16) -> bool {
        let asked = Authority {
            host: Host::Name(host.into()),
            port,
        };
        let of = (host, port);
        let judged =
            self.snapshot
                .evaluate_exposure(Caller::UNKNOWN, &asked, of, &MatchedBy::Service);
        judged == ExposureVerdict::Allowed
    }
}

fn line(listener: &Listener, ports: &str, asked: &str) -> String {
    let from = sources(listener).map(|sources| format!(" from {sources}"));
    let (from, name) = (from.unwrap_or_default(), &listener.name);
    format!("anyone{from} on port {ports} through listener {name} ({asked})")
}

/// Returns the services and ports that a route leads to.
fn targets_of<'a>(snapshot: &'a Snapshot, route: &SniRoute) -> Vec<(&'a str, u16)> {
    let asked = Authority {
        host: Host::Name(route.to.host.as_str().into()),
        port: route.to.port.unwrap_or_default(),
    };
    let Some(found) = snapshot.find(Caller::UNKNOWN, &asked) else {
        return Vec::new();
    };
    let MatchedBy::Alias(alias) = &found.matched_by else {
        return vec![(&found.service.hostname, found.port)];
    };
    let targets = snapshot.behind(alias, asked.port);
    let service = |(host, port)| Some((&*snapshot.services.get(host)?.hostname, port));
    targets.filter_map(service).collect()
}
