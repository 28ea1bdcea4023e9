//! Header list of a request: its rules in RFC 9113, and what the gateway needs of it.

use http::uri;

use crate::reason::Reason;
use crate::wire::{Authority, VIA_HEADER, baggage};

use super::hpack::{Decoder, HpackError};
use super::tunnel::{Forwarded, Origin, Target};

/// Limit of a decoded header list in bytes, SETTINGS_MAX_HEADER_LIST_SIZE. Istio's own headers
/// take under 1 KiB.
pub const HEADER_LIST_BYTES_MAX: usize = 16 * 1024;
/// Size of a field in excess of its octets (RFC 9113 section 6.5.2).
const FIELD_OVERHEAD_BYTES: usize = 32;
/// Limit of fields in a header list besides pseudo-header fields: HPACK encodes a field in one
/// byte.
const HEADER_FIELDS_MAX: usize = 64;
/// Header by which Istio's waypoints and gateways identify themselves. It is trusted only from the
/// waypoints of the requested service and from `trust.waypoints`.
const ISTIO_SOURCE_HEADER: &[u8] = b"x-istio-source";
/// Header by which Istio's clients describe the source. It is a hint: no decision depends on it.
const BAGGAGE_HEADER: &[u8] = b"baggage";
/// Headers of gateways, and of traces, which the next gateway gets.
const VIA_HEADER_NAME: &[u8] = VIA_HEADER.as_bytes();
const STRAIT_SOURCE_HEADER: &[u8] = b"x-strait-source";
const TRACE_HEADER: &[u8] = b"traceparent";

/// Header list of a request, as far as the gateway needs it.
#[derive(Debug)]
pub struct Request {
    /// Authority as received, for the log.
    pub authority: Box<str>,
    pub target: Result<Target, Reason>,
    /// Cluster of the source as claimed in `baggage`.
    pub source_cluster: Option<Box<[u8]>>,
}

impl Request {
    /// Returns the first peer as sent, which is trusted only from a gateway.
    pub fn first_peer(&self) -> Option<&[u8]> {
        let forwarded = self.target.as_ref().ok()?.forwarded()?;
        forwarded.source.as_deref()
    }
}

/// A header list that is no request: a stream error of type PROTOCOL_ERROR (RFC 9113
/// section 8.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Decodes the header block of a request. A list of more than [`HEADER_LIST_BYTES_MAX`] is a
/// request that is rejected with status 431 (RFC 9113 section 10.5.1).
///
/// `content-length` has to be a number, without contradiction. Its value is not compared with
/// DATA: a CONNECT has no content (RFC 9110 section 9.3.6), and other methods are rejected.
///
/// # Errors
/// The outer error concerns the connection, the inner one the stream.
pub fn decode(
    decoder: &mut Decoder,
    block: &[u8],
) -> Result<Result<Request, Malformed>, HpackError> {
    let mut list = HeaderList::default();
    decoder.decode(block, &mut |name, value| list.push(name, value))?;
    Ok(list.request())
}

/// Fields received so far. Fields after an error or the limit are ignored, which bounds the work.
#[derive(Default)]
struct HeaderList {
    is_malformed: bool,
    bytes: usize,
    /// Number of fields besides pseudo-header fields.
    fields: usize,
    /// Pseudo-header fields may no longer occur.
    fields_began: bool,
    is_connect: Option<bool>,
    authority: Option<Box<[u8]>>,
    has_scheme: bool,
    has_path: bool,
    content_length: Option<u64>,
    /// Origin of the only [`ISTIO_SOURCE_HEADER`]. Two values count as none.
    origin: Option<Origin>,
    source_cluster: Option<Box<[u8]>>,
    forwarded: Option<Box<Forwarded>>,
}

impl HeaderList {
    fn push(&mut self, name: &[u8], value: &[u8]) {
        if self.is_malformed || self.is_too_large() {
            return;
        }
        self.bytes += name.len() + value.len() + FIELD_OVERHEAD_BYTES;
        let is_pseudo = name.first() == Some(&b':');
        self.fields += usize::from(!is_pseudo);
        if self.is_too_large() {
            return;
        }
        let accepted = is_value(value).then_some(()).and_then(|()| {
            if is_pseudo { self.push_pseudo(name, value) } else { self.push_field(name, value) }
        });
        self.is_malformed = accepted.is_none();
    }

    const fn is_too_large(&self) -> bool {
        self.bytes > HEADER_LIST_BYTES_MAX || self.fields > HEADER_FIELDS_MAX
    }

    /// Adds a pseudo-header field (RFC 9113 section 8.3). Returns none if it is malformed.
    fn push_pseudo(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        let is_first = match name {
            b":method" => {
                is_token(value).then_some(())?;
                self.is_connect.replace(value == b"CONNECT").is_none()
            }
            b":authority" => self.authority.replace(value.into()).is_none(),
            b":scheme" => {
                uri::Scheme::try_from(value).ok()?;
                !std::mem::replace(&mut self.has_scheme, true)
            }
            b":path" if !value.is_empty() => {
                uri::PathAndQuery::try_from(value).ok()?;
                !std::mem::replace(&mut self.has_path, true)
            }
            // This includes `:protocol`, as SETTINGS_ENABLE_CONNECT_PROTOCOL is not advertised
            // (RFC 8441 section 3).
            _ => return None,
        };
        (is_first && !self.fields_began).then_some(())
    }

    /// Adds another field (RFC 9113 section 8.2). Returns none if it is malformed.
    fn push_field(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        self.fields_began = true;
        match name {
            // RFC 9113 section 8.2.2.
            b"connection" | b"proxy-connection" | b"keep-alive" | b"transfer-encoding"
            | b"upgrade" => return None,
            b"te" => return (value == b"trailers").then_some(()),
            b"content-length" => {
                let length = parse_length(value)?;
                let before = self.content_length.replace(length);
                return before.is_none_or(|before| before == length).then_some(());
            }
            ISTIO_SOURCE_HEADER => {
                self.origin = Some(match (self.origin, value) {
                    (None, b"waypoint") => Origin::Waypoint,
                    (None, b"gateway") => Origin::Gateway,
                    _ => Origin::Workload,
                });
            }
            BAGGAGE_HEADER => {
                if self.source_cluster.is_none() {
                    self.source_cluster = baggage::source_cluster([value]).map(Into::into);
                }
                append(&mut self.forwarded().baggage, value);
            }
            VIA_HEADER_NAME => append(&mut self.forwarded().via, value),
            STRAIT_SOURCE_HEADER => append(&mut self.forwarded().source, value),
            TRACE_HEADER => append(&mut self.forwarded().traceparent, value),
            _ => {
                let is_lower_case = !name.iter().any(u8::is_ascii_uppercase);
                return (is_token(name) && is_lower_case).then_some(());
            }
        }
        Some(())
    }

    fn forwarded(&mut self) -> &mut Forwarded {
        self.forwarded.get_or_insert_default()
    }

    fn request(self) -> Result<Request, Malformed> {
        if self.is_malformed {
            return Err(Malformed);
        }
        if self.is_too_large() {
            let authority = self.authority.as_deref().unwrap_or_default();
            return Ok(Request {
                authority: String::from_utf8_lossy(authority).into(),
                target: Err(Reason::TooManyFields),
                source_cluster: self.source_cluster,
            });
        }
        let is_connect = self.is_connect.ok_or(Malformed)?;
        let is_complete = if is_connect {
            // RFC 9113 section 8.5.
            self.authority.is_some() && !self.has_scheme && !self.has_path
        } else {
            // RFC 9113 section 8.3.1.
            self.has_scheme && self.has_path
        };
        if !is_complete {
            return Err(Malformed);
        }
        let has_authority = self.authority.is_some();
        let octets = self.authority.unwrap_or_default().into_vec();
        let authority = String::from_utf8(octets).map_err(|_| Malformed)?;
        let parsed = Authority::parse(&authority);
        // An authority that the contract accepts satisfies RFC 3986 section 3.2, too.
        if has_authority && parsed.is_err() && uri::Authority::try_from(&*authority).is_err() {
            return Err(Malformed);
        }
        let target = if !is_connect {
            Err(Reason::NotConnect)
        } else {
            parsed
                .map(|authority| Target {
                    authority,
                    origin: self.origin.unwrap_or(Origin::Workload),
                    forwarded: self.forwarded,
                })
                .map_err(|_| Reason::BadAuthority)
        };
        Ok(Request { authority: authority.into(), target, source_cluster: self.source_cluster })
    }
}

/// Appends a line of a field to those before it (RFC 9110 section 5.3). Only the line is copied:
/// the price of a request covers no copy of all lines before each of them.
fn append(lines: &mut Option<Vec<u8>>, value: &[u8]) {
    match lines {
        None => *lines = Some(value.into()),
        Some(lines) => {
            lines.push(b',');
            lines.extend_from_slice(value);
        }
    }
}

/// Returns true if a value has only octets of a field value (RFC 9110 section 5.5), and no
/// whitespace at its ends (RFC 9113 section 8.2.1).
fn is_value(value: &[u8]) -> bool {
    let is_octet = |octet: &u8| *octet == b'\t' || (*octet >= b' ' && *octet != 0x7f);
    let is_space = |octet: Option<&u8>| octet.is_some_and(|octet| matches!(octet, b' ' | b'\t'));
    value.iter().all(is_octet) && !is_space(value.first()) && !is_space(value.last())
}

/// Returns true if `text` is a token (RFC 9110 section 5.6.2).
fn is_token(text: &[u8]) -> bool {
    let is_octet = |octet: &u8| octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(octet);
    !text.is_empty() && text.iter().all(is_octet)
}

/// Parses the value of `content-length`, which has digits only (RFC 9110 section 8.6).
fn parse_length(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    let is_plain = text.bytes().all(|octet| octet.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Field<'a> = (&'a [u8], &'a [u8]);

    const METHOD: Field<'_> = (b":method", b"CONNECT");
    const AUTHORITY: Field<'_> = (b":authority", b"echo.app:80");
    const GET: [Field<'_>; 3] = [(b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/")];

    /// Returns a header block of literals without indexing.
    fn block(fields: &[Field<'_>]) -> Vec<u8> {
        let mut block = Vec::new();
        for (name, value) in fields {
            block.push(0);
            for text in [name, value] {
                let length = text.len();
                if length < 127 {
                    block.push(u8::try_from(length).unwrap());
                } else {
                    let rest = length - 127;
                    let low = u8::try_from(rest % 128).unwrap();
                    block.extend([127, 0x80 | low, u8::try_from(rest / 128).unwrap()]);
                }
                block.extend(*text);
            }
        }
        block
    }

    fn decode(fields: &[Field<'_>]) -> Result<Request, Malformed> {
        super::decode(&mut Decoder::default(), &block(fields)).unwrap()
    }

    fn connect_with(fields: &[Field<'_>]) -> Result<Request, Malformed> {
        decode(&[&[METHOD, AUTHORITY], fields].concat())
    }

    fn rejection(request: Result<Request, Malformed>) -> Result<Option<Reason>, Malformed> {
        request.map(|request| request.target.err())
    }

    #[test]
    fn a_connect_has_a_target_and_the_fields_that_the_gateway_needs() {
        let baggage = b"k8s.namespace.name=shop,k8s.cluster.name=west";
        let request = connect_with(&[
            (b"forwarded", b"for=\"10.0.0.1:80\""),
            (b"baggage", b"service.name=a"),
            (b"baggage", baggage),
            (b"baggage", b"k8s.cluster.name=east"),
            (b"x-istio-source", b"waypoint"),
            (b"te", b"trailers"),
        ])
        .unwrap();
        assert_eq!(&*request.authority, "echo.app:80");
        assert_eq!(request.source_cluster.as_deref(), Some(&b"west"[..]));
        let Target { authority, origin, .. } = request.target.unwrap();
        assert_eq!(authority.to_string(), "echo.app:80");
        assert_eq!(origin, Origin::Waypoint);
        let portless = decode(&[METHOD, (b":authority", b"echo.app")]).unwrap();
        assert_eq!(&*portless.authority, "echo.app", "as the access log shows it");
    }

    #[test]
    fn only_one_known_value_is_the_origin_of_a_tunnel() {
        for (values, want) in [
            (&[][..], Origin::Workload),
            (&["waypoint"], Origin::Waypoint),
            (&["gateway"], Origin::Gateway),
            (&["sidecar"], Origin::Workload),
            (&["Waypoint"], Origin::Workload),
            (&["waypoint,gateway"], Origin::Workload),
            (&["waypoint", "waypoint"], Origin::Workload),
            (&["waypoint", "waypoint", "waypoint"], Origin::Workload),
            (&["sidecar", "waypoint"], Origin::Workload),
        ] {
            let field = |value: &&'static str| (ISTIO_SOURCE_HEADER, value.as_bytes());
            let fields: Vec<Field<'_>> = values.iter().map(field).collect();
            let target = connect_with(&fields).unwrap().target.unwrap();
            assert_eq!(target.origin, want, "{values:?}");
        }
    }

    #[test]
    fn a_field_has_only_valid_octets() {
        for octet in 0..=255_u8 {
            let is_token = octet.is_ascii_digit()
                || octet.is_ascii_lowercase()
                || b"!#$%&'*+-.^_`|~".contains(&octet);
            let in_name = connect_with(&[(&[b'a', octet], b"b")]);
            assert_eq!(in_name.is_ok(), is_token, "{octet} in a name");
            let first = connect_with(&[(&[octet], b"b")]);
            assert_eq!(first.is_ok(), is_token, "{octet} as a name");
            let is_text = octet > b' ' && octet != 0x7f;
            let is_inner = is_text || matches!(octet, b' ' | b'\t');
            let inner = connect_with(&[(b"a", &[b'b', octet, b'c'])]);
            assert_eq!(inner.is_ok(), is_inner, "{octet} in a value");
            for ends in [[b'b', octet], [octet, b'b']] {
                let ends = connect_with(&[(b"a", &ends)]);
                assert_eq!(ends.is_ok(), is_text, "{octet} at an end of a value");
            }
        }
        assert!(connect_with(&[(b"a", b"")]).is_ok());
        assert!(connect_with(&[(b"", b"b")]).is_err());
    }

    #[test]
    fn a_header_list_is_bounded_in_fields_and_bytes() {
        let field: Field<'_> = (b"a", b"b");
        assert!(connect_with(&[field; 64]).unwrap().target.is_ok());
        let many = Ok(Some(Reason::TooManyFields));
        assert_eq!(rejection(connect_with(&[field; 65])), many);
        assert_eq!(rejection(decode(&[&GET[..], &[field; 65]].concat())), many);
        // `:method: CONNECT`, `:authority: echo.app:80` and the field take 32 bytes more each.
        let rest = HEADER_LIST_BYTES_MAX - (7 + 7 + 32) - (10 + 11 + 32) - (1 + 32);
        let value = vec![b'x'; rest + 1];
        assert!(connect_with(&[(b"a", &value[1..])]).is_ok());
        let large = connect_with(&[(b"a", &value), (b"A", b"ignored")]);
        assert_eq!(rejection(large), many);
        // One octet for each field: 46 bytes of the list for each `:method: GET`.
        let references = [&block(&[METHOD, AUTHORITY])[..], &[0x90; 20_000]].concat();
        let large = super::decode(&mut Decoder::default(), &references).unwrap();
        assert_eq!(rejection(large), many);
    }
}
