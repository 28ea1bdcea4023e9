//! Parser of CONNECT authorities: `host:port`, `1.2.3.4:80` or `[2001:db8::1]:80`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;

/// Authority of a CONNECT request, normalised: the host is in lower case, without a trailing
/// dot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    pub host: Host,
    /// The port, 1 to 65535.
    pub port: u16,
}

#[derive(Clone, Debug, derive_more::Display, PartialEq, Eq, Hash)]
pub enum Host {
    /// A name, resolved in the snapshot and never in DNS.
    Name(Box<str>),
    /// An address; an IPv4-mapped IPv6 address is converted to IPv4.
    Ip(IpAddr),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AuthorityError {
    #[error("longer than {LENGTH_BYTES_MAX} bytes")]
    TooLong,
    #[error("has no port")]
    NoPort,
    #[error("has a port outside 1 to 65535 or not in plain decimal")]
    BadPort,
    #[error("has an empty host")]
    EmptyHost,
    #[error("has a host with a character other than letters, digits, '-', '_' and '.'")]
    BadHost,
    #[error("has brackets around something other than an IPv6 address without zone")]
    BadIpv6,
    /// The host is numeric but not an IPv4 address: `0177.0.0.1` must not mean `127.0.0.1`.
    #[error("has a numeric host that is not an IPv4 address in dotted decimal")]
    BadIpv4,
}

/// Limit of an authority's length (docs/wire-contract.md 1.4). A DNS name has at most 253
/// characters.
pub const LENGTH_BYTES_MAX: usize = 255;

impl Authority {
    /// Parses `text` by the rules of docs/wire-contract.md 1.4.
    pub fn parse(text: &str) -> Result<Self, AuthorityError> {
        if text.len() > LENGTH_BYTES_MAX {
            return Err(AuthorityError::TooLong);
        }
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once("]:").ok_or(AuthorityError::NoPort)?;
                let ip: Ipv6Addr = host.parse().map_err(|_| AuthorityError::BadIpv6)?;
                (Host::Ip(IpAddr::V6(ip).to_canonical()), port)
            }
            None => {
                let (host, port) = text.rsplit_once(':').ok_or(AuthorityError::NoPort)?;
                (Host::parse_unbracketed(host)?, port)
            }
        };
        Ok(Self { host, port: parse_port(port)? })
    }
}

impl Host {
    pub(super) fn parse_unbracketed(text: &str) -> Result<Self, AuthorityError> {
        let name = text.strip_suffix('.').unwrap_or(text);
        if name.is_empty() {
            return Err(AuthorityError::EmptyHost);
        }
        if let Ok(ip) = name.parse::<Ipv4Addr>() {
            return Ok(Self::Ip(IpAddr::V4(ip)));
        }
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if !name.bytes().all(allowed) || name.split('.').any(str::is_empty) {
            return Err(AuthorityError::BadHost);
        }
        // Some resolvers (WHATWG URL, inet_aton) take a last label of digits for an IPv4
        // address. No host of that form is accepted as a name.
        let last = name.rsplit('.').next().unwrap_or(name);
        if last.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(AuthorityError::BadIpv4);
        }
        Ok(Self::Name(name.to_ascii_lowercase().into_boxed_str()))
    }
}

/// Parses a port in plain decimal: no sign, no leading zero, 1 to 65535.
pub fn parse_port(text: &str) -> Result<u16, AuthorityError> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    if !plain {
        return Err(AuthorityError::BadPort);
    }
    text.parse().map_err(|_| AuthorityError::BadPort)
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => write!(f, "{name}:{}", self.port),
            Host::Ip(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_form_is_read_or_refused_as_the_contract_says() {
        use AuthorityError::*;
        let long = format!("{}:80", "a".repeat(253));
        let cases: &[(&str, Result<&str, AuthorityError>)] = &[
            ("echo.app.svc.cluster.local:80", Ok("echo.app.svc.cluster.local:80")),
            ("ECHO.App:8080", Ok("echo.app:8080")),
            ("echo.app.:80", Ok("echo.app:80")),
            ("under_score.app:80", Ok("under_score.app:80")),
            ("10.0.0.1:80", Ok("10.0.0.1:80")),
            ("[2001:db8::1]:80", Ok("[2001:db8::1]:80")),
            ("[2001:DB8:0::1]:80", Ok("[2001:db8::1]:80")),
            ("[::ffff:10.0.0.1]:80", Ok("10.0.0.1:80")),
            ("echo:65535", Ok("echo:65535")),
            ("echo", Err(NoPort)),
            ("echo:", Err(BadPort)),
            ("echo:0", Err(BadPort)),
            ("echo:65536", Err(BadPort)),
            ("echo:+80", Err(BadPort)),
            ("echo:-80", Err(BadPort)),
            ("echo:080", Err(BadPort)),
            ("echo:80 ", Err(BadPort)),
            (":80", Err(EmptyHost)),
            (".:80", Err(EmptyHost)),
            ("echo..:80", Err(BadHost)),
            ("a..b:80", Err(BadHost)),
            (".a:80", Err(BadHost)),
            ("user@echo:80", Err(BadHost)),
            ("user:pass@echo:80", Err(BadHost)),
            ("echo:80:90", Err(BadHost)),
            ("ec%68o:80", Err(BadHost)),
            ("écho:80", Err(BadHost)),
            ("fe80::1:80", Err(BadHost)),
            ("[fe80::1%25eth0]:80", Err(BadIpv6)),
            ("[fe80::1%eth0]:80", Err(BadIpv6)),
            ("[10.0.0.1]:80", Err(BadIpv6)),
            ("[]:80", Err(BadIpv6)),
            ("[::1]", Err(NoPort)),
            ("0177.0.0.1:80", Err(BadIpv4)),
            ("127.1:80", Err(BadIpv4)),
            ("2130706433:80", Err(BadIpv4)),
            ("256.0.0.1:80", Err(BadIpv4)),
            ("0x7f.1:80", Err(BadIpv4)),
            ("", Err(NoPort)),
            (&long, Err(TooLong)),
        ];
        for (text, want) in cases {
            let got = Authority::parse(text).map(|authority| authority.to_string());
            assert_eq!(got.as_deref().map_err(|error| *error), *want, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_reads_the_same_when_printed(text in "\\PC{0,300}") {
            if let Ok(authority) = Authority::parse(&text) {
                prop_assert_eq!(Authority::parse(&authority.to_string()), Ok(authority));
            }
        }

        #[test]
        fn every_plain_name_and_port_is_accepted(
            name in "[a-z][a-z0-9-]{0,20}(\\.[a-z][a-z0-9-]{0,20}){0,4}", port in 1u16..,
        ) {
            let text = format!("{name}:{port}");
            prop_assert_eq!(Authority::parse(&text).map(|a| a.to_string()), Ok(text));
        }
    }
}
