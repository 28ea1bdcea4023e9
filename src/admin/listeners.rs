//! The listeners as people see them, and what those of TLS open beside `exposure`.

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::Serialize;

use crate::config::{Listener, ListenerProtocol, SniRoute, TlsRouting};
use crate::snapshot::{Caller, Means, Snapshot, Verdict, mesh};
use crate::wire::{Authority, Host};

/// A listener of the running gateway.
#[derive(Clone, Debug, Serialize)]
pub struct ListenerRow {
    /// The listener as the configuration has it, or had it when it was removed.
    #[serde(flatten)]
    pub listener: Listener,
    /// Its address, with the port that the kernel chose.
    pub address: SocketAddr,
    /// Its state: accepting connections or not.
    pub state: ListenerState,
    /// Reason for the failure in the state [`ListenerState::Failed`].
    pub error: Option<String>,
}

/// State of a listener: accepting connections or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerState {
    /// Not before the first certificate.
    Waiting,
    /// It does.
    Open,
    /// Not any more; open tunnels go on.
    Draining,
    /// It could not be opened.
    Failed,
}

/// Gives the listeners of the running gateway.
#[derive(Clone)]
pub struct Listeners(Arc<dyn Fn() -> Vec<ListenerRow> + Send + Sync>);

impl Listeners {
    /// Wraps the function that gives them.
    pub fn new(rows: impl Fn() -> Vec<ListenerRow> + Send + Sync + 'static) -> Self {
        Self(Arc::new(rows))
    }

    pub(super) fn rows(&self) -> Vec<ListenerRow> {
        (self.0)()
    }
}

impl fmt::Debug for Listeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listeners")
    }
}

impl ListenerRow {
    /// Returns whether new connections come, or will come.
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

    /// Returns the columns of what is reached through the listener.
    pub(super) fn opens(&self) -> Vec<[String; 4]> {
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

/// The networks of a listener's peers; none where every address may connect.
fn sources(listener: &Listener) -> Option<String> {
    let sources: Vec<_> = listener.sources.iter().map(ToString::to_string).collect();
    (!sources.is_empty()).then(|| sources.join(", "))
}

fn names(route: &SniRoute) -> String {
    let names: Vec<_> = route.sni.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Access to services through TLS listeners, whose peers have no verified identity.
pub(super) struct Strangers<'a> {
    snapshot: &'a Snapshot,
    /// By the hostnames of the services that routes lead to.
    by_route: HashMap<&'a str, Vec<String>>,
    /// Listeners by Istio's names.
    istio: Vec<&'a Listener>,
}

impl<'a> Strangers<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, rows: &'a [ListenerRow]) -> Self {
        let mut by_route: HashMap<_, Vec<_>> = HashMap::new();
        let in_use = || rows.iter().filter(|row| row.is_in_use());
        let listeners = in_use().map(|row| &row.listener);
        for listener in listeners.clone() {
            for route in listener.routes() {
                for (host, port) in behind(snapshot, route) {
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

    /// Returns a line for each way in which anyone reaches the service.
    pub(super) fn of(&self, service: &mesh::Service) -> Vec<String> {
        if !service.waypoints.is_empty() {
            // It has no endpoint on TLS listeners.
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
            lines.extend(istio.map(|listener| line(listener, &ports, "sni of Istio's form")));
        }
        lines
    }

    /// Returns whether `exposure` opens a port to peers without an identity.
    fn is_open(&self, host: &str, port: u16) -> bool {
        let asked = Authority {
            host: Host::Name(host.into()),
            port,
        };
        let of = (host, port);
        let judged = self
            .snapshot
            .judge(Caller::UNKNOWN, &asked, of, &Means::Service);
        judged == Verdict::Allowed
    }
}

fn line(listener: &Listener, ports: &str, asked: &str) -> String {
    let from = sources(listener).map(|sources| format!(" from {sources}"));
    let (from, name) = (from.unwrap_or_default(), &listener.name);
    format!("anyone{from} on port {ports} through listener {name} ({asked})")
}

/// The service ports that a route leads to.
fn behind<'a>(snapshot: &'a Snapshot, route: &SniRoute) -> Vec<(&'a str, u16)> {
    let asked = Authority {
        host: Host::Name(route.to.host.as_str().into()),
        port: route.to.port.unwrap_or_default(),
    };
    let Some(found) = snapshot.find(Caller::UNKNOWN, &asked) else {
        return Vec::new();
    };
    let Means::Alias(alias) = &found.means else {
        return vec![(&found.service.hostname, found.port)];
    };
    let targets = snapshot.behind(alias, asked.port);
    let service = |(host, port)| Some((&*snapshot.services.get(host)?.hostname, port));
    targets.filter_map(service).collect()
}
