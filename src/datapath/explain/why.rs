//! Why, in words: what matched, what allows or refuses, and what to write so that it would not.

use crate::reason::Reason;
use crate::snapshot::{Enforcement, Exposure, Service, Snapshot};
use crate::tls::Identity;
use crate::wire::{Authority, Host};

use super::super::hello::Hello;
use super::super::identity::Peer;
use super::super::route::{self, Route};
use super::super::tunnel::Origin;
use super::answer::{EntryRow, Leg, PeerRow, RouteRow, RuleRow};

/// What is done about Istio's policies.
pub(super) fn enforcement(snapshot: &Snapshot) -> &'static str {
    match snapshot.enforcement {
        Enforcement::Off => "off",
        Enforcement::Audit => "audit",
        Enforcement::Enforce => "enforce",
    }
}

/// A peer of whom nothing is known.
pub(super) fn peer(peer: &Peer) -> PeerRow {
    let address = peer.source.address.ip();
    let from = match address.is_unspecified() {
        true => String::new(),
        false => format!(" at {address}"),
    };
    PeerRow {
        said: format!("a peer{from} without an identity, as everybody is on a TLS listener"),
        ..PeerRow::default()
    }
}

/// A peer whose identity was verified, in the cluster that its trust domain stands for.
pub(super) fn identity(identity: &Identity, cluster: Option<&str>) -> PeerRow {
    let domain = &identity.trust_domain;
    let said = match cluster {
        Some(cluster) => format!("of cluster {cluster}, by its trust domain {domain}"),
        None => format!(
            "refused in the handshake: trust domain {domain} is not in the trust set; write \
             {{name: {domain}, cluster: NAME}} into `trust.domains`"
        ),
    };
    PeerRow {
        identity: Some(identity.uri.to_string()),
        cluster: cluster.map(ToOwned::to_owned),
        said,
    }
}

/// An authority that is none.
pub(super) fn no_authority(asked: &str) -> Leg {
    Leg {
        asked: asked.to_owned(),
        rule: RuleRow {
            said: "it is no authority of the form host:port or ip:port".to_owned(),
            change: Some("write HOST:PORT, such as echo.app.svc.cluster.local:80".to_owned()),
            ..RuleRow::default()
        },
        ..Leg::default()
    }
}

/// A hello that nothing is routed by.
pub(super) fn unrouted(hello: &Hello, from: String, reason: Reason) -> Leg {
    let asked = hello.sni.as_deref().unwrap_or("no server name");
    let (said, change) = match reason {
        Reason::NoIstioAlpn => (
            "the hello offers none of Istio's protocols by ALPN",
            "the client has to offer one, such as `istio`",
        ),
        _ => (
            "nothing is routed by this server name",
            "the client has to send outbound_.PORT_._.HOST on a listener of Istio's names (its \
             subsets are not known here), and elsewhere a name that a route has",
        ),
    };
    Leg {
        asked: asked.to_owned(),
        from: Some(from),
        rule: RuleRow {
            said: said.to_owned(),
            change: Some(change.to_owned()),
            ..RuleRow::default()
        },
        ..Leg::default()
    }
}

/// The target of a listener's own route.
pub(super) fn granted() -> RuleRow {
    RuleRow {
        allowed: true,
        said: "the listener's own route opens it to whoever reaches the listener".to_owned(),
        ..RuleRow::default()
    }
}

/// A route that was found, and why it does or does not go to a waypoint.
pub(super) fn route(snapshot: &Snapshot, peer: &Peer, route: &Route) -> RouteRow {
    let service = route.service();
    let (by, said) = matched(snapshot, route);
    RouteRow {
        service: format!("{}/{}", service.namespace, service.hostname),
        port: route.port(),
        by: by.to_owned(),
        said,
        by_waypoint: route.is_by_waypoint(),
        waypoint: waypoint(snapshot, peer, route),
        route_by: match route.is_direct() {
            true => "sni".to_owned(),
            false => "authority".to_owned(),
        },
    }
}

/// What leads from what was asked for to the service.
fn matched(snapshot: &Snapshot, route: &Route) -> (&'static str, String) {
    match &route.asked().host {
        Host::Name(name) if **name == *route.service().hostname => {
            ("hostname", "its hostname".to_owned())
        }
        Host::Name(_) => ("exposedName", "a name that `exposure` gives it".to_owned()),
        Host::Ip(_) => ("vip", format!("its VIP in network {}", snapshot.network())),
    }
}

fn waypoint(snapshot: &Snapshot, peer: &Peer, route: &Route) -> Option<String> {
    let definition = &route.service().definition;
    if definition.waypoints.is_empty() {
        return None;
    }
    let names = definition.waypoint_names();
    let origin = match route.origin() {
        Origin::Workload => "no x-istio-source",
        Origin::Waypoint => "x-istio-source: waypoint",
        Origin::Gateway => "x-istio-source: gateway",
    };
    if route.is_past_waypoints() {
        return Some(format!(
            "past its waypoint {names}: the peer says {origin}, and is believed"
        ));
    }
    let why = match route.origin() {
        _ if route.is_direct() => "nobody on a TLS listener is believed to come from it".to_owned(),
        Origin::Workload => format!("the peer says {origin}"),
        Origin::Gateway if definition.ingress_use_waypoint => {
            format!("the peer says {origin}, and the service sends gateways to its waypoint too")
        }
        Origin::Waypoint | Origin::Gateway => format!(
            "the peer says {origin}, and is not believed: {} is neither an identity of a waypoint \
             nor in `trust.waypoints`",
            peer.source.principal
        ),
    };
    let there = match route::waypoints(snapshot, definition).next() {
        Some(_) if !route.is_direct() => "",
        Some(_) => ", and it has no endpoint there",
        None => ", which is unknown or has no HBONE endpoint",
    };
    Some(format!("to its waypoint {names}{there}: {why}"))
}

/// Why nothing was found.
pub(super) fn unknown(snapshot: &Snapshot, _peer: &Peer, asked: &Authority) -> RuleRow {
    let service = match &asked.host {
        Host::Name(name) => snapshot.services.get(&**name),
        Host::Ip(ip) => snapshot.by_vip(*ip),
    };
    let (said, change) = match service {
        Some(service) => without_port(service, asked.port),
        None if matches!(asked.host, Host::Ip(_)) => (
            format!("no service has this VIP in network {}", snapshot.network()),
            "write the hostname of a service, or a VIP of one in this network".to_owned(),
        ),
        None => (
            "no service has this hostname, and `exposure` gives the name to none".to_owned(),
            "write a hostname that the mesh has (`strait status --all`), or this one into `names` \
             of an entry of `exposure.services`"
                .to_owned(),
        ),
    };
    RuleRow {
        said,
        change: Some(change),
        ..RuleRow::default()
    }
}

fn without_port(service: &Service, port: u16) -> (String, String) {
    let ports = service.ports.keys().map(ToString::to_string);
    let mut ports: Vec<_> = ports.collect();
    ports.sort_unstable();
    let ports = match ports.is_empty() {
        true => "none".to_owned(),
        false => ports.join(", "),
    };
    (
        format!("{} has no port {port}; it has {ports}", service.hostname),
        format!("write a port of {}", service.hostname),
    )
}

/// What is judged, kept while the route goes to the judge.
pub(super) struct Judge<'a> {
    snapshot: &'a Snapshot,
    peer: &'a Peer,
    host: String,
    port: u16,
    /// The entries that count for what was asked for.
    entries: Vec<&'a Exposure>,
    /// Whether the service has any entry at all.
    has_entry: bool,
}

impl<'a> Judge<'a> {
    pub(super) fn of(snapshot: &'a Snapshot, peer: &'a Peer, route: &Route) -> Self {
        let (host, port) = (route.service().hostname.to_string(), route.port());
        let own = snapshot.exposure.entries(&host);
        let entries = match matched(snapshot, route).0 {
            "exposedName" => snapshot.exposure.entries_called(route.asked()).collect(),
            _ => {
                let of_port = |entry: &&Exposure| entry.port.is_none_or(|only| only == port);
                own.iter().filter(of_port).collect()
            }
        };
        Self {
            snapshot,
            peer,
            has_entry: snapshot.exposure.has_entry(&host),
            host,
            port,
            entries,
        }
    }

    /// Says what allowed it, or what refused it for a reason.
    pub(super) fn rule(&self, refused: Option<Reason>) -> RuleRow {
        match refused {
            None => self.allowed(),
            Some(reason) => self.refused(reason),
        }
    }

    fn allowed(&self) -> RuleRow {
        let (caller, trust) = (self.peer.caller(), &self.snapshot.trust);
        let admits = |entry: &&&Exposure| entry.to.iter().any(|to| to.admits(caller, trust));
        let found = self.entries.iter().find(admits);
        let said = match found {
            Some(entry) => {
                let to = entry.to.iter().find(|to| to.admits(caller, trust));
                let to = to.map(ToString::to_string).unwrap_or_default();
                format!("exposure.services[{}] is for {to}", entry.index)
            }
            None if self.snapshot.exports_to(caller, &self.host, self.port) => {
                "the control plane exports it to the trust set".to_owned()
            }
            None => "`exposure.default: all` exposes it to the trust set".to_owned(),
        };
        RuleRow {
            allowed: true,
            said,
            entries: found.into_iter().map(|entry| row(entry)).collect(),
            change: None,
        }
    }

    fn refused(&self, reason: Reason) -> RuleRow {
        let Self { host, port, .. } = self;
        let who = self.audience();
        let entries: Vec<_> = self.entries.iter().map(|entry| row(entry)).collect();
        let (said, change) = match (reason, self.entries.last()) {
            (Reason::NotForPeer, Some(last)) => (
                "its entries of `exposure` admit others, and not this peer".to_owned(),
                format!("write {who} into `to` of exposure.services[{}]", last.index),
            ),
            _ if self.has_entry => (
                format!("its entries of `exposure` admit nobody on port {port}"),
                format!("write an entry {{service: \"{host}:{port}\", to: [{who}]}}"),
            ),
            _ => (
                "it is exposed to nobody: it has no entry in `exposure`, the control plane does \
                 not export it, and `exposure.default` is `none`"
                    .to_owned(),
                format!(
                    "write exposure: {{services: [{{service: \"{host}:{port}\", to: [{who}]}}]}}"
                ),
            ),
        };
        RuleRow {
            allowed: false,
            said,
            entries,
            change: Some(change),
        }
    }

    /// The peer as an entry of `to` describes it.
    fn audience(&self) -> String {
        let source = &self.peer.source;
        match self.peer.is_unknown() {
            true => "{anyone: true}".to_owned(),
            false => format!(
                "{{cluster: {}, namespaces: [{}]}}",
                source.cluster, source.namespace
            ),
        }
    }
}

fn row(entry: &Exposure) -> EntryRow {
    EntryRow {
        index: entry.index,
        line: None,
        to: entry.to.iter().map(ToString::to_string).collect(),
    }
}
