//! In-memory certificate authority for development and tests.
//!
//! It issues the certificates that a mesh's own authority would: one root, an intermediate per
//! cluster, and SPIFFE leaves. It neither reads nor writes files; `strait certs` does. The
//! gateway never uses it.

use std::time::SystemTime;

use anyhow::{Context as _, ensure};
use derive_more::{Debug, Deref};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams,
    CertificateSigningRequestParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
    RevokedCertParams, SanType,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use spiffe::SpiffeId;
use time::{Duration, OffsetDateTime};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Development root. Its key never leaves this value.
#[derive(Debug, Deref)]
pub struct Authority {
    name: String,
    #[deref]
    root: Issuer,
}

impl Authority {
    /// Creates a root with a new key and a unique name. A chain to another root therefore fails
    /// with an unknown issuer, as between two meshes.
    pub fn new() -> anyhow::Result<Self> {
        let key = new_key()?;
        let id = authority_params(INTERMEDIATES_BELOW_ROOT).key_identifier(&key);
        let id: String = id.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        Self::named(format!("Strait development root {id}"), key)
    }

    /// Creates a root with the same name and a new key, like an authority that renews its key.
    pub fn successor(&self) -> anyhow::Result<Self> {
        Self::named(self.name.clone(), new_key()?)
    }

    fn named(name: String, key: KeyPair) -> anyhow::Result<Self> {
        let mut params = authority_params(INTERMEDIATES_BELOW_ROOT);
        params.distinguished_name.push(DnType::CommonName, name.as_str());
        let root = CertifiedIssuer::self_signed(params, key).context(NOT_SIGNED)?;
        let root = Issuer { signer: root };
        Ok(Self { name, root })
    }

    /// Creates an intermediate for a cluster, with a new key.
    ///
    /// Like a real intermediate, it signs any identity. Verifiers have to bind identities to
    /// clusters, and tests check that they do.
    pub fn intermediate(&self, cluster: &str) -> anyhow::Result<Issuer> {
        self.intermediate_with(cluster, |_| ())
    }

    /// Creates an intermediate like [`Authority::intermediate`], with parameters changed by the
    /// caller.
    pub fn intermediate_with(
        &self,
        cluster: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> anyhow::Result<Issuer> {
        let mut params = authority_params(INTERMEDIATES_BELOW_INTERMEDIATE);
        let name = format!("Strait development intermediate of {cluster}");
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        CertifiedIssuer::signed_by(params, new_key()?, &self.root.signer)
            .map(|signer| Issuer { signer })
            .context(NOT_SIGNED)
    }

    /// Returns the root certificate, which peers trust, in PEM.
    pub fn root_pem(&self) -> String {
        self.root.signer.pem()
    }
}

/// Root, or intermediate of one cluster, which signs the leaves of that cluster.
#[derive(Debug)]
pub struct Issuer {
    signer: CertifiedIssuer<'static, KeyPair>,
}

impl Issuer {
    /// Creates a leaf for a SPIFFE identity such as `spiffe://east.local/ns/app/sa/echo`.
    pub fn leaf(&self, id: &str) -> anyhow::Result<Leaf> {
        let identity = SpiffeId::new(id).with_context(|| {
            format!(
                "`{id}` is not a SPIFFE identity; write it as \
                 spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/ACCOUNT"
            )
        })?;
        ensure!(
            !identity.path().is_empty(),
            "`{id}` is a trust domain without a workload; add a path: /ns/NAMESPACE/sa/ACCOUNT"
        );
        let uri = identity.to_string().try_into().context(NOT_SIGNED)?;
        self.leaf_with(|params| params.subject_alt_names.push(SanType::URI(uri)))
    }

    /// Creates a leaf with the identity and other parameters set by the caller. Tests create
    /// invalid certificates this way.
    pub fn leaf_with(&self, change: impl FnOnce(&mut CertificateParams)) -> anyhow::Result<Leaf> {
        let key = new_key()?;
        let mut params = leaf_params();
        change(&mut params);
        let leaf = params.signed_by(&key, &self.signer).context(NOT_SIGNED)?;
        Ok(Leaf { chain_pem: leaf.pem() + &self.signer.pem(), key_pem: key.serialize_pem() })
    }

    /// Creates a revocation list (PEM) of the first certificate in each PEM text. A list with a
    /// larger number is newer.
    pub fn crl(
        &self,
        revoked: &[&str],
        number: u64,
        next_update: SystemTime,
    ) -> anyhow::Result<String> {
        let now = OffsetDateTime::now_utc();
        let entry = |pem: &&str| {
            let der = CertificateDer::from_pem_slice(pem.as_bytes());
            let der = der.context(NOT_A_CERTIFICATE)?;
            let parsed = X509Certificate::from_der(&der);
            let (_, parsed) = parsed.context(NOT_A_CERTIFICATE)?;
            Ok(RevokedCertParams {
                serial_number: parsed.raw_serial().to_vec().into(),
                revocation_time: now,
                reason_code: None,
                invalidity_date: None,
            })
        };
        let order = Duration::seconds(i64::try_from(number).unwrap_or(i64::MAX).min(1_000_000));
        let params = CertificateRevocationListParams {
            this_update: now - Duration::days(30) + order,
            next_update: next_update.into(),
            crl_number: number.into(),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect::<anyhow::Result<_>>()?,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.signer).context(NOT_SIGNED)?;
        list.pem().context(NOT_SIGNED)
    }

    pub fn pem(&self) -> String {
        self.signer.pem()
    }

    /// Creates a leaf like [`Issuer::leaf_with`], for the key of a signing request (PEM). Names
    /// in the request are ignored, because a mesh's authority authenticates the caller. Returns
    /// the leaf and the intermediate in PEM.
    pub fn sign(
        &self,
        request: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> anyhow::Result<[String; 2]> {
        let mut request = CertificateSigningRequestParams::from_pem(request).context(NOT_SIGNED)?;
        request.params = leaf_params();
        change(&mut request.params);
        let leaf = request.signed_by(&self.signer).context(NOT_SIGNED)?;
        Ok([leaf.pem(), self.signer.pem()])
    }
}

/// Certificate of a workload, with its key.
#[derive(Clone, Debug)]
pub struct Leaf {
    /// The leaf, then the intermediate. The root is omitted, because the peer has its own.
    pub chain_pem: String,
    // No log line or failed assertion shows it.
    #[debug(skip)]
    pub key_pem: String,
}

/// Contexts of errors of rcgen, and of the text to revoke.
const NOT_SIGNED: &str = "certificate signing failed";
const NOT_A_CERTIFICATE: &str = "the certificate to revoke is invalid; write one in PEM";

fn new_key() -> anyhow::Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).context("private key generation failed")
}

/// Returns the parameters that roots and intermediates share, without a name.
fn authority_params(intermediates_below: u8) -> CertificateParams {
    let mut params = valid_for(AUTHORITY_VALIDITY);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(intermediates_below));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Returns the parameters of a leaf as X509-SVID and Istio's agents require them, without an
/// identity.
fn leaf_params() -> CertificateParams {
    let mut params = valid_for(LEAF_VALIDITY);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Both usages: with mutual TLS a workload is server and client.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params
}

/// Returns parameters without a subject. rcgen derives the serial number from a digest of the
/// public key. Its 160 bits are unpredictable, since every certificate has a new key.
fn valid_for(validity: Duration) -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + validity;
    params.use_authority_key_identifier_extension = true;
    params
}

/// Tolerance for the clock of a container that runs behind that of its host.
const CLOCK_SKEW: Duration = Duration::MINUTE;
const AUTHORITY_VALIDITY: Duration = Duration::days(365);
/// A month of experiments; too short for lasting use.
const LEAF_VALIDITY: Duration = Duration::days(30);
const INTERMEDIATES_BELOW_ROOT: u8 = 1;
const INTERMEDIATES_BELOW_INTERMEDIATE: u8 = 0;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::RootCertStore;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
    use rustls::server::WebPkiClientVerifier;
    use rustls::server::danger::ClientCertVerifier;
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

    use super::*;

    const ECHO: &str = "spiffe://east.local/ns/app/sa/echo";

    fn chain(leaf: &Leaf) -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_slice_iter(leaf.chain_pem.as_bytes()).collect::<Result<_, _>>().unwrap()
    }

    fn verifier(authority: &Authority) -> Arc<dyn ClientCertVerifier> {
        let root = CertificateDer::from_pem_slice(authority.root_pem().as_bytes()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(root).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap()
    }

    fn verify(authority: &Authority, leaf: &Leaf) -> Result<(), rustls::Error> {
        let chain = chain(leaf);
        let (end_entity, intermediates) = chain.split_first().unwrap();
        verifier(authority)
            .verify_client_cert(end_entity, intermediates, UnixTime::now())
            .map(|_| ())
    }

    #[test]
    fn a_leaf_chains_to_its_root_and_to_no_other() {
        let authority = Authority::new().unwrap();
        let leaf = authority.intermediate("east").unwrap().leaf(ECHO).unwrap();
        verify(&authority, &leaf).unwrap();

        let refusal = verify(&Authority::new().unwrap(), &leaf).unwrap_err();
        let unknown = rustls::CertificateError::UnknownIssuer;
        assert_eq!(refusal, rustls::Error::InvalidCertificate(unknown));
    }

    #[test]
    fn a_leaf_is_what_the_svid_standard_wants() {
        let authority = Authority::new().unwrap();
        let chain = chain(&authority.intermediate("east").unwrap().leaf(ECHO).unwrap());
        assert_eq!(chain.len(), 2, "the leaf and the intermediate");
        let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();

        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert!(names.critical, "critical, because the subject is empty");
        assert_eq!(names.value.general_names, [GeneralName::URI(ECHO)]);
        assert_eq!(leaf.subject().iter().count(), 0);

        assert!(!leaf.basic_constraints().unwrap().unwrap().value.ca);
        let usage = leaf.key_usage().unwrap().unwrap().value;
        assert_eq!(usage.flags, 1, "digitalSignature alone");
        let extended = leaf.extended_key_usage().unwrap().unwrap().value;
        assert!(extended.server_auth && extended.client_auth && !extended.any);
    }

    #[test]
    fn an_intermediate_signs_leaves_and_no_further_authority() {
        let authority = Authority::new().unwrap();
        let chain = chain(&authority.intermediate("east").unwrap().leaf(ECHO).unwrap());
        let (_, intermediate) = X509Certificate::from_der(&chain[1]).unwrap();
        let constraints = intermediate.basic_constraints().unwrap().unwrap().value;
        assert!(constraints.ca);
        assert_eq!(constraints.path_len_constraint, Some(0));
    }

    #[test]
    fn validity_begins_a_minute_ago_and_ends_after_a_month() {
        let authority = Authority::new().unwrap();
        let chain = chain(&authority.intermediate("east").unwrap().leaf(ECHO).unwrap());
        let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let since = now - leaf.validity().not_before.timestamp();
        assert!((60..120).contains(&since), "valid since {since} s");
        let days = (leaf.validity().not_after.timestamp() - now) / 86_400;
        assert!((29..=30).contains(&days), "valid for {days} days");
    }

    #[test]
    fn serials_differ_and_are_long() {
        let authority = Authority::new().unwrap();
        let issuer = authority.intermediate("east").unwrap();
        let serial = || {
            let chain = chain(&issuer.leaf(ECHO).unwrap());
            let (_, leaf) = X509Certificate::from_der(&chain[0]).unwrap();
            leaf.raw_serial().to_vec()
        };
        let (one, other) = (serial(), serial());
        assert_ne!(one, other);
        assert!(one.len() >= 16, "{} bytes", one.len());
    }

    #[test]
    fn the_key_is_a_p256_key_that_rustls_reads() {
        let authority = Authority::new().unwrap();
        let leaf = authority.intermediate("east").unwrap().leaf(ECHO).unwrap();
        let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).unwrap();
        let key = rustls::crypto::aws_lc_rs::sign::any_ecdsa_type(&key).unwrap();
        let scheme = rustls::SignatureScheme::ECDSA_NISTP256_SHA256;
        assert!(key.choose_scheme(&[scheme]).is_some());
    }

    #[test]
    fn leaf_with_hands_out_the_parameters() {
        let authority = Authority::new().unwrap();
        let issuer = authority.intermediate("east").unwrap();
        let expired = issuer
            .leaf_with(|params| params.not_after = params.not_before + Duration::SECOND)
            .unwrap();
        let refusal = verify(&authority, &expired).unwrap_err().to_string();
        assert!(refusal.contains("expired"), "{refusal}");
    }

    #[test]
    fn what_is_no_identity_of_a_workload_is_not_signed() {
        let issuer = Authority::new().unwrap().intermediate("east").unwrap();
        for id in ["", "https://east.local/ns/app/sa/echo", "spiffe:///ns/app", "spiffe://a b/c"] {
            let refusal = issuer.leaf(id).unwrap_err().to_string();
            assert!(refusal.contains("is not a SPIFFE identity"), "{refusal}");
        }
        let refusal = issuer.leaf("spiffe://east.local").unwrap_err();
        assert!(refusal.to_string().contains("without a workload"));
    }

    #[test]
    fn the_debug_form_of_a_leaf_has_no_key() {
        let authority = Authority::new().unwrap();
        let leaf = authority.intermediate("east").unwrap().leaf(ECHO).unwrap();
        assert!(!format!("{leaf:?} {authority:?}").contains("PRIVATE"));
    }
}
