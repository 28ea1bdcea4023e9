//! The `listeners` section: addresses for peers, their protocols and routes.

use std::fmt;
use std::net::SocketAddr;

use ipnet::IpNet;
use serde::{Serialize, Serializer};
use serde_json::{Value as Json, json};

use super::bindings::Binding;
use super::define::{NonEmpty, ServicePort, Shape, Type, repeated, scalar, section, words};
use super::line::Line;
use super::names::HostPort;
use crate::wire::sni::{RouteBy, SniPattern};
use crate::wire::{Authority, Host, Transit};
use crate::yaml::Value;

const PLACE: &str = "listeners[]";
const ROUTES: &str = "listeners[].routes[]";

/// An address on which peers connect.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Listener {
    /// The name in logs and findings, which is unique.
    pub name: String,
    /// The address.
    pub bind: SocketAddr,
    /// The line, for findings that need the mesh.
    #[serde(skip)]
    pub line: Line,
    /// The networks whose peers may connect; none is all.
    pub sources: Vec<IpNet>,
    /// The load balancers whose PROXY headers state the addresses of peers.
    pub balancers: Vec<IpNet>,
    /// The protocol of its peers.
    #[serde(flatten)]
    pub protocol: ListenerProtocol,
}

/// Protocol of the peers of a listener.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "protocol", rename_all = "lowercase")]
pub enum ListenerProtocol {
    /// HBONE.
    Hbone {
        /// The routing of tunnels to services that do not define it themselves.
        #[serde(serialize_with = "word")]
        route_by: RouteBy,
        /// The limit of transit.
        #[serde(serialize_with = "word")]
        transit: Transit,
    },
    /// TLS passthrough, routed by the server name of the ClientHello.
    Tls(TlsRouting),
    /// Plain TCP of local clients, for the service of a binding.
    Binding(Box<Binding>),
}

/// Routing of a TLS listener.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum TlsRouting {
    /// By Istio's names, to services that are exposed to anyone.
    Istio {
        /// `istio`.
        routing: &'static str,
    },
    /// By routes of the listener, which also expose their targets through it.
    Routes {
        /// The routes; no name is in two of them.
        routes: Vec<SniRoute>,
    },
}

section! {
    /// Keys of a listener.
    pub(super) struct ListenerKeys at "listeners[]", planned("to") {
        /// Name in logs and findings, which is unique.
        name: String = required("cross-network");
        /// Address and port.
        bind: SocketAddr = required("\"[::]:15008\"");
        /// Protocol of the peers.
        protocol: Protocol = default(Protocol::Hbone);
        /// Routing of tunnels, of `protocol: hbone`. `authority`: by the authority of the CONNECT.
        /// `sni`: the authority must be a service that the peer may reach; it is answered 200, and
        /// the server name of the TLS inside (`outbound_.PORT_._.HOST`, or a name at the
        /// authority's port) is resolved and authorized in its place. `strict`: by the authority,
        /// and no byte reaches the endpoint before the server name inside is one of the same
        /// service. With `sni` and `strict`, a tunnel without ClientHello within 5 s and 16 KiB is
        /// reset.
        route_by: Option<RouteBy> = default(None, "`authority`");
        /// Routing by Istio's names, of `protocol: tls`: `outbound_.PORT_._.HOST`, with one of
        /// Istio's protocols in ALPN. Only services that are exposed to `{anyone: true}` are
        /// reached. Subsets are those of `exposure.services[].subsets`.
        routing: Option<Routing> = default(None, "`routes` are required with `protocol: tls`")
            unless json!({"anyOf": [{"required": ["routes"]},
                {"properties": {"protocol": {"const": "hbone"}}}]});
        /// Routes by server name, of `protocol: tls`, instead of `routing`. The target is open to
        /// every client of this listener, whatever `exposure` contains.
        routes: Option<Vec<SniRoute>> = default(
            None, "`routing` is required with `protocol: tls`");
        /// Limit of `exposure.services[].transit` for tunnels of this listener, of `protocol:
        /// hbone`.
        transit: Option<Transit> = default(None, "`always`");
        /// Networks whose addresses may connect and open tunnels. Connections of others are reset.
        sources: Vec<IpNet> as NonEmpty<IpNet> = default(Vec::new(), "every address");
        /// Networks of load balancers, whose connections begin with a header of the PROXY protocol
        /// (version 1 or 2) within 5 s. The peer has the address in it, for `sources` and for
        /// everything else. Other peers send no header, and one that does is refused.
        balancers: Vec<IpNet> as NonEmpty<IpNet> = default(
            Vec::new(), "peers have the address of their connection");
    }
}

words! {
    /// Protocol of the peers, as it is written.
    pub(super) enum Protocol {
        /// HBONE: mutual TLS with HTTP/2 CONNECT.
        Hbone = "hbone",
        /// TLS passthrough: connections are routed by the server name of their ClientHello, and
        /// forwarded without being decrypted.
        Tls = "tls",
    }
}

words! {
    /// Routing of a TLS listener, as it is written.
    pub(super) enum Routing {
        /// Names of Istio's sidecars.
        Istio = "istio",
    }
}

section! {
    /// Server names and their service.
    pub struct SniRoute at "listeners[].routes[]" {
        /// Server names: `NAME`, `*.NAME` for all names below it at any depth, or `*` for any name
        /// and none. The longest match wins. `*` on a listener without `sources` is a warning.
        sni: Vec<SniPattern> as NonEmpty<SniPattern> = required("[\"*.example.com\"]");
        /// Hostname and port of the service.
        to: HostPort as ServicePort = required("\"istiod.istio-system.svc.cluster.local:15012\"");
        /// The line, for findings that need the mesh.
        line: Line = aside(Line::of);
    }
}

impl SniRoute {
    /// Returns the target. The configuration was validated: there is none without a port.
    pub fn target(&self) -> Authority {
        let host = Host::Name(self.to.host.as_str().into());
        Authority { host, port: self.to.port.unwrap_or_default() }
    }
}

fn word<S: Serializer>(word: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(word)
}

impl From<&Binding> for Listener {
    fn from(binding: &Binding) -> Self {
        Self {
            name: format!("binding {}", binding.service),
            bind: binding.listen,
            line: binding.line.clone(),
            sources: binding.clients.clone(),
            balancers: Vec::new(),
            protocol: ListenerProtocol::Binding(Box::new(binding.clone())),
        }
    }
}

impl Listener {
    /// Returns the routes of the listener; none for other kinds of listeners.
    pub fn routes(&self) -> &[SniRoute] {
        match &self.protocol {
            ListenerProtocol::Tls(TlsRouting::Routes { routes }) => routes,
            _ => &[],
        }
    }

    /// Returns whether local clients of a binding use the listener.
    pub fn is_binding(&self) -> bool {
        matches!(self.protocol, ListenerProtocol::Binding(_))
    }

    /// Returns the lines of the objects whose binding the listener is.
    pub fn objects(&self) -> &[Line] {
        match &self.protocol {
            ListenerProtocol::Binding(binding) => &binding.objects,
            _ => &[],
        }
    }

    /// Returns whether the listener is a binding of an object.
    pub fn is_of_object(&self) -> bool {
        !self.objects().is_empty()
    }

    /// Returns whether the listener forwards TLS by passthrough.
    pub fn is_tls(&self) -> bool {
        matches!(self.protocol, ListenerProtocol::Tls(_))
    }

    /// Returns whether the listener has HBONE peers.
    pub fn is_hbone(&self) -> bool {
        matches!(self.protocol, ListenerProtocol::Hbone { .. })
    }

    /// Returns whether another version of the configuration means the same socket: the address and
    /// the protocol are the same. Where the kernel chooses the port, the name decides.
    pub fn is_same_socket(&self, other: &Self) -> bool {
        let protocol = |one: &Self| std::mem::discriminant(&one.protocol);
        let is_same = self.bind == other.bind && protocol(self) == protocol(other);
        is_same && (self.bind.port() != 0 || self.name == other.name)
    }

    /// Returns this version of a listener at the address of an older one, if that has its name and
    /// protocol. A binding has no older version with another address.
    pub fn at_address_of(&self, old: &Self) -> Option<Self> {
        let moved = Self { bind: old.bind, ..self.clone() };
        let is_moved = !self.is_binding() && self.name == old.name && old.is_same_socket(&moved);
        is_moved.then_some(moved)
    }
}

impl Type for Listener {
    type Out = Self;

    fn read(value: Value<'_>) -> Option<Self> {
        let keys = ListenerKeys::read(value)?;
        let protocol = match keys.protocol {
            Protocol::Hbone => hbone(&keys, value),
            Protocol::Tls => tls(&keys, value).map(ListenerProtocol::Tls),
        };
        warn_of_untrusted(&keys.balancers, value);
        Some(Self {
            line: Line(value.at(PLACE, "bind").place()),
            protocol: protocol?,
            name: keys.name,
            bind: keys.bind,
            sources: keys.sources,
            balancers: keys.balancers,
        })
    }

    fn show(out: &Self) -> Json {
        json!(out)
    }

    fn shape() -> Shape {
        ListenerKeys::shape()
    }

    fn compare(_: Value<'_>, read: &[(Self, Value<'_>)]) {
        repeated(read, |one| one.name.clone());
    }
}

/// Warns of balancers that every host is one of.
fn warn_of_untrusted(balancers: &[IpNet], value: Value<'_>) {
    if let Some(all) = balancers.iter().find(|network| network.prefix_len() == 0) {
        let what = format!("contains {all}: every peer states its own address");
        value.at(PLACE, "balancers").warning(what, "the addresses of the load balancers");
    }
}

fn hbone(keys: &ListenerKeys, value: Value<'_>) -> Option<ListenerProtocol> {
    let foreign = ["routing", "routes"].map(|key| value.child(PLACE, key));
    for key in foreign.iter().flatten() {
        let how = "`protocol: tls` beside it, or remove it";
        key.error("applies to TLS listeners, and this is an HBONE listener", how);
    }
    let route_by = keys.route_by.unwrap_or_default();
    let transit = keys.transit.unwrap_or(Transit::Always);
    (keys.routing.is_none() && keys.routes.is_none())
        .then_some(ListenerProtocol::Hbone { route_by, transit })
}

fn tls(keys: &ListenerKeys, value: Value<'_>) -> Option<TlsRouting> {
    let foreign = [("route_by", keys.route_by.is_some()), ("transit", keys.transit.is_some())];
    if let Some((key, _)) = foreign.into_iter().find(|(_, is_set)| *is_set) {
        let what = "applies to HBONE listeners, and this is a TLS listener";
        value.at(PLACE, key).error(what, "the listener without it");
        return None;
    }
    match (keys.routing, &keys.routes) {
        (None, None) => {
            let what = "is a TLS listener with neither `routing` nor `routes`, so it serves \
                        nothing";
            let how = "`routing: istio`, or `routes: [{sni: [NAME], to: \"HOST:PORT\"}]`";
            value.error(what, how);
            None
        }
        (Some(_), Some(_)) => {
            let what = "conflicts with `routes`: a listener has one kind of routing";
            let how = "one of the two; another listener can have the other";
            value.at(PLACE, "routing").error(what, how);
            None
        }
        (Some(Routing::Istio), None) => Some(TlsRouting::Istio { routing: "istio" }),
        (None, Some(routes)) if routes.is_empty() => {
            let how = "`- {sni: [\"*\"], to: \"istiod.istio-system.svc.cluster.local:15012\"}`";
            let what = "is empty, so the listener serves nothing";
            value.at(PLACE, "routes").error(what, how);
            None
        }
        (None, Some(routes)) => {
            compare_routes(routes, keys.sources.is_empty(), value.at(PLACE, "routes"));
            Some(TlsRouting::Routes { routes: routes.clone() })
        }
    }
}

/// Reports names that two routes have, and routes that are open to every address.
fn compare_routes(routes: &[SniRoute], is_open: bool, list: Value<'_>) {
    let mut names = Vec::new();
    for (route, entry) in routes.iter().zip(list.entries()) {
        let items = entry.at(ROUTES, "sni").entries();
        for (pattern, item) in route.sni.iter().zip(items) {
            names.push((pattern.to_string(), item));
            if is_open && *pattern == SniPattern::Any {
                let what = format!(
                    "is `*`, and the listener has no `sources`: {} is open to every address, under \
                     any server name and none",
                    route.to
                );
                let how = "`sources: [NETWORK]` for the listener, or names instead";
                item.warning(what, how);
            }
        }
    }
    repeated(&names, String::clone);
}

scalar! {
    SniPattern => SniPattern, "`NAME`, `*.NAME` or `*`", "string",
        |value, wanted| {
            let text = value.text()?;
            let read = SniPattern::parse(text);
            if let Err(error) = &read {
                value.error(format!("is `{text}`, which {error}"), wanted);
            }
            read.ok()
        },
        |pattern| json!(pattern.to_string());
}
