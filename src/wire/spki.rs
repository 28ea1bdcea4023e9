//! Hash of a SubjectPublicKeyInfo, which identifies an issuer of certificates.

use std::fmt;

/// Cluster of peers whose issuer has none in the configuration, and the label of anything without a
/// cluster.
pub const UNKNOWN_CLUSTER: &str = "unknown";

/// SHA-256 digest of a DER-encoded SubjectPublicKeyInfo (RFC 5280 section 4.1.2.7). A
/// certificate that is renewed with the same key keeps the hash.
#[derive(Clone, Copy, derive_more::Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[debug("{self}")]
pub struct SpkiHash([u8; 32]);

impl SpkiHash {
    pub const fn new(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// Parses 64 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let mut digest = [0; 32];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != digest.len() || !rest.is_empty() {
            return None;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        for (byte, [high, low]) in digest.iter_mut().zip(pairs) {
            let value = digit(*high)? * 16 + digit(*low)?;
            *byte = u8::try_from(value).ok()?;
        }
        Some(Self(digest))
    }
}

impl fmt::Display for SpkiHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_64_hexadecimal_digits_and_nothing_else() {
        let text = "0123456789abcdef".repeat(4);
        let parsed = SpkiHash::parse(&text).expect("a hash");
        assert_eq!(parsed.to_string(), text);
        assert_eq!(SpkiHash::parse(&text.to_uppercase()), Some(parsed));
        for bad in ["", &text[1..], &format!("{text}00"), &text.replace('f', "g")] {
            assert_eq!(SpkiHash::parse(bad), None, "{bad}");
        }
        assert_eq!(SpkiHash::parse(&"ä".repeat(32)), None);
    }
}
