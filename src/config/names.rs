//! Names in the configuration: `host[:port]`, namespaces and service accounts.

use std::fmt;
use std::net::IpAddr;

use serde::{Serialize, Serializer};

use crate::wire::{Authority, AuthorityError, Host};

/// A service or another name of one: `host` or `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// The name in lower case without trailing dot, or an address without brackets.
    pub host: String,
    /// The port; none is every port.
    pub port: Option<u16>,
}

impl HostPort {
    /// Parses by the rules for the authority of a CONNECT, so that a name means the same here and
    /// there, but for the port, which may be absent.
    pub fn parse(text: &str) -> Result<Self, AuthorityError> {
        match Authority::parse(text) {
            Ok(authority) => Ok(Self::new(&authority.host, Some(authority.port))),
            Err(AuthorityError::NoPort) => {
                let authority = Authority::parse(&format!("{text}:1"))?;
                Ok(Self::new(&authority.host, None))
            }
            Err(error) => Err(error),
        }
    }

    fn new(host: &Host, port: Option<u16>) -> Self {
        Self { host: host.to_string(), port }
    }

    /// Returns whether this is an IP address and no name.
    pub fn is_address(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok()
    }

    /// Returns whether an authority could mean both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let ports = match (self.port, other.port) {
            (Some(mine), Some(theirs)) => mine == theirs,
            _ => true,
        };
        self.host == other.host && ports
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?
        } else {
            f.write_str(&self.host)?
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl Serialize for HostPort {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Returns whether this can be a segment of a SPIFFE path, as namespaces and service accounts are.
/// `*` is none: it would match nobody where its author meant everybody.
pub(super) fn is_segment(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !text.is_empty() && text != "." && text != ".." && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_what_it_means_in_an_authority() {
        let cases = [
            ("Echo.App.:80", "echo.app:80"),
            ("echo.app", "echo.app"),
            ("10.0.0.1", "10.0.0.1"),
            ("[2001:DB8::1]", "[2001:db8::1]"),
            ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ];
        for (text, want) in cases {
            assert_eq!(HostPort::parse(text).map(|name| name.to_string()).as_deref(), Ok(want));
        }
        let refused = ["", ":80", "a:0", "a:65536", "a:080", "a:", "*.a:80", "::1", "a b", "a:1:2"];
        for text in refused {
            assert!(HostPort::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_name_without_port_overlaps_every_port() {
        let parse = |text| HostPort::parse(text).unwrap();
        assert!(parse("a").overlaps(&parse("a:80")));
        assert!(parse("a:80").overlaps(&parse("a")));
        assert!(!parse("a:80").overlaps(&parse("a:81")));
        assert!(!parse("a").overlaps(&parse("b")));
    }

    #[test]
    fn a_star_is_no_namespace() {
        assert!(is_segment("shop-1"));
        assert!(!is_segment("*") && !is_segment("a/b") && !is_segment("..") && !is_segment(""));
    }
}
