//! Keys and their signatures: of the chain, and of the handshake itself.

use rcgen::{
    KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ECDSA_P521_SHA512, PKCS_ED25519, PKCS_RSA_SHA256,
    RsaKeySize,
};
use rustls::SignatureScheme::{RSA_PKCS1_SHA1, RSA_PKCS1_SHA256, RSA_PSS_SHA256};

use super::{ADMITTED, Case, case};
use crate::der::{self, Name, SIGNATURE_ALGORITHM, SUBJECT_PUBLIC_KEY, URI};
use crate::pki::{Authority, Key, Pki, Shown};
use crate::support::CLIENT;
use crate::weak::{FixedSchemeKey, Hash, P224Key, RsaKey};

const BAD: &str = "bad_signature";
const ID: &[Name<'_>] = &[(URI, CLIENT.as_bytes())];

pub fn cases(pki: &Pki) -> Vec<Case> {
    let mut cases = leaves(pki);
    cases.extend(authorities(pki));
    cases
}

fn leaves(pki: &Pki) -> Vec<Case> {
    let west = &pki.west;
    let of = |algorithm| {
        let key = KeyPair::generate_for(algorithm).expect("a key");
        west.keyed(key, ID, |_| ())
    };
    let rsa = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).expect("a key");
    let by_hand = |key: RsaKey, scheme| {
        let chain = west.chain_of(&key, ID, |_| ());
        Shown::nothing().chain(chain).signing(FixedSchemeKey(key, scheme))
    };
    let good = west.client();
    let wrong = Shown { key: west.client().key, ..good.clone() };
    let p224 = west.rewrites(good, |fields| fields[SUBJECT_PUBLIC_KEY] = P224Key::spki());
    let other_kind = Shown { key: of(&PKCS_ED25519).key, ..west.client() };
    let (weak, strong) = (RsaKey::bits_1024, RsaKey::bits_2048);
    vec![
        case("an RSA-2048 leaf", ADMITTED, west.keyed(rsa, ID, |_| ())),
        case("a P-384 leaf", ADMITTED, of(&PKCS_ECDSA_P384_SHA384)),
        case("a P-521 leaf", ADMITTED, of(&PKCS_ECDSA_P521_SHA512)),
        case("an Ed25519 leaf", ADMITTED, of(&PKCS_ED25519)),
        case("another private key", BAD, wrong),
        case("a private key of another kind", BAD, other_kind),
        // Validates the hand-made key, so that the rejections below are due to its weakness.
        case("an RSA-2048 leaf by hand", ADMITTED, by_hand(strong(), RSA_PSS_SHA256)),
        case("an RSA-1024 leaf", BAD, by_hand(weak(), RSA_PSS_SHA256)),
        case("a handshake signed with SHA-1", BAD, by_hand(strong(), RSA_PKCS1_SHA1)),
        case("a handshake signed as in TLS 1.2", BAD, by_hand(strong(), RSA_PKCS1_SHA256)),
        // TLS 1.3 has no scheme for this curve, so the peer signs with a P-256 key.
        case("a P-224 leaf", BAD, p224),
    ]
}

fn authorities(pki: &Pki) -> Vec<Case> {
    let root = &pki.root;
    let rsa = |key| root.below_with("an RSA authority", Key::new(key), |_| ());
    let (weak, strong) = (rsa(RsaKey::bits_1024()), rsa(RsaKey::bits_2048()));
    let mut p224 = root.below_with("a P-224 authority", Key::new(P224Key), |_| ());
    let change = |fields: &mut Vec<Vec<u8>>| fields[SUBJECT_PUBLIC_KEY] = P224Key::spki();
    p224.der = der::rewritten(&p224.der, change, |tbs| root.signs(tbs));
    vec![
        case("an RSA-2048 issuer", ADMITTED, strong.client()),
        case("an RSA-1024 issuer", BAD, weak.client()),
        case("a P-224 issuer", BAD, p224.client()),
        case("signed with SHA-1", BAD, with_sha1(&strong)),
    ]
}

/// Returns a certificate with sha1WithRSAEncryption, which differs from the variant with SHA-256 in
/// one byte.
fn with_sha1(issuer: &Authority) -> Shown {
    let shown = issuer.client();
    let change = |fields: &mut Vec<Vec<u8>>| {
        let last = &mut fields[SIGNATURE_ALGORITHM][12];
        assert_eq!(*last, 11, "sha256WithRSAEncryption");
        *last = 5;
    };
    let sign = |tbs: &[u8]| RsaKey::bits_2048().pkcs1(Hash::Sha1, tbs);
    let leaf = der::rewritten(&shown.chain[0], change, sign);
    shown.leaf(|_| leaf.to_vec())
}
