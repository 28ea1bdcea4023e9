//! Strict parser of SPIFFE identities and key usages in peer certificates.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::config::parse_identity;
use crate::reason::HandshakeRefusal;

/// SPIFFE identity in the form that Istio issues to workloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The whole ID, `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub uri: Arc<str>,
    /// The trust domain, byte for byte as in the certificate.
    pub trust_domain: Arc<str>,
    pub namespace: Arc<str>,
    pub service_account: Arc<str>,
    pub not_after: SystemTime,
}

impl Identity {
    /// Parses a whole ID, of a certificate with this expiry.
    pub fn parse(uri: &str, not_after: SystemTime) -> Option<Self> {
        let [trust_domain, namespace, service_account] = parse_identity(uri)?.map(Arc::from);
        Some(Self { uri: uri.into(), trust_domain, namespace, service_account, not_after })
    }
}

/// Parses the identity in a leaf certificate.
///
/// The certificate must be a leaf with exactly one SAN of the URI type. The URI must be a SPIFFE ID
/// with the path `/ns/NAMESPACE/sa/ACCOUNT` (docs/wire-contract.md 4.1). This function does not
/// check the certificate's signature.
pub fn leaf_identity(leaf: &CertificateDer<'_>) -> Result<Identity, HandshakeRefusal> {
    let certificate = parse(leaf)?;
    let constraints = certificate.basic_constraints().map_err(|_| HandshakeRefusal::BadEncoding)?;
    if constraints.is_some_and(|extension| extension.value.ca) {
        return Err(HandshakeRefusal::CaAsLeaf);
    }
    let uri = single_uri_san(&certificate)?;
    let not_after = Duration::from_secs(not_after_seconds(&certificate));
    let identity = Identity::parse(uri, SystemTime::UNIX_EPOCH + not_after);
    identity.ok_or(HandshakeRefusal::BadSpiffeId)
}

/// Checks the key usages on a verified path, leaf first, that webpki does not check.
///
/// The leaf must have the key usage digitalSignature, and neither keyCertSign nor cRLSign
/// (X509-SVID section 4.3). If it has extended key usages, they must include server and client
/// authentication (section 4.4). If an issuer has key usages, they must include keyCertSign
/// (RFC 5280 section 4.2.1.3).
pub(super) fn check_usage(path: &[CertificateDer<'_>]) -> Result<(), HandshakeRefusal> {
    let (leaf, intermediates) = path.split_first().ok_or(HandshakeRefusal::NoCertificate)?;
    let leaf = parse(leaf)?;
    for issuer in intermediates {
        check_issuer(&parse(issuer)?)?;
    }
    let usage = leaf.key_usage().map_err(|_| HandshakeRefusal::BadEncoding)?;
    let signs = usage.is_some_and(|extension| {
        let usage = extension.value;
        usage.digital_signature() && !usage.key_cert_sign() && !usage.crl_sign()
    });
    let purposes = leaf.extended_key_usage().map_err(|_| HandshakeRefusal::BadEncoding)?;
    let serves = purposes.is_none_or(|extension| {
        let purposes = extension.value;
        purposes.server_auth && purposes.client_auth
    });
    if signs && serves { Ok(()) } else { Err(HandshakeRefusal::BadKeyUsage) }
}

/// Returns the expiry of a certificate in seconds since 1970, or 0 for an earlier time.
fn not_after_seconds(certificate: &X509Certificate<'_>) -> u64 {
    u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0)
}

/// Returns the start of a certificate's validity, or 1970 for a malformed certificate.
pub(super) fn not_before(der: &CertificateDer<'_>) -> SystemTime {
    time_of(der, |certificate| {
        u64::try_from(certificate.validity().not_before.timestamp()).unwrap_or(0)
    })
}

/// Returns the expiry of a certificate, or 1970 for a malformed certificate.
pub(super) fn not_after(der: &CertificateDer<'_>) -> SystemTime {
    time_of(der, not_after_seconds)
}

fn time_of(der: &CertificateDer<'_>, seconds: impl Fn(&X509Certificate<'_>) -> u64) -> SystemTime {
    let seconds = parse(der).map_or(0, |certificate| seconds(&certificate));
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

fn check_issuer(issuer: &X509Certificate<'_>) -> Result<(), HandshakeRefusal> {
    let usage = issuer.key_usage().map_err(|_| HandshakeRefusal::BadEncoding)?;
    if usage.is_some_and(|extension| !extension.value.key_cert_sign()) {
        return Err(HandshakeRefusal::BadKeyUsage);
    }
    Ok(())
}

/// Parses a certificate. Rejects trailing bytes and duplicate extensions.
fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, HandshakeRefusal> {
    let bad = HandshakeRefusal::BadEncoding;
    let (rest, certificate) = X509Certificate::from_der(der).map_err(|_| bad)?;
    if rest.is_empty() && certificate.extensions_map().is_ok() { Ok(certificate) } else { Err(bad) }
}

fn single_uri_san<'a>(certificate: &'a X509Certificate<'_>) -> Result<&'a str, HandshakeRefusal> {
    /// Tag of uniformResourceIdentifier (RFC 5280 section 4.2.1.6).
    const URI_TAG: u32 = 6;
    let names =
        certificate.subject_alternative_name().map_err(|_| HandshakeRefusal::BadEncoding)?;
    let names = names.map_or(&[][..], |extension| &extension.value.general_names);
    let mut uris = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(Some(*uri)),
        GeneralName::Invalid(tag, _) if tag.0 == URI_TAG => Some(None),
        _ => None,
    });
    match (uris.next(), uris.next()) {
        (None, _) => Err(HandshakeRefusal::NoUriSan),
        (Some(_), Some(_)) => Err(HandshakeRefusal::ManyUriSans),
        (Some(None), None) => Err(HandshakeRefusal::BadSpiffeId),
        (Some(Some(uri)), None) => Ok(uri),
    }
}
