//! Server names of ClientHello messages, and the patterns that match them.

use derive_more::Display;

use super::authority::{Authority, AuthorityError, Host, LENGTH_BYTES_MAX, parse_port};
use crate::labels::labelled;

labelled! {
    /// Routing key of tunnels on an HBONE listener.
    ///
    /// Variants are ordered by strictness: of several settings for one tunnel, the greatest
    /// applies.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    pub enum RouteBy {
        /// The authority of the CONNECT request.
        #[default]
        Authority = "authority",
        /// The server name (SNI) of the TLS connection inside the tunnel.
        Sni = "sni",
        /// The authority; the server name of the TLS connection inside the tunnel must match it.
        Strict = "strict",
    }
}

/// Returns the service that a [`normalise`] name addresses inside a tunnel to `port`. A name of
/// Istio's form has its own port; any other name is taken with `port`.
pub fn authority_of(name: &str, port: u16) -> Authority {
    match IstioName::parse(name) {
        Some(istio) => istio.target(),
        None => Authority { host: Host::Name(name.into()), port },
    }
}

/// Normalises a name by the rules for the host of an authority: lower case, no trailing dot.
/// Returns `None` for an invalid name or an address (RFC 6066 section 3 allows no addresses).
pub fn normalise(name: &str) -> Option<Box<str>> {
    if name.len() > LENGTH_BYTES_MAX {
        return None;
    }
    match Host::parse_unbracketed(name) {
        Ok(Host::Name(name)) => Some(name),
        Ok(Host::Ip(_)) | Err(_) => None,
    }
}

/// Server name in the form that Istio's sidecars send to a gateway (docs/wire-contract.md 1.9):
/// `outbound_.PORT_.SUBSET_.HOST`.
#[derive(Clone, Debug, Display, PartialEq, Eq)]
#[display("outbound_.{}_.{subset}_.{}", authority.port, authority.host)]
pub struct IstioName {
    pub authority: Authority,
    /// Subset of the endpoints; empty for all endpoints.
    pub subset: Box<str>,
}

impl IstioName {
    /// Parses a [`normalise`] name. Returns `None` for any other form.
    pub fn parse(name: &str) -> Option<Self> {
        let (port, rest) = name.strip_prefix("outbound_.")?.split_once("_.")?;
        let (subset, host) = rest.split_once("_.")?;
        Some(Self {
            authority: Authority {
                host: Host::Name(normalise(host)?),
                port: parse_port(port).ok()?,
            },
            subset: subset.into(),
        })
    }

    /// Returns the authority of the service, or `HOST@SUBSET:PORT` for a subset. No CONNECT can
    /// request the latter, because `@` is not valid in an authority.
    pub fn target(self) -> Authority {
        let Self { authority, subset } = self;
        match authority.host {
            Host::Name(name) if !subset.is_empty() => Authority {
                host: Host::Name(format!("{name}@{subset}").into()),
                port: authority.port,
            },
            _ => authority,
        }
    }
}

/// Pattern of the server names of a route.
#[derive(Clone, Debug, Display, PartialEq, Eq, Hash)]
pub enum SniPattern {
    /// Exactly this name.
    Exact(Box<str>),
    /// All names below this one, at any depth, as in Envoy and Istio gateways: `*.example.com`.
    /// The name itself does not match.
    #[display("*.{_0}")]
    Wildcard(Box<str>),
    /// Every name, and a ClientHello without a name: `*`.
    #[display("*")]
    Any,
}

impl SniPattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// The name in the pattern is invalid.
    pub fn parse(text: &str) -> Result<Self, AuthorityError> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let (is_wildcard, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text),
        };
        if name.len() > LENGTH_BYTES_MAX {
            return Err(AuthorityError::TooLong);
        }
        match Host::parse_unbracketed(name)? {
            Host::Name(name) if is_wildcard => Ok(Self::Wildcard(name)),
            Host::Name(name) => Ok(Self::Exact(name)),
            Host::Ip(_) => Err(AuthorityError::BadHost),
        }
    }

    /// Returns whether a [`normalise`] name matches.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(own) => **own == *name,
            Self::Wildcard(own) => {
                let below = name.strip_suffix(&**own);
                below.is_some_and(|below| below.len() > 1 && below.ends_with('.'))
            }
            Self::Any => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn istios_names_are_read_and_no_others() {
        let long = format!("outbound_.80_._.{}", "a.".repeat(130));
        let cases = [
            (
                "outbound_.80_._.echo.app.svc.cluster.local",
                Some(("echo.app.svc.cluster.local:80", "")),
            ),
            ("outbound_.8080_.v1_.echo.app", Some(("echo.app:8080", "v1"))),
            ("outbound_.80_._.a_.b", Some(("a_.b:80", ""))),
            ("outbound_.80_.v1_.a_.b", Some(("a_.b:80", "v1"))),
            ("outbound_.80_._.10.0.0.1", None),
            ("outbound_.080_._.echo.app", None),
            ("outbound_.0_._.echo.app", None),
            ("outbound_.65536_._.echo.app", None),
            ("outbound_._._.echo.app", None),
            ("outbound_.80_.echo.app", None),
            ("outbound_.80_._.", None),
            ("outbound_.80_._..echo", None),
            ("outbound.80._.echo.app", None),
            ("inbound_.80_._.echo.app", None),
            ("echo.app", None),
            ("", None),
            (&long, None),
        ];
        for (name, want) in cases {
            let got = IstioName::parse(name).map(|name| (name.authority.to_string(), name.subset));
            let got = got.as_ref().map(|(host, subset)| (&**host, &**subset));
            assert_eq!(got, want, "{name:?}");
        }
    }

    #[test]
    fn a_name_inside_a_tunnel_has_its_port_or_the_tunnels() {
        let cases = [
            ("echo.app", "echo.app:443"),
            ("outbound_.80_._.echo.app", "echo.app:80"),
            ("outbound_.80_.v1_.echo.app", "echo.app@v1:80"),
            ("outbound_.0_._.echo.app", "outbound_.0_._.echo.app:443"),
        ];
        for (name, want) in cases {
            assert_eq!(authority_of(name, 443).to_string(), want, "{name}");
        }
        assert!(Authority::parse("echo.app@v1:80").is_err());
    }

    #[test]
    fn names_are_compared_in_lower_case_and_without_their_last_dot() {
        let cases = [
            ("Echo.App", Some("echo.app")),
            ("echo.app.", Some("echo.app")),
            ("a_b.c", Some("a_b.c")),
            ("echo.app..", None),
            ("10.0.0.1", None),
            ("::1", None),
            ("*.app", None),
            ("e\0cho", None),
            ("écho", None),
            ("", None),
            (".", None),
        ];
        for (name, want) in cases {
            assert_eq!(normalise(name).as_deref(), want, "{name:?}");
        }
        assert!(normalise(&"a.".repeat(128)).is_none());
    }

    #[test]
    fn a_wildcard_matches_whole_labels_below_its_name() {
        let matches = |pattern: &str, name: &str| {
            let pattern = SniPattern::parse(pattern).expect("a pattern");
            pattern.matches(name)
        };
        for (pattern, name, want) in [
            ("*", "a", true),
            ("a.b", "a.b", true),
            ("a.b", "c.a.b", false),
            ("*.a.b", "c.a.b", true),
            ("*.a.b", "d.c.a.b", true),
            ("*.a.b", "a.b", false),
            ("*.a.b", ".a.b", false),
            ("*.a.b", "ca.b", false),
        ] {
            assert_eq!(matches(pattern, name), want, "{pattern} {name}");
        }
    }

    #[test]
    fn patterns_are_a_name_all_below_one_or_all() {
        let parse = |text| SniPattern::parse(text).map(|pattern| pattern.to_string());
        for (text, want) in [
            ("*", "*"),
            ("*.Example.com.", "*.example.com"),
            ("example.com", "example.com"),
            ("*.com", "*.com"),
        ] {
            assert_eq!(parse(text).as_deref(), Ok(want));
        }
        for text in ["", "*.", "*.*", "a.*.b", "*a.b", "a*", "10.0.0.1", "*.10.0.0.1", "a:80"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_written_as_it_was(
            host in "[a-z][a-z0-9_-]{0,9}(\\.[a-z][a-z0-9-]{0,9}){0,3}",
            subset in "[a-z0-9-]{0,6}", port in 1u16..,
        ) {
            let name = format!("outbound_.{port}_.{subset}_.{host}");
            prop_assert_eq!(IstioName::parse(&name).map(|read| read.to_string()), Some(name));
        }
    }
}
