//! Gateways that a tunnel has passed, as the header `x-strait-via` lists them.

use derive_more::Display;

use crate::labels::join;

/// Header with the gateways that a tunnel has passed, in order.
pub const VIA_HEADER: &str = "x-strait-via";
/// Limit of gateways that forward a tunnel to the next one. A path through one network between
/// two others takes two.
pub const HOPS_MAX: usize = 3;

/// Short hash of a gateway's cluster, network and identity. Replicas of a gateway share it.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
#[display("{:016x}", u64::from_be_bytes(*_0))]
pub struct GatewayHash([u8; 8]);

/// Gateways that a tunnel has passed, at most [`HOPS_MAX`].
#[derive(Clone, Debug, Default, Display, PartialEq, Eq)]
#[display("{}", join(_0, ","))]
pub struct Via(Vec<GatewayHash>);

impl GatewayHash {
    pub const fn new(octets: [u8; 8]) -> Self {
        Self(octets)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?.trim_matches([' ', '\t']);
        let is_hash = text.len() == 16 && text.bytes().all(|octet| octet.is_ascii_hexdigit());
        let number = is_hash.then(|| u64::from_str_radix(text, 16).ok()).flatten()?;
        Some(Self(number.to_be_bytes()))
    }
}

impl Via {
    /// Parses the value of the header. Returns `None` if it is malformed or names too many
    /// gateways.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let mut hashes = Vec::new();
        for part in value.split(|octet| *octet == b',') {
            if hashes.len() == HOPS_MAX {
                return None;
            }
            hashes.push(GatewayHash::parse(part)?);
        }
        Some(Self(hashes))
    }

    pub fn contains(&self, gateway: GatewayHash) -> bool {
        self.0.contains(&gateway)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if no further gateway may forward the tunnel.
    pub fn is_full(&self) -> bool {
        self.0.len() >= HOPS_MAX
    }

    /// Returns the list with one more gateway, or `None` at the limit.
    pub fn with(mut self, gateway: GatewayHash) -> Option<Self> {
        (!self.is_full()).then(|| self.0.push(gateway))?;
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(octet: u8) -> GatewayHash {
        GatewayHash::new([octet; 8])
    }

    #[test]
    fn a_list_survives_its_text_and_ends_at_three_gateways() {
        let mut via = Via::default();
        for octet in 1..=3 {
            via = via.with(hash(octet)).expect("room");
            assert_eq!(Via::parse(via.to_string().as_bytes()).as_ref(), Some(&via));
        }
        assert!(via.contains(hash(2)) && !via.contains(hash(4)));
        let text = via.to_string();
        assert_eq!(via.with(hash(4)), None);
        assert_eq!(Via::parse(format!("{text},{}", hash(4)).as_bytes()), None);
        let spaced = text.replace(',', " ,\t");
        assert!(Via::parse(spaced.as_bytes()).is_some());
    }

    #[test]
    fn a_malformed_list_is_none() {
        for text in ["", ",", "00", "0101010101010101,", "+101010101010101", "g101010101010101"] {
            assert_eq!(Via::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Via::parse(&[0xff; 16]), None);
    }
}
