//! A listener while it is open: its rules, which change with the configuration, and its drain.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use ipnet::IpNet;

use crate::config::{self, ListenerProtocol, TlsRouting};
use crate::lifecycle::Part;
use crate::reason::Reason;
use crate::wire::sni::{IstioName, RouteBy, SniPattern};
use crate::wire::{Authority, Host};

use super::hello::Hello;

/// A listener, shared by its connections. Its protocol never changes.
#[derive(Debug, Default)]
pub struct Listener {
    rules: ArcSwap<Rules>,
    /// The drain of the listener and of its connections.
    pub stop: Part,
}

/// The rules for the connections of one listener. By default those of an HBONE listener that is
/// open to every address.
#[derive(Debug, Default)]
pub struct Rules {
    sources: Vec<IpNet>,
    routing: Option<Routing>,
    route_by: RouteBy,
}

/// How a TLS listener routes.
#[derive(Debug)]
enum Routing {
    /// By Istio's names.
    Istio,
    /// By routes of its own.
    Routes(Routes),
}

/// Routes by server name. The longest match is found by looking names up from the whole one to its
/// last label, so that a thousand routes cost what one does.
#[derive(Debug, Default)]
struct Routes {
    exact: HashMap<Box<str>, Authority>,
    below: HashMap<Box<str>, Authority>,
    any: Option<Authority>,
}

/// What of a name was found in the table.
#[derive(Clone, Copy, Debug)]
enum Pattern<'a> {
    Exact(&'a str),
    Below(&'a str),
    Any,
}

/// What a hello is routed to.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The service.
    pub authority: Authority,
    /// Whether the listener's own route opens it.
    pub granted: bool,
}

impl Listener {
    /// Returns the listener that the configuration describes.
    pub fn new(listener: &config::Listener, stop: Part) -> Self {
        Self {
            rules: ArcSwap::from_pointee(Rules::new(listener)),
            stop,
        }
    }

    /// Returns the rules in force, for a look-up that ends before the next await.
    pub fn rules(&self) -> Guard<Arc<Rules>> {
        self.rules.load()
    }

    /// Replaces the rules by those of the same protocol in another version of the configuration.
    pub fn revise(&self, listener: &config::Listener) {
        self.rules.store(Arc::new(Rules::new(listener)));
    }

    /// Returns whether its peers speak TLS that is passed on.
    pub fn is_tls(&self) -> bool {
        self.rules().is_tls()
    }
}

impl Rules {
    /// Returns the rules that the configuration describes.
    pub fn new(listener: &config::Listener) -> Self {
        let routing = match &listener.protocol {
            ListenerProtocol::Hbone { .. } => None,
            ListenerProtocol::Tls(TlsRouting::Istio { .. }) => Some(Routing::Istio),
            ListenerProtocol::Tls(TlsRouting::Routes { routes }) => {
                Some(Routing::Routes(Routes::new(routes)))
            }
        };
        let route_by = match &listener.protocol {
            ListenerProtocol::Hbone { route_by } => *route_by,
            ListenerProtocol::Tls(_) => RouteBy::Sni,
        };
        Self {
            sources: listener.sources.clone(),
            routing,
            route_by,
        }
    }

    /// Whether a peer of this address may connect.
    pub fn admits(&self, address: IpAddr) -> bool {
        self.sources.is_empty() || self.sources.iter().any(|net| net.contains(&address))
    }

    /// Whether only peers of some addresses may connect.
    pub fn has_sources(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Whether its peers speak TLS that is passed on.
    pub fn is_tls(&self) -> bool {
        self.routing.is_some()
    }

    /// By what tunnels are routed whose service does not say it.
    pub fn route_by(&self) -> RouteBy {
        self.route_by
    }

    /// What a hello asks for.
    ///
    /// # Errors
    /// [`Reason::UnknownSni`] or [`Reason::NoIstioAlpn`].
    pub fn target(&self, hello: &Hello) -> Result<Wanted, Reason> {
        self.wanted(hello.sni.as_deref(), hello.offers_istio)
    }

    /// Returns whether the listener's own route opens a tunnel now that was opened for this server
    /// name and target, `granted` by a route or not.
    ///
    /// # Errors
    /// The name does not lead to the target any more.
    pub fn still_grants(
        &self,
        name: Option<&str>,
        asked: &Authority,
        granted: bool,
    ) -> Result<bool, Reason> {
        // One that no route granted has offered Istio's protocols.
        let wanted = self.wanted(name, !granted)?;
        match wanted.authority == *asked {
            true => Ok(wanted.granted),
            false => Err(Reason::UnknownSni),
        }
    }

    fn wanted(&self, name: Option<&str>, offers_istio: bool) -> Result<Wanted, Reason> {
        match &self.routing {
            Some(Routing::Istio) => istio(name, offers_istio),
            Some(Routing::Routes(routes)) => Ok(Wanted {
                authority: routes.find(name).ok_or(Reason::UnknownSni)?.1.clone(),
                granted: true,
            }),
            None => Err(Reason::UnknownSni),
        }
    }

    /// The server names of a TLS listener's own routes, for people; none if it routes by Istio's.
    pub fn names(&self) -> Option<Vec<String>> {
        let Some(Routing::Routes(routes)) = &self.routing else {
            return None;
        };
        let exact = routes.exact.keys().map(ToString::to_string);
        let below = routes.below.keys().map(|name| format!("*.{name}"));
        let mut names: Vec<_> = exact.chain(below).collect();
        names.sort_unstable();
        Some(names)
    }

    /// What of a TLS listener's own decides about a server name, for people.
    pub fn matched(&self, name: Option<&str>) -> String {
        match &self.routing {
            Some(Routing::Istio) => "by Istio's form of a server name".to_owned(),
            Some(Routing::Routes(routes)) => match routes.find(name) {
                Some((pattern, _)) => format!("by the listener's route for {pattern}"),
                None => "no route of the listener is for it".to_owned(),
            },
            None => String::new(),
        }
    }
}

/// Subsets are the destination rules' of a client's cluster, which we do not know: to any endpoint
/// would be to the wrong one.
fn istio(name: Option<&str>, offers_istio: bool) -> Result<Wanted, Reason> {
    let name = name.and_then(IstioName::parse);
    let name = name.filter(|name| name.subset.is_empty());
    let name = name.ok_or(Reason::UnknownSni)?;
    if !offers_istio {
        return Err(Reason::NoIstioAlpn);
    }
    Ok(Wanted {
        authority: name.authority,
        granted: false,
    })
}

impl Routes {
    fn new(routes: &[config::SniRoute]) -> Self {
        let mut table = Self::default();
        for route in routes {
            // The configuration was checked: a target without port leads nowhere.
            let to = Authority {
                host: Host::Name(route.to.host.as_str().into()),
                port: route.to.port.unwrap_or_default(),
            };
            for pattern in &route.sni {
                match pattern {
                    SniPattern::Exact(name) => drop(table.exact.insert(name.clone(), to.clone())),
                    SniPattern::Below(name) => drop(table.below.insert(name.clone(), to.clone())),
                    SniPattern::Any => table.any = Some(to.clone()),
                }
            }
        }
        table
    }

    /// The exact name first, then the wildcard with most labels, then any name and none.
    fn find<'a>(&'a self, name: Option<&'a str>) -> Option<(Pattern<'a>, &'a Authority)> {
        let by_name = name.and_then(|name| {
            let above = || {
                let mut rest = name;
                std::iter::from_fn(move || {
                    rest = rest.split_once('.')?.1;
                    Some(rest)
                })
            };
            let exact = self.exact.get(name).map(|to| (Pattern::Exact(name), to));
            let below = |name| Some((Pattern::Below(name), self.below.get(name)?));
            exact.or_else(|| above().find_map(below))
        });
        by_name.or_else(|| Some((Pattern::Any, self.any.as_ref()?)))
    }
}

impl fmt::Display for Pattern<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => write!(f, "{name:?}"),
            Self::Below(name) => write!(f, "\"*.{name}\""),
            Self::Any => f.write_str("\"*\""),
        }
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
            line: config::Line(1),
        }
    }

    fn listener(protocol: ListenerProtocol, sources: &[&str]) -> Rules {
        Rules::new(&config::Listener {
            name: "one".to_owned(),
            bind: ([127, 0, 0, 1], 0).into(),
            line: config::Line(1),
            sources: sources
                .iter()
                .map(|net| net.parse().expect("a net"))
                .collect(),
            protocol,
        })
    }

    fn hello(sni: Option<&str>, offers_istio: bool) -> Hello {
        Hello {
            bytes: Vec::new(),
            sni: sni.map(Into::into),
            offers_istio,
        }
    }

    #[test]
    fn the_longest_match_wins_and_only_a_star_takes_no_name() {
        let routes = |with_any: bool| {
            let mut routes = vec![
                route(&["a.example.com", "b.example.com"], "exact:1"),
                route(&["*.example.com"], "near:1"),
                route(&["*.com"], "far:1"),
            ];
            routes.extend(with_any.then(|| route(&["*"], "any:1")));
            listener(ListenerProtocol::Tls(TlsRouting::Routes { routes }), &[])
        };
        let (with, without) = (routes(true), routes(false));
        let cases = [
            (Some("a.example.com"), "exact:1"),
            (Some("b.example.com"), "exact:1"),
            (Some("c.example.com"), "near:1"),
            (Some("d.a.example.com"), "near:1"),
            (Some("example.com"), "far:1"),
            (Some("x.y.z.com"), "far:1"),
            (Some("com"), "any:1"),
            (Some("aexample.org"), "any:1"),
            (None, "any:1"),
        ];
        for (name, want) in cases {
            let got = |from: &Rules| {
                let wanted = from.target(&hello(name, false));
                wanted.map(|wanted| (wanted.authority.to_string(), wanted.granted))
            };
            assert_eq!(got(&with), Ok((want.to_owned(), true)), "{name:?}");
            let lost = want == "any:1";
            assert_eq!(got(&without).is_err(), lost, "{name:?}");
        }
    }

    #[test]
    fn istios_names_need_istios_protocol_and_grant_nothing() {
        let routing = TlsRouting::Istio { routing: "istio" };
        let istio = listener(ListenerProtocol::Tls(routing), &[]);
        let target = |name, alpn| {
            let wanted = istio.target(&hello(name, alpn));
            wanted.map(|wanted| (wanted.authority.to_string(), wanted.granted))
        };
        let good = Some("outbound_.80_._.echo.app");
        assert_eq!(target(good, true), Ok(("echo.app:80".to_owned(), false)));
        assert_eq!(target(good, false), Err(Reason::NoIstioAlpn));
        let subset = Some("outbound_.80_.v1_.echo.app");
        for name in [None, Some("echo.app"), subset] {
            assert_eq!(target(name, true), Err(Reason::UnknownSni), "{name:?}");
        }
    }

    #[test]
    fn other_rules_grant_an_open_tunnel_only_what_its_name_leads_to() {
        let to = |text| Authority::parse(text).expect("an authority");
        let routes = vec![route(&["a.example"], "a:1"), route(&["*"], "any:1")];
        let routes = listener(ListenerProtocol::Tls(TlsRouting::Routes { routes }), &[]);
        let named = Some("a.example");
        assert_eq!(routes.still_grants(named, &to("a:1"), true), Ok(true));
        assert_eq!(routes.still_grants(None, &to("any:1"), true), Ok(true));
        let moved = routes.still_grants(named, &to("any:1"), true);
        assert_eq!(moved, Err(Reason::UnknownSni));
        let routing = TlsRouting::Istio { routing: "istio" };
        let istio = listener(ListenerProtocol::Tls(routing), &[]);
        let named = Some("outbound_.80_._.echo.app");
        let asked = to("echo.app:80");
        assert_eq!(istio.still_grants(named, &asked, false), Ok(false));
        let by_route = istio.still_grants(named, &asked, true);
        assert_eq!(by_route, Err(Reason::NoIstioAlpn));
        assert!(istio.still_grants(None, &asked, false).is_err());
    }

    #[test]
    fn sources_narrow_who_may_connect() {
        let ip = |text: &str| text.parse().expect("an address");
        let hbone = ListenerProtocol::Hbone {
            route_by: RouteBy::default(),
        };
        let open = listener(hbone.clone(), &[]);
        assert!(open.admits(ip("192.0.2.1")) && open.admits(ip("::1")) && !open.is_tls());
        let narrow = listener(hbone, &["10.0.0.0/8", "2001:db8::/32"]);
        assert!(narrow.admits(ip("10.1.2.3")) && narrow.admits(ip("2001:db8::1")));
        assert!(!narrow.admits(ip("192.0.2.1")) && !narrow.admits(ip("2001:db9::1")));
    }
}
