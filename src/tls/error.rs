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
    #[error("{file}: cannot be read as PEM: {source}; {}", pem_remedy(.source))]
    Pem { file: PathBuf, source: pem::Error },
    #[error("{0}: contains no certificate; write the path of a PEM file with one")]
    NoCertificate(PathBuf),
    #[error(
        "{0}: contains a certificate that is not a CA certificate; write the file of the \
         intermediate that signs leaves"
    )]
    NotAnIssuer(PathBuf),
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
    #[error("{file}: contains an unusable root: {source}")]
    BadRoot { file: PathBuf, source: rustls::Error },
    #[error(
        "{file}: not a workload certificate ({refusal}); it needs one URI SAN \
         spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT and must not be a CA"
    )]
    BadLeaf {
        file: PathBuf,
        /// Refusal that a peer with this certificate would get.
        refusal: HandshakeRefusal,
    },
    #[error("{file}: peers would refuse this certificate ({refusal}): {detail}; {remedy}")]
    Refused {
        file: PathBuf,
        /// Refusal that a peer with this certificate would get.
        refusal: HandshakeRefusal,
        detail: String,
        remedy: &'static str,
    },
    #[error("{file}: the root {subject:?} is not a CA certificate; write the roots of the mesh")]
    NotARoot { file: PathBuf, subject: String },
    #[error("the private key does not match the certificate: {0}; use both from one issuance")]
    KeyMismatch(#[source] rustls::Error),
    #[error("{0}: the private key is encrypted; decrypt it, such as by `openssl pkey`")]
    EncryptedKey(PathBuf),
    #[error(
        "the private key cannot be used: {0}; write an ECDSA key (P-256, P-384, P-521), an Ed25519 \
         key, or an RSA key of at least 2048 bits"
    )]
    UnusableKey(String),
    #[error("roots are unusable: {0}")]
    Verifier(#[source] VerifierBuilderError),
    #[error("{file}: cannot be used as a CRL: {why}; write the path of a CRL in PEM or DER")]
    BadCrl { file: PathBuf, why: String },
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
