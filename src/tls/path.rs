//! The certification path in a received chain: one path, in the order sent, without a search.
//!
//! Names alone determine it, so its length bounds the signature checks that a peer without a valid
//! certificate can cause. webpki would try every path that the names allow.

use std::time::SystemTime;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use crate::reason::HandshakeRefusal;

use super::identity::{not_after, not_before};

/// Limit of the certificates received above the leaf: an intermediate or two, and a bundle of
/// roots.
pub(super) const RECEIVED_MAX: usize = 6;

/// Certificates from a leaf up to the last one below a root.
#[derive(Debug)]
pub(super) struct Path<'a>(Vec<CertificateDer<'a>>);

/// Reason for which a chain has no path.
#[derive(Debug)]
pub(super) struct BrokenPath {
    pub(super) refusal: HandshakeRefusal,
    pub(super) detail: Option<String>,
}

impl BrokenPath {
    fn new(detail: String) -> Self {
        Self { refusal: HandshakeRefusal::UnknownIssuer, detail: Some(detail) }
    }

    fn malformed(_: webpki::Error) -> Self {
        Self { refusal: HandshakeRefusal::BadEncoding, detail: None }
    }
}

impl<'a> Path<'a> {
    /// Returns the path in a chain, with at most `depth` intermediates.
    ///
    /// istio-agent sends the whole bundle of roots behind the intermediates. Self-issued
    /// certificates, and further ones of a name and key, are therefore dropped first. The path ends
    /// below the first certificate that is itself a root. Each of the others has to be the issuer,
    /// by name, of the one before, and no issuer may occur twice.
    ///
    /// # Errors
    /// A certificate is malformed or not the issuer of the one before, or there are too many.
    pub(super) fn new(
        leaf: &'a CertificateDer<'_>,
        received: &'a [CertificateDer<'_>],
        roots: &[TrustAnchor<'_>],
        depth: usize,
    ) -> Result<Self, BrokenPath> {
        if received.len() > RECEIVED_MAX {
            let detail = format!("more than {RECEIVED_MAX} certificates above the leaf");
            return Err(BrokenPath::new(detail));
        }
        let mut path = vec![EndEntityCert::try_from(leaf).map_err(BrokenPath::malformed)?];
        for (index, der) in received.iter().enumerate() {
            let next = EndEntityCert::try_from(der).map_err(BrokenPath::malformed)?;
            let is_self_issued = next.subject() == next.issuer();
            if is_self_issued || path.iter().any(|one| has_name_and_key(one, &next)) {
                continue;
            }
            if roots.iter().any(|root| is_root(root, &next)) {
                break;
            }
            if path.last().is_none_or(|last| last.issuer() != next.subject()) {
                return Err(BrokenPath::new(format!(
                    "certificate {} of the chain is not the issuer of the one before; send the \
                     leaf, then each issuer",
                    index + 2
                )));
            }
            if path.iter().any(|one| one.issuer() == next.issuer()) {
                let detail = "the chain leads back to one of its names".to_owned();
                return Err(BrokenPath::new(detail));
            }
            if path.len() > depth {
                return Err(BrokenPath::new(format!(
                    "the chain has more than {depth} intermediates (`trust.max_verify_depth`)"
                )));
            }
            path.push(next);
        }
        let certificates = path.iter().map(|one| one.der());
        Ok(Self(certificates.collect()))
    }

    /// Returns the leaf, then the intermediates.
    pub(super) fn certificates(&self) -> &[CertificateDer<'a>] {
        &self.0
    }

    /// Returns the last start of the validity of its certificates.
    pub(super) fn not_before(&self) -> SystemTime {
        let starts = self.0.iter().map(not_before).max();
        starts.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Returns the first expiry of its certificates.
    pub(super) fn not_after(&self) -> SystemTime {
        let ends = self.0.iter().map(not_after).min();
        ends.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Verifies the path up to one of the roots, for a usage. Returns the root, and removes the
    /// intermediates above it. Revocation is not checked.
    ///
    /// # Errors
    /// The error of the most specific kind.
    pub(super) fn verify(
        &mut self,
        (roots, usage): (&[TrustAnchor<'_>], KeyUsage),
        provider: &CryptoProvider,
        now: UnixTime,
    ) -> Result<TrustAnchor<'static>, webpki::Error> {
        let (leaf, intermediates) = self.0.split_first().ok_or(webpki::Error::BadDer)?;
        let certificate = EndEntityCert::try_from(leaf)?;
        let algorithms = provider.signature_verification_algorithms.all;
        let verified = certificate.verify_for_usage(
            algorithms,
            roots,
            intermediates,
            now,
            usage,
            None,
            None,
        )?;
        let length = 1 + verified.intermediate_certificates().count();
        let root = verified.anchor().to_owned();
        self.0.truncate(length);
        Ok(root)
    }
}

fn has_name_and_key(one: &EndEntityCert<'_>, other: &EndEntityCert<'_>) -> bool {
    one.subject() == other.subject()
        && one.subject_public_key_info() == other.subject_public_key_info()
}

/// Returns whether a certificate has the name and key of a root. webpki keeps the contents of both
/// in an anchor, without tag and length.
fn is_root(root: &TrustAnchor<'_>, certificate: &EndEntityCert<'_>) -> bool {
    let key = || certificate.subject_public_key_info();
    *root.subject == *certificate.subject() && key().ends_with(&root.subject_public_key_info)
}
