//! Headers of traces (W3C Trace Context and W3C Baggage) that gateways forward.

/// Header with the position of a tunnel in a trace.
pub const TRACEPARENT: &str = "traceparent";
/// Header with properties of the client.
pub const BAGGAGE: &str = "baggage";

/// Limit of `baggage`, which W3C Baggage section 3.3.2 demands to be forwarded.
const BAGGAGE_BYTES_MAX: usize = 8 * 1024;
/// Limit of `traceparent`. Version 00 has 55 octets, and later ones may append fields.
const TRACEPARENT_BYTES_MAX: usize = 128;

/// Returns whether a header of a trace is forwarded: others could be larger once they are encoded,
/// or be refused by the next gateway. Several lines of `traceparent` are joined by a comma.
pub fn is_forwarded(name: &str, value: &[u8]) -> bool {
    match name {
        TRACEPARENT => is_traceparent(value),
        _ => value.len() <= BAGGAGE_BYTES_MAX && value.iter().all(is_text),
    }
}

const fn is_text(octet: &u8) -> bool {
    matches!(octet, b'\t' | b' '..=b'~')
}

/// Returns whether a value is `VERSION-TRACE_ID-PARENT_ID-FLAGS` (W3C Trace Context section 3.2).
fn is_traceparent(value: &[u8]) -> bool {
    let is_hex = |octet: &u8| matches!(octet, b'0'..=b'9' | b'a'..=b'f');
    let is_set = |id: &[u8]| id.iter().any(|octet| *octet != b'0');
    let mut parts = value.splitn(5, |octet| *octet == b'-');
    let mut part = |length: usize| {
        let part = parts.next().filter(|part| part.len() == length);
        part.filter(|part| part.iter().all(is_hex))
    };
    let (Some(version), Some(trace), Some(parent), Some(_)) =
        (part(2), part(32), part(16), part(2))
    else {
        return false;
    };
    let is_extended = parts.next().is_some();
    let is_known_form = version != b"ff" && !(version == b"00" && is_extended);
    let is_short = value.len() <= TRACEPARENT_BYTES_MAX;
    is_known_form && is_set(trace) && is_set(parent) && is_short && is_one(value)
}

/// Returns whether a value has octets of one line alone.
fn is_one(value: &[u8]) -> bool {
    value.iter().all(|octet| matches!(octet, b'!'..=b'~') && *octet != b',')
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_well_formed_traceparent_is_forwarded_and_no_other() {
        for (value, is_sent) in [
            (TRACE.to_owned(), true),
            (TRACE.replacen("00", "cc", 1), true),
            (format!("{}-later", TRACE.replacen("00", "cc", 1)), true),
            (format!("{TRACE}-later"), false),
            (TRACE.replacen("00", "ff", 1), false),
            (TRACE.to_uppercase(), false),
            (format!("{TRACE},{TRACE}"), false),
            (format!("cc{},{TRACE}", &format!("{TRACE}-later")[2..]), false),
            (format!("cc{}-\u{e9}", &TRACE[2..]), false),
            (format!("cc{}-{}", &TRACE[2..], "x".repeat(100)), false),
            (TRACE.replace("b7ad6b7169203331", "0000000000000000"), false),
            (TRACE.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)), false),
            (TRACE[..54].to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_forwarded(TRACEPARENT, value.as_bytes()), is_sent, "{value}");
        }
    }

    #[test]
    fn baggage_of_8_kib_of_printable_ascii_is_forwarded_and_no_other() {
        let long = "~".repeat(BAGGAGE_BYTES_MAX);
        for (value, is_sent) in [
            ("k8s.cluster.name=west, a = b;\tc", true),
            ("", true),
            (&*long, true),
            (&*format!("{long}~"), false),
            ("a=\u{e9}", false),
            ("a=\u{7f}", false),
        ] {
            assert_eq!(is_forwarded(BAGGAGE, value.as_bytes()), is_sent, "{value:.40}");
        }
    }
}
