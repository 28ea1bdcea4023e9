//! Load of a service behind a gateway, as the header `x-strait-load` states it.

use derive_more::Display;

/// Response header with the load of the service that a CONNECT asks for.
pub const LOAD_HEADER: &str = "x-strait-load";
/// Limit of the header's bytes. The value of this version has at most 27.
const BYTES_MAX: usize = 128;

/// Load of a service behind a gateway: a dictionary (RFC 9651) such as `ready=4, free=0.80`.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
#[display("ready={ready}, free={}.{:02}", free_percent / 100, free_percent % 100)]
pub struct ServiceLoad {
    /// Capacity of the ready instances in the gateway's network.
    pub ready: u32,
    /// Free share of the tightest limit that applies to the service, in percent up to 100.
    pub free_percent: u32,
}

impl ServiceLoad {
    /// Parses the value of the header. Returns `None` if it is malformed or lacks a member.
    /// Members of later versions are ignored.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let value = std::str::from_utf8(value).ok();
        let value = value.filter(|value| value.len() <= BYTES_MAX)?;
        let (mut ready, mut free) = (None, None);
        for member in value.split(',') {
            match member.trim_matches([' ', '\t']).split_once('=')? {
                ("ready", count) => ready = Some(parse_integer(count)?),
                ("free", share) => free = Some(parse_percent(share)?),
                _ => {}
            }
        }
        Some(Self { ready: ready?, free_percent: free? })
    }
}

fn parse_integer(text: &str) -> Option<u32> {
    let is_number = text.bytes().all(|octet| octet.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

/// Parses a decimal between 0 and 1, which has up to three digits after the point (RFC 9651 section
/// 3.3.2). The third one is dropped.
fn parse_percent(text: &str) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let thousandths = (1..=3).contains(&fraction.len());
    let thousandths = thousandths.then(|| parse_integer(&format!("{fraction:0<3}")))??;
    let whole = parse_integer(whole).filter(|whole| *whole <= 1)?;
    let percent = 100 * whole + thousandths / 10;
    (1000 * whole + thousandths <= 1000).then_some(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_survives_its_text_and_members_of_later_versions_are_ignored() {
        for (ready, free_percent) in [(0, 0), (4, 80), (4, 7), (u32::MAX, 100)] {
            let load = ServiceLoad { ready, free_percent };
            assert_eq!(ServiceLoad::parse(load.to_string().as_bytes()), Some(load));
        }
        let load = ServiceLoad { ready: 4, free_percent: 50 };
        assert_eq!(load.to_string(), "ready=4, free=0.50");
        for text in ["free=0.5,ready=4", "ready=4 ,\tfree=0.509, later=(1 2)"] {
            assert_eq!(ServiceLoad::parse(text.as_bytes()), Some(load), "{text}");
        }
    }

    #[test]
    fn a_malformed_load_is_none() {
        let long = format!("ready=4, free=0.5, later={}", "a".repeat(BYTES_MAX));
        let malformed = "|ready=4|free=0.5|ready=4, free=|ready=, free=0.5|ready=-1, free=0.5|\
            ready=+1, free=0.5|ready=4294967296, free=0.5|ready=4, free=1.001|ready=4, free=2|\
            ready=4, free=.5|ready=4, free=1.|ready=4, free=1e-3|ready=4, free=0.5000|\
            ready=4, free=NaN|ready=4; free=0.5|ready=4, free=0.5,";
        for text in malformed.split('|').chain([&*long]) {
            assert_eq!(ServiceLoad::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(ServiceLoad::parse(b"ready=4, free=0.5\xff"), None);
    }
}
