//! Remedies: configuration changes that would let a tunnel open, with the values of this peer
//! and mesh filled in and the line of the entry to change.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::config::{HostPort, Line};
use crate::datapath::client_hello::ClientHello;
use crate::datapath::identity::Peer;
use crate::reason::Reason;
use crate::snapshot::{Alias, Audience, Exposure, Service, Snapshot};
use crate::wire::sni::{self, IstioName};
use crate::wire::{Authority, Host};

use super::ExplainState;
use super::answer::EntryRow;

/// Example authority for a mesh without services.
const EXAMPLE: (&str, u16) = ("echo.app.svc.cluster.local", 80);

/// Positions of configuration entries in their file.
#[derive(Clone, Debug, Default)]
pub struct ConfigPositions {
    pub file: PathBuf,
    /// Lines of `exposure.services`, by index. Entries of Kubernetes objects have other files.
    pub services: Vec<Line>,
    /// Index and line of each entry of `names.aliases`, by the label of the alias.
    pub aliases: HashMap<Arc<str>, (usize, String)>,
}

impl ConfigPositions {
    /// Formats the position of an entry of `exposure.services`.
    pub(super) fn service(&self, index: usize) -> String {
        let line = self.line(index);
        let line = line.map_or_else(String::new, |line| format!(" ({line})"));
        format!("exposure.services[{index}]{line}")
    }

    pub(super) fn row(&self, entry: &Exposure) -> EntryRow {
        let line = self.services.get(entry.index);
        EntryRow {
            index: entry.index,
            line: line.map(Line::number),
            file: line.and_then(|line| line.file_beside(&self.file)),
            to: entry.to.iter().map(ToString::to_string).collect(),
        }
    }

    /// Formats the line of an entry of `exposure.services`.
    pub(super) fn line(&self, index: usize) -> Option<String> {
        let line = self.services.get(index);
        line.map(|line| line.within(&self.file))
    }

    /// Formats the position of an entry of `names.aliases`.
    pub(super) fn alias(&self, alias: &Alias) -> String {
        match self.aliases.get(&alias.label) {
            Some((index, line)) => format!("names.aliases[{index}] ({line})"),
            None => format!("the alias {}", alias.name.host),
        }
    }
}

/// Returns the service that a name resembles: one with the same first label, otherwise any. The
/// first by hostname wins.
fn nearest<'a>(snapshot: &'a Snapshot, name: &str) -> Option<(&'a Arc<Service>, u16)> {
    let label = name.split(['.', ':']).next().unwrap_or_default();
    let with_ports = snapshot.services.values().filter(|service| !service.ports.is_empty());
    let first = with_ports.min_by_key(|service| (*service.name != *label, &service.hostname))?;
    Some((first, *first.ports.keys().min()?))
}

/// Suggests an authority that the mesh has, similar to the requested one.
pub(super) fn authority(snapshot: &Snapshot, requested: &str) -> String {
    let nearest = nearest(snapshot, requested);
    let (host, port) = nearest.map_or(EXAMPLE, |(service, port)| (&*service.hostname, port));
    format!("request a hostname and a port, such as {host}:{port}")
}

/// Returns the remedy for a ClientHello without a route. `names` are the server names of the
/// listener's own routes.
pub(super) fn client_hello(
    snapshot: &Snapshot,
    client_hello: &ClientHello,
    reason: Reason,
    names: Option<&[String]>,
) -> String {
    if reason == Reason::NoIstioAlpn {
        return "let the client offer an Istio ALPN protocol, such as `istio`".to_owned();
    }
    if let Some(names) = names {
        return format!("let the client send one of the server names {}", names.join(", "));
    }
    let sent = client_hello.sni.as_deref().unwrap_or_default();
    let meant = IstioName::parse(sent).map(|name| name.authority);
    let host = meant.as_ref().and_then(|meant| match &meant.host {
        Host::Name(name) => Some((snapshot.service_by_name(name)?, meant.port)),
        Host::Ip(_) => None,
    });
    let port_of = |service: &Service| service.ports.keys().min().copied();
    let named = || {
        let service = snapshot.service_by_name(sent)?;
        Some((service, port_of(service)?))
    };
    let found = host.or_else(named).or_else(|| nearest(snapshot, sent));
    let (host, port) = found.map_or(EXAMPLE, |(service, port)| (&*service.hostname, port));
    format!(
        "let the client send a server name such as outbound_.{port}_._.{host}, without a subset"
    )
}

/// Returns the remedy for an address that matches no service.
pub(super) fn address(state: &ExplainState<'_>, peer: &Peer, ip: IpAddr, port: u16) -> String {
    let snapshot = state.snapshot;
    let workloads = snapshot.mesh.workloads.values();
    let mut there = workloads.filter(|one| one.addresses.iter().any(|at| at.to_canonical() == ip));
    let served = there.find_map(|workload| {
        workload.services.iter().find_map(|(name, ports)| {
            let (_, host) = name.split_once('/')?;
            let (of, _) = ports.iter().find(|(_, target)| **target == port)?;
            Some((snapshot.services.get(host)?, *of, workload.has_waypoint))
        })
    });
    match served {
        Some((service, of, true)) => {
            let host = &service.hostname;
            format!("request {host}:{of}; the workload at this address has its own waypoint")
        }
        Some((service, of, false)) => {
            let host = &*service.hostname;
            let mut entries = snapshot.exposure_entries(host).iter();
            match entries.find(|entry| entry.applies_to(of)) {
                Some(entry) => {
                    let place = state.places.service(entry.index);
                    format!("add `workloads: true` to {place}")
                }
                None => new_entry(host, of, peer, true),
            }
        }
        None => format!("{}, or for a VIP in this network", authority(snapshot, "")),
    }
}

/// Suggests a new entry of `exposure.services`.
pub(super) fn new_entry(host: &str, port: u16, peer: &Peer, workloads: bool) -> String {
    let more = if workloads { ", workloads: true" } else { "" };
    let who = audience(peer);
    format!("add {{service: \"{host}:{port}\", to: [{who}]{more}}} to `exposure.services`")
}

/// Formats the peer as an entry of `to`.
fn audience(peer: &Peer) -> String {
    let source = &peer.source;
    if peer.is_unauthenticated() {
        return "{anyone: true}".to_owned();
    }
    let (cluster, namespace) = (&source.cluster, &source.namespace);
    format!("{{cluster: {cluster}, namespaces: [{namespace}]}}")
}

/// Returns the smallest change that makes one of `entries`, which admit other peers, admit this
/// peer.
pub(super) fn admission(
    places: &ConfigPositions,
    entries: &[&Exposure],
    peer: &Peer,
) -> Option<String> {
    let nearly = entries.iter().find_map(|entry| {
        let mut to = entry.to.iter().enumerate();
        let (at, what) = to.find_map(|(at, to)| Some((at, missing_item(to, peer)?)))?;
        let place = places.service(entry.index);
        Some(match entry.to.len() {
            1 => format!("add {what} to {place}"),
            _ => format!("add {what} to `to[{at}]` of {place}"),
        })
    });
    nearly.or_else(|| {
        let place = places.service(entries.last()?.index);
        Some(format!("add {} to `to` of {place}", audience(peer)))
    })
}

/// Returns the single item to add to an audience of the peer's cluster so that it admits the
/// peer.
fn missing_item(to: &Audience, peer: &Peer) -> Option<String> {
    let source = &peer.source;
    let (namespace, account) = (&*source.namespace, &*source.service_account);
    let is_its = to.cluster.as_deref() == Some(&*source.cluster) && !peer.is_unauthenticated();
    let has_namespace =
        to.namespaces.is_empty() || to.namespaces.iter().any(|of| **of == *namespace);
    match (is_its, has_namespace, to.service_accounts.is_empty()) {
        (true, false, true) => Some(format!("namespace {namespace}")),
        (true, true, false) => Some(format!("service account {namespace}/{account}")),
        _ => None,
    }
}

/// Returns the remedy for a hostname that no service has.
pub(super) fn name(
    snapshot: &Snapshot,
    places: &ConfigPositions,
    requested: &Authority,
    name: &str,
) -> String {
    let Some((service, port)) = nearest(snapshot, name) else {
        return "the mesh has no services; add one".to_owned();
    };
    let host = &*service.hostname;
    if name.split('.').next() != Some(&*service.name) {
        return format!(
            "request a hostname of the mesh, such as {host}:{port} (`strait status --all` lists \
             them)"
        );
    }
    let entry = snapshot.exposure_entries(host).first();
    let given = entry.filter(|_| sni::normalise(name).is_some());
    match given {
        Some(entry) => format!(
            "request {host}:{port}, or add \"{requested}\" to `names` of {}",
            places.service(entry.index)
        ),
        None => format!("request {host}:{port}"),
    }
}

/// Returns the remedy for a port that a service does not have.
pub(super) fn port(service: &Service) -> String {
    let host = &service.hostname;
    match service.ports.keys().min() {
        Some(port) => format!("request {host}:{port}"),
        None => format!("give {host} a port in the mesh"),
    }
}

pub(super) fn ports(service: &Service) -> String {
    let mut ports: Vec<_> = service.ports.keys().collect();
    ports.sort_unstable();
    let ports: Vec<_> = ports.into_iter().map(ToString::to_string).collect();
    ports.join(", ")
}

/// Returns the remedy for an alias that leads to no existing service port.
pub(super) fn target(snapshot: &Snapshot, places: &ConfigPositions, alias: &Alias) -> String {
    let targets = alias.to.iter().map(|HostPort { host, .. }| {
        match snapshot.service_by_name(host).map(|service| ports(service)) {
            Some(ports) if !ports.is_empty() => format!("{host} has port {ports}"),
            Some(_) => format!("{host} has no port"),
            None => format!("{host} is not a service of the mesh"),
        }
    });
    let targets = targets.collect::<Vec<_>>().join(", ");
    format!("correct `to` of {}: {targets}", places.alias(alias))
}

/// Returns the remedy for an alias that is not for this peer's cluster and port.
pub(super) fn consumer(
    places: &ConfigPositions,
    alias: &Alias,
    cluster: Option<&str>,
    port: u16,
) -> String {
    if let Some(own) = alias.name.port.filter(|own| *own != port) {
        return format!("request {}:{own}", alias.name.host);
    }
    let place = places.alias(alias);
    match cluster {
        Some(cluster) => format!("add {cluster} to `consumers` of {place}"),
        None => format!("remove `consumers` from {place}"),
    }
}

/// Returns the remedy if `exposure` gives a name to a service that the mesh does not have.
pub(super) fn missing_service(
    snapshot: &Snapshot,
    places: &ConfigPositions,
    requested: &Authority,
    host: &str,
) -> String {
    let entry = snapshot.exposure.entries_with_alias(requested).next();
    let place = entry.map_or_else(String::new, |entry| {
        format!(", or correct `service` of {}", places.service(entry.index))
    });
    format!("add {host} to the mesh{place}")
}
