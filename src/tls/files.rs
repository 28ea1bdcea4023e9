//! Certificates, keys and trust loaded from PEM files.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, TrustAnchor};
use time::format_description::well_known::Rfc3339;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate, X509Version};

use crate::config::{self, IdentityFiles, IssuerCluster, Trust, TrustDomain, UnknownIssuers};
use crate::status::{Certificate, CertificateInfo};
use crate::wire::SpkiHash;

use super::crl::Crls;
use super::error::TlsError;
use super::identity::{Identity, leaf_identity, not_after, not_before};
use super::issuers::Issuer;

/// Certificate with its key, and the roots that came with it.
#[derive(Debug)]
pub struct IdentityMaterial {
    /// Name of the source of the chain, such as its file.
    pub(super) source: PathBuf,
    /// The leaf, then its intermediates.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    pub roots: Arc<RootCertStore>,
    /// The roots of each trust domain, where they are not shared.
    pub bundles: Option<Bundles>,
    /// All root certificates, for status output, expiry times and the cache on disk.
    pub root_certificates: Vec<CertificateDer<'static>>,
    pub identity: Identity,
    /// Start of the leaf's validity.
    pub not_before: SystemTime,
    /// First expiry of a certificate on the path to the own roots; that of the leaf before
    /// `Self::verified`.
    pub valid_until: SystemTime,
}

pub type Bundles = HashMap<Box<str>, Arc<RootCertStore>>;

/// Trust in peers, in addition to the roots that come with the gateway's certificate.
#[derive(Debug, PartialEq)]
pub struct PeerTrust {
    pub domains: Vec<TrustedDomain>,
    /// The revocation lists, or `None` if revocation is not checked.
    pub crls: Option<Arc<Crls>>,
    /// True if every other trust domain is accepted, by the shared roots or by its bundle.
    pub skip_validation: bool,
    pub clusters: HashMap<SpkiHash, String>,
    /// True if leaves of issuers without a cluster are refused.
    pub rejects_unknown: bool,
    /// Limit of the intermediates between a leaf and its root.
    pub max_verify_depth: usize,
}

impl Default for PeerTrust {
    fn default() -> Self {
        Self {
            domains: Vec::new(),
            crls: None,
            skip_validation: false,
            clusters: HashMap::new(),
            rejects_unknown: false,
            max_verify_depth: config::VERIFY_DEPTH,
        }
    }
}

/// Trust domain, with its own roots or the shared ones.
#[derive(Debug, PartialEq)]
pub struct TrustedDomain {
    /// The trust domain's name.
    pub name: String,
    /// The only issuers that may sign for the domain; `None` permits every issuer below its
    /// roots.
    pub issuers: Option<Arc<HashSet<SpkiHash>>>,
    /// Roots of this domain alone, or `None` for the shared ones.
    pub roots: Option<DomainRoots>,
}

#[derive(Debug)]
pub struct DomainRoots {
    store: Arc<RootCertStore>,
    /// The same roots as certificates, for status output and expiry times.
    certificates: Vec<CertificateDer<'static>>,
}

impl PartialEq for DomainRoots {
    fn eq(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }
}

impl IdentityMaterial {
    /// Returns whether both have the same certificates, key and bundles.
    pub fn is_same(&self, other: &Self) -> bool {
        self.chain == other.chain
            && self.root_certificates == other.root_certificates
            && self.bundles.as_ref().map(anchors) == other.bundles.as_ref().map(anchors)
            && self.key == other.key
    }

    pub fn load(files: &IdentityFiles) -> Result<Self, TlsError> {
        let chain = certificates(&files.chain)?;
        let key = load_key(&files.key)?;
        let roots = certificates(&files.roots)?;
        let material = Self::new(&files.chain, chain, key, &files.roots, roots)?;
        material.verified(SystemTime::now())
    }

    /// Parses material from PEM texts, for clients that keep certificates in memory.
    ///
    /// # Errors
    /// As [`IdentityMaterial::load`], with `(memory)` as the file's name.
    pub fn from_pem(chain: &str, key: &str, roots: &str) -> Result<Self, TlsError> {
        let file = Path::new("(memory)");
        let bad_pem = |source| TlsError::Pem { file: file.to_owned(), source };
        let parse = |text: &str| {
            CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>()
        };
        let chain = parse(chain).map_err(bad_pem)?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(bad_pem)?;
        let roots = parse(roots).map_err(bad_pem)?;
        Self::new(file, chain, key, file, roots)
    }

    /// Builds material from certificates, each list with the name of its source. The caller
    /// verifies it by [`Self::verified`].
    pub(super) fn new(
        file: &Path,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        roots_file: &Path,
        root_certificates: Vec<CertificateDer<'static>>,
    ) -> Result<Self, TlsError> {
        let identity = identity(file, &chain)?;
        Ok(Self {
            source: file.to_owned(),
            valid_until: identity.not_after,
            identity,
            not_before: chain.first().map_or(SystemTime::UNIX_EPOCH, |leaf| not_before(leaf)),
            roots: root_store(roots_file, &root_certificates)?,
            chain,
            key,
            bundles: None,
            root_certificates,
        })
    }

    /// Returns the issuer of the leaf, if the chain contains it.
    pub fn issuer(&self) -> Option<Issuer> {
        self.chain.get(1).and_then(Issuer::from_certificate)
    }

    /// Returns the roots for a trust domain without its own roots: its bundle if there are
    /// bundles, else the shared roots.
    pub fn roots_for_domain(&self, domain: &str) -> Option<&Arc<RootCertStore>> {
        match &self.bundles {
            None => Some(&self.roots),
            Some(bundles) => bundles.get(domain),
        }
    }
}

fn anchors(bundles: &Bundles) -> HashMap<&str, &[TrustAnchor<'static>]> {
    bundles.iter().map(|(domain, roots)| (&**domain, &*roots.roots)).collect()
}

fn identity(file: &Path, chain: &[CertificateDer<'static>]) -> Result<Identity, TlsError> {
    let leaf = chain.first().ok_or_else(|| TlsError::NoCertificate(file.to_owned()))?;
    leaf_identity(leaf).map_err(|refusal| TlsError::BadLeaf { file: file.to_owned(), refusal })
}

impl IdentityMaterial {
    pub fn status(&self) -> Certificate {
        Certificate {
            identity: self.identity.uri.to_string(),
            state: "Available".to_owned(),
            chain: certificate_infos(&self.chain),
            roots: certificate_infos(&self.root_certificates),
            validity: Some((self.not_before, self.valid_until)),
            failing_since: None,
        }
    }

    /// Returns the first expiry among the certificates of each kind.
    pub fn expiries(&self) -> Vec<(&'static str, SystemTime)> {
        let (leaf, intermediates) = self.chain.split_at(self.chain.len().min(1));
        let first = |certificates: &[_]| certificates.iter().map(not_after).min();
        let kinds = [
            ("leaf", first(leaf)),
            ("intermediate", first(intermediates)),
            ("root", first(&self.root_certificates)),
        ];
        kinds.into_iter().filter_map(|(kind, end)| Some((kind, end?))).collect()
    }
}

fn certificate_infos(certificates: &[CertificateDer<'static>]) -> Vec<CertificateInfo> {
    certificates.iter().filter_map(certificate_info).collect()
}

/// Returns a description of a certificate for status output, or `None` if the certificate is
/// malformed.
fn certificate_info(der: &CertificateDer<'static>) -> Option<CertificateInfo> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    let rfc3339 = |time: &ASN1Time| time.to_datetime().format(&Rfc3339).ok();
    Some(CertificateInfo {
        pem: ::pem::encode(&::pem::Pem::new("CERTIFICATE", der.to_vec())),
        // Decimal, as `istioctl` parses it (configdump/certificates.go).
        serial: certificate.serial.to_string(),
        valid_from: rfc3339(&validity.not_before)?,
        expires: rfc3339(&validity.not_after)?,
    })
}

impl TrustedDomain {
    /// Returns the roots for peers of the domain: its own, else those that came with `material`.
    pub fn effective_roots<'a>(
        &'a self,
        material: &'a IdentityMaterial,
    ) -> Option<&'a Arc<RootCertStore>> {
        self.roots.as_ref().map(|own| &own.store).or_else(|| material.roots_for_domain(&self.name))
    }

    /// Returns a description of its own roots for the status pages.
    pub fn status(&self) -> Option<Certificate> {
        let own = self.roots.as_ref()?;
        Some(Certificate {
            identity: format!("trust domain {}", self.name),
            state: "Available".to_owned(),
            roots: certificate_infos(&own.certificates),
            ..Certificate::default()
        })
    }

    /// Returns the first expiry among its own roots.
    pub fn expiry(&self) -> Option<SystemTime> {
        self.roots.as_ref()?.certificates.iter().map(not_after).min()
    }

    /// Loads trust domains, with the files of their roots and issuers.
    fn load_all(domains: &[TrustDomain]) -> Result<Vec<Self>, TlsError> {
        let load = |domain: &TrustDomain| {
            let own = |file: &PathBuf| {
                let certificates = certificates(file)?;
                let store = root_store(file, &certificates)?;
                Ok(DomainRoots { store, certificates })
            };
            let issuers = domain.issuers.as_ref().map(|list| hashes(list)).transpose()?;
            Ok(Self {
                name: domain.name.clone(),
                issuers: issuers.map(|list| Arc::new(list.into_iter().collect())),
                roots: domain.roots.as_ref().map(own).transpose()?,
            })
        };
        domains.iter().map(load).collect()
    }
}

impl PeerTrust {
    pub fn load(trust: &Trust) -> Result<Self, TlsError> {
        let crls = trust.crl.as_ref().map(Crls::load).transpose()?;
        Ok(Self {
            domains: TrustedDomain::load_all(&trust.domains)?,
            crls: crls.map(Arc::new),
            skip_validation: trust.skip_validation,
            clusters: clusters(&trust.clusters)?,
            rejects_unknown: trust.unknown_issuers == UnknownIssuers::Reject,
            max_verify_depth: trust.max_verify_depth,
        })
    }

    /// Returns the issuers that have a cluster, with its name.
    pub fn clusters(&self) -> impl Iterator<Item = (SpkiHash, &str)> {
        self.clusters.iter().map(|(issuer, cluster)| (*issuer, cluster.as_str()))
    }

    /// Returns the subjects of the trusted roots that have no list in `trust.crl`. Every peer
    /// below them is refused.
    pub fn roots_without_crl(&self, material: Option<&IdentityMaterial>) -> BTreeSet<String> {
        let Some(crls) = &self.crls else {
            return BTreeSet::new();
        };
        let mut domains = self.domains.iter();
        let uses_shared = self.skip_validation || domains.any(|domain| domain.roots.is_none());
        let shared = material.filter(|_| uses_shared).into_iter();
        let shared = shared.flat_map(|material| &material.root_certificates);
        let own = self.domains.iter().filter_map(|one| one.roots.as_ref());
        crls.unlisted(shared.chain(own.flat_map(|own| &own.certificates)))
    }
}

fn clusters(clusters: &[IssuerCluster]) -> Result<HashMap<SpkiHash, String>, TlsError> {
    let mut all: HashMap<_, String> = HashMap::new();
    for cluster in clusters {
        for issuer in hashes(&cluster.issuers)? {
            let known = all.insert(issuer, cluster.name.clone());
            if let Some(one) = known.filter(|known| *known != cluster.name) {
                return Err(TlsError::SharedIssuer { issuer, one, other: cluster.name.clone() });
            }
        }
    }
    Ok(all)
}

/// Returns the hashes of issuers. A file may contain several.
fn hashes(issuers: &[config::Issuer]) -> Result<Vec<SpkiHash>, TlsError> {
    let mut hashes = Vec::new();
    for issuer in issuers {
        let file = match issuer {
            config::Issuer::Hash(hash) => {
                hashes.push(*hash);
                continue;
            }
            config::Issuer::File(file) => file,
        };
        for certificate in certificates(file)? {
            let issuer = Issuer::from_certificate(&certificate).filter(|_| is_ca(&certificate));
            let issuer = issuer.ok_or_else(|| TlsError::NotAnIssuer(file.clone()))?;
            hashes.push(issuer.spki);
        }
    }
    Ok(hashes)
}

fn is_ca(der: &CertificateDer<'_>) -> bool {
    X509Certificate::from_der(der).is_ok_and(|(_, certificate)| certificate.is_ca())
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad_pem = |source| TlsError::Pem { file: file.to_owned(), source };
    let found = CertificateDer::pem_file_iter(file).map_err(bad_pem)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(bad_pem)?;
    if found.is_empty() { Err(TlsError::NoCertificate(file.to_owned())) } else { Ok(found) }
}

fn root_store(
    file: &Path,
    certificates: &[CertificateDer<'static>],
) -> Result<Arc<RootCertStore>, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates {
        check_root(file, certificate)?;
        let bad = |source| TlsError::BadRoot { file: file.to_owned(), source };
        store.add(certificate.clone()).map_err(bad)?;
    }
    Ok(Arc::new(store))
}

fn load_key(file: &PathBuf) -> Result<PrivateKeyDer<'static>, TlsError> {
    let loaded = PrivateKeyDer::from_pem_file(file);
    loaded.map_err(|source| {
        // Of PKCS#8 (RFC 5958 section 3) and of OpenSSL's older format.
        const ENCRYPTED: [&str; 2] = ["BEGIN ENCRYPTED PRIVATE KEY", "Proc-Type: 4,ENCRYPTED"];
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if ENCRYPTED.iter().any(|mark| text.contains(mark)) {
            return TlsError::EncryptedKey(file.clone());
        }
        TlsError::Pem { file: file.clone(), source }
    })
}

/// Checks that a root is the certificate of an authority. Certificates of version 1 have no
/// extension that says so.
fn check_root(file: &Path, root: &CertificateDer<'_>) -> Result<(), TlsError> {
    match X509Certificate::from_der(root) {
        Ok((_, root)) if !root.is_ca() && root.version() == X509Version::V3 => {
            Err(TlsError::NotARoot { file: file.to_owned(), subject: root.subject().to_string() })
        }
        // webpki reports what it cannot parse.
        _ => Ok(()),
    }
}
