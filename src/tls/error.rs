//! Errors of certificates, keys and trust.

use std::io::ErrorKind;
use std::path::PathBuf;

use rustls::pki_types::pem;
use rustls::server::VerifierBuilderError;
use thiserror::Error;

use crate::reason::HandshakeRefusal;
use crate::wire::SpkiHash;

/// Reason for which certificates are unusable.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file is missing, unreadable or not PEM.
    #[error("{file}: cannot be read as PEM: {source}; {}", pem_remedy(.source))]
    Pem {
        file: PathBuf,
        /// Cause of the failure.
        source: pem::Error,
    },
    #[error("{0}: contains no certificate; write the path of a PEM file with one")]
    NoCertificate(PathBuf),
    /// A certificate in an issuer's file is not a CA certificate.
    #[error(
        "{0}: contains a certificate that is not a CA certificate; write the file of the \
         intermediate that signs leaves"
    )]
    NotAnIssuer(PathBuf),
    /// An issuer belongs to two clusters.
    #[error(
        "`trust.clusters`: issuer {issuer} is in both `{one}` and `{other}`; remove it from one \
         of them"
    )]
    SharedIssuer {
        issuer: SpkiHash,
        one: String,
        /// Another cluster.
        other: String,
    },
    /// A root certificate cannot serve as trust anchor.
    #[error("{file}: contains an unusable root: {source}")]
    BadRoot {
        file: PathBuf,
        /// Cause of the failure.
        source: rustls::Error,
    },
    /// The gateway's own certificate would be refused by peers.
    #[error(
        "{file}: not a workload certificate ({refusal}); it needs one URI SAN \
         spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT and must not be a CA"
    )]
    BadLeaf {
        file: PathBuf,
        /// Refusal that a peer with this certificate would get.
        refusal: HandshakeRefusal,
    },
    /// Peers with the gateway's own roots and revocation lists would refuse its certificate.
    #[error("{file}: peers would refuse this certificate ({refusal}): {detail}; {remedy}")]
    Refused {
        file: PathBuf,
        /// Refusal that a peer with this certificate would get.
        refusal: HandshakeRefusal,
        /// Detail about this certificate.
        detail: String,
        remedy: &'static str,
    },
    /// A root is not the certificate of an authority.
    #[error("{file}: the root {subject:?} is not a CA certificate; write the roots of the mesh")]
    NotARoot { file: PathBuf, subject: String },
    /// The key does not match the certificate.
    #[error("the private key does not match the certificate: {0}; use both from one issuance")]
    KeyMismatch(#[source] rustls::Error),
    #[error("{0}: the private key is encrypted; decrypt it, such as by `openssl pkey`")]
    EncryptedKey(PathBuf),
    /// The key has an unsupported type or size.
    #[error(
        "the private key cannot be used: {0}; write an ECDSA key (P-256, P-384, P-521), an Ed25519 \
         key, or an RSA key of at least 2048 bits"
    )]
    UnusableKey(String),
    /// The roots are unusable.
    #[error("roots are unusable: {0}")]
    Verifier(#[source] VerifierBuilderError),
    /// A revocation list is unusable.
    #[error("{file}: cannot be used as a CRL: {why}; write the path of a CRL in PEM or DER")]
    BadCrl {
        file: PathBuf,
        /// Cause of the failure.
        why: String,
    },
    /// The crypto library lacks a required algorithm.
    #[error("the crypto provider cannot be used: {0}")]
    Provider(#[source] rustls::Error),
}

/// Returns the remedy for a file that cannot be read as PEM.
fn pem_remedy(error: &pem::Error) -> &'static str {
    match error {
        pem::Error::Io(error) if error.kind() == ErrorKind::PermissionDenied => {
            "let this user read it, or run the command as the user of the gateway"
        }
        _ => "write the path of a PEM file",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_user_has_another_remedy_than_one_that_is_not_there() {
        for (kind, remedy) in [
            (ErrorKind::PermissionDenied, "let this user read it"),
            (ErrorKind::NotFound, "write the path of a PEM file"),
        ] {
            let source = pem::Error::Io(kind.into());
            let error = TlsError::Pem { file: "own.key".into(), source }.to_string();
            assert!(error.contains(remedy), "{error}");
        }
    }
}
