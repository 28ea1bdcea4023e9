//! Traffic key of one direction, with its sequence number.

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;
use zeroize::Zeroizing;

use super::error::RecordError;

pub const HEADER_BYTES: usize = 5;

/// Size of the authentication tag of every suite (RFC 8446 5.2).
pub(super) const TAG_BYTES: usize = 16;

pub(super) struct Key {
    cipher: Cipher,
    /// Number of records that the key has protected (RFC 8446 5.3).
    pub(super) sequence: u64,
}

/// aws-lc zeroizes the key when it frees it.
enum Cipher {
    Aead {
        key: LessSafeKey,
        iv: Zeroizing<[u8; NONCE_LEN]>,
    },
    /// No encryption, and a tag of zeros.
    Plain,
}

impl Key {
    /// Creates a key that has protected `sequence` records.
    pub(super) fn new(
        (sequence, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, rustls::Error> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => return Err(rustls::Error::General("unknown cipher suite".to_owned())),
        };
        let key = UnboundKey::new(algorithm, key.as_ref());
        let key = key.map_err(|_| rustls::Error::General("unusable traffic key".to_owned()))?;
        let mut own = Zeroizing::new([0; NONCE_LEN]);
        for (own, byte) in own.iter_mut().zip(iv.as_ref()) {
            *own = *byte;
        }
        let key = LessSafeKey::new(key);
        Ok(Self { cipher: Cipher::Aead { key, iv: own }, sequence })
    }

    /// Creates a key that does not encrypt.
    pub(super) fn plain() -> Self {
        Self { cipher: Cipher::Plain, sequence: 0 }
    }

    /// Opens the protected part of a record in place. Returns TLSInnerPlaintext.
    pub(super) fn open<'a>(
        &mut self,
        header: [u8; HEADER_BYTES],
        protected: &'a mut [u8],
    ) -> Result<&'a [u8], RecordError> {
        let inner = match &self.cipher {
            Cipher::Aead { key, iv } => key
                .open_in_place(nonce(iv, self.sequence), Aad::from(header), protected)
                .ok()
                .map(|inner| &*inner),
            Cipher::Plain => protected
                .split_last_chunk()
                .and_then(|(inner, tag)| (*tag == [0; TAG_BYTES]).then_some(inner)),
        };
        self.sequence += 1;
        inner.ok_or(RecordError::BadRecordMac)
    }

    /// Seals TLSInnerPlaintext in place and writes its tag.
    pub(super) fn seal(
        &mut self,
        header: [u8; HEADER_BYTES],
        inner: &mut [u8],
        tag: &mut [u8; TAG_BYTES],
    ) -> Result<(), RecordError> {
        match &self.cipher {
            Cipher::Aead { key, iv } => {
                let nonce = nonce(iv, self.sequence);
                let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(header), inner);
                let sealed = sealed.map_err(|_| RecordError::Internal("sealing has failed"))?;
                let sealed = sealed.as_ref().try_into();
                *tag = sealed.map_err(|_| RecordError::Internal("wrong size of a tag"))?;
            }
            Cipher::Plain => *tag = [0; TAG_BYTES],
        }
        self.sequence += 1;
        Ok(())
    }
}

/// Returns the nonce of a record: the IV, exclusive or with the sequence number (RFC 8446 5.3).
fn nonce(iv: &[u8; NONCE_LEN], sequence: u64) -> Nonce {
    let mut nonce = *iv;
    let low = nonce.iter_mut().rev();
    for (byte, of_sequence) in low.zip(sequence.to_le_bytes()) {
        *byte ^= of_sequence;
    }
    Nonce::assume_unique_for_key(nonce)
}
