//! Certificate revocation lists, loaded from files.
//!
//! Every certificate of a verified path except the root is checked against each list of its issuer
//! whose scope covers it. A peer without a valid path causes no work here.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, SubjectPublicKeyInfoDer, TrustAnchor,
};
use webpki::{OwnedCertRevocationList, RawPublicKeyEntity};
use x509_parser::asn1_rs::Any;
use x509_parser::extensions::{DistributionPointName, GeneralName, ParsedExtension};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate, X509Extension};
use x509_parser::revocation_list::CertificateRevocationList;

use crate::config::{Crl, CrlPolicy};
use crate::reason::HandshakeRefusal;
use crate::status;

use super::error::TlsError;
use super::issuers::sequence;

/// Limit of all files together, in bytes. A list of 100,000 certificates has about 4 MB.
const BYTES_MAX: usize = 16 << 20;
/// Limit of the keys that a list keeps as not its own: those of a rotation, and some more.
const OTHER_KEYS_MAX: usize = 16;
/// Minimum time between verifications of a list by unknown keys once its signer is known. A
/// compromised authority can use a new key under the issuer's name for each handshake, and each
/// verification hashes the whole list.
const VERIFICATION_INTERVAL: Duration = Duration::from_secs(1);
/// OID of the extension issuingDistributionPoint (RFC 5280 section 5.2.5).
const DISTRIBUTION_POINT: &str = "2.5.29.28";

/// The revocation lists in force, and the policies for stale and missing lists.
#[derive(Debug)]
pub struct Crls {
    lists: Vec<List>,
    on_stale: CrlPolicy,
    on_missing: CrlPolicy,
}

#[derive(Debug)]
struct List {
    /// Name of the issuer in DER.
    issuer: Vec<u8>,
    /// Key identifier of the issuer, if the list has one.
    key: Option<Vec<u8>>,
    /// None if the list covers all certificates of the issuer.
    scope: Option<Scope>,
    /// Serial numbers of the revoked certificates.
    revoked: HashSet<Vec<u8>>,
    signed: Signed,
    /// Key that verified the signature, as SubjectPublicKeyInfo.
    signer: OnceLock<Vec<u8>>,
    other_keys: Mutex<OtherKeys>,
    this_update: i64,
    status: status::Crl,
}

/// Keys of authorities with the issuer's name that have not signed a list.
#[derive(Debug, Default)]
struct OtherKeys {
    /// The last ones, at most [`OTHER_KEYS_MAX`].
    keys: VecDeque<Vec<u8>>,
    /// Time of the last verification while the signer was known.
    verified_at: Option<Instant>,
}

impl OtherKeys {
    /// Returns whether the signature is to be verified with `key`.
    fn permit(&mut self, key: &[u8], has_signer: bool, now: Instant) -> bool {
        if self.keys.iter().any(|one| one == key) {
            return false;
        }
        let is_due = |at| now.saturating_duration_since(at) >= VERIFICATION_INTERVAL;
        if has_signer && !self.verified_at.is_none_or(is_due) {
            return false;
        }
        self.verified_at = has_signer.then_some(now);
        true
    }

    fn add(&mut self, key: &[u8]) {
        self.keys.truncate(OTHER_KEYS_MAX - 1);
        self.keys.push_front(key.to_vec());
    }
}

/// Certificates that a list covers, by its issuingDistributionPoint.
#[derive(Debug)]
struct Scope {
    der: Vec<u8>,
    only_leaves: bool,
    only_authorities: bool,
    /// URIs of its distribution point, if it has one.
    uris: Option<Vec<String>>,
}

impl PartialEq for Crls {
    fn eq(&self, other: &Self) -> bool {
        self.lists.iter().map(|list| &list.signed).eq(other.lists.iter().map(|list| &list.signed))
            && (self.on_stale, self.on_missing) == (other.on_stale, other.on_missing)
    }
}

/// Parts of a list that its signature is verified with.
#[derive(Debug, PartialEq, Eq)]
struct Signed {
    message: Vec<u8>,
    algorithm: Vec<u8>,
    signature: Vec<u8>,
}

/// Result of a comparison of a list's signer with an issuer of the same name.
enum Signer {
    Issuer,
    /// Another key, by the key identifiers.
    Another,
    /// No key that is known.
    Unknown,
}

struct PathIssuer {
    key: Vec<u8>,
    /// True if its key usage permits cRLSign.
    signs_lists: bool,
}

impl Signed {
    /// Splits a list into its parts, which webpki has verified to exist.
    fn new(der: &[u8]) -> Option<Self> {
        let (_, list) = Any::from_der(der).ok()?;
        let (rest, _) = Any::from_der(list.data).ok()?;
        let message = list.data.get(..list.data.len() - rest.len())?;
        let (rest, algorithm) = Any::from_der(rest).ok()?;
        let (_, signature) = Any::from_der(rest).ok()?;
        Some(Self {
            message: message.to_vec(),
            algorithm: algorithm.data.to_vec(),
            // The first byte of a BIT STRING is the number of unused bits, which is 0.
            signature: signature.data.get(1..)?.to_vec(),
        })
    }

    fn is_by(&self, key: &[u8], provider: &CryptoProvider) -> bool {
        let key = SubjectPublicKeyInfoDer::from(key);
        let Ok(key) = RawPublicKeyEntity::try_from(&key) else {
            return false;
        };
        let all = provider.signature_verification_algorithms.all.iter();
        all.filter(|one| *one.signature_alg_id() == *self.algorithm).any(|one| {
            let verified = key.verify_signature(*one, &self.message, &self.signature);
            verified.is_ok()
        })
    }
}

impl Scope {
    /// Returns the scope of a list, or `None` if it has an unknown form.
    fn new(extension: &X509Extension<'_>) -> Option<Self> {
        let ParsedExtension::IssuingDistributionPoint(point) = extension.parsed_extension() else {
            return None;
        };
        Some(Self {
            der: extension.value.to_vec(),
            only_leaves: point.only_contains_user_certs,
            only_authorities: point.only_contains_ca_certs,
            uris: point
                .distribution_point
                .as_ref()
                .map(|point| uris(Some(point)).map(ToOwned::to_owned).collect()),
        })
    }

    /// Returns whether the scope includes a certificate: by its role, and, if both have
    /// distribution points, by a common one (RFC 5280 section 6.3.3).
    fn covers(&self, certificate: &X509Certificate<'_>, is_leaf: bool) -> bool {
        if is_leaf && self.only_authorities || !is_leaf && self.only_leaves {
            return false;
        }
        let Some(own) = &self.uris else {
            return true;
        };
        let parsed = certificate.extensions().iter();
        let mut points = parsed.filter_map(|extension| match extension.parsed_extension() {
            ParsedExtension::CRLDistributionPoints(points) => Some(&points.points),
            _ => None,
        });
        points.next().is_none_or(|points| {
            let direct = points.iter();
            let direct = direct.filter(|one| one.crl_issuer.is_none() && one.reasons.is_none());
            direct
                .flat_map(|one| uris(one.distribution_point.as_ref()))
                .any(|uri| own.iter().any(|own| own == uri))
        })
    }
}

fn uris<'a>(name: Option<&'a DistributionPointName<'a>>) -> impl Iterator<Item = &'a str> {
    let names = match name {
        Some(DistributionPointName::FullName(names)) => names.as_slice(),
        _ => &[],
    };
    names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => Some(*uri),
        _ => None,
    })
}

impl List {
    /// Returns whether the list was issued by `root`: the names are equal, and also the key
    /// identifiers if both have one.
    fn is_issued_by(&self, root: &X509Certificate<'_>) -> bool {
        let mut extensions = root.extensions().iter();
        let key = extensions.find_map(|extension| match extension.parsed_extension() {
            ParsedExtension::SubjectKeyIdentifier(key) => Some(key.0),
            _ => None,
        });
        let keys = self.key.as_deref().zip(key);
        self.issuer == root.subject().as_raw() && keys.is_none_or(|(own, of)| own == of)
    }

    /// Returns whether the key of an issuer signed the list. `named` is the key identifier in a
    /// certificate of this issuer. A signature is verified once for each of the last keys, and once
    /// a second for further ones.
    fn signer(&self, key: &[u8], named: Option<&[u8]>, provider: &CryptoProvider) -> Signer {
        let is_another = self.key.as_deref().zip(named).is_some_and(|(own, of)| own != of);
        let known = self.signer.get();
        if known.is_some_and(|known| known == key) {
            return Signer::Issuer;
        }
        let is_open = known.is_none() || !is_another;
        let has_signer = known.is_some();
        if is_open && self.other_keys.lock().permit(key, has_signer, Instant::now()) {
            if self.signed.is_by(key, provider) {
                // The first signer stays: it is one of several with this signature at most.
                let _ = self.signer.set(key.to_vec());
                return Signer::Issuer;
            }
            self.other_keys.lock().add(key);
        }
        if is_another { Signer::Another } else { Signer::Unknown }
    }
}

impl PathIssuer {
    fn of(path: &[CertificateDer<'_>], index: usize, root: &TrustAnchor<'_>) -> Option<Self> {
        let Some(issuer) = path.get(index + 1) else {
            return Some(Self { key: sequence(&root.subject_public_key_info), signs_lists: true });
        };
        let (_, issuer) = X509Certificate::from_der(issuer).ok()?;
        let usage = issuer.key_usage().ok()?;
        Some(Self {
            key: issuer.public_key().raw.to_vec(),
            signs_lists: usage.is_none_or(|usage| usage.value.crl_sign()),
        })
    }
}

impl Crls {
    /// Loads the lists. Of several lists with the same issuer, key and scope, the newest
    /// applies.
    pub fn load(config: &Crl) -> Result<Self, TlsError> {
        let (mut lists, mut left) = (Vec::new(), BYTES_MAX);
        for file in &config.files {
            let absent_is_empty = config.on_missing == CrlPolicy::Accept;
            let bytes = match read(file, left) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && absent_is_empty => {
                    continue;
                }
                read => read.map_err(|error| bad_crl(file, &error))?,
            };
            left -= bytes.len();
            if bytes.trim_ascii().is_empty() && absent_is_empty {
                continue;
            }
            lists.extend(parse(file, &bytes)?);
        }
        Ok(Self {
            lists: drop_superseded(lists),
            on_stale: config.on_stale,
            on_missing: config.on_missing,
        })
    }

    /// Checks each certificate of a verified path below `root`.
    ///
    /// # Errors
    /// The refusal, with the certificate or list that caused it.
    pub(super) fn check(
        &self,
        (path, root): (&[CertificateDer<'_>], &TrustAnchor<'_>),
        provider: &CryptoProvider,
        now: SystemTime,
    ) -> Result<(), (HandshakeRefusal, String)> {
        (0..path.len()).try_for_each(|index| self.check_at(index, (path, root), provider, now))
    }

    /// Returns the certificate of a verified path below `root` that is in a list, with the list.
    pub(super) fn revocation(
        &self,
        verified: (&[CertificateDer<'_>], &TrustAnchor<'_>),
        provider: &CryptoProvider,
        now: SystemTime,
    ) -> Option<String> {
        (0..verified.0.len()).find_map(|index| {
            let checked = self.check_at(index, verified, provider, now);
            let (refusal, detail) = checked.err()?;
            (refusal == HandshakeRefusal::Revoked).then_some(detail)
        })
    }

    /// Searches every list whose issuer and key match and whose scope covers the certificate at
    /// this index of the path.
    fn check_at(
        &self,
        index: usize,
        (path, root): (&[CertificateDer<'_>], &TrustAnchor<'_>),
        provider: &CryptoProvider,
        now: SystemTime,
    ) -> Result<(), (HandshakeRefusal, String)> {
        let parsed = path.get(index).and_then(|der| X509Certificate::from_der(der).ok());
        let Some(((_, certificate), issuer)) = parsed.zip(PathIssuer::of(path, index, root)) else {
            let refusal = HandshakeRefusal::BadEncoding;
            return Err((refusal, refusal.description().to_owned()));
        };
        let named = authority_key(certificate.extensions());
        let (mut is_covered, mut stale, mut unusable) = (false, None, None);
        let lists = self.lists.iter().filter(|list| list.issuer == certificate.issuer().as_raw());
        for list in lists {
            if let Some(scope) = &list.scope
                && !scope.covers(&certificate, index == 0)
            {
                continue;
            }
            match list.signer(&issuer.key, named.as_deref(), provider) {
                Signer::Issuer if issuer.signs_lists => is_covered = true,
                Signer::Issuer => {
                    unusable = Some((list, "the issuer may not sign lists"));
                    continue;
                }
                Signer::Another => continue,
                Signer::Unknown => {
                    unusable = unusable.or(Some((list, "the issuer did not sign it")));
                    continue;
                }
            }
            if list.revoked.contains(certificate.raw_serial()) {
                let serial = certificate.raw_serial_as_string();
                let detail = format!("the certificate with serial {serial} is in {}", list.status);
                return Err((HandshakeRefusal::Revoked, detail));
            }
            let is_stale = self.on_stale == CrlPolicy::Reject && list.status.next_update <= now;
            stale = stale.or_else(|| is_stale.then_some(list));
        }
        let unknown = HandshakeRefusal::UnknownRevocation;
        match (stale, unusable) {
            (Some(list), _) => {
                let detail = format!("{} is stale", list.status);
                Err((HandshakeRefusal::StaleCrl, detail))
            }
            (None, _) if is_covered => Ok(()),
            (None, Some((list, why))) => {
                Err((unknown, format!("{} is unusable: {why}", list.status)))
            }
            (None, None) if self.on_missing == CrlPolicy::Accept => Ok(()),
            (None, None) => {
                let issuer = certificate.issuer();
                let detail = format!("`trust.crl` has no list for issuer {issuer}");
                Err((unknown, detail))
            }
        }
    }

    /// Returns the first time after `at` at which a list becomes stale.
    pub fn next_stale(&self, at: SystemTime) -> Option<SystemTime> {
        self.lists.iter().map(|list| list.status.next_update).filter(|end| *end > at).min()
    }

    /// Returns [`Self::next_stale`] if stale lists lead to refusals.
    pub(super) fn next_refused_as_stale(&self, at: SystemTime) -> Option<SystemTime> {
        let is_refused = self.on_stale == CrlPolicy::Reject;
        self.next_stale(at).filter(|_| is_refused)
    }

    /// Returns the lists that are stale at `at`, if stale lists lead to refusals.
    pub fn refused_as_stale(&self, at: SystemTime) -> impl Iterator<Item = &status::Crl> {
        let is_refused = self.on_stale == CrlPolicy::Reject;
        let lists = self.lists.iter().map(|list| &list.status);
        lists.filter(move |list| is_refused && list.next_update <= at)
    }

    /// Returns the subjects of the roots without a list, if missing lists lead to refusals.
    pub(super) fn unlisted<'a>(
        &self,
        roots: impl Iterator<Item = &'a CertificateDer<'static>>,
    ) -> BTreeSet<String> {
        if self.on_missing == CrlPolicy::Accept {
            return BTreeSet::new();
        }
        let parsed = roots.filter_map(|der| X509Certificate::from_der(der).ok());
        let roots = parsed.map(|(_, root)| root);
        let unlisted = roots.filter(|root| !self.lists.iter().any(|list| list.is_issued_by(root)));
        unlisted.map(|root| root.subject().to_string()).collect()
    }

    /// Returns a description of each list for status output.
    pub fn status(&self) -> Vec<status::Crl> {
        self.lists.iter().map(|list| list.status.clone()).collect()
    }
}

fn bad_crl(file: &Path, why: &dyn ToString) -> TlsError {
    TlsError::BadCrl { file: file.to_owned(), why: why.to_string() }
}

fn read(file: &Path, left: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(left).unwrap_or(u64::MAX).saturating_add(1);
    File::open(file)?.take(limit).read_to_end(&mut bytes)?;
    if bytes.len() <= left {
        Ok(bytes)
    } else {
        Err(io::Error::other(format!("the files exceed {} MiB", BYTES_MAX >> 20)))
    }
}

fn parse(file: &Path, bytes: &[u8]) -> Result<Vec<List>, TlsError> {
    const PEM: &[u8] = b"-----BEGIN";
    let is_pem = bytes.windows(PEM.len()).any(|window| window == PEM);
    let found = if is_pem {
        CertificateRevocationListDer::pem_slice_iter(bytes)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| bad_crl(file, &error))?
    } else {
        vec![CertificateRevocationListDer::from(bytes.to_vec())]
    };
    if found.is_empty() {
        return Err(bad_crl(file, &"contains no list"));
    }
    found.iter().map(|der| parse_list(file, der)).collect()
}

fn parse_list(file: &Path, der: &CertificateRevocationListDer<'_>) -> Result<List, TlsError> {
    // webpki rejects delta lists, indirect lists, and critical extensions that it does not know.
    OwnedCertRevocationList::from_der(der).map_err(|error| bad_crl(file, &error))?;
    let parsed = CertificateRevocationList::from_der(der);
    let (_, parsed) = parsed.map_err(|error| bad_crl(file, &error))?;
    let next_update = parsed.next_update().as_ref().map_or(0, seconds);
    let mut points = parsed.extensions().iter();
    let point = points.find(|extension| extension.oid.to_id_string() == DISTRIBUTION_POINT);
    let scope = point.map(|point| {
        let unknown = "its issuingDistributionPoint has an unknown form";
        Scope::new(point).ok_or_else(|| bad_crl(file, &unknown))
    });
    let revoked = parsed.iter_revoked_certificates();
    Ok(List {
        issuer: parsed.issuer().as_raw().to_vec(),
        key: authority_key(parsed.extensions()),
        scope: scope.transpose()?,
        revoked: revoked.map(|one| one.raw_serial().to_vec()).collect(),
        signed: Signed::new(der).ok_or_else(|| bad_crl(file, &"it is no signed list"))?,
        signer: OnceLock::new(),
        other_keys: Mutex::default(),
        this_update: parsed.last_update().timestamp(),
        status: status::Crl {
            file: file.to_owned(),
            issuer: parsed.issuer().to_string(),
            number: parsed.crl_number().map(ToString::to_string),
            next_update: SystemTime::UNIX_EPOCH + Duration::from_secs(next_update),
        },
    })
}

fn seconds(time: &ASN1Time) -> u64 {
    u64::try_from(time.timestamp()).unwrap_or(0)
}

/// Removes each list that has a newer one with the same issuer, key and scope.
fn drop_superseded(mut lists: Vec<List>) -> Vec<List> {
    lists.sort_by_key(|list| std::cmp::Reverse(list.this_update));
    let mut seen = HashSet::new();
    lists.retain(|list| {
        seen.insert((
            list.issuer.clone(),
            list.key.clone(),
            list.scope.as_ref().map(|scope| scope.der.clone()),
        ))
    });
    lists
}

/// Returns the key identifier of the issuer (authority key identifier).
fn authority_key(extensions: &[X509Extension<'_>]) -> Option<Vec<u8>> {
    let parsed = extensions.iter().map(X509Extension::parsed_extension);
    let mut keys = parsed.filter_map(|extension| match extension {
        ParsedExtension::AuthorityKeyIdentifier(key) => key.key_identifier.as_ref(),
        _ => None,
    });
    keys.next().map(|key| key.0.to_vec())
}

#[cfg(test)]
mod tests;
