//! Open listeners: their rules, which change with the configuration, and their drain.

use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use foldhash::HashMap;

use crate::config::{self, Line, ListenerProtocol, TlsRouting};
use crate::lifecycle::DrainScope;
use crate::reason::Reason;
use crate::wire::sni::{IstioName, RouteBy, SniPattern};
use crate::wire::{Authority, Host, Transit};

use super::binding::Binding;
use super::client_hello::ClientHello;
use super::limits::clients::ClientConnections;

/// A listener, shared by its connections. Its protocol never changes.
#[derive(Debug, Default)]
pub struct Listener {
    rules: ArcSwap<ListenerRules>,
    pub drain: DrainScope,
    pub clients: ClientConnections,
}

/// Rules for the connections of one listener. The default is an HBONE listener that is open to
/// every address and does not limit transit.
#[derive(Debug)]
pub struct ListenerRules {
    pub config: config::Listener,
    name: Arc<str>,
    routes: Routes,
    binding: Option<Arc<Binding>>,
}

impl Default for ListenerRules {
    fn default() -> Self {
        Self::with_transit(Transit::Always)
    }
}

/// Routes by server name. A lookup tries the whole name, then each parent domain, so that a
/// thousand routes cost the same as one.
#[derive(Debug, Default)]
struct Routes {
    exact: HashMap<Box<str>, Routed>,
    below: HashMap<Box<str>, Routed>,
    any: Option<Routed>,
}

/// Pattern of server names, and their target.
type Routed = (SniPattern, Authority);

#[derive(Debug, PartialEq, Eq)]
pub struct ListenerTarget {
    pub authority: Authority,
    /// True if the listener's own route grants the tunnel.
    pub granted_by_listener: bool,
}

impl Listener {
    pub fn new(listener: &config::Listener, stop: DrainScope) -> Self {
        Self {
            rules: ArcSwap::from_pointee(ListenerRules::new(listener)),
            drain: stop,
            clients: ClientConnections::default(),
        }
    }

    pub fn open_to_all(rules: &ListenerRules) -> Self {
        let open = config::Listener { sources: Vec::new(), ..rules.config.clone() };
        Self { rules: ArcSwap::from_pointee(ListenerRules::new(&open)), ..Self::default() }
    }

    /// Returns the current rules, for a lookup that ends before the next await.
    pub fn rules(&self) -> Guard<Arc<ListenerRules>> {
        self.rules.load()
    }

    /// Replaces the rules by those of another version of the configuration. The protocol stays the
    /// same.
    pub fn replace_rules(&self, listener: &config::Listener) {
        let mut rules = ListenerRules::new(listener);
        if let (Some(new), Some(old)) = (&mut rules.binding, self.binding()) {
            if *new == old {
                // Open connections know their binding by it.
                *new = old;
            } else {
                new.endpoints.keep_states(&old.endpoints);
            }
        }
        self.rules.store(Arc::new(rules));
    }

    /// Returns the binding whose clients connect to the listener, if it has one.
    pub fn binding(&self) -> Option<Arc<Binding>> {
        self.rules.load().binding.clone()
    }
}

impl ListenerRules {
    /// Creates rules that admit every address and limit transit.
    pub fn with_transit(transit: Transit) -> Self {
        Self::new(&config::Listener {
            name: String::new(),
            bind: ([0; 4], 0).into(),
            line: Line::default(),
            sources: Vec::new(),
            balancers: Vec::new(),
            protocol: ListenerProtocol::Hbone { route_by: RouteBy::default(), transit },
        })
    }

    pub fn new(listener: &config::Listener) -> Self {
        let binding = match &listener.protocol {
            ListenerProtocol::Binding(binding) => Some(Arc::new(Binding::new(binding))),
            ListenerProtocol::Hbone { .. } | ListenerProtocol::Tls(_) => None,
        };
        Self {
            name: listener.name.as_str().into(),
            routes: Routes::new(listener.routes()),
            binding,
            config: listener.clone(),
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the limit of transit.
    pub fn transit(&self) -> Transit {
        match self.config.protocol {
            ListenerProtocol::Hbone { transit, .. } => transit,
            ListenerProtocol::Tls(_) | ListenerProtocol::Binding(_) => Transit::Off,
        }
    }

    /// Returns true if a peer with this address may connect.
    pub fn admits(&self, address: IpAddr) -> bool {
        !self.has_sources() || self.config.sources.iter().any(|net| net.contains(&address))
    }

    /// Returns true if a peer with this address is a load balancer, which states the address of
    /// the peer that it forwards.
    pub fn is_balancer(&self, address: IpAddr) -> bool {
        self.config.balancers.iter().any(|net| net.contains(&address))
    }

    /// Returns true if only some addresses may connect.
    pub fn has_sources(&self) -> bool {
        !self.config.sources.is_empty()
    }

    /// Returns true for a TLS passthrough listener.
    pub fn is_passthrough(&self) -> bool {
        self.config.is_tls()
    }

    /// Returns the routing key of tunnels whose service does not define one.
    pub fn route_by(&self) -> RouteBy {
        match self.config.protocol {
            ListenerProtocol::Hbone { route_by, .. } => route_by,
            ListenerProtocol::Tls(_) | ListenerProtocol::Binding(_) => RouteBy::Sni,
        }
    }

    /// Returns the target of a ClientHello.
    ///
    /// # Errors
    /// Returns [`Reason::UnknownSni`] or [`Reason::NoIstioAlpn`].
    pub fn target(&self, hello: &ClientHello) -> Result<ListenerTarget, Reason> {
        self.resolve(hello.sni.as_deref(), hello.offers_istio)
    }

    /// Returns true if the listener's own route currently grants a tunnel that was opened for this
    /// server name and target. `granted` is true if a route granted it then.
    ///
    /// # Errors
    /// Fails if the name no longer leads to the target.
    pub fn still_grants(
        &self,
        name: Option<&str>,
        authority: &Authority,
        granted: bool,
    ) -> Result<bool, Reason> {
        // A tunnel that no route granted has offered Istio's protocols.
        let wanted = self.resolve(name, !granted)?;
        if wanted.authority != *authority {
            return Err(Reason::UnknownSni);
        }
        Ok(wanted.granted_by_listener)
    }

    fn resolve(&self, name: Option<&str>, offers_istio: bool) -> Result<ListenerTarget, Reason> {
        if let ListenerProtocol::Tls(TlsRouting::Istio { .. }) = self.config.protocol {
            return resolve_istio_name(name, offers_istio);
        }
        let (_, authority) = self.routes.longest_match(name).ok_or(Reason::UnknownSni)?;
        Ok(ListenerTarget { authority: authority.clone(), granted_by_listener: true })
    }

    /// Returns the server names of the listener's own routes, for display. `None` if it has no
    /// routes of its own.
    pub fn server_names(&self) -> Option<Vec<String>> {
        let ListenerProtocol::Tls(TlsRouting::Routes { .. }) = self.config.protocol else {
            return None;
        };
        let routes = self.routes.exact.values().chain(self.routes.below.values());
        let mut names: Vec<_> = routes.map(|(pattern, _)| pattern.to_string()).collect();
        names.sort_unstable();
        Some(names)
    }

    /// Describes the rule of a TLS listener that decides about a server name, for display.
    pub fn describe_match(&self, name: Option<&str>) -> String {
        match (&self.config.protocol, self.routes.longest_match(name)) {
            (ListenerProtocol::Tls(TlsRouting::Istio { .. }), _) => {
                "matched by Istio's server name format".to_owned()
            }
            (ListenerProtocol::Tls(TlsRouting::Routes { .. }), Some((pattern, _))) => {
                format!("matched by the listener's route for \"{pattern}\"")
            }
            (ListenerProtocol::Tls(TlsRouting::Routes { .. }), None) => {
                "no matching listener route".to_owned()
            }
            _ => String::new(),
        }
    }
}

/// Resolves a server name in Istio's form. Subsets are those of the configuration, because the
/// destination rules of the client's cluster are not known.
fn resolve_istio_name(name: Option<&str>, offers_istio: bool) -> Result<ListenerTarget, Reason> {
    let name = name.and_then(IstioName::parse).ok_or(Reason::UnknownSni)?;
    if !offers_istio {
        return Err(Reason::NoIstioAlpn);
    }
    Ok(ListenerTarget { authority: name.target(), granted_by_listener: false })
}

/// Returns the reason for which a target that no service has is rejected.
pub fn reason_if_unknown(target: &Authority) -> Reason {
    match &target.host {
        Host::Name(name) if name.contains('@') => Reason::UnknownSni,
        _ => Reason::UnknownService,
    }
}

impl Routes {
    fn new(routes: &[config::SniRoute]) -> Self {
        let mut table = Self::default();
        for route in routes {
            for pattern in &route.sni {
                let route = (pattern.clone(), route.target());
                match pattern {
                    SniPattern::Exact(name) => drop(table.exact.insert(name.clone(), route)),
                    SniPattern::Wildcard(name) => drop(table.below.insert(name.clone(), route)),
                    SniPattern::Any => table.any = Some(route),
                }
            }
        }
        table
    }

    /// Returns the exact name first, then the wildcard with the most labels, then the route for
    /// any name or none.
    fn longest_match(&self, name: Option<&str>) -> Option<&Routed> {
        let by_name = name.and_then(|name| {
            let above = || {
                let mut rest = name;
                std::iter::from_fn(move || {
                    rest = rest.split_once('.')?.1;
                    Some(rest)
                })
            };
            self.exact.get(name).or_else(|| above().find_map(|name| self.below.get(name)))
        });
        by_name.or(self.any.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(sni: &[&str], to: &str) -> config::SniRoute {
        let pattern = |text: &&str| SniPattern::parse(text).expect("a pattern");
        config::SniRoute {
            sni: sni.iter().map(pattern).collect(),
            to: config::HostPort::parse(to).expect("a target"),
            line: Line::default(),
        }
    }

    fn listener(protocol: ListenerProtocol) -> ListenerRules {
        ListenerRules::new(&config::Listener {
            name: "one".to_owned(),
            bind: ([127, 0, 0, 1], 0).into(),
            line: Line::default(),
            sources: Vec::new(),
            balancers: Vec::new(),
            protocol,
        })
    }

    #[test]
    fn other_rules_grant_an_open_tunnel_only_what_its_name_leads_to() {
        let to = |text| Authority::parse(text).expect("an authority");
        let routes = vec![route(&["a.example"], "a:1"), route(&["*"], "any:1")];
        let routes = listener(ListenerProtocol::Tls(TlsRouting::Routes { routes }));
        let named = Some("a.example");
        assert_eq!(routes.still_grants(named, &to("a:1"), true), Ok(true));
        assert_eq!(routes.still_grants(None, &to("any:1"), true), Ok(true));
        let moved = routes.still_grants(named, &to("any:1"), true);
        assert_eq!(moved, Err(Reason::UnknownSni));
        let routing = TlsRouting::Istio { routing: "istio" };
        let istio = listener(ListenerProtocol::Tls(routing));
        let named = Some("outbound_.80_._.echo.app");
        let requested = to("echo.app:80");
        assert_eq!(istio.still_grants(named, &requested, false), Ok(false));
        let by_route = istio.still_grants(named, &requested, true);
        assert_eq!(by_route, Err(Reason::NoIstioAlpn));
        assert!(istio.still_grants(None, &requested, false).is_err());
    }

    #[test]
    fn gateways_of_a_binding_keep_their_states_until_its_service_changes() {
        use crate::snapshot::builder::{Change, build};
        use crate::snapshot::tests::hosts;
        use crate::snapshot::{Network, NetworkTable, Snapshot};

        let binding = |service: &str, connections| {
            let text = format!(
                "gateway: {{cluster: east}}
identity: {{kind: spiffe, socket: 'unix:///dev/null'}}
trust: {{domains: [{{name: west.local, cluster: west}}]}}
listeners: [{{name: a, bind: '127.0.0.1:0'}}]
discovery: {{kind: file, path: /dev/null}}
bindings: [{{cluster: west, service: '{service}', listen: '127.0.0.1:80', connections: \
                 {connections}}}]"
            );
            let (config, findings) = config::Config::parse("c".as_ref(), &text);
            config::Listener::from(&config.unwrap_or_else(|| panic!("{findings}")).bindings[0])
        };
        let gateway = Network {
            cluster: Some("west".into()),
            gateways: hosts(&["192.0.2.1:15008"]),
            ..Network::default()
        };
        let change = Change {
            networks: Some(NetworkTable::from_iter([("west".into(), gateway)])),
            ..Change::default()
        };
        let snapshot = build(&Snapshot::default(), change);
        let open = Listener::new(&binding("echo.app:80", 1024), DrainScope::default());
        let state = || {
            let set = open.binding().expect("a binding").endpoints.load(&snapshot);
            Arc::clone(&set.endpoints[0].state)
        };
        let first = state();
        for (service, connections, stays) in [
            ("echo.app:80", 1024, true),
            ("echo.app:80", 2048, true),
            ("other.app:80", 2048, false),
        ] {
            open.replace_rules(&binding(service, connections));
            let kept = Arc::ptr_eq(&first, &state());
            assert_eq!(kept, stays, "{service} {connections}");
        }
    }
}
