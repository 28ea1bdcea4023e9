//! Decomposition and composition of certificates, for encodings that no library writes.

use rustls::pki_types::CertificateDer;

pub const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 3;

/// Positions of fields in a TBSCertificate (RFC 5280 section 4.1).
pub const VERSION: usize = 0;
pub const SIGNATURE_ALGORITHM: usize = 2;
pub const SUBJECT_PUBLIC_KEY: usize = 6;
pub const EXTENSIONS: usize = 7;

/// Returns an element: its tag, its length in the shortest form, and its content.
pub fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let length = match content.len() {
        0..128 => &length[7..],
        128..256 => &[&[0x81], &length[7..]].concat(),
        _ => &[&[0x82], &length[6..]].concat(),
    };
    [&[tag], length, content].concat()
}

/// Returns the length of the head of the first element in `der`, and of its content.
fn lengths(der: &[u8]) -> (usize, usize) {
    match der[1] {
        0x82 => (4, usize::from(der[2]) << 8 | usize::from(der[3])),
        0x81 => (3, usize::from(der[2])),
        short => (2, usize::from(short)),
    }
}

/// Returns the content of an element.
pub fn content(der: &[u8]) -> &[u8] {
    let (head, length) = lengths(der);
    &der[head..head + length]
}

/// Returns consecutive elements, each with its head.
pub fn elements(mut row: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while !row.is_empty() {
        let (head, length) = lengths(row);
        let (first, rest) = row.split_at(head + length);
        found.push(first.to_vec());
        row = rest;
    }
    found
}

/// Returns the parts of a certificate: the signed part, the algorithm, and the signature.
pub fn parts(certificate: &CertificateDer<'_>) -> [Vec<u8>; 3] {
    elements(content(certificate)).try_into().expect("three parts")
}

/// Returns a certificate of these parts.
pub fn certificate(parts: &[Vec<u8>; 3]) -> CertificateDer<'static> {
    element(SEQUENCE, &parts.concat()).into()
}

/// Returns the certificate with another content, signed again.
pub fn rewritten(
    old: &CertificateDer<'_>,
    change: impl FnOnce(&mut Vec<Vec<u8>>),
    sign: impl FnOnce(&[u8]) -> Vec<u8>,
) -> CertificateDer<'static> {
    let [tbs, ..] = parts(old);
    let mut fields = elements(content(&tbs));
    change(&mut fields);
    // Version 1 has no version field.
    let versionless = usize::from(fields[VERSION][0] != 0xa0);
    let algorithm = fields[SIGNATURE_ALGORITHM - versionless].clone();
    let tbs = element(SEQUENCE, &fields.concat());
    let signature = element(BIT_STRING, &[&[0], &*sign(&tbs)].concat());
    certificate(&[tbs, algorithm, signature])
}

/// Name of a SAN extension: its type, and its raw bytes.
pub type Name<'a> = (u8, &'a [u8]);

/// Types of names (RFC 5280 section 4.2.1.6).
pub const OTHER_NAME: u8 = 0xa0;
pub const EMAIL: u8 = 0x81;
pub const DNS: u8 = 0x82;
pub const URI: u8 = 0x86;
pub const IP: u8 = 0x87;

/// Returns the content of a SAN extension.
pub fn names(names: &[Name<'_>]) -> Vec<u8> {
    let names: Vec<_> = names.iter().map(|(tag, bytes)| element(*tag, bytes)).collect();
    element(SEQUENCE, &names.concat())
}
