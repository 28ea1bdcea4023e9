//! Peers that may reach each service: by the rules of `exposure`, by exports, and through TLS
//! listeners, which grant access in addition.

use std::collections::HashMap;

use crate::admin::pages::ListenerRow;
use crate::config::{Listener, ListenerProtocol, SniRoute, TlsRouting};
use crate::labels::join;
use crate::snapshot::mesh::Service;
use crate::snapshot::{Caller, Exposure, MatchedBy, Requested, ServicePort, Snapshot};
use crate::wire::{Authority, Host, Transit};

/// Describes the peers that may reach a service, by the rules of `exposure` and of TLS listeners.
pub(super) fn exposed_to(
    snapshot: &Snapshot,
    unverified: &AnonymousAccess<'_>,
    service: &Service,
) -> Vec<String> {
    if let Some(namespace) = snapshot.required_namespace(&service.hostname)
        && *namespace != *service.namespace
    {
        return vec![format!("nobody: `exposure` selects the service of namespace {namespace}")];
    }
    let (by_rules, by_listeners) = (by_exposure(snapshot, service), unverified.of(service));
    let unneeded = snapshot.scope.unneeded.get(&*service.hostname);
    let unneeded =
        unneeded.map(|rule| format!("only its own cluster's endpoints are used: {rule}"));
    let mut reported = match (by_rules, by_listeners.is_empty()) {
        (Ok(mut reported), _) => {
            reported.extend(by_listeners);
            reported
        }
        (Err(nobody), true) => vec![nobody],
        (Err(_), false) => by_listeners,
    };
    reported.extend(unneeded);
    reported
}

/// Describes the peers that may reach a service by `exposure`, exports and objects.
///
/// # Errors
/// No peer may reach it, with the reason.
fn by_exposure(snapshot: &Snapshot, service: &Service) -> Result<Vec<String>, String> {
    let host = &*service.hostname;
    if let Some(namespace) = snapshot.closed_namespace(host) {
        return Err(format!("nobody: namespace {namespace} is closed, as it has too many objects"));
    }
    if snapshot.is_cluster_local(host) {
        return Err("nobody: it is private to its cluster".to_owned());
    }
    let mut by_link: Vec<_> = snapshot.clusters_by_link(host).collect();
    by_link.sort_unstable();
    let by_link = by_link.into_iter();
    let by_link = by_link.map(|cluster| format!("cluster {cluster} (links)"));
    let entries = snapshot.exposure_entries(host);
    if !entries.is_empty() {
        let default = snapshot.default_transit(host);
        let reported = entries.iter().flat_map(|entry| of_entry(entry, default));
        let reported: Vec<_> = reported.chain(by_link).collect();
        if reported.is_empty() {
            return Err("nobody: its `to` is empty".to_owned());
        }
        return Ok(reported);
    }
    let mut audiences: Vec<_> = by_link.collect();
    let ports = service.ports.keys();
    let exported = join(ports.filter(|port| snapshot.is_exported(host, **port)), ", ");
    let transit = other_networks(snapshot.default_transit(host));
    if snapshot.scope.exported.contains(host) {
        audiences.push(format!("the trust set (exported){transit}"));
    } else if !exported.is_empty() {
        let how = "(export set)";
        audiences.push(format!("the trust set on port {exported} {how}{transit}"));
    }
    if snapshot.is_exposed_by_default(host) {
        audiences.push(format!("the trust set (exposure.default){transit}"));
    }
    if !audiences.is_empty() {
        Ok(audiences)
    } else if snapshot.exposure.exposes_by_default {
        Err("nobody: it is visible only in its namespace".to_owned())
    } else {
        Err("nobody".to_owned())
    }
}

fn of_entry(entry: &Exposure, default: Transit) -> impl Iterator<Item = String> {
    let port = entry.service.port.map(|port| format!(" on port {port}"));
    let port = port.unwrap_or_default();
    let workloads = if entry.workloads { ", its workloads too" } else { "" };
    let transit = other_networks(entry.transit.unwrap_or(default));
    let limits = entry.limits;
    let limits = limits.is_some().then(|| format!(" (limits: {limits})"));
    let limits = limits.unwrap_or_default();
    let audiences = entry.to.iter();
    audiences.map(move |to| format!("{to}{port}{workloads}{transit}{limits}"))
}

fn other_networks(transit: Transit) -> String {
    match transit {
        Transit::Off => String::new(),
        transit => format!(", other networks too (transit {transit})"),
    }
}

/// Access to services through TLS listeners, whose peers have no verified identity.
pub(super) struct AnonymousAccess<'a> {
    snapshot: &'a Snapshot,
    /// By the hostnames of the services that the routes lead to.
    by_route: HashMap<&'a str, Vec<String>>,
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
                    let requested = format!("sni {}", names(route));
                    let line = line(listener, &port.to_string(), &requested);
                    by_route.entry(host).or_default().push(line);
                }
            }
        }
        let is_istio = |listener: &&Listener| {
            let protocol = &listener.protocol;
            matches!(protocol, ListenerProtocol::Tls(TlsRouting::Istio { .. }))
        };
        Self { snapshot, by_route, istio: listeners.filter(is_istio).collect() }
    }

    /// Returns a line for each way in which peers without an identity reach the service.
    pub(super) fn of(&self, service: &Service) -> Vec<String> {
        if !service.waypoints.is_empty() {
            // A service with a waypoint has no endpoints on TLS listeners.
            return Vec::new();
        }
        let host = &*service.hostname;
        let mut lines = self.by_route.get(host).cloned().unwrap_or_default();
        let ports = service.ports.keys();
        let ports = join(ports.filter(|port| self.is_open(host, **port)), ", ");
        if !ports.is_empty() {
            let istio = self.istio.iter();
            let requested = "server name in Istio's format";
            lines.extend(istio.map(|listener| line(listener, &ports, requested)));
        }
        lines
    }

    /// Returns true if `exposure` permits peers without an identity on a port.
    fn is_open(&self, host: &str, port: u16) -> bool {
        let authority = &Authority { host: Host::Name(host.into()), port };
        let (to, matched_by) = (ServicePort { host, port }, &MatchedBy::Service);
        let of = Requested { authority, to, matched_by };
        self.snapshot.evaluate_exposure(Caller::UNKNOWN, of).is_ok()
    }
}

fn line(listener: &Listener, ports: &str, requested: &str) -> String {
    let from = sources(listener).map(|sources| format!(" from {sources}"));
    let (from, name) = (from.unwrap_or_default(), &listener.name);
    format!("anyone{from} on port {ports} through listener {name} ({requested})")
}

/// Returns the services and ports that a route leads to.
fn targets_of<'a>(snapshot: &'a Snapshot, route: &SniRoute) -> Vec<(&'a str, u16)> {
    let requested = route.target();
    let Some(found) = snapshot.find(Caller::UNKNOWN, &requested) else {
        return Vec::new();
    };
    let MatchedBy::Alias(alias) = &found.matched_by else {
        return vec![(&found.service.hostname, found.port)];
    };
    let targets = snapshot.behind(alias, requested.port);
    let service = |(host, port)| Some((&*snapshot.services.get(host)?.hostname, port));
    targets.filter_map(service).collect()
}

/// Returns the permitted networks of the listener's peers; none if every address may connect.
fn sources(listener: &Listener) -> Option<String> {
    let sources = &listener.sources;
    (!sources.is_empty()).then(|| join(sources, ", "))
}

fn names(route: &SniRoute) -> String {
    join(&route.sni, ", ")
}
