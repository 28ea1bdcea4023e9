//! Verifiers of peer certificates: webpki verifies the chain, and this module the SPIFFE
//! identity, the issuer and the key usages.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, TrustAnchor, UnixTime};
use rustls::server::VerifierBuilderError;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, PeerIncompatible, PeerMisbehaved, RootCertStore, SignatureScheme,
};
use webpki::KeyUsage;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::reason::HandshakeRefusal;
use crate::wire::SpkiHash;

use super::chains::{ChainCache, ChainFingerprint, Verdict, VerifiedPath};
use super::crl::Crls;
use super::error::TlsError;
use super::files::{IdentityMaterial, PeerTrust};
use super::identity::{check_usage, leaf_identity};
use super::issuers::{Issuer, escape_for_display};
use super::path::{Path, RECEIVED_MAX};

/// Refusal inside a rustls error, which returns from the handshake unchanged.
#[derive(Debug, derive_more::Display)]
#[display("{}", detail.as_deref().unwrap_or_else(|| refusal.description()))]
struct RefusalError {
    refusal: HandshakeRefusal,
    detail: Option<String>,
    /// The issuer that caused the refusal, below a trusted root.
    issuer: Option<Arc<Issuer>>,
}

impl std::error::Error for RefusalError {}

fn refusal_error(refusal: HandshakeRefusal) -> Error {
    refusal_error_with(refusal, None)
}

fn refusal_error_with(refusal: HandshakeRefusal, detail: Option<String>) -> Error {
    refused(RefusalError { refusal, detail, issuer: None })
}

fn refused(refused: RefusalError) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(refused))))
}

/// Returns the issuer that caused a handshake to fail, if an issuer did.
pub(super) fn issuer_of(error: &Error) -> Option<&Arc<Issuer>> {
    let Error::InvalidCertificate(CertificateError::Other(OtherError(other))) = error else {
        return None;
    };
    other.downcast_ref::<RefusalError>()?.issuer.as_ref()
}

/// Verifies the one path of a chain to a root, with at most this many intermediates and for this
/// usage. Revocation is not checked.
pub(super) fn verify_for<'a>(
    (leaf, received): (&'a CertificateDer<'_>, &'a [CertificateDer<'_>]),
    roots: &RootCertStore,
    (depth, usage): (usize, KeyUsage),
    provider: &CryptoProvider,
    now: UnixTime,
) -> Result<(Path<'a>, TrustAnchor<'static>), Error> {
    let mut path = Path::new(leaf, received, &roots.roots, depth)
        .map_err(|broken| refusal_error_with(broken.refusal, broken.detail))?;
    let root = path
        .verify((&roots.roots, usage), provider, now)
        .map_err(|error| path_error(error, &path))?;
    check_usage(path.certificates()).map_err(refusal_error)?;
    Ok((path, root))
}

/// Returns the refusal for an error of webpki, with details about the path.
fn path_error(error: webpki::Error, path: &Path<'_>) -> Error {
    if error != webpki::Error::UnknownIssuer {
        return Error::InvalidCertificate(from_webpki(error));
    }
    let top = path.certificates().last();
    let top = top.and_then(|top| X509Certificate::from_der(top).ok());
    let detail = top.map(|(_, top)| {
        let words = HandshakeRefusal::UnknownIssuer.description();
        let issuer = escape_for_display(&top.issuer().to_string());
        format!("{words}: its last issuer is {issuer}")
    });
    refusal_error_with(HandshakeRefusal::UnknownIssuer, detail)
}

/// Explains to an operator why a handshake failed.
pub fn explain_error(error: &Error) -> String {
    match (error, refusal_for_error(error)) {
        (Error::InvalidCertificate(CertificateError::Other(OtherError(other))), refusal) => {
            let refused = other.downcast_ref::<RefusalError>();
            refused.map_or_else(|| refusal.description().to_owned(), ToString::to_string)
        }
        (Error::AlertReceived(alert), refusal @ HandshakeRefusal::PeerRejectedUs) => {
            format!("{}: alert {alert:?}", refusal.description())
        }
        // The text of rustls adds details, such as the time of expiry.
        (
            _,
            HandshakeRefusal::Expired | HandshakeRefusal::NotYetValid | HandshakeRefusal::Other,
        ) => error.to_string(),
        (_, refusal) => refusal.description().to_owned(),
    }
}

pub fn refusal_for_error(error: &Error) -> HandshakeRefusal {
    match error {
        Error::NoCertificatesPresented => HandshakeRefusal::NoCertificate,
        Error::NoApplicationProtocol => HandshakeRefusal::NoAlpn,
        Error::InvalidCertificate(certificate) => certificate_refusal(certificate),
        Error::PeerIncompatible(
            PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::Tls12NotOffered
            | PeerIncompatible::Tls12NotOfferedOrEnabled
            | PeerIncompatible::Tls13RequiredForQuic,
        ) => HandshakeRefusal::TlsVersion,
        Error::PeerMisbehaved(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme) => {
            HandshakeRefusal::BadSignature
        }
        Error::AlertReceived(alert) if CERTIFICATE_ALERTS.contains(alert) => {
            HandshakeRefusal::PeerRejectedUs
        }
        _ => HandshakeRefusal::Other,
    }
}

/// Alerts that a peer sends because of our certificate (RFC 8446 section 6.2). TLS libraries send
/// access_denied for an identity that they do not expect, and decrypt_error for a signature.
const CERTIFICATE_ALERTS: [AlertDescription; 12] = [
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::CertificateUnobtainable,
    AlertDescription::BadCertificateStatusResponse,
    AlertDescription::BadCertificateHashValue,
    AlertDescription::CertificateRequired,
    AlertDescription::UnknownCA,
    AlertDescription::AccessDenied,
    AlertDescription::DecryptError,
];

/// Returns whether a server has rejected our certificate. With TLS 1.3 its alert follows the
/// handshake, as an error of HTTP/2, which keeps only the text of rustls.
pub fn is_rejection_of_us(error: &h2::Error) -> bool {
    let text = error.get_io().map(ToString::to_string);
    let alerts = CERTIFICATE_ALERTS.into_iter().map(Error::AlertReceived);
    text.is_some_and(|text| alerts.into_iter().any(|alert| alert.to_string() == text))
}

fn certificate_refusal(error: &CertificateError) -> HandshakeRefusal {
    match error {
        CertificateError::BadEncoding => HandshakeRefusal::BadEncoding,
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            HandshakeRefusal::Expired
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            HandshakeRefusal::NotYetValid
        }
        CertificateError::UnknownIssuer => HandshakeRefusal::UnknownIssuer,
        CertificateError::BadSignature
        | CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            HandshakeRefusal::BadSignature
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            HandshakeRefusal::BadKeyUsage
        }
        CertificateError::Other(OtherError(other)) => other
            .downcast_ref::<RefusalError>()
            // An error of webpki without a variant in rustls: the path is too long, an issuer is
            // not a CA, or a name violates a constraint. The certificates are well-formed here.
            .map_or(HandshakeRefusal::UnknownIssuer, |refused| refused.refusal),
        _ => HandshakeRefusal::Other,
    }
}

/// Converts an error of webpki as rustls' own verifier does.
fn from_webpki(error: webpki::Error) -> CertificateError {
    use webpki::Error as E;
    match error {
        E::BadDer | E::BadDerTime | E::TrailingData(_) => CertificateError::BadEncoding,
        E::CertNotValidYet { time, not_before } => {
            CertificateError::NotValidYetContext { time, not_before }
        }
        E::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        E::InvalidCertValidity => CertificateError::Expired,
        E::UnknownIssuer => CertificateError::UnknownIssuer,
        E::InvalidSignatureForPublicKey
        | E::UnsupportedSignatureAlgorithmContext(_)
        | E::UnsupportedSignatureAlgorithmForPublicKeyContext(_) => CertificateError::BadSignature,
        E::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
        error => CertificateError::Other(OtherError(Arc::new(error))),
    }
}

/// Verifier of clients, and of servers by the same rules: of gateways of other networks, and of the
/// servers of tools. The leaf's trust domain selects the roots. A domain outside the set is
/// rejected before any signature check. A chain that was verified recently costs one hash.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    domains: HashMap<Box<str>, DomainRules>,
    /// Rules for all other domains, if trust domains are not validated.
    default_domain: Option<DomainRules>,
    /// The only issuers that may sign leaves, if others are refused.
    known_issuers: Option<HashSet<SpkiHash>>,
    crls: Option<Arc<Crls>>,
    /// The only identities that a server may have, if others are refused.
    expected: Option<HashSet<Box<str>>>,
    /// Limit of the intermediates on a path.
    depth: usize,
    chains: ChainCache,
    provider: Arc<CryptoProvider>,
    /// Number of paths that webpki had to verify.
    #[cfg(test)]
    webpki_verifications: AtomicUsize,
}

#[derive(Debug)]
struct DomainRules {
    roots: Arc<RootCertStore>,
    /// The only issuers that may sign for the domain; `None` permits every issuer.
    issuers: Option<Arc<HashSet<SpkiHash>>>,
}

impl DomainRules {
    fn with_any_issuer(roots: &Arc<RootCertStore>) -> Self {
        Self { roots: Arc::clone(roots), issuers: None }
    }
}

impl ClientVerifier {
    /// Creates a verifier. A domain without roots, its own or from the material, is not trusted.
    pub(super) fn new(
        trust: &PeerTrust,
        material: &IdentityMaterial,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, TlsError> {
        let mut new = Self::rejecting(provider);
        for domain in &trust.domains {
            if let Some(roots) = domain.effective_roots(material) {
                let entry =
                    DomainRules { roots: Arc::clone(roots), issuers: domain.issuers.clone() };
                new.domains.insert(domain.name.as_str().into(), entry);
            }
        }
        match &material.bundles {
            Some(bundles) if trust.skip_validation => {
                for (name, roots) in bundles {
                    let entry = new.domains.entry(name.clone());
                    entry.or_insert_with(|| DomainRules::with_any_issuer(roots));
                }
            }
            None if trust.skip_validation => {
                new.default_domain = Some(DomainRules::with_any_issuer(&material.roots));
            }
            _ => {}
        }
        let mut all = new.domains.values().chain(&new.default_domain);
        if all.any(|domain| domain.roots.is_empty()) {
            return Err(TlsError::Verifier(VerifierBuilderError::NoRootAnchors));
        }
        new.crls.clone_from(&trust.crls);
        new.depth = trust.max_verify_depth;
        new.known_issuers = trust.rejects_unknown.then(|| trust.clusters.keys().copied().collect());
        Ok(new)
    }

    /// Creates a verifier that refuses every client.
    pub(super) fn rejecting(provider: &Arc<CryptoProvider>) -> Self {
        Self {
            domains: HashMap::new(),
            default_domain: None,
            known_issuers: None,
            crls: None,
            expected: None,
            depth: 0,
            chains: ChainCache::default(),
            provider: Arc::clone(provider),
            #[cfg(test)]
            webpki_verifications: AtomicUsize::new(0),
        }
    }

    /// Creates a verifier of servers of any trust domain under these roots, with one of the
    /// `expected` identities if there are some.
    pub(super) fn of_servers(
        expected: Option<&[&str]>,
        roots: &Arc<RootCertStore>,
        provider: &Arc<CryptoProvider>,
    ) -> Self {
        Self {
            default_domain: Some(DomainRules::with_any_issuer(roots)),
            expected: expected.map(|ids| ids.iter().map(|&id| id.into()).collect()),
            depth: RECEIVED_MAX,
            ..Self::rejecting(provider)
        }
    }

    fn check_expected(&self, leaf: &CertificateDer<'_>) -> Result<(), Error> {
        let Some(expected) = &self.expected else { return Ok(()) };
        let uri = leaf_identity(leaf).map_err(refusal_error)?.uri;
        if expected.contains(&*uri) {
            return Ok(());
        }
        let detail = format!("{} is not an expected identity", escape_for_display(&uri));
        Err(refusal_error_with(HandshakeRefusal::UntrustedDomain, Some(detail)))
    }

    /// Verifies a chain and returns the path to the root.
    pub(super) fn verify_chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<VerifiedPath, Error> {
        let key = ChainFingerprint::new(leaf, intermediates);
        if let Some(path) = self.chains.get(&key, now) {
            return Ok(path);
        }
        let identity = leaf_identity(leaf).map_err(refusal_error)?;
        let domain = self.domains.get(&*identity.trust_domain);
        let Some(domain) = domain.or(self.default_domain.as_ref()) else {
            let detail = format!(
                "trust domain {} ({}) is not in trust.domains",
                escape_for_display(&identity.trust_domain),
                escape_for_display(&identity.uri)
            );
            return Err(refusal_error_with(HandshakeRefusal::UntrustedDomain, Some(detail)));
        };
        let path = self.verify_path((domain, &identity.trust_domain), leaf, intermediates, now)?;
        let verified =
            Verdict { at: now, until: self.verdict_valid_until(now), path: path.clone() };
        self.chains.add(key, verified);
        Ok(path)
    }

    /// Refuses an issuer that may not sign for the trust domain, or that has no cluster where
    /// one is required.
    fn check_issuer(
        &self,
        domain: &DomainRules,
        name: &str,
        issuer: &Arc<Issuer>,
    ) -> Result<(), Error> {
        let is_in = |list: &HashSet<SpkiHash>| list.contains(&issuer.spki);
        let why = if !domain.issuers.as_deref().is_none_or(is_in) {
            format!("is not in trust.domains[].issuers of {}", escape_for_display(name))
        } else if !self.known_issuers.as_ref().is_none_or(is_in) {
            "is not in trust.clusters, and trust.unknown_issuers is `reject`".to_owned()
        } else {
            return Ok(());
        };
        let Issuer { spki, subject } = &**issuer;
        Err(refused(RefusalError {
            refusal: HandshakeRefusal::UntrustedIssuer,
            detail: Some(format!("issuer {spki} ({subject}) {why}")),
            issuer: Some(Arc::clone(issuer)),
        }))
    }

    /// Returns the time from which a verdict of `now` no longer applies, because another
    /// revocation list is stale.
    fn verdict_valid_until(&self, now: UnixTime) -> UnixTime {
        let crls = self.crls.as_ref();
        let end = crls.and_then(|crls| crls.next_refused_as_stale(time_of(now)));
        let end = end.and_then(|end| end.duration_since(SystemTime::UNIX_EPOCH).ok());
        UnixTime::since_unix_epoch(end.unwrap_or(Duration::MAX))
    }

    /// Verifies the path, then its issuer, and last the revocation lists, which are large.
    fn verify_path(
        &self,
        (domain, name): (&DomainRules, &str),
        leaf: &CertificateDer<'_>,
        received: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<VerifiedPath, Error> {
        #[cfg(test)]
        self.webpki_verifications.fetch_add(1, Ordering::Relaxed);
        let limits = (self.depth, KeyUsage::client_auth());
        let verified = verify_for((leaf, received), &domain.roots, limits, &self.provider, now);
        let (path, root) = verified?;
        let certificates = path.certificates();
        let issuer = match certificates.get(1) {
            Some(issuer) => Issuer::from_certificate(issuer)
                .ok_or_else(|| refusal_error(HandshakeRefusal::BadEncoding))?,
            None => Issuer::from_anchor(&root),
        };
        let issuer = Arc::new(issuer);
        self.check_issuer(domain, name, &issuer)?;
        if let Some(crls) = &self.crls {
            crls.check((certificates, &root), &self.provider, time_of(now))
                .map_err(|(refusal, detail)| refusal_error_with(refusal, Some(detail)))?;
        }
        Ok(VerifiedPath {
            not_before: unix_time(path.not_before()),
            not_after: unix_time(path.not_after()),
            issuer,
        })
    }
}

pub(super) fn unix_time(time: SystemTime) -> UnixTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    UnixTime::since_unix_epoch(since.unwrap_or_default())
}

fn time_of(time: UnixTime) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(time.as_secs())
}

/// Methods of both traits for signatures in handshakes: TLS 1.3 by the provider, TLS 1.2 never.
macro_rules! tls13_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            leaf: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature(message, leaf, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl ClientCertVerifier for ClientVerifier {
    /// Sends no hints: a peer has one certificate, and the list of roots is not disclosed.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.verify_chain(leaf, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    tls13_signatures!();
}

impl ServerCertVerifier for ClientVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check_expected(leaf)?;
        self.verify_chain(leaf, intermediates, now)?;
        Ok(ServerCertVerified::assertion())
    }

    tls13_signatures!();
}

#[cfg(test)]
mod tests;
