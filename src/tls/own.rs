//! Verification of the gateway's own certificate, key and roots, before and during their use.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::sign::CertifiedKey;
use webpki::KeyUsage;
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use crate::reason::HandshakeRefusal;

use super::crl::Crls;
use super::error::TlsError;
use super::files::IdentityMaterial;
use super::path::RECEIVED_MAX;
use super::provider;
use super::verifier::{explain_error, refusal_for_error, unix_time, verify_for};

/// Smallest RSA key that TLS libraries of peers accept, in bits.
const RSA_BITS_MIN: usize = 2048;

impl IdentityMaterial {
    /// Checks that the key is usable and belongs to the certificate, which [`Self::verify`]
    /// verifies without revocation lists.
    ///
    /// # Errors
    /// The mistake in the key, or as [`Self::verify`].
    pub(super) fn verified(mut self, now: SystemTime) -> Result<Self, TlsError> {
        self.check_key()?;
        self.valid_until = self.verify(None, now)?;
        Ok(self)
    }

    /// Returns this certificate with the roots of another one.
    ///
    /// # Errors
    /// As [`Self::verify`], below those roots.
    pub fn with_roots_of(&self, other: &Self, now: SystemTime) -> Result<Self, TlsError> {
        let own = Self {
            source: self.source.clone(),
            chain: self.chain.clone(),
            key: self.key.clone_key(),
            roots: Arc::clone(&other.roots),
            bundles: other.bundles.clone(),
            root_certificates: other.root_certificates.clone(),
            identity: self.identity.clone(),
            not_before: self.not_before,
            valid_until: self.valid_until,
        };
        own.verified(now)
    }

    /// Verifies the certificate as peers with the same roots and revocation lists do, as client and
    /// as server. Returns the first expiry on its path. Lists that are stale or do not cover it are
    /// no evidence against it.
    ///
    /// # Errors
    /// The refusal that a peer with this certificate would get.
    pub fn verify(&self, crls: Option<&Crls>, now: SystemTime) -> Result<SystemTime, TlsError> {
        let provider = provider();
        let refused = |refusal, detail| TlsError::Refused {
            file: self.source.clone(),
            refusal,
            detail,
            remedy: remedy(refusal),
        };
        let by_rustls = |error: rustls::Error| {
            let detail = explain_error(&error);
            let detail = detail.trim_start_matches("invalid peer certificate: ");
            refused(refusal_for_error(&error), detail.to_owned())
        };
        let chain = self.chain.split_first();
        let chain = chain.ok_or_else(|| TlsError::NoCertificate(self.source.clone()))?;
        let roots = self.roots_for_domain(&self.identity.trust_domain);
        let roots = roots.unwrap_or(&self.roots);
        let mut end = self.identity.not_after;
        for usage in [KeyUsage::client_auth(), KeyUsage::server_auth()] {
            let limits = (RECEIVED_MAX, usage);
            let (path, root) =
                verify_for(chain, roots, limits, &provider, unix_time(now)).map_err(by_rustls)?;
            let is_revoked =
                |crls: &Crls| crls.revocation((path.certificates(), &root), &provider, now);
            if let Some(detail) = crls.and_then(is_revoked) {
                return Err(refused(HandshakeRefusal::Revoked, detail));
            }
            end = path.not_after();
        }
        Ok(end)
    }

    fn check_key(&self) -> Result<(), TlsError> {
        let key = self.key.clone_key();
        let loaded = CertifiedKey::from_der(self.chain.clone(), key, &provider());
        loaded.map(drop).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => TlsError::KeyMismatch(error),
            error => TlsError::UnusableKey(match self.rsa_bits() {
                Some(bits) if bits < RSA_BITS_MIN => format!("it is an RSA key of {bits} bits"),
                _ => error.to_string(),
            }),
        })
    }

    /// Returns the size of the leaf's key, if it is one of RSA.
    fn rsa_bits(&self) -> Option<usize> {
        let (_, leaf) = X509Certificate::from_der(self.chain.first()?).ok()?;
        match leaf.public_key().parsed().ok()? {
            PublicKey::RSA(key) => Some(key.key_size()),
            _ => None,
        }
    }
}

/// Returns what the operator does about an own certificate that peers refuse.
const fn remedy(refusal: HandshakeRefusal) -> &'static str {
    match refusal {
        HandshakeRefusal::Expired | HandshakeRefusal::Revoked => "have a new one issued",
        HandshakeRefusal::NotYetValid => "compare it with this host's clock",
        HandshakeRefusal::BadKeyUsage => "have one issued for client and server authentication",
        _ => "write the leaf, then each issuer below the roots of `identity`",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{
        CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
        PKCS_RSA_SHA256, PublicKeyData, SanType,
    };

    use super::*;
    use crate::config::{Crl, CrlPolicy, IdentityFiles};
    use crate::tools::dev::{Authority, Leaf};

    const ID: &str = "spiffe://east.local/ns/a/sa/b";
    const HOUR: Duration = Duration::from_secs(3600);

    fn load(chain: &str, key: &str, roots: &str) -> Result<IdentityMaterial, TlsError> {
        let folder = tempfile::tempdir().expect("a folder");
        let [chain, key, roots] =
            [("chain", chain), ("key", key), ("roots", roots)].map(|(name, text)| {
                let file = folder.path().join(name);
                std::fs::write(&file, text).expect("a file");
                file
            });
        IdentityMaterial::load(&IdentityFiles { chain, key, roots })
    }

    fn refusal(loaded: Result<IdentityMaterial, TlsError>) -> Option<HandshakeRefusal> {
        match loaded.expect_err("a refusal") {
            TlsError::Refused { refusal, .. } => Some(refusal),
            _ => None,
        }
    }

    fn leaf(params: &mut CertificateParams) {
        params.subject_alt_names = vec![SanType::URI(ID.try_into().expect("a URI"))];
    }

    #[test]
    fn a_certificate_that_peers_would_refuse_is_not_loaded() {
        let authority = Authority::new().expect("a root");
        let root = authority.root_pem();
        let east = authority.intermediate("east").expect("an intermediate");
        let signed = |change: fn(&mut CertificateParams)| {
            let signed = east.leaf_with(|params| {
                leaf(params);
                change(params);
            });
            signed.expect("a leaf")
        };
        let below = |change: fn(&mut CertificateParams)| {
            let issuer = authority.intermediate_with("east", change);
            issuer.expect("an intermediate").leaf(ID).expect("a leaf")
        };
        let loaded = |leaf: &Leaf| load(&leaf.chain_pem, &leaf.key_pem, &root);
        let only_server: fn(&mut CertificateParams) =
            |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let only_client: fn(&mut CertificateParams) =
            |params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let good = signed(|_| ());
        let material = loaded(&good).expect("an identity");
        assert_eq!(material.valid_until, material.identity.not_after);
        for (leaf, want) in [
            (signed(|params| params.not_before += HOUR), HandshakeRefusal::NotYetValid),
            (signed(|params| params.not_after = params.not_before), HandshakeRefusal::Expired),
            (below(|params| params.not_after = params.not_before), HandshakeRefusal::Expired),
            (signed(only_server), HandshakeRefusal::BadKeyUsage),
            (signed(only_client), HandshakeRefusal::BadKeyUsage),
            // Only one of the two directions sees each of these.
            (below(only_server), HandshakeRefusal::BadKeyUsage),
            (below(only_client), HandshakeRefusal::BadKeyUsage),
            (below(|params| params.is_ca = IsCa::ExplicitNoCa), HandshakeRefusal::UnknownIssuer),
        ] {
            assert_eq!(refusal(loaded(&leaf)), Some(want));
        }
        let other = Authority::new().expect("a root").root_pem();
        let elsewhere = load(&good.chain_pem, &good.key_pem, &other);
        assert_eq!(refusal(elsewhere), Some(HandshakeRefusal::UnknownIssuer));
        let both = load(&good.chain_pem, &good.key_pem, &(other + &root));
        assert!(both.is_ok(), "one of two roots suffices");
        let roots = load(&good.chain_pem, &good.key_pem, &good.chain_pem);
        assert!(matches!(roots, Err(TlsError::NotARoot { .. })), "{roots:?}");
    }

    #[test]
    fn only_a_list_that_names_a_certificate_of_the_chain_is_evidence_against_it() {
        let authority = Authority::new().expect("a root");
        let east = authority.intermediate("east").expect("an intermediate");
        let [own, other] = [0, 1].map(|_| east.leaf(ID).expect("a leaf"));
        let material = load(&own.chain_pem, &own.key_pem, &authority.root_pem());
        let material = material.expect("an identity");
        let now = SystemTime::now();
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("list");
        for (list, want) in [
            (authority.crl(&[], 1, now + HOUR), None),
            (east.crl(&[&other.chain_pem], 1, now + HOUR), None),
            (east.crl(&[], 1, now - HOUR), None),
            (east.crl(&[&own.chain_pem], 1, now + HOUR), Some(HandshakeRefusal::Revoked)),
            (east.crl(&[&own.chain_pem], 1, now - HOUR), Some(HandshakeRefusal::Revoked)),
            (authority.crl(&[&east.pem()], 1, now + HOUR), Some(HandshakeRefusal::Revoked)),
        ] {
            std::fs::write(&file, list.expect("a list")).expect("a file");
            let (on_stale, on_missing) = (CrlPolicy::Reject, CrlPolicy::Reject);
            let crls = Crls::load(&Crl { files: vec![file.clone()], on_stale, on_missing });
            let verified = material.verify(Some(&crls.expect("a list")), now);
            let refused = verified.err().and_then(|error| match error {
                TlsError::Refused { refusal, .. } => Some(refusal),
                _ => None,
            });
            assert_eq!(refused, want);
        }
        let late = material.verify(None, material.valid_until + HOUR);
        let late = late.expect_err("it has expired").to_string();
        assert!(late.contains("(expired)") && late.contains("have a new one issued"), "{late}");
    }

    #[test]
    fn the_end_of_the_chain_is_the_first_on_its_path() {
        let authority = Authority::new().expect("a root");
        let end = SystemTime::now() + HOUR;
        let east = authority.intermediate_with("east", |params| params.not_after = end.into());
        let leaf = east.expect("an intermediate").leaf(ID).expect("a leaf");
        let material = load(&leaf.chain_pem, &leaf.key_pem, &authority.root_pem());
        let material = material.expect("an identity");
        assert!(material.valid_until <= end && material.identity.not_after > end);
    }

    /// Public key of RSA with 1024 bits. Nobody has its private key.
    struct WeakKey(Vec<u8>);

    impl PublicKeyData for WeakKey {
        fn der_bytes(&self) -> &[u8] {
            &self.0
        }

        fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
            &PKCS_RSA_SHA256
        }
    }

    #[test]
    fn encrypted_weak_and_foreign_keys_are_distinguished() {
        let authority = Authority::new().expect("a root");
        let east = authority.intermediate("east").expect("an intermediate");
        let [own, other] = [0, 1].map(|_| east.leaf(ID).expect("a leaf"));
        let root = authority.root_pem();
        let reported = |chain: &str, key: &str| {
            let loaded = load(chain, key, &root).expect_err("no usable key");
            loaded.to_string()
        };
        let encrypted = own.key_pem.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
        let old = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\
                   DEK-Info: AES-256-CBC,00\n\nAAAA\n-----END RSA PRIVATE KEY-----\n";
        for key in [&*encrypted, old] {
            let reported = reported(&own.chain_pem, key);
            assert!(reported.contains("the private key is encrypted; decrypt it"), "{reported}");
        }
        let foreign = reported(&own.chain_pem, &other.key_pem);
        assert!(foreign.contains("does not match the certificate"), "{foreign}");

        let modulus = [&[0x02, 0x81, 0x81, 0][..], &[0xff; 128], &[2, 3, 1, 0, 1]].concat();
        let length = u8::try_from(modulus.len()).expect("a byte");
        let weak = WeakKey([&[0x30, 0x81, length][..], &modulus].concat());
        let issuer = CertificateParams::default();
        let issuer = CertifiedIssuer::self_signed(issuer, KeyPair::generate().expect("a key"));
        let mut params = CertificateParams::default();
        leaf(&mut params);
        let chain = params.signed_by(&weak, &issuer.expect("an issuer")).expect("a leaf");
        let key = ::pem::encode(&::pem::Pem::new("RSA PRIVATE KEY", weak.0));
        let weak = reported(&chain.pem(), &key);
        assert!(weak.contains("an RSA key of 1024 bits"), "{weak}");
        assert!(weak.contains("at least 2048 bits"), "{weak}");
    }
}
