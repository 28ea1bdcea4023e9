//! The `listeners` section: where peers connect, and what becomes of their connections.

use std::net::SocketAddr;

use ipnet::IpNet;
use serde::{Serialize, Serializer};

use crate::wire::sni::{RouteBy, SniPattern};

use super::checks;
use super::names::HostPort;
use crate::yaml::{Fields, Value};

/// A place where peers connect.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Listener {
    /// Its name in logs and findings. Required, unique.
    pub name: String,
    /// Its address. Required.
    pub bind: SocketAddr,
    /// Where that stands, for findings that only show once the mesh is known.
    #[serde(skip)]
    pub line: Line,
    /// The networks whose peers may connect. Default: none, which is all.
    pub sources: Vec<IpNet>,
    /// What its peers speak.
    #[serde(flatten)]
    pub protocol: ListenerProtocol,
}

/// What the peers of a listener speak. Default HBONE.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "protocol", rename_all = "lowercase")]
pub enum ListenerProtocol {
    /// HBONE.
    Hbone {
        /// By what tunnels are routed, unless the service that they ask for says so itself.
        /// Default: by their authority.
        #[serde(serialize_with = "word")]
        route_by: RouteBy,
    },
    /// TLS, which is passed on unread, routed by the server name of its hello.
    Tls(TlsRouting),
}

/// How a TLS listener routes. Exactly one of the two keys is given.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum TlsRouting {
    /// By Istio's names, to services that are exposed to anyone.
    Istio {
        /// `istio`.
        routing: &'static str,
    },
    /// By routes of the listener's own, which also expose their targets through it.
    Routes {
        /// The routes; no name is in two of them.
        routes: Vec<SniRoute>,
    },
}

/// Server names and the service that they stand for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SniRoute {
    /// The names. Required.
    #[serde(serialize_with = "patterns")]
    pub sni: Vec<SniPattern>,
    /// The service; it always has a port. Required.
    pub to: HostPort,
    /// Where that stands, for findings that only show once the mesh is known.
    #[serde(skip)]
    pub line: Line,
}

/// A line of the file. All are equal: a listener that has moved down has not changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line(pub u64);

impl PartialEq for Line {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

fn patterns<S: Serializer>(patterns: &[SniPattern], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(patterns.iter().map(ToString::to_string))
}

fn word<S: Serializer>(route_by: &RouteBy, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(route_by)
}

impl Listener {
    /// The routes of its own; none where it has no such thing.
    pub fn routes(&self) -> &[SniRoute] {
        match &self.protocol {
            ListenerProtocol::Tls(TlsRouting::Routes { routes }) => routes,
            _ => &[],
        }
    }

    /// Whether its peers speak TLS that is passed on.
    pub fn is_tls(&self) -> bool {
        matches!(self.protocol, ListenerProtocol::Tls(_))
    }

    /// Returns whether another version of the configuration means the same socket: the address and
    /// the protocol are the same. Where the kernel chooses the port, the name decides.
    pub fn is_same_socket(&self, other: &Self) -> bool {
        let is_same = self.bind == other.bind && self.is_tls() == other.is_tls();
        is_same && (self.bind.port() != 0 || self.name == other.name)
    }
}

/// Reads the section: the listeners, each with the line of its address.
pub(super) fn read(value: Value<'_>) -> Vec<(Listener, u64)> {
    if value.is_vacant() {
        let what = "is empty, so nobody could connect";
        value.error(what, "`- {name: cross-network, bind: \"[::]:15008\"}`");
    }
    let read: Vec<_> = value
        .items()
        .filter_map(|item| Some((listener(item)?, item)))
        .collect();
    checks::repeated(
        read.iter()
            .map(|((listener, _), item)| (listener.name.as_str(), *item)),
    );
    read.into_iter().map(|(read, _)| read).collect()
}

/// A listener and the line of its address.
fn listener(value: Value<'_>) -> Option<(Listener, u64)> {
    let mut fields = value.fields("listeners[]")?;
    fields.later(&["to"]);
    let protocol = fields.get("protocol");
    if protocol.is_some_and(|protocol| protocol.is_later(&["tcp"], "`hbone` or `tls`")) {
        return None;
    }
    let is_tls = match protocol {
        Some(protocol) => protocol.choice(&[("hbone", false), ("tls", true)]),
        None => Some(false),
    };
    let name = fields
        .need("name", "cross-network")
        .and_then(Value::text)
        .map(str::to_owned);
    let bind = fields.need("bind", "\"[::]:15008\"");
    let address = bind.and_then(socket_address);
    let sources = match fields.get("sources") {
        Some(list) => sources(list),
        None => Some(Vec::new()),
    };
    let protocol = match is_tls {
        Some(true) => tls(value, &mut fields).map(ListenerProtocol::Tls),
        Some(false) => hbone(&mut fields),
        // Which of the other keys it may have is said by a protocol that nobody knows.
        None => return None,
    };
    fields.finish();
    let listener = Listener {
        name: name?,
        bind: address?,
        line: Line(bind?.line()),
        sources: sources?,
        protocol: protocol?,
    };
    Some((listener, bind?.line()))
}

fn sources(list: Value<'_>) -> Option<Vec<IpNet>> {
    if list.is_vacant() {
        list.error(
            "is empty, which would refuse everybody",
            "a network such as `10.0.0.0/8`, or remove the key to admit every address",
        );
        return None;
    }
    let read: Vec<_> = list.items().map(network).collect();
    read.into_iter().collect()
}

/// A network in CIDR form.
pub(super) fn network(item: Value<'_>) -> Option<IpNet> {
    item.parsed("a network in CIDR form, such as `127.0.0.0/8`", |text| {
        text.parse().ok()
    })
}

/// An address to listen on.
pub(super) fn socket_address(value: Value<'_>) -> Option<SocketAddr> {
    let wanted = "an address and a port, such as `\"127.0.0.1:15000\"` or `\"[::]:15008\"`";
    value.parsed(wanted, |text| text.parse().ok())
}

fn hbone(fields: &mut Fields<'_>) -> Option<ListenerProtocol> {
    let route_by = match fields.get("route_by") {
        Some(route_by) => route_by.choice(&RouteBy::WORDS),
        None => Some(RouteBy::default()),
    };
    for key in ["routing", "routes"] {
        if let Some(value) = fields.get(key) {
            let how = "`protocol: tls` beside it, or remove it";
            value.error("is for listeners of TLS, and this one is of HBONE", how);
        }
    }
    Some(ListenerProtocol::Hbone {
        route_by: route_by?,
    })
}

fn tls(listener: Value<'_>, fields: &mut Fields<'_>) -> Option<TlsRouting> {
    if let Some(route_by) = fields.get("route_by") {
        let how = "the listener without it";
        route_by.error("is for listeners of HBONE, and this one is of TLS", how);
    }
    let (routing, list) = (fields.get("routing"), fields.get("routes"));
    match (routing, list) {
        (None, None) => {
            let what = "is of TLS and has neither `routing` nor `routes`, so it leads nowhere";
            let how = "`routing: istio`, or `routes: [{sni: [NAME], to: \"HOST:PORT\"}]`";
            listener.error(what, how);
            None
        }
        (Some(routing), Some(_)) => {
            let what = "stands beside `routes`, and a listener routes in one way";
            routing.error(what, "one of the two; another listener can have the other");
            None
        }
        (Some(routing), None) => {
            routing.choice(&[("istio", ())])?;
            Some(TlsRouting::Istio { routing: "istio" })
        }
        (None, Some(list)) => {
            let is_open = fields.get("sources").is_none();
            let routes = routes(list, is_open)?;
            Some(TlsRouting::Routes { routes })
        }
    }
}

/// Reads the routes of a listener, which `is_open` to every address or not.
fn routes(list: Value<'_>, is_open: bool) -> Option<Vec<SniRoute>> {
    let example = "`- {sni: [\"*\"], to: \"istiod.istio-system.svc.cluster.local:15012\"}`";
    if list.is_vacant() {
        list.error("is empty, so the listener leads nowhere", example);
        return None;
    }
    let read: Vec<_> = list.items().map(route).collect();
    let routes = read.into_iter().collect::<Option<Vec<_>>>()?;
    let names: Vec<_> = routes
        .iter()
        .flat_map(|(route, items)| route.sni.iter().map(ToString::to_string).zip(items))
        .collect();
    checks::repeated(names.iter().map(|(name, item)| (name.as_str(), **item)));
    for (route, items) in routes.iter().filter(|_| is_open) {
        for (_, item) in route
            .sni
            .iter()
            .zip(items)
            .filter(|(sni, _)| **sni == SniPattern::Any)
        {
            let to = &route.to;
            let what = format!(
                "is `*`, and the listener has no `sources`: {to} is open to every address, under \
                 any server name and none"
            );
            item.warning(
                what,
                "`sources: [NETWORK]` for the listener, or names instead",
            );
        }
    }
    Some(routes.into_iter().map(|(route, _)| route).collect())
}

/// A route, and where each of its names stands.
fn route(value: Value<'_>) -> Option<(SniRoute, Vec<Value<'_>>)> {
    let mut fields = value.fields("listeners[].routes[]")?;
    let list = fields.need("sni", "[\"*.example.com\"]");
    let to = fields.need("to", "\"istiod.istio-system.svc.cluster.local:15012\"");
    fields.finish();
    let items: Vec<_> = list.map(|list| list.items().collect()).unwrap_or_default();
    if list.is_some_and(Value::is_vacant) {
        let how = "a name, `*.` and a name for all below it, or `\"*\"` for any name and none";
        value.error("has no name in its `sni`, so nothing reaches it", how);
        return None;
    }
    let sni: Vec<_> = items.iter().map(|item| pattern(*item)).collect();
    let line = Line(to.unwrap_or(value).line());
    let (to, sni) = (to.and_then(target), sni.into_iter().collect());
    let route = SniRoute {
        sni: Option::<Vec<_>>::filter(sni, |sni| !sni.is_empty())?,
        to: to?,
        line,
    };
    Some((route, items))
}

fn pattern(item: Value<'_>) -> Option<SniPattern> {
    let text = item.text()?;
    let read = SniPattern::parse(text);
    if let Err(error) = &read {
        let what = format!("is `{text}`, which {error}");
        item.error(what, "a name, `*.` and a name for all below it, or `\"*\"`");
    }
    read.ok()
}

fn target(value: Value<'_>) -> Option<HostPort> {
    let wanted = "the hostname and port of a service, such as \
                  `istiod.istio-system.svc.cluster.local:15012`";
    value.parsed(wanted, |text| {
        let to = HostPort::parse(text).ok()?;
        (to.port.is_some() && !to.is_address()).then_some(to)
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::super::tests::{GOOD, instead};

    /// What is found of this listener beside the good one, which has the line before.
    fn listening(rest: &str) -> String {
        let listener = format!("listeners:\n  - {{name: one, bind: \"127.0.0.1:0\", {rest}}}");
        instead("listeners:", &listener)
    }

    /// Listeners, and what is said of each.
    const WRONG: &[(&str, &str)] = &[
        (
            "protocol: tls",
            "is of TLS and has neither `routing` nor `routes`",
        ),
        (
            "protocol: tls, routing: istio, routes: []",
            "`listeners[].routing` stands beside `routes`",
        ),
        (
            "protocol: tls, routing: envoy",
            "`listeners[].routing` cannot be `envoy`; write `istio`",
        ),
        (
            "routing: istio",
            "`listeners[].routing` is for listeners of TLS",
        ),
        ("routes: []", "`listeners[].routes` is for listeners of TLS"),
        (
            "protocol: tls, routing: istio, route_by: authority",
            "`listeners[].route_by` is for listeners of HBONE",
        ),
        (
            "protocol: tls, routes: []",
            "`listeners[].routes` is empty, so",
        ),
        (
            "protocol: tls, routes: [{sni: [a]}]",
            "`listeners[].routes[]` has no `to`",
        ),
        (
            "protocol: tls, routes: [{to: \"a:1\"}]",
            "`listeners[].routes[]` has no `sni`",
        ),
        (
            "protocol: tls, routes: [{sni: [], to: \"a:1\"}]",
            "has no name in its `sni`",
        ),
        (
            "protocol: tls, routes: [{sni: [\"a*\"], to: \"a:1\"}]",
            "`listeners[].routes[].sni[]` is `a*`, which has a host with a character",
        ),
        (
            "protocol: tls, routes: [{sni: [a], to: a}]",
            "`listeners[].routes[].to` is `a`; write the hostname and port of a service",
        ),
        (
            "protocol: tls, routes: [{sni: [a], to: \"10.0.0.1:1\"}]",
            "`listeners[].routes[].to` is `10.0.0.1:1`; write the hostname and port",
        ),
        (
            "protocol: tls, routes: [{sni: [a], to: \"b:1\"}, {sni: [A.], to: \"c:1\"}]",
            "`listeners[].routes[].sni[]` has `a` twice, first on line 9; write each name once",
        ),
        (
            "route_by: name",
            "`listeners[].route_by` cannot be `name`; write one of `authority`, `sni`, `strict`",
        ),
        (
            "protocol: tcp",
            "`listeners[].protocol: tcp` is not built yet",
        ),
        (
            "protocol: udp",
            "`listeners[].protocol` cannot be `udp`; write one of `hbone`, `tls`",
        ),
        (
            "sources: []",
            "`listeners[].sources` is empty, which would refuse everybody",
        ),
        (
            "sources: [10.0.0.1.0/8]",
            "`listeners[].sources[]` is `10.0.0.1.0/8`; write a network in CIDR form",
        ),
    ];

    #[test]
    fn a_tls_listener_routes_in_one_way_and_each_name_once() {
        let good = [
            "protocol: tls, routing: istio",
            "route_by: sni",
            "protocol: hbone, route_by: strict",
            "protocol: tls, sources: [10.0.0.0/8], routing: istio",
            "sources: [10.0.0.0/8, \"2001:db8::/32\"]",
            "protocol: tls, sources: [10.0.0.0/8], routes: [{sni: [\"*\"], to: \"a.b:15012\"}]",
            "protocol: tls, routes: [{sni: [a.b, \"*.b\"], to: \"c:1\"}, {sni: [b], to: \"c:2\"}]",
        ];
        for listener in good {
            assert_eq!(listening(listener), "", "{listener}");
        }
        for (listener, want) in WRONG {
            let found = listening(listener);
            assert!(found.starts_with("9: error: "), "{listener}: {found}");
            assert!(found.contains(want), "{listener}: {found}");
            assert_eq!(found.lines().count(), 1, "{listener}: {found}");
        }
    }

    #[test]
    fn a_route_of_any_name_without_sources_is_a_warning() {
        let found = listening("protocol: tls, routes: [{sni: [a, \"*\"], to: \"b:1\"}]");
        let want = "9: warning: `listeners[].routes[].sni[]` is `*`, and the listener has no \
                    `sources`: b:1 is open to every address, under any server name and none; write \
                    `sources: [NETWORK]` for the listener, or names instead";
        assert_eq!(found.trim_end(), want);
    }

    #[test]
    fn listeners_are_shown_as_they_are_written() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
        let text = "name: one, bind: \"127.0.0.1:0\", protocol: tls, \
                    routes: [{sni: [\"*.B.\"], to: \"C:1\"}]";
        let text = GOOD.replace("listeners:", &format!("listeners:\n  - {{{text}}}"));
        let config = Config::parse(&here, &text).0.expect("a good file");
        let shown = serde_json::to_value(&config.listeners).unwrap();
        assert_eq!(
            shown[0],
            serde_json::json!({"name": "one", "bind": "127.0.0.1:0", "sources": [],
                "protocol": "tls", "routes": [{"sni": ["*.b"], "to": "c:1"}]})
        );
        assert_eq!(shown[1]["protocol"], "hbone");
        assert_eq!(shown[1]["route_by"], "authority");
        let moved = Config::parse(&here, &format!("\n{text}")).0;
        let moved = moved.expect("the same, a line further down");
        assert_eq!(config.listeners, moved.listeners);
    }
}
