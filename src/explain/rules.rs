//! Reasons as text: the match that was found, and the rule that allows or rejects the tunnel.
//! Remedies are in [`remedies`].

use crate::datapath::client_hello::ClientHello;
use crate::datapath::http2::tunnel::{Forwarded, Origin};
use crate::datapath::identity::Peer;
use crate::datapath::policy::{self, Rejection};
use crate::datapath::route::Route;
use crate::reason::{HandshakeRefusal, Reason};
use crate::snapshot::{
    Alias, ExclusionReason, ExposedBy, Exposure, MatchedBy, RemoteGateway, Requested, Service,
    ServicePort, Snapshot,
};
use crate::tls::Identity;
use crate::wire::{Authority, HOPS_MAX, Host, Transit, Via};

use super::ExplainState;
use super::answer::{LookupRow, PeerRow, RouteRow, RuleRow};
use super::remedies;

/// Describes a peer without an identity.
pub(super) fn peer(peer: &Peer) -> PeerRow {
    let address = peer.source.address.ip();
    let from = (!address.is_unspecified()).then(|| format!(" at {address}"));
    let from = from.unwrap_or_default();
    PeerRow {
        description: format!(
            "a peer{from} without an identity; TLS listeners do not authenticate peers"
        ),
        ..PeerRow::default()
    }
}

/// Describes a peer with a verified identity and its cluster, which comes from the certificate's
/// issuer or the trust domain.
pub(super) fn identity(
    identity: &Identity,
    peer: &Result<Peer, HandshakeRefusal>,
    snapshot: &Snapshot,
) -> PeerRow {
    let domain = &identity.trust_domain;
    let description = match peer {
        Ok(peer) if !snapshot.trust.has_issuers() => {
            let cluster = &peer.source.cluster;
            format!("of cluster {cluster}, by its trust domain {domain}")
        }
        Ok(peer) if peer.issuer.is_some() => {
            let cluster = &peer.source.cluster;
            format!("of cluster {cluster}, by the issuer of its certificate")
        }
        Ok(peer) => format!(
            "of cluster {}, by an issuer that is not in `trust.clusters`; select another cluster \
             by --cluster",
            peer.source.cluster
        ),
        Err(HandshakeRefusal::UntrustedIssuer) => {
            "rejected in the handshake: `trust.unknown_issuers` is `reject`; select one of \
             `trust.clusters` by --cluster"
                .to_owned()
        }
        Err(_) => format!(
            "rejected in the handshake: trust domain {domain} is not in the trust set; add \
             {{name: {domain}}} to `trust.domains`"
        ),
    };
    PeerRow {
        identity: Some(identity.uri.to_string()),
        cluster: peer.as_ref().ok().map(|peer| peer.source.cluster.to_string()),
        description,
    }
}

/// Returns a rule that rejects a tunnel, with the remedy.
fn refusal(description: impl Into<String>, change: impl Into<String>) -> RuleRow {
    RuleRow { description: description.into(), change: Some(change.into()), ..RuleRow::default() }
}

pub(super) fn no_authority(snapshot: &Snapshot, requested: &str) -> LookupRow {
    LookupRow {
        requested: requested.to_owned(),
        rule: refusal(
            "not an authority of the form host:port or ip:port",
            remedies::authority(snapshot, requested),
        ),
        ..LookupRow::default()
    }
}

/// Describes a ClientHello without a route.
pub(super) fn unrouted(
    snapshot: &Snapshot,
    hello: &ClientHello,
    reason: Reason,
    names: Option<&[String]>,
) -> LookupRow {
    let requested = hello.sni.as_deref().unwrap_or("no server name");
    let description = match reason {
        Reason::NoIstioAlpn => "the ClientHello offers none of Istio's ALPN protocols",
        _ => "no route matches this server name",
    };
    LookupRow {
        requested: requested.to_owned(),
        rule: refusal(description, remedies::client_hello(snapshot, hello, reason, names)),
        ..LookupRow::default()
    }
}

/// Describes the permission of a tunnel to leave the network; none if no other network has
/// instances of the service.
pub(super) fn transit(route: &Route) -> Option<String> {
    let networks = &route.service.other_networks;
    if networks.is_empty() {
        return None;
    }
    let networks = networks.join(", ");
    let transit = route.transit;
    Some(match transit {
        _ if route.passthrough => {
            format!("off on TLS listeners; other instances are in {networks}")
        }
        _ if route.by_waypoint => {
            format!("off for tunnels to a waypoint; other instances are in {networks}")
        }
        Transit::Off => format!(
            "off; other instances are in {networks}; see `exposure.services[].transit`, \
             `exposure.transit` and `listeners[].transit`"
        ),
        Transit::Failover => format!("{transit}: {networks} if no endpoint here can serve"),
        Transit::Always => format!("{transit}: {networks} by the distribution of the service"),
    })
}

/// Describes why an instance of another network is no endpoint itself. `by_location` returns the
/// reason of its location.
pub(super) fn other_network(
    route: &Route,
    network: &str,
    by_location: impl FnOnce() -> Option<ExclusionReason>,
) -> String {
    let mut endpoints = route.endpoints.endpoints.iter();
    let is_through = |remote: &RemoteGateway| *remote.network == *network;
    let is_reached = endpoints.any(|one| one.remote.as_deref().is_some_and(is_through));
    let is_subset = matches!(&route.matched_by, MatchedBy::Alias(alias) if alias.subset.is_some());
    let or = if is_subset { ", or instances outside the subset" } else { "" };
    match route.transit {
        _ if is_reached => format!("in network {network}, reached through its gateways"),
        Transit::Off => format!("in network {network}, and transit is off"),
        _ => match by_location() {
            Some(why) => why.in_network(network),
            None => format!("in network {network}, which has no gateway that can be used{or}"),
        },
    }
}

/// Describes a route, and the reason for which it does or does not go to a waypoint.
pub(super) fn route(snapshot: &Snapshot, peer: &Peer, route: &Route) -> RouteRow {
    let service = &route.service;
    let (by, mut description) = matched(snapshot, route);
    let collision = match (&route.matched_by, &route.authority.host) {
        (MatchedBy::Service, Host::Ip(ip)) => snapshot.vip_collision(*ip),
        _ => snapshot.collision(&service.hostname),
    };
    description.extend(collision.map(|collision| format!("; {collision}")));
    let is_tls = route.passthrough;
    let route_by = if is_tls { "sni" } else { "authority" };
    RouteRow {
        service: service.key(),
        port: route.port,
        by: by.to_owned(),
        description,
        by_waypoint: route.by_waypoint,
        waypoint: waypoint(snapshot, peer, route),
        route_by: route_by.to_owned(),
    }
}

/// Returns the rule that leads from the authority to the service, as identifier and as text.
fn matched(snapshot: &Snapshot, route: &Route) -> (&'static str, String) {
    let hostname = &route.service.hostname;
    let fixed = |by, description: &str| (by, description.to_owned());
    match (&route.matched_by, &route.authority.host) {
        (MatchedBy::Service, Host::Name(name)) if **name == **hostname => {
            fixed("hostname", "its hostname")
        }
        (MatchedBy::Service, Host::Name(_)) => {
            fixed("family", "its name with another suffix of `names.suffixes`")
        }
        (MatchedBy::Service, Host::Ip(_)) => {
            ("vip", format!("its VIP in network {}", snapshot.network()))
        }
        (MatchedBy::Exposed, _) => {
            fixed("exposedName", "a name of its entry in `exposure.services`")
        }
        (MatchedBy::Alias(alias), _) => ("alias", describe_alias(alias)),
        (MatchedBy::Workload(workload), _) => {
            ("workload", format!("an address of workload {}", workload.uid))
        }
    }
}

fn describe_alias(alias: &Alias) -> String {
    let subset = alias.subset.as_ref();
    let subset = subset.map_or_else(String::new, |subset| format!(", subset {subset}"));
    let consumers = match &alias.consumers {
        None => "for every peer".to_owned(),
        Some(consumers) => format!("for peers of {}", consumers.join(", ")),
    };
    let to = alias.to.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let region = alias.region.as_deref();
    let region = region.map_or_else(String::new, |region| format!(", in region {region}"));
    format!("an alias of `names` {consumers}, to {to}{region}{subset}")
}

fn waypoint(snapshot: &Snapshot, peer: &Peer, route: &Route) -> Option<String> {
    let definition = &route.service.definition;
    if definition.waypoints.is_empty() {
        return None;
    }
    let names = definition.waypoint_names();
    let origin = match route.origin {
        Origin::Workload => "no x-istio-source",
        Origin::Waypoint => "x-istio-source: waypoint",
        Origin::Gateway => "x-istio-source: gateway",
    };
    if route.bypasses_waypoints() {
        return Some(format!(
            "bypasses its waypoint {names}: the peer sends {origin}, and is trusted"
        ));
    }
    let why = match route.origin {
        _ if route.passthrough => "TLS listeners trust no peer as a waypoint".to_owned(),
        Origin::Workload => format!("the peer sends {origin}"),
        Origin::Gateway if definition.ingress_use_waypoint => {
            format!("the peer sends {origin}, and the service uses its waypoint for gateways too")
        }
        Origin::Waypoint | Origin::Gateway if !snapshot.trust.distinguishes_clusters() => format!(
            "the peer sends {origin}, and is not trusted: {} is not in `trust.waypoints`, and \
             clusters cannot be distinguished (one cluster in `trust.domains`, no \
             `trust.clusters`)",
            peer.source.principal
        ),
        Origin::Waypoint | Origin::Gateway => format!(
            "the peer sends {origin}, and is not trusted: {} is not in `trust.waypoints`, and not \
             a workload of this cluster in the service's waypoint and the waypoint's namespace",
            peer.source.principal
        ),
    };
    let there = match snapshot.usable_waypoints(definition).next() {
        Some(_) if !route.passthrough => "",
        Some(_) => ", which has no endpoint for this tunnel",
        None => ", which is unknown or has no HBONE endpoint",
    };
    Some(format!("to its waypoint {names}{there}: {why}"))
}

/// Returns the reason for which no service was found, with the remedy.
pub(super) fn describe_unknown(
    state: &ExplainState<'_>,
    peer: &Peer,
    requested: &Authority,
) -> RuleRow {
    let snapshot = state.snapshot;
    let collision = match &requested.host {
        Host::Name(name) => snapshot.collision(name),
        Host::Ip(ip) => snapshot.vip_collision(*ip),
    };
    let mut rule = match &requested.host {
        Host::Name(name) => unknown_name(state, peer, requested, name),
        Host::Ip(ip) => match snapshot.service_by_vip(*ip) {
            Some(service) => without_port(service, requested.port),
            None => refusal(
                format!(
                    "no service has this VIP in network {}, and no entry of `exposure` with \
                     `workloads: true` opens a workload at this address and target port",
                    snapshot.network()
                ),
                remedies::address(state, peer, *ip, requested.port),
            ),
        },
    };
    let collision = collision.map(|collision| format!("; {collision}"));
    rule.description.extend(collision);
    rule
}

fn unknown_name(
    state: &ExplainState<'_>,
    peer: &Peer,
    requested: &Authority,
    name: &str,
) -> RuleRow {
    let ExplainState { snapshot, places, .. } = *state;
    let cluster = snapshot.trust.cluster(peer.policy_source());
    let alias = snapshot.names.alias(requested, cluster);
    let others = snapshot.names.aliases_of(name);
    if let Some((host, port)) = snapshot.exposed_alias(requested) {
        match snapshot.service_by_name(host) {
            Some(service) => without_port(service, port),
            None => refusal(
                format!("`exposure` maps the name to {host}, which is not in the mesh"),
                remedies::missing_service(snapshot, places, requested, host),
            ),
        }
    } else if let Some(alias) = alias {
        refusal(
            format!("it is {}: no target has this port", describe_alias(alias)),
            remedies::target(snapshot, places, alias),
        )
    } else if let Some(service) = snapshot.service_by_unassigned_name(name) {
        without_port(service, requested.port)
    } else if let Some(other) = others.first() {
        let port = other.name.port.map(|port| format!(" at port {port}")).unwrap_or_default();
        refusal(
            format!("not for this peer and port: {}{port}", describe_alias(other)),
            remedies::consumer(places, other, cluster, requested.port),
        )
    } else {
        refusal(
            "unknown name: not a hostname of the mesh, not in `exposure` or `names`, and not with \
             another suffix of `names.suffixes`",
            remedies::name(snapshot, places, requested, name),
        )
    }
}

fn without_port(service: &Service, port: u16) -> RuleRow {
    let (host, mut ports) = (&service.hostname, remedies::ports(service));
    if ports.is_empty() {
        ports = "none".to_owned();
    }
    let description = format!("{host} has no port {port}; it has {ports}");
    refusal(description, remedies::port(service))
}

/// Service port that has to be exposed.
struct Subject<'a> {
    to: ServicePort<'a>,
    /// True for an address of a workload of the service.
    is_workload: bool,
    /// Entries that apply to the requested kind of name.
    entries: Vec<&'a Exposure>,
    exposed: Result<ExposedBy<'a>, Reason>,
}

/// Describes the rule that permits or rejects a route, with the limits of the entries that admit
/// the tunnel.
pub(super) fn rule(
    state: &ExplainState<'_>,
    peer: &Peer,
    route: &Route,
    rejection: Option<&Rejection>,
) -> RuleRow {
    if route.granted_by_listener {
        let description = "allowed by the listener's own route for all clients of the listener";
        return RuleRow {
            allowed: true,
            description: description.to_owned(),
            ..RuleRow::default()
        };
    }
    let snapshot = state.snapshot;
    let is_of_first = rejection.is_some_and(|rejection| rejection.is_of_first_peer);
    let first = route.first_peer().filter(|_| is_of_first);
    let first = first.map(|first| first.as_peer(peer, snapshot));
    let caller = first.as_ref().unwrap_or(peer);
    let subjects = subjects(snapshot, caller, route);
    let mut rule = match rejection.map(|rejection| rejection.reason) {
        None | Some(Reason::TunnelLimit) => allowed(state, caller, &subjects),
        Some(Reason::NotLinked) => not_linked(snapshot, caller),
        Some(reason) => not_exposed(state, caller, &subjects, reason),
    };
    if let Some(first) = &first {
        let principal = &first.source.principal;
        rule.description = format!("for the first peer {principal}: {}", rule.description);
    }
    let limiting = policy::limiting_entries(snapshot, peer, route);
    rule.description.extend(limits(state, &limiting));
    rule
}

/// Describes the rejection of a service port by the exposure rules.
fn not_exposed(
    state: &ExplainState<'_>,
    peer: &Peer,
    subjects: &[Subject<'_>],
    reason: Reason,
) -> RuleRow {
    let failing = subjects.iter().find(|subject| subject.exposed.is_err());
    let Some(subject) = failing else {
        let description = format!("a rule refuses it ({reason})");
        return RuleRow { description, ..RuleRow::default() };
    };
    let mut rule = rejected(state, peer, subject);
    if subjects.len() > 1 {
        let host = subject.to.host;
        rule.description = format!(
            "{host} is one of its targets, and has to be exposed too: {}",
            rule.description
        );
    }
    rule
}

/// Describes the rejection of a tunnel whose `x-strait-via` names this gateway or too many others.
pub(super) fn gateway_loop(forwarded: Option<&Forwarded>) -> RuleRow {
    let via = forwarded.and_then(|forwarded| forwarded.via.as_deref());
    let description = if via.and_then(Via::parse).is_some() {
        "x-strait-via has this gateway, so that the tunnel has come back".to_owned()
    } else {
        format!("x-strait-via has more than {HOPS_MAX} gateways")
    };
    let change =
        "turn off `transit` of the service at one of the gateways that the tunnel has passed";
    refusal(description, change)
}

/// Describes the rejection of a malformed `x-strait-source`.
pub(super) fn malformed_first_peer() -> RuleRow {
    RuleRow {
        description:
            "x-strait-source of a gateway in `trust.gateways` is malformed, or was sent twice"
                .to_owned(),
        ..RuleRow::default()
    }
}

/// Describes the evaluation of `x-strait-source`; none if it does not matter.
pub(super) fn first_peer(snapshot: &Snapshot, peer: &Peer, source: Option<&str>) -> Option<String> {
    match (snapshot.trust.is_gateway(&peer.source.principal), source) {
        (true, Some(source)) => Some(format!(
            "rules are evaluated for the first peer {source} too: the peer is in `trust.gateways`"
        )),
        (true, None) => Some(
            "the peer is in `trust.gateways`: without x-strait-source only its own identity is \
             evaluated; test a first peer by --source"
                .to_owned(),
        ),
        (false, Some(_)) => Some(
            "x-strait-source is ignored: the peer is not in `trust.gateways`, and only its own \
             identity is evaluated"
                .to_owned(),
        ),
        (false, None) => None,
    }
}

/// Returns the service ports that have to be exposed: for an alias, all behind it.
fn subjects<'a>(snapshot: &'a Snapshot, peer: &Peer, route: &'a Route) -> Vec<Subject<'a>> {
    let subject = |of: Requested<'a>| Subject {
        to: of.to,
        is_workload: matches!(of.matched_by, MatchedBy::Workload(_)),
        entries: snapshot.applying_entries(of),
        exposed: snapshot.exposed_by(peer.policy_source(), of),
    };
    snapshot.exposed_ports(route.requested()).map(subject).collect()
}

fn allowed(state: &ExplainState<'_>, peer: &Peer, subjects: &[Subject<'_>]) -> RuleRow {
    let mut rule = RuleRow { allowed: true, ..RuleRow::default() };
    let description = subjects.iter().map(|subject| {
        let description = match subject.exposed {
            Ok(ExposedBy::Entry(entry)) => {
                rule.entries.push(state.places.row(entry));
                format!("exposure.services[{}] admits the peer", entry.index)
            }
            Ok(ExposedBy::Link) => {
                let cluster = &peer.source.cluster;
                format!("`exposes` of the link from {cluster} has it")
            }
            _ if state.snapshot.is_exported(subject.to.host, subject.to.port) => {
                "it is exported to the trust set, by the control plane or its own objects"
                    .to_owned()
            }
            _ => "`exposure.default: all` exposes it to the trust set".to_owned(),
        };
        match subjects.len() {
            1 => description,
            _ => format!("{}: {description}", subject.to.host),
        }
    });
    rule.description = description.collect::<Vec<_>>().join("; ");
    rule
}

fn not_linked(snapshot: &Snapshot, peer: &Peer) -> RuleRow {
    let (from, to) = (&peer.source.cluster, &snapshot.balancing.position.cluster);
    refusal(
        format!("no entry of `links` allows cluster {from}"),
        format!("add {{from: {from}, to: {to}}} to `links`"),
    )
}

fn rejected(state: &ExplainState<'_>, peer: &Peer, subject: &Subject<'_>) -> RuleRow {
    let (snapshot, ServicePort { host, port }) = (state.snapshot, subject.to);
    let has_entry = !snapshot.exposure_entries(host).is_empty();
    let new_entry = || remedies::new_entry(host, port, peer, subject.is_workload);
    let admission = || remedies::admission(state.places, &subject.entries, peer);
    let (description, change) = match subject.exposed {
        Err(Reason::NotForPeer) => (
            "its entries of `exposure` do not admit this peer",
            admission().unwrap_or_else(new_entry),
        ),
        _ if snapshot.closed_namespace(host).is_some() => (
            "its namespace is closed: it has too many objects, or too large ones, so that some of \
             them are not known",
            "limit the objects of the namespace by a ResourceQuota".to_owned(),
        ),
        _ if snapshot.is_cluster_local(host) => (
            "a label or annotation keeps it private to its cluster, regardless of `exposure`",
            "remove the label or annotation from the Service, or from its namespace".to_owned(),
        ),
        _ if has_entry => (
            "its entries of `exposure` do not cover this kind of name and this port",
            admission().unwrap_or_else(new_entry),
        ),
        _ if snapshot.exposure.exposes_by_default && !peer.is_unauthenticated() => (
            "not exposed: `exportTo` limits it to its namespace, so `exposure.default: all` does \
             not apply",
            new_entry(),
        ),
        _ => (
            "not exposed: no entry in `exposure`, no export by the control plane or its own \
             objects, and `exposure.default` does not apply to this peer",
            new_entry(),
        ),
    };
    let entries = subject.entries.iter();
    let unneeded = snapshot.scope.unneeded.get(host);
    let unneeded = unneeded.map(|rule| format!("; it is not used from other clusters: {rule}"));
    let description = format!("{description}{}", unneeded.unwrap_or_default());
    RuleRow {
        entries: entries.map(|entry| state.places.row(entry)).collect(),
        ..refusal(description, change)
    }
}

/// Describes the limits of the entries that admit a tunnel, with their open tunnels.
fn limits(state: &ExplainState<'_>, entries: &[&Exposure]) -> Vec<String> {
    let describe = |entry: &&Exposure| {
        let line = state.places.line(entry.index);
        let line = line.map_or_else(String::new, |line| format!(" of {line}"));
        let open = entry.limits.tunnels.map(|_| entry.open.get());
        let open = open.map(|open| format!(" ({open} open)"));
        format!("; limits{line}: {}{}", entry.limits, open.unwrap_or_default())
    };
    entries.iter().map(describe).collect()
}
