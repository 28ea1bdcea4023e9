//! Header list of a request: its rules in RFC 9113, and what the gateway needs of it.

use http::uri;

use crate::reason::Reason;
use crate::wire::{Authority, baggage};

use super::hpack::{Decoder, HpackError};
use super::tunnel::{Origin, Target};

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
const SOURCE_HEADER: &[u8] = b"x-istio-source";
/// Header by which Istio's clients describe the source. It is a hint: no decision depends on it.
const BAGGAGE_HEADER: &[u8] = b"baggage";

/// Header list of a request, as far as the gateway needs it.
#[derive(Debug)]
pub struct Request {
    /// Authority as received, for the log.
    pub authority: Box<str>,
    /// Target, or the reason for a rejection.
    pub target: Result<Target, Reason>,
    /// Cluster of the source as claimed in `baggage`.
    pub source_cluster: Option<Box<[u8]>>,
}

/// Reason for which a header list is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// Stream error of type PROTOCOL_ERROR (RFC 9113 section 8.1.1).
    Malformed,
    /// More than [`HEADER_LIST_BYTES_MAX`]: status 431 (RFC 9113 section 10.5.1).
    TooLarge,
}

/// Decodes the header block of a request.
///
/// `content-length` has to be a number, without contradiction. Its value is not compared with
/// DATA: a CONNECT has no content (RFC 9110 section 9.3.6), and other methods are rejected.
///
/// # Errors
/// The outer error concerns the connection, the inner one the stream.
pub fn decode(
    decoder: &mut Decoder,
    block: &[u8],
) -> Result<Result<Request, RequestError>, HpackError> {
    let mut list = HeaderList::default();
    decoder.decode(block, &mut |name, value| list.push(name, value))?;
    Ok(list.request())
}

/// Decodes the header block of a trailer section, whose fields are ignored.
///
/// # Errors
/// As for [`decode`].
pub fn decode_trailers(
    decoder: &mut Decoder,
    block: &[u8],
) -> Result<Result<(), RequestError>, HpackError> {
    // A trailer section has no pseudo-header fields (RFC 9113 section 8.1).
    let mut list = HeaderList {
        fields_began: true,
        ..HeaderList::default()
    };
    decoder.decode(block, &mut |name, value| list.push(name, value))?;
    Ok(list.error.map_or(Ok(()), Err))
}

/// Fields received so far. Fields after an error are ignored, which bounds the work.
#[derive(Default)]
struct HeaderList {
    error: Option<RequestError>,
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
    /// Origin of the only [`SOURCE_HEADER`]. Two values count as none.
    origin: Option<Origin>,
    source_cluster: Option<Box<[u8]>>,
}

impl HeaderList {
    fn push(&mut self, name: &[u8], value: &[u8]) {
        if self.error.is_some() {
            return;
        }
        self.bytes += name.len() + value.len() + FIELD_OVERHEAD_BYTES;
        if self.bytes > HEADER_LIST_BYTES_MAX {
            self.error = Some(RequestError::TooLarge);
            return;
        }
        let accepted = is_value(value).then_some(()).and_then(|()| {
            if name.first() == Some(&b':') {
                self.push_pseudo(name, value)
            } else {
                self.push_field(name, value)
            }
        });
        if accepted.is_none() {
            self.error = Some(RequestError::Malformed);
        }
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
        self.fields += 1;
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
            SOURCE_HEADER => {
                self.origin = Some(match (self.origin, value) {
                    (None, b"waypoint") => Origin::Waypoint,
                    (None, b"gateway") => Origin::Gateway,
                    _ => Origin::Workload,
                });
            }
            BAGGAGE_HEADER if self.source_cluster.is_none() => {
                self.source_cluster = baggage::source_cluster([value]).map(Into::into);
            }
            _ => {
                let is_lower_case = !name.iter().any(u8::is_ascii_uppercase);
                return (is_token(name) && is_lower_case).then_some(());
            }
        }
        Some(())
    }

    fn request(self) -> Result<Request, RequestError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let is_connect = self.is_connect.ok_or(RequestError::Malformed)?;
        let is_complete = if is_connect {
            // RFC 9113 section 8.5.
            self.authority.is_some() && !self.has_scheme && !self.has_path
        } else {
            // RFC 9113 section 8.3.1.
            self.has_scheme && self.has_path
        };
        if !is_complete {
            return Err(RequestError::Malformed);
        }
        let authority = match &self.authority {
            Some(authority) => text_of_authority(authority)?,
            None => Box::default(),
        };
        let target = if self.fields > HEADER_FIELDS_MAX {
            Err(Reason::TooManyFields)
        } else if !is_connect {
            Err(Reason::NotConnect)
        } else {
            match Authority::parse(&authority) {
                Ok(authority) => Ok(Target {
                    authority,
                    origin: self.origin.unwrap_or(Origin::Workload),
                }),
                Err(_) => Err(Reason::BadAuthority),
            }
        };
        Ok(Request {
            authority,
            target,
            source_cluster: self.source_cluster,
        })
    }
}

/// Returns an authority by the syntax of RFC 3986 section 3.2 as text.
fn text_of_authority(octets: &[u8]) -> Result<Box<str>, RequestError> {
    let text = std::str::from_utf8(octets).map_err(|_| RequestError::Malformed)?;
    if uri::Authority::try_from(text).is_err() {
        return Err(RequestError::Malformed);
    }
    Ok(text.into())
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
    let is_octet =
        |octet: &u8| octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(octet);
    !text.is_empty() && text.iter().all(is_octet)
}

/// Parses the value of `content-length`, which has digits only (RFC 9110 section 8.6).
fn parse_length(value: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(value).ok()?;
    let is_plain = text.bytes().all(|octet| octet.is_ascii_digit());
    is_plain.then(|| text.parse().ok()).flatten()
}
