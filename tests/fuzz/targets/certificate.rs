//! Identities of certificates: raw bytes, and names in a well-formed certificate.

use rustls::pki_types::CertificateDer;
use strait::tls::leaf_identity;

/// Tags of the types of names in a SAN (RFC 5280 section 4.2.1.6).
const TAGS: [u8; 6] = [0x86, 0x82, 0x81, 0x87, 0xa0, 0x88];
const URI: u8 = TAGS[0];
const ID_BYTES_MAX: usize = 2048;

/// Reads the mode from the first byte: 0 for a certificate, 1 for its names, 2 for changes to one,
/// of three bytes each: place and new value.
pub fn identity(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else {
        return;
    };
    match mode % 3 {
        0 => drop(judge(rest)),
        1 => judge_names(&names(rest)),
        _ => {
            let uri: &[u8] = b"spiffe://west.local/ns/shop/sa/checkout";
            let mut der = certificate(&[(URI, uri)]);
            for change in rest.chunks_exact(3) {
                let place = usize::from(change[0]) << 8 | usize::from(change[1]);
                let place = place % der.len();
                der[place] = change[2];
            }
            drop(judge(&der));
        }
    }
}

/// Checks that an accepted identity consists of its parts.
fn judge(der: &[u8]) -> Option<String> {
    let identity = leaf_identity(&CertificateDer::from(der)).ok()?;
    let whole = format!(
        "spiffe://{}/ns/{}/sa/{}",
        identity.trust_domain, identity.namespace, identity.service_account
    );
    assert_eq!(*identity.uri, *whole);
    assert!(is_plain(whole.as_bytes()), "{whole:?}");
    Some(whole)
}

/// Checks that only the names decide in an otherwise valid certificate.
fn judge_names(names: &[(u8, &[u8])]) {
    let got = judge(&certificate(names));
    let uris: Vec<_> = names.iter().filter(|(tag, _)| *tag == URI).collect();
    match uris[..] {
        [(_, uri)] if is_plain(uri) => {
            // Other names may still break the certificate's encoding.
            let alone = names.len() == 1;
            assert!(got.is_some() || !alone, "{:?}", String::from_utf8_lossy(uri));
            assert!(got.is_none_or(|got| got.as_bytes() == *uri));
        }
        _ => assert_eq!(got, None, "{names:?}"),
    }
}

/// Returns true for the form of Istio's identities, implemented independently of the gateway.
fn is_plain(uri: &[u8]) -> bool {
    let small = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
    let any = |byte: &u8| small(byte) || byte.is_ascii_uppercase();
    let Some(rest) = uri.strip_prefix(b"spiffe://") else {
        return false;
    };
    let parts: Vec<&[u8]> = rest.split(|byte| *byte == b'/').collect();
    let [domain, b"ns", namespace, b"sa", account] = parts[..] else {
        return false;
    };
    let segment = |part: &[u8]| !matches!(part, b"" | b"." | b"..") && part.iter().all(any);
    let domain = !domain.is_empty() && domain.len() <= 255 && domain.iter().all(small);
    uri.len() <= ID_BYTES_MAX && domain && segment(namespace) && segment(account)
}

/// Parses names: a byte for the type, one for the length in units of eight or one, then the name.
fn names(mut data: &[u8]) -> Vec<(u8, &[u8])> {
    let mut names = Vec::new();
    while let [kind, length, rest @ ..] = data {
        let unit = if kind & 0x80 == 0 { 1 } else { 8 };
        let length = (usize::from(*length) * unit).min(rest.len());
        let (name, rest) = rest.split_at(length);
        names.push((TAGS[usize::from(kind & 0x7f) % TAGS.len()], name));
        data = rest;
    }
    names
}

/// An element of DER: its tag, its length in the shortest form, and its content.
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let length = match content.len() {
        0..128 => &length[7..],
        128..256 => &[&[0x81], &length[7..]].concat(),
        256..65_536 => &[&[0x82], &length[6..]].concat(),
        _ => &[&[0x83], &length[5..]].concat(),
    };
    [&[tag], length, content].concat()
}

/// A certificate with these names, without a subject and with an empty signature.
fn certificate(names: &[(u8, &[u8])]) -> Vec<u8> {
    const SEQUENCE: u8 = 0x30;
    const SUBJECT_ALT_NAME: &[u8] = &[6, 3, 0x55, 0x1d, 0x11];
    const ECDSA_WITH_SHA256: &[u8] = &[6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
    const EC_PUBLIC_KEY: &[u8] = &[6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
    const EMPTY_BITS: &[u8] = &[3, 1, 0];
    let sequence = |parts: &[&[u8]]| element(SEQUENCE, &parts.concat());
    let names: Vec<u8> = names.iter().flat_map(|(tag, name)| element(*tag, name)).collect();
    let names = element(4, &element(SEQUENCE, &names));
    let extensions = sequence(&[&sequence(&[SUBJECT_ALT_NAME, &[1, 1, 0xff], &names])]);
    let algorithm = sequence(&[ECDSA_WITH_SHA256]);
    let validity = sequence(&[&element(0x17, b"250101000000Z"), &element(0x17, b"490101000000Z")]);
    let key = sequence(&[&sequence(&[EC_PUBLIC_KEY]), EMPTY_BITS]);
    let empty = sequence(&[]);
    let signed = sequence(&[
        &element(0xa0, &[2, 1, 2]),
        &[2, 1, 1],
        &algorithm,
        &empty,
        &validity,
        &empty,
        &key,
        &element(0xa3, &extensions),
    ]);
    sequence(&[&signed, &algorithm, EMPTY_BITS])
}
