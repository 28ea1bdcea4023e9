//! Hand-made weak keys and signatures, which no library here produces any more.

use std::fmt;

use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_RSA_SHA256, PublicKeyData, SigningKey};
use rustls::SignatureScheme;
use rustls::sign::Signer;
use sha2::{Digest, Sha256};
use x509_parser::num_bigint::BigUint;

use crate::der::{SEQUENCE, element};

const INTEGER: u8 = 2;

/// RSA key of any size whose modulus is a single known prime, so that it needs no search for primes
/// and has no secret. Its signatures verify like any other's.
#[derive(Clone)]
pub struct RsaKey {
    modulus: BigUint,
    private: BigUint,
    bytes: usize,
    public: Vec<u8>,
}

/// Hash of a PKCS#1 v1.5 signature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Hash {
    Sha1,
    Sha256,
}

impl RsaKey {
    /// Returns a key with the modulus 2^1024 - 105.
    pub fn bits_1024() -> Self {
        Self::new(1024, 105)
    }

    /// Returns a key with the modulus 2^2048 - 1942289.
    pub fn bits_2048() -> Self {
        Self::new(2048, 1_942_289)
    }

    fn new(bits: usize, below: u32) -> Self {
        let exponent = BigUint::from(65537_u32);
        let modulus = (BigUint::from(1_u8) << bits) - below;
        // The order of the group of a prime modulus is the modulus minus one.
        let order = &modulus - 1_u8;
        let private = exponent.modinv(&order).expect("no common factor");
        let public = [integer(&modulus), integer(&exponent)].concat();
        Self { public: element(SEQUENCE, &public), modulus, private, bytes: bits / 8 }
    }

    fn apply(&self, padded: &[u8]) -> Vec<u8> {
        let padded = BigUint::from_bytes_be(padded);
        let signature = padded.modpow(&self.private, &self.modulus).to_bytes_be();
        let mut bytes = vec![0; self.bytes - signature.len()];
        bytes.extend(signature);
        bytes
    }

    /// RSASSA-PKCS1-v1_5 (RFC 8017 section 9.2).
    pub fn pkcs1(&self, hash: Hash, message: &[u8]) -> Vec<u8> {
        let digest = match hash {
            Hash::Sha1 => hex("3021300906052b0e03021a05000414", &sha1(message)),
            Hash::Sha256 => hex("3031300d060960864801650304020105000420", &Sha256::digest(message)),
        };
        let mut padded = vec![0xff; self.bytes - digest.len()];
        (padded[0], padded[1]) = (0, 1);
        *padded.last_mut().expect("room") = 0;
        padded.extend(digest);
        self.apply(&padded)
    }

    /// RSASSA-PSS with SHA-256 and a salt of 32 zeros (RFC 8017 section 9.1.1).
    fn pss(&self, message: &[u8]) -> Vec<u8> {
        let salt = [0; 32];
        let hash = [&[0; 8][..], &Sha256::digest(message), &salt].concat();
        let hash = Sha256::digest(hash);
        let mut block = vec![0; self.bytes - hash.len() - salt.len() - 2];
        block.push(1);
        block.extend(salt);
        let mask = (0_u32..).flat_map(|counter| {
            Sha256::digest([&hash[..], &counter.to_be_bytes()].concat()).to_vec()
        });
        for (byte, mask) in block.iter_mut().zip(mask) {
            *byte ^= mask;
        }
        // One bit less than the modulus.
        block[0] &= 0x7f;
        block.extend(hash);
        block.push(0xbc);
        self.apply(&block)
    }
}

impl PublicKeyData for RsaKey {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &PKCS_RSA_SHA256
    }
}

impl SigningKey for RsaKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        Ok(self.pkcs1(Hash::Sha256, message))
    }
}

impl fmt::Debug for RsaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RSA-{}", 8 * self.bytes)
    }
}

/// Key of a peer that signs its handshake by one scheme, regardless of the offered ones.
#[derive(Clone, Debug)]
pub struct FixedSchemeKey(pub RsaKey, pub SignatureScheme);

impl rustls::sign::SigningKey for FixedSchemeKey {
    fn choose_scheme(&self, _: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        Some(Box::new(self.clone()))
    }

    fn algorithm(&self) -> rustls::SignatureAlgorithm {
        rustls::SignatureAlgorithm::RSA
    }
}

impl Signer for FixedSchemeKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        Ok(match self.1 {
            SignatureScheme::RSA_PKCS1_SHA1 => self.0.pkcs1(Hash::Sha1, message),
            SignatureScheme::RSA_PKCS1_SHA256 => self.0.pkcs1(Hash::Sha256, message),
            _ => self.0.pss(message),
        })
    }

    fn scheme(&self) -> SignatureScheme {
        self.1
    }
}

/// P-224 key with the private number 1: its public point is the generator itself.
#[derive(Clone, Debug)]
pub struct P224Key;

const P224_X: &str = "b70e0cbd6bb4bf7f321390b94a03c1d356c21122343280d6115c1d21";
const P224_Y: &str = "bd376388b5f723fb4c22dfe6cd4375a05a07476444d5819985007e34";
const P224_ORDER: &str = "ffffffffffffffffffffffffffff16a2e0b8f03e13dd29455c5c2a3d";

impl P224Key {
    /// Returns its SubjectPublicKeyInfo, because rcgen does not support the curve.
    pub fn spki() -> Vec<u8> {
        let algorithm = hex("301006072a8648ce3d020106052b81040021", &[]);
        let point = hex(&format!("0004{P224_X}{P224_Y}"), &[]);
        element(SEQUENCE, &[algorithm, element(3, &point)].concat())
    }
}

impl PublicKeyData for P224Key {
    fn der_bytes(&self) -> &[u8] {
        // Replaced by `spki` before use.
        &[4; 65]
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

impl SigningKey for P224Key {
    /// With 1 as private number and 1 as nonce, r is the generator's x and s is hash + r.
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let number = |text| BigUint::from_bytes_be(&hex(text, &[]));
        let order = number(P224_ORDER);
        let hash = BigUint::from_bytes_be(&Sha256::digest(message)[..28]);
        let r = number(P224_X) % &order;
        let s = (hash + &r) % &order;
        Ok(element(SEQUENCE, &[integer(&r), integer(&s)].concat()))
    }
}

fn integer(number: &BigUint) -> Vec<u8> {
    let bytes = number.to_bytes_be();
    let sign = if bytes[0] < 0x80 { &[][..] } else { &[0] };
    element(INTEGER, &[sign, &bytes].concat())
}

/// Decodes hex, and appends `more`.
fn hex(text: &str, more: &[u8]) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let digits = digits.map(|pair| std::str::from_utf8(pair).expect("ASCII"));
    let bytes = digits.map(|pair| u8::from_str_radix(pair, 16).expect("hex"));
    bytes.chain(more.iter().copied()).collect()
}

/// SHA-1 (RFC 3174).
fn sha1(message: &[u8]) -> [u8; 20] {
    let mut state = [0x6745_2301_u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0];
    let mut padded = [message, &[0x80]].concat();
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend((8 * message.len() as u64).to_be_bytes());
    for block in padded.chunks(64) {
        let words = block.chunks(4).map(|word| word.try_into().expect("4"));
        let mut w: Vec<_> = words.map(u32::from_be_bytes).collect();
        for t in 16..80 {
            w.push((w[t - 3] ^ w[t - 8] ^ w[t - 14] ^ w[t - 16]).rotate_left(1));
        }
        let [mut a, mut b, mut c, mut d, mut e] = state;
        for (t, word) in w.iter().enumerate() {
            let (f, k) = match t / 20 {
                0 => ((b & c) | (!b & d), 0x5a82_7999),
                1 => (b ^ c ^ d, 0x6ed9_eba1),
                2 => ((b & c) | (b & d) | (c & d), 0x8f1b_bcdc),
                _ => (b ^ c ^ d, 0xca62_c1d6_u32),
            };
            let next = a.rotate_left(5).wrapping_add(f).wrapping_add(e);
            (e, d, c, b, a) =
                (d, c, b.rotate_left(30), a, next.wrapping_add(k).wrapping_add(*word));
        }
        for (sum, part) in state.iter_mut().zip([a, b, c, d, e]) {
            *sum = sum.wrapping_add(part);
        }
    }
    let bytes: Vec<u8> = state.iter().flat_map(|word| word.to_be_bytes()).collect();
    bytes.try_into().expect("20 bytes")
}

#[test]
fn the_hash_by_hand_is_sha1() {
    for (message, digest) in [
        ("abc", "a9993e364706816aba3e25717850c26c9cd0d89d"),
        (
            "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "84983e441c3bd26ebaae4aa1f95129e5e54670f1",
        ),
    ] {
        assert_eq!(sha1(message.as_bytes()).to_vec(), hex(digest, &[]));
    }
}
