//! First bytes that answer a ClientHello: a TLS alert in the clear, which rejects it, or the answer
//! of `strait load serve --after-hello`.

use derive_more::Display;

/// Length of an alert's record header and body (RFC 8446 sections 5.1 and 6).
pub(super) const ALERT_BYTES: usize = 7;

/// The answer of `strait load serve --after-hello` to a ClientHello: a record with the type of a
/// ServerHello alone. A gateway may treat an endpoint that answers nothing as failed.
pub(super) const HELLO_RESPONSE: [u8; 6] = [22, 3, 3, 0, 1, 2];

/// Alert, by its description code.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
#[display("TLS alert {} ({_0})", name(*_0))]
pub(super) struct Alert(u8);

#[derive(Debug, PartialEq, Eq)]
pub(super) enum FirstBytes {
    Alert(Alert),
    /// [`HELLO_RESPONSE`], and what follows it.
    Answer,
    /// Too few bytes to classify.
    Incomplete,
    Payload,
}

impl FirstBytes {
    pub(super) fn classify(bytes: &[u8]) -> Self {
        if bytes.starts_with(&HELLO_RESPONSE) {
            return Self::Answer;
        }
        if HELLO_RESPONSE.starts_with(bytes) {
            return Self::Incomplete;
        }
        let fits = |(at, byte): (usize, &u8)| match (at, *byte) {
            // Type alert, a legacy version, a length of two, a level.
            (0, 21) | (1, 3) | (2, 0..=4) | (3, 0) | (4, 2) | (5, 1 | 2) => true,
            (at, _) => at >= 6,
        };
        match bytes.get(ALERT_BYTES - 1) {
            _ if !bytes.iter().enumerate().all(fits) => Self::Payload,
            Some(code) => Self::Alert(Alert(*code)),
            None => Self::Incomplete,
        }
    }
}

impl std::error::Error for Alert {}

/// Returns the name of an alert (RFC 8446 section 6, RFC 5246 section 7.2 for older ones).
fn name(code: u8) -> &'static str {
    match code {
        0 => "close_notify",
        10 => "unexpected_message",
        20 => "bad_record_mac",
        22 => "record_overflow",
        40 => "handshake_failure",
        42 => "bad_certificate",
        43 => "unsupported_certificate",
        44 => "certificate_revoked",
        45 => "certificate_expired",
        46 => "certificate_unknown",
        47 => "illegal_parameter",
        48 => "unknown_ca",
        49 => "access_denied",
        50 => "decode_error",
        51 => "decrypt_error",
        70 => "protocol_version",
        71 => "insufficient_security",
        80 => "internal_error",
        86 => "inappropriate_fallback",
        90 => "user_canceled",
        109 => "missing_extension",
        110 => "unsupported_extension",
        112 => "unrecognized_name",
        113 => "bad_certificate_status_response",
        115 => "unknown_psk_identity",
        116 => "certificate_required",
        120 => "no_application_protocol",
        _ => "of an unknown kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alert_is_distinguished_from_its_beginning_and_from_other_bytes() {
        let alert = [21, 3, 3, 0, 2, 2, 112];
        for length in 0..ALERT_BYTES {
            assert_eq!(FirstBytes::classify(&alert[..length]), FirstBytes::Incomplete);
        }
        assert_eq!(FirstBytes::classify(&alert), FirstBytes::Alert(Alert(112)));
        for length in 0..HELLO_RESPONSE.len() {
            assert_eq!(FirstBytes::classify(&HELLO_RESPONSE[..length]), FirstBytes::Incomplete);
        }
        let answered = [&HELLO_RESPONSE[..], &[1, 2, 3]].concat();
        assert_eq!(FirstBytes::classify(&answered), FirstBytes::Answer);
        // Bytes after the alert are ignored.
        let longer = [&alert[..], &[1, 2, 3]].concat();
        assert_eq!(FirstBytes::classify(&longer), FirstBytes::Alert(Alert(112)));
        assert_eq!(Alert(112).to_string(), "TLS alert unrecognized_name (112)");
        for at in 0..ALERT_BYTES - 1 {
            let mut other = alert;
            other[at] = 200;
            assert_eq!(FirstBytes::classify(&other[..=at]), FirstBytes::Payload, "{at}");
        }
    }
}
