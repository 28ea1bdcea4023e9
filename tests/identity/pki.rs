//! Authorities of these tests. Their keys are available for certificates that real authorities
//! would not sign.

use std::fmt;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PublicKeyData, SigningKey,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use time::{Duration, OffsetDateTime};

use crate::der::{self, Name, URI};
use crate::support::CLIENT;

/// Certificate chain and key of a peer in its handshake.
#[derive(Clone, Debug)]
pub struct Shown {
    pub chain: Vec<CertificateDer<'static>>,
    /// None if the peer has no certificate at all.
    pub key: Option<Arc<dyn rustls::sign::SigningKey>>,
}

impl Shown {
    pub fn nothing() -> Self {
        Self { chain: Vec::new(), key: None }
    }

    pub fn certified(&self) -> Option<Arc<CertifiedKey>> {
        let key = self.key.clone()?;
        Some(Arc::new(CertifiedKey::new(self.chain.clone(), key)))
    }

    /// Returns the same key with another chain.
    pub fn chain(self, chain: impl IntoIterator<Item = CertificateDer<'static>>) -> Self {
        Self { chain: chain.into_iter().collect(), ..self }
    }

    /// Adds certificates at the end of the chain.
    pub fn and<'a>(mut self, more: impl IntoIterator<Item = &'a Authority>) -> Self {
        self.chain.extend(more.into_iter().map(|authority| authority.der.clone()));
        self
    }

    /// Replaces the leaf.
    pub fn leaf(mut self, change: impl FnOnce(&[u8]) -> Vec<u8>) -> Self {
        self.chain[0] = change(&self.chain[0]).into();
        self
    }

    pub fn signing(self, key: impl rustls::sign::SigningKey + 'static) -> Self {
        Self { key: Some(Arc::new(key)), ..self }
    }
}

/// Key of an authority: one of rcgen, or a hand-made one.
#[derive(Clone)]
pub struct Key(Arc<dyn SigningKey + Send + Sync>);

impl Key {
    pub fn new(key: impl SigningKey + Send + Sync + 'static) -> Self {
        Self(Arc::new(key))
    }

    pub fn fresh() -> Self {
        Self::new(KeyPair::generate().expect("a key"))
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0.sign(message)
    }
}

/// Authority. Its certificate may be replaced by another of the same key.
pub struct Authority {
    issuer: CertifiedIssuer<'static, Key>,
    key: Key,
    pub der: CertificateDer<'static>,
}

impl Authority {
    fn certified(key: Key, issuer: CertifiedIssuer<'static, Key>) -> Self {
        let der = issuer.der().clone();
        Self { issuer, key, der }
    }

    pub fn root(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let (key, params) = (Key::fresh(), authority(name, change));
        let issuer = CertifiedIssuer::self_signed(params, key.clone()).expect("a root");
        Self::certified(key, issuer)
    }

    /// Returns an authority below this one.
    pub fn below(&self, name: &str) -> Self {
        self.below_with(name, Key::fresh(), |_| ())
    }

    pub fn below_but(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        self.below_with(name, Key::fresh(), change)
    }

    pub fn below_with(
        &self,
        name: &str,
        key: Key,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Self {
        let params = authority(name, change);
        let issuer = CertifiedIssuer::signed_by(params, key.clone(), &self.issuer);
        Self::certified(key, issuer.expect("an authority"))
    }

    /// Returns a certificate of another authority's name and key, signed by this one.
    pub fn cross_signs(&self, name: &str, other: &Self) -> Self {
        self.below_with(name, other.key.clone(), |_| ())
    }

    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Returns the certificate of a valid client.
    pub fn client(&self) -> Shown {
        self.client_but(|_| ())
    }

    /// Returns the certificate of a valid client, changed by `change`.
    pub fn client_but(&self, change: impl FnOnce(&mut CertificateParams)) -> Shown {
        self.named_but(&[(URI, CLIENT.as_bytes())], change)
    }

    /// Returns a leaf with these names.
    pub fn named(&self, names: &[Name<'_>]) -> Shown {
        self.named_but(names, |_| ())
    }

    pub fn named_but(
        &self,
        names: &[Name<'_>],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Shown {
        self.keyed(KeyPair::generate().expect("a key"), names, change)
    }

    /// Returns a leaf for a key of rcgen.
    pub fn keyed(
        &self,
        key: KeyPair,
        names: &[Name<'_>],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Shown {
        Shown { chain: self.chain_of(&key, names, change), key: Some(signing(&key)) }
    }

    /// Returns the certificate of a leaf with any public key, followed by that of this authority.
    pub fn chain_of(
        &self,
        key: &impl PublicKeyData,
        names: &[Name<'_>],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Vec<CertificateDer<'static>> {
        let mut params = leaf(names);
        change(&mut params);
        let leaf = params.signed_by(key, &self.issuer).expect("a leaf");
        vec![leaf.der().clone(), self.der.clone()]
    }

    /// Returns the leaf with other fields, signed again by this authority.
    pub fn rewrites(&self, shown: Shown, change: impl FnOnce(&mut Vec<Vec<u8>>)) -> Shown {
        let mut chain = shown.chain.clone();
        chain[0] = der::rewritten(&chain[0], change, |tbs| self.signs(tbs));
        shown.chain(chain)
    }

    pub fn signs(&self, message: &[u8]) -> Vec<u8> {
        self.key.sign(message).expect("a signature")
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

/// Returns a SAN extension, which is critical because the subject is empty.
pub fn san(names: &[Name<'_>]) -> CustomExtension {
    let mut extension = CustomExtension::from_oid_content(&[2, 5, 29, 17], der::names(names));
    extension.set_criticality(true);
    extension
}

/// Returns a certificate with a valid ID that is signed by its own key.
pub fn self_signed() -> Shown {
    let key = KeyPair::generate().expect("a key");
    let certificate = leaf(&[(URI, CLIENT.as_bytes())]).self_signed(&key);
    Shown { chain: vec![certificate.expect("a leaf").der().clone()], key: Some(signing(&key)) }
}

/// Returns the key as rustls uses it for signatures.
fn signing(key: &KeyPair) -> Arc<dyn rustls::sign::SigningKey> {
    let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    rustls::crypto::aws_lc_rs::sign::any_supported_type(&private).expect("a signing key")
}

fn leaf(names: &[Name<'_>]) -> CertificateParams {
    let mut params = usual();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    if !names.is_empty() {
        params.custom_extensions = vec![san(names)];
    }
    params
}

fn usual() -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = now - Duration::MINUTE;
    params.not_after = now + Duration::days(1);
    params.use_authority_key_identifier_extension = true;
    params
}

fn authority(name: &str, change: impl FnOnce(&mut CertificateParams)) -> CertificateParams {
    let mut params = usual();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name.push(DnType::CommonName, name);
    change(&mut params);
    params
}

/// Authorities of most cases.
pub struct Pki {
    /// Trusted by the gateway.
    pub root: Authority,
    /// Below the root.
    pub west: Authority,
    /// Trusted too, although its certificate has expired.
    pub expired: Authority,
    /// Not trusted.
    pub foreign: Authority,
}

impl Pki {
    pub fn new() -> Self {
        let root = Authority::root("root of these tests", |_| ());
        Self {
            west: root.below("west"),
            root,
            expired: Authority::root("expired root", |params| {
                params.not_before -= Duration::days(3);
                params.not_after -= Duration::days(2);
            }),
            foreign: Authority::root("foreign root", |_| ()),
        }
    }

    /// Returns the roots that the gateway trusts.
    pub fn trusted(&self) -> String {
        self.root.pem() + &self.expired.pem()
    }
}
