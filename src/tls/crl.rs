//! Certificate revocation lists, loaded from files.
//!
//! webpki checks every certificate of a chain except the root against them.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use webpki::{
    CertRevocationList, ExpirationPolicy, OwnedCertRevocationList, RevocationOptions,
    RevocationOptionsBuilder, UnknownStatusPolicy,
};
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate, X509Extension};
use x509_parser::revocation_list::CertificateRevocationList;

use crate::config::{Crl, CrlPolicy};
use crate::reason::HandshakeRefusal;
use crate::status;

use super::error::TlsError;

/// Limit of all files together, in bytes. A list of 100,000 certificates has about 4 MB.
const BYTES_MAX: usize = 16 << 20;
/// Limit of the key combinations of equally named issuers that are tried for one chain. Any
/// client can cause them, and each costs the signature checks of a chain.
const LIST_SETS_MAX: usize = 8;
/// OID of the extension issuingDistributionPoint (RFC 5280 section 5.2.5).
const DISTRIBUTION_POINT: &str = "2.5.29.28";

/// The revocation lists in force, and the policies for stale and missing lists.
#[derive(Debug)]
pub struct Crls {
    lists: Vec<List>,
    issuers: Vec<IssuerLists>,
    on_stale: CrlPolicy,
    on_missing: CrlPolicy,
}

#[derive(Debug)]
struct List {
    list: CertRevocationList<'static>,
    /// Name of the issuer in DER.
    issuer: Vec<u8>,
    /// Key identifier of the issuer, and issuing distribution point, if the list has them.
    key: Option<Vec<u8>>,
    distribution_point: Option<Vec<u8>>,
    this_update: i64,
    status: status::Crl,
}

/// Lists of all issuers with one name. webpki uses the first list of a name, so the lists of
/// different keys are tried in turn, for example after a change of roots.
#[derive(Debug)]
struct IssuerLists {
    name: Vec<u8>,
    keys: Vec<KeyLists>,
}

/// Indexes of the lists of one key.
#[derive(Debug)]
struct KeyLists {
    key: Option<Vec<u8>>,
    lists: Vec<usize>,
}

/// Issuer named in a certificate.
struct NamedIssuer {
    name: Vec<u8>,
    key: Option<Vec<u8>>,
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
}

impl Crls {
    /// Loads the lists. Of several lists with the same issuer, key and scope, the newest
    /// applies.
    ///
    /// # Errors
    /// The first file that is unusable.
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
        let lists = drop_superseded(lists);
        Ok(Self {
            issuers: issuers(&lists),
            lists,
            on_stale: config.on_stale,
            on_missing: config.on_missing,
        })
    }

    /// Calls `verify` with the options of each set of lists in turn, until the result is not a
    /// signature error. A signature error can mean that another key with the same name signed
    /// the chain or the list.
    pub(super) fn verify<T>(
        &self,
        chain: &[&CertificateDer<'_>],
        verify: impl Fn(Option<RevocationOptions<'_>>) -> Result<T, webpki::Error>,
    ) -> Result<T, webpki::Error> {
        let mut result = Err(webpki::Error::UnknownRevocationStatus);
        for lists in self.sets(chain) {
            result = match RevocationOptionsBuilder::new(&lists) {
                Ok(options) => verify(Some(self.options(options))),
                // There is no list at all: `load` permits that only under `on_missing: accept`.
                Err(_) => verify(None),
            };
            match &result {
                // With several roots of one name, webpki returns the first of the errors of
                // equal rank. An error that another root did not sign the chain can hide that
                // this root did not sign the list.
                Err(
                    webpki::Error::InvalidCrlSignatureForPublicKey
                    | webpki::Error::InvalidSignatureForPublicKey
                    | webpki::Error::UnsupportedCrlSignatureAlgorithmForPublicKeyContext(_)
                    | webpki::Error::UnsupportedSignatureAlgorithmForPublicKeyContext(_),
                ) => {}
                _ => break,
            }
        }
        result
    }

    /// Returns the sets of lists to try for a chain, at most [`LIST_SETS_MAX`]. Each set has the
    /// lists of one key for every issuer name. Only issuers named in the chain are tried with
    /// several keys, beginning with the keys that its certificates name.
    fn sets(
        &self,
        chain: &[&CertificateDer<'_>],
    ) -> impl Iterator<Item = Vec<&CertRevocationList<'static>>> {
        let has_equal_names = self.issuers.iter().any(|issuer| issuer.keys.len() > 1);
        let chain = chain.iter().filter(|_| has_equal_names);
        let named: Vec<_> = chain.filter_map(|der| issuer_named_in(der)).collect();
        let choices = self.issuers.iter().map(|issuer| issuer.keys_to_try(&named));
        let choices: Vec<_> = choices.collect();
        let count = choices.iter().map(Vec::len);
        let count = count.fold(1, usize::saturating_mul).min(LIST_SETS_MAX);
        (0..count).map(move |number| {
            let mut rest = number;
            let chosen = choices.iter().filter_map(|keys| {
                let length = keys.len().max(1);
                let key = keys.get(rest % length).copied();
                rest /= length;
                key
            });
            let lists = chosen.flat_map(|of: &KeyLists| &of.lists);
            let lists = lists.filter_map(|&index| self.lists.get(index));
            lists.map(|list| &list.list).collect()
        })
    }

    fn options<'a>(&self, options: RevocationOptionsBuilder<'a>) -> RevocationOptions<'a> {
        let status = match self.on_missing {
            CrlPolicy::Reject => UnknownStatusPolicy::Deny,
            CrlPolicy::Accept => UnknownStatusPolicy::Allow,
        };
        let expiration = match self.on_stale {
            CrlPolicy::Reject => ExpirationPolicy::Enforce,
            CrlPolicy::Accept => ExpirationPolicy::Ignore,
        };
        let options = options.with_status_policy(status);
        options.with_expiration_policy(expiration).build()
    }

    /// Returns the first time after `at` at which a list becomes stale.
    pub fn next_stale(&self, at: SystemTime) -> Option<SystemTime> {
        let ends = self.lists.iter().map(|list| list.status.next_update);
        ends.filter(|end| *end > at).min()
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

    /// Returns the refusal for a revocation error, with the certificate or list that caused it.
    /// Returns `None` for any other error.
    pub(super) fn explain(
        &self,
        error: &webpki::Error,
        chain: &[&CertificateDer<'_>],
        now: SystemTime,
    ) -> Option<(HandshakeRefusal, String)> {
        let parsed = chain
            .iter()
            .filter_map(|der| X509Certificate::from_der(der).ok());
        let parsed: Vec<_> = parsed.map(|(_, certificate)| certificate).collect();
        let lists_of = |certificate: &X509Certificate<'_>| {
            let issuer = certificate.issuer().as_raw().to_vec();
            self.lists.iter().filter(move |list| list.issuer == issuer)
        };
        let named = parsed.iter();
        let (refusal, detail) = match error {
            webpki::Error::CertRevoked => {
                let mut found = named.flat_map(|certificate| {
                    let lists = lists_of(certificate).filter(|list| {
                        let found = list.list.find_serial(certificate.raw_serial());
                        matches!(found, Ok(Some(_)))
                    });
                    lists.map(move |list| {
                        let serial = certificate.raw_serial_as_string();
                        format!("the certificate with serial {serial} is in {}", list.status)
                    })
                });
                (HandshakeRefusal::Revoked, found.next())
            }
            webpki::Error::CrlExpired { .. } => {
                let mut stale = named.flat_map(|certificate| {
                    lists_of(certificate).filter(|list| list.status.next_update <= now)
                });
                let stale = stale.next().map(|list| format!("{} is stale", list.status));
                (HandshakeRefusal::StaleCrl, stale)
            }
            webpki::Error::UnknownRevocationStatus => {
                let mut without = named.filter(|one| lists_of(one).next().is_none());
                let without = without
                    .next()
                    .map(|one| format!("`trust.crl` has no list for issuer {}", one.issuer()));
                (HandshakeRefusal::UnknownRevocation, without)
            }
            webpki::Error::InvalidCrlSignatureForPublicKey
            | webpki::Error::UnsupportedCrlSignatureAlgorithmContext(_)
            | webpki::Error::UnsupportedCrlSignatureAlgorithmForPublicKeyContext(_)
            | webpki::Error::IssuerNotCrlSigner => {
                let detail = format!("a list of the issuer is unusable: {error}");
                (HandshakeRefusal::UnknownRevocation, Some(detail))
            }
            _ => return None,
        };
        Some((
            refusal,
            detail.unwrap_or_else(|| refusal.description().to_owned()),
        ))
    }
}

fn bad_crl(file: &Path, why: &dyn ToString) -> TlsError {
    TlsError::BadCrl {
        file: file.to_owned(),
        why: why.to_string(),
    }
}

fn read(file: &Path, left: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(left).unwrap_or(u64::MAX).saturating_add(1);
    File::open(file)?.take(limit).read_to_end(&mut bytes)?;
    if bytes.len() <= left {
        Ok(bytes)
    } else {
        Err(io::Error::other(format!(
            "the files exceed {} MiB",
            BYTES_MAX >> 20
        )))
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
    let lists = found.iter().map(|der| parse_list(file, der));
    lists.collect()
}

fn parse_list(file: &Path, der: &CertificateRevocationListDer<'_>) -> Result<List, TlsError> {
    let list = OwnedCertRevocationList::from_der(der).map_err(|error| bad_crl(file, &error))?;
    let parsed = CertificateRevocationList::from_der(der);
    let (_, parsed) = parsed.map_err(|error| bad_crl(file, &error))?;
    let next_update = parsed.next_update().as_ref().map_or(0, seconds);
    let mut points = parsed.extensions().iter();
    let point = points.find(|extension| extension.oid.to_id_string() == DISTRIBUTION_POINT);
    Ok(List {
        list: list.into(),
        issuer: parsed.issuer().as_raw().to_vec(),
        key: authority_key(parsed.extensions()),
        distribution_point: point.map(|point| point.value.to_vec()),
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
    let mut seen = std::collections::HashSet::new();
    lists.retain(|list| {
        seen.insert((
            list.issuer.clone(),
            list.key.clone(),
            list.distribution_point.clone(),
        ))
    });
    lists
}

/// Groups lists by the name and key of their issuer.
fn issuers(lists: &[List]) -> Vec<IssuerLists> {
    let mut issuers: Vec<IssuerLists> = Vec::new();
    for (index, list) in lists.iter().enumerate() {
        let of_key = || KeyLists {
            key: list.key.clone(),
            lists: vec![index],
        };
        let Some(issuer) = issuers.iter_mut().find(|one| one.name == list.issuer) else {
            issuers.push(IssuerLists {
                name: list.issuer.clone(),
                keys: vec![of_key()],
            });
            continue;
        };
        match issuer.keys.iter_mut().find(|one| one.key == list.key) {
            Some(known) => known.lists.push(index),
            None => issuer.keys.push(of_key()),
        }
    }
    issuers
}

impl IssuerLists {
    /// Returns the keys to try for certificates with these issuers. Keys that a certificate
    /// names come first.
    fn keys_to_try(&self, named: &[NamedIssuer]) -> Vec<&KeyLists> {
        let named: Vec<_> = named.iter().filter(|one| one.name == self.name).collect();
        let count = if named.is_empty() { 1 } else { self.keys.len() };
        let mut keys: Vec<_> = self.keys.iter().take(count).collect();
        keys.sort_by_key(|of| {
            !named
                .iter()
                .any(|one| one.key.is_some() && one.key == of.key)
        });
        keys
    }
}

/// Returns the issuer that a certificate names, or `None` if the certificate is malformed.
fn issuer_named_in(der: &CertificateDer<'_>) -> Option<NamedIssuer> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    Some(NamedIssuer {
        name: certificate.issuer().as_raw().to_vec(),
        key: authority_key(certificate.extensions()),
    })
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
mod tests {
    use super::*;
    use crate::tools::dev::Authority;

    const LAX: CrlPolicy = CrlPolicy::Accept;
    const STRICT: CrlPolicy = CrlPolicy::Reject;

    /// Loads files with these contents; `None` is an absent file.
    fn load(files: &[Option<&[u8]>], on_missing: CrlPolicy) -> Result<Crls, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |(index, text): (usize, &Option<&[u8]>)| {
            let path = folder.path().join(format!("{index}.crl"));
            if let Some(text) = text {
                std::fs::write(&path, text).expect("a file");
            }
            path
        };
        let config = Crl {
            files: files.iter().enumerate().map(file).collect(),
            on_stale: STRICT,
            on_missing,
        };
        Crls::load(&config).map_err(|error| error.to_string())
    }

    fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
        let read = CertificateDer::pem_slice_iter(pem.as_bytes());
        read.collect::<Result<_, _>>().expect("certificates")
    }

    fn hour() -> SystemTime {
        SystemTime::now() + Duration::from_secs(3600)
    }

    #[test]
    fn lists_are_read_from_pem_and_der_and_shown() {
        let authority = Authority::new().expect("a root");
        let west = authority.intermediate("west").expect("an intermediate");
        let first = authority.crl(&[], 7, hour()).expect("a list");
        let second = west.crl(&[&west.pem()], 8, hour()).expect("a list");
        let der = CertificateRevocationListDer::from_pem_slice(second.as_bytes());
        let der = der.expect("DER").to_vec();
        let both = first.clone() + &second;
        let of = |files: &[Option<&[u8]>]| load(files, STRICT).expect("lists");
        for crls in [
            of(&[Some(both.as_bytes())]),
            of(&[Some(first.as_bytes()), Some(&der)]),
        ] {
            let shown = crls.status();
            let numbers: Vec<_> = shown
                .iter()
                .filter_map(|one| one.number.as_deref())
                .collect();
            assert_eq!(numbers, ["8", "7"], "the newest first");
            assert!(
                shown[0].issuer.contains("intermediate of west"),
                "{shown:?}"
            );
            let end = crls.next_stale(SystemTime::now()).expect("an end");
            assert!(end <= hour() && end > SystemTime::now());
            assert_eq!(crls.next_stale(hour() + Duration::from_secs(1)), None);
        }
    }

    #[test]
    fn what_is_no_list_is_refused_with_its_file_and_absence_only_where_that_is_strict() {
        for (bytes, strict, lax) in [
            (None, "0.crl: cannot be used as a CRL: No such file", ""),
            (Some(&b" \n"[..]), "0.crl: cannot be used as a CRL", ""),
            (Some(b"x"), "0.crl: cannot be used", "0.crl: cannot be used"),
            (
                Some(b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"),
                "contains no list",
                "contains no list",
            ),
        ] {
            for (policy, want) in [(STRICT, strict), (LAX, lax)] {
                let reported = load(&[bytes], policy).err().unwrap_or_default();
                assert!(reported.contains(want), "{reported}");
                assert_eq!(reported.is_empty(), want.is_empty(), "{reported}");
            }
        }
        let large = vec![b' '; BYTES_MAX + 1];
        let reported = load(&[Some(&large)], LAX).expect_err("too large");
        assert!(reported.contains("exceed 16 MiB"), "{reported}");
    }

    #[test]
    fn a_newer_list_replaces_an_older_one_and_keys_of_one_name_are_sets() {
        let authority = Authority::new().expect("a root");
        let twins = [0, 1].map(|_| authority.intermediate("west").expect("an intermediate"));
        let mut text = authority.crl(&[], 1, hour()).expect("a list");
        for number in [3, 2] {
            for twin in &twins {
                text += &twin.crl(&[], number, hour()).expect("a list");
            }
        }
        let crls = load(&[Some(text.as_bytes())], STRICT).expect("lists");
        assert_eq!(crls.lists.len(), 3, "of each twin the newest");
        let leaf = twins[1].leaf("spiffe://west.local/ns/a/sa/b");
        let chain = certificates(&leaf.expect("a leaf").chain_pem);
        let sets: Vec<_> = crls.sets(&chain.iter().collect::<Vec<_>>()).collect();
        assert_eq!(sets.len(), 2);
        assert!(sets.iter().all(|set| set.len() == 2), "{sets:?}");
        assert_eq!(crls.sets(&[]).count(), 1, "a chain that names neither");
        let none = load(&[None], LAX).expect("no lists");
        let sets: Vec<_> = none.sets(&[]).collect();
        assert!(sets.len() == 1 && sets[0].is_empty(), "one empty set");
    }

    #[test]
    fn only_issuers_of_the_chain_are_tried_with_several_keys_and_the_named_ones_first() {
        let authority = Authority::new().expect("a root");
        let mut text = authority.crl(&[], 1, hour()).expect("a list");
        let mut twins = Vec::new();
        for name in ["a", "b", "c", "d"] {
            for number in [2, 1] {
                let twin = authority.intermediate(name).expect("an intermediate");
                text += &twin.crl(&[], number, hour()).expect("a list");
                twins.push(twin);
            }
        }
        let crls = load(&[Some(text.as_bytes())], STRICT).expect("lists");
        for twin in &twins {
            let leaf = twin.leaf("spiffe://west.local/ns/a/sa/b");
            let chain = certificates(&leaf.expect("a leaf").chain_pem);
            let sets: Vec<_> = crls.sets(&chain.iter().collect::<Vec<_>>()).collect();
            assert_eq!(sets.len(), 2);
            let key = issuer_named_in(&chain[0]).expect("an issuer").key;
            let own = crls.lists.iter().find(|list| list.key == key);
            let own = &own.expect("a list of the key").list;
            assert!(sets[0].iter().any(|list| std::ptr::eq(*list, own)));
        }
    }
}
