//! Issuers of leaf certificates: their identification and statistics.
//!
//! The issuer of a leaf is the certificate whose key signed it on the verified path to a root:
//! an intermediate, or the root itself. Other certificates that a peer sends are ignored.

use std::collections::HashMap;
use std::sync::Arc;

use aws_lc_rs::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, TrustAnchor};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::x509::X509Name;

use crate::wire::SpkiHash;

/// Limit of distinct issuers: an authority without a path length constraint can create any
/// number.
const SEEN_MAX: usize = 512;
/// DER tag of a SEQUENCE.
const SEQUENCE: u8 = 0x30;

/// Authority that signed a leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issuer {
    pub spki: SpkiHash,
    /// Subject for display, escaped and of bounded length.
    pub subject: Box<str>,
}

impl Issuer {
    /// Reads an intermediate. Returns `None` if it is malformed.
    pub(super) fn from_certificate(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        Some(Self::new(certificate.public_key().raw, &certificate.subject().to_string()))
    }

    /// Reads a root. webpki keeps only the contents of its subject and its public key, two
    /// SEQUENCEs.
    pub(super) fn from_anchor(anchor: &TrustAnchor<'_>) -> Self {
        let subject = sequence(&anchor.subject);
        let subject = X509Name::from_der(&subject).map(|(_, name)| name.to_string());
        Self::new(&sequence(&anchor.subject_public_key_info), &subject.unwrap_or_default())
    }

    fn new(spki: &[u8], subject: &str) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, spki).as_ref());
        Self { spki: SpkiHash::new(hash), subject: escape_for_display(subject).into() }
    }
}

/// Returns a prefix of an untrusted text, escaped for a single line.
pub(super) fn escape_for_display(text: &str) -> String {
    let whole = text.chars().take(DISPLAY_CHARS_MAX).collect::<String>();
    whole.escape_debug().to_string()
}

/// Limit of a displayed identity, in characters; identities of a mesh are shorter.
pub(super) const DISPLAY_CHARS_MAX: usize = 256;

/// Returns the DER encoding of a SEQUENCE with these contents (X.690 section 8.1.3).
pub(super) fn sequence(contents: &[u8]) -> Vec<u8> {
    let mut der = vec![SEQUENCE];
    match u8::try_from(contents.len()) {
        Ok(short @ ..0x80) => der.push(short),
        _ => {
            let bytes = contents.len().to_be_bytes();
            let length = bytes.iter().skip_while(|byte| **byte == 0);
            // A usize has at most 8 bytes.
            der.push(0x80 | u8::try_from(length.clone().count()).unwrap_or_default());
            der.extend(length);
        }
    }
    der.extend_from_slice(contents);
    der
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuerCounter {
    pub issuer: Arc<Issuer>,
    pub accepted: u64,
    /// Number of handshakes refused because of the issuer.
    pub refused: u64,
}

/// Issuers seen since the start, at most [`SEEN_MAX`].
#[derive(Debug, Default)]
pub(super) struct IssuerCounters(HashMap<SpkiHash, IssuerCounter>);

impl IssuerCounters {
    pub(super) fn accept(&mut self, issuer: &Arc<Issuer>) {
        if let Some(seen) = self.entry(issuer) {
            seen.accepted += 1;
        }
    }

    /// Counts a handshake refused because of its issuer.
    pub(super) fn refuse(&mut self, issuer: &Arc<Issuer>) {
        if let Some(seen) = self.entry(issuer) {
            seen.refused += 1;
        }
    }

    /// Returns the counters of all issuers.
    pub(super) fn all(&self) -> Vec<IssuerCounter> {
        self.0.values().cloned().collect()
    }

    /// Returns the entry of an issuer, or `None` if the issuer is new and the table is full.
    fn entry(&mut self, issuer: &Arc<Issuer>) -> Option<&mut IssuerCounter> {
        if self.0.len() >= SEEN_MAX && !self.0.contains_key(&issuer.spki) {
            return None;
        }
        Some(self.0.entry(issuer.spki).or_insert_with(|| IssuerCounter {
            issuer: Arc::clone(issuer),
            accepted: 0,
            refused: 0,
        }))
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;
    use webpki::anchor_from_trusted_cert;

    use super::*;
    use crate::tools::dev::Authority;

    #[test]
    fn an_anchor_has_the_hash_and_the_subject_of_its_certificate() {
        let root = Authority::new().expect("a root").root_pem();
        let root = CertificateDer::from_pem_slice(root.as_bytes()).expect("a certificate");
        let of_certificate = Issuer::from_certificate(&root).expect("an issuer");
        let anchor = anchor_from_trusted_cert(&root).expect("an anchor");
        assert_eq!(Issuer::from_anchor(&anchor), of_certificate);
        assert!(of_certificate.subject.starts_with("CN=Strait development root"));
    }

    #[test]
    fn a_sequence_has_the_shortest_length_that_der_knows() {
        for (size, head) in [
            (0, &[0x30, 0][..]),
            (0x7f, &[0x30, 0x7f]),
            (0x80, &[0x30, 0x81, 0x80]),
            (0x1234, &[0x30, 0x82, 0x12, 0x34]),
        ] {
            let der = sequence(&vec![7; size]);
            assert_eq!(der.split_at(head.len()).0, head, "{size}");
            assert_eq!(der.len(), head.len() + size);
        }
    }

    #[test]
    fn issuers_beyond_the_bound_are_not_distinguished() {
        let mut seen = IssuerCounters::default();
        let issuer = |number: usize| {
            let spki = SpkiHash::new(std::array::from_fn(|index| match index {
                0 => u8::try_from(number % 256).expect("a byte"),
                1 => u8::try_from(number / 256).expect("a byte"),
                _ => 0,
            }));
            let subject = "CN=x".into();
            Arc::new(Issuer { spki, subject })
        };
        for number in 0..2 * SEEN_MAX {
            seen.accept(&issuer(number));
            seen.refuse(&issuer(0));
        }
        let all = seen.all();
        assert_eq!(all.len(), SEEN_MAX);
        let first = all.iter().find(|one| one.issuer == issuer(0));
        let first = first.expect("the first issuer");
        assert_eq!((first.accepted, first.refused), (1, 2 * SEEN_MAX as u64));
    }
}
