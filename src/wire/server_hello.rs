//! Parser of the answer of a TLS server to a ClientHello.

use super::client_hello::{HANDSHAKE, RECORD_HEADER_BYTES, Rest};
use crate::labels::labelled;

/// Content type of an alert record (RFC 8446 section 5.1).
const ALERT: u8 = 21;
/// Message type of a ServerHello, and of a HelloRetryRequest (RFC 8446 section 4).
const SERVER_HELLO: u8 = 2;
/// Extension with the version in use (RFC 8446 section 4.2.1).
const SUPPORTED_VERSIONS: &[u8] = &[0, 43];
const RANDOM_BYTES: usize = 32;
const CIPHER_SUITE_BYTES: usize = 2;
const COMPRESSION_METHOD_BYTES: usize = 1;

labelled! {
    /// Answer of a TLS server to a ClientHello, by its version.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ServerAnswer {
        Tls13 = "1.3",
        Tls12 = "1.2",
        /// An alert: the server refuses the handshake.
        Alert = "alert",
        /// Another version, no TLS, or a ServerHello of which the first read had a part.
        Other = "other",
    }
}

impl ServerAnswer {
    /// Reads the first bytes of a server.
    pub fn read(bytes: &[u8]) -> Self {
        if bytes.first() == Some(&ALERT) {
            return Self::Alert;
        }
        match version(bytes) {
            Some([3, 4]) => Self::Tls13,
            Some([3, 3]) => Self::Tls12,
            _ => Self::Other,
        }
    }
}

/// Returns the version of a whole ServerHello (RFC 8446 section 4.1.3): that of its extension, or
/// without one the legacy version.
fn version(bytes: &[u8]) -> Option<[u8; 2]> {
    let mut record = Rest(bytes);
    let &[kind, ..] = record.take(RECORD_HEADER_BYTES)? else { return None };
    let &[message, first, second, third] = record.take(4)? else { return None };
    (kind == HANDSHAKE && message == SERVER_HELLO).then_some(())?;
    let length = u32::from_be_bytes([0, first, second, third]) as usize;
    let mut rest = Rest(record.take(length)?);
    let legacy = rest.take(2)?.try_into().ok()?;
    rest.take(RANDOM_BYTES)?;
    rest.take_sized(1)?;
    rest.take(CIPHER_SUITE_BYTES + COMPRESSION_METHOD_BYTES)?;
    // TLS 1.2 may omit the extensions.
    let mut extensions = Rest(if rest.0.is_empty() { &[] } else { rest.take_sized(2)? });
    while !extensions.0.is_empty() {
        let (kind, body) = (extensions.take(2)?, extensions.take_sized(2)?);
        if kind == SUPPORTED_VERSIONS {
            return body.try_into().ok();
        }
    }
    Some(legacy)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a ServerHello with extensions, if any, in a record.
    fn record(legacy: [u8; 2], extensions: Option<&[u8]>) -> Vec<u8> {
        let sized = |bytes: &[u8]| {
            let length = u16::try_from(bytes.len()).expect("short").to_be_bytes();
            [&length, bytes].concat()
        };
        let extensions = extensions.map(sized).unwrap_or_default();
        let body = [&legacy[..], &[7; 32], &[0], &[0x13, 1, 0], &extensions].concat();
        [&[22, 3, 3], &sized(&[&[2, 0][..], &sized(&body)].concat())[..]].concat()
    }

    #[test]
    fn the_version_is_that_of_the_extension_or_else_the_legacy_one() {
        let other = [0, 16, 0, 5, 0, 3, 2, b'h', b'2'];
        let selected = [&other[..], &[0, 43, 0, 2, 3, 4]].concat();
        for (legacy, extensions, expected) in [
            ([3, 3], Some(&selected[..]), ServerAnswer::Tls13),
            ([3, 3], Some(&other), ServerAnswer::Tls12),
            ([3, 3], Some(&[]), ServerAnswer::Tls12),
            ([3, 3], None, ServerAnswer::Tls12),
            ([3, 1], None, ServerAnswer::Other),
            ([3, 3], Some(&[0, 43, 0, 1, 3]), ServerAnswer::Other),
            ([3, 3], Some(&[0, 43, 0, 9, 3, 4]), ServerAnswer::Other),
        ] {
            let answer = record(legacy, extensions);
            assert_eq!(ServerAnswer::read(&answer), expected, "{answer:?}");
            // Bytes of the next message are not read as extensions.
            let more = [&answer[..], &[11, 0, 1, 0, 43]].concat();
            assert_eq!(ServerAnswer::read(&more), expected, "{more:?}");
        }
    }

    #[test]
    fn alerts_parts_and_other_protocols_have_no_version() {
        let answer = record([3, 3], None);
        for end in 0..answer.len() {
            assert_eq!(ServerAnswer::read(&answer[..end]), ServerAnswer::Other);
        }
        assert_eq!(ServerAnswer::read(&[21, 3, 3, 0, 2, 2, 40]), ServerAnswer::Alert);
        assert_eq!(ServerAnswer::read(b"HTTP/1.1 400 Bad Request"), ServerAnswer::Other);
    }
}
