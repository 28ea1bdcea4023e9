//! Malformed certificates.

use rcgen::CustomExtension;

use super::{ADMITTED, Case, case};
use crate::der::{self, EXTENSIONS, SEQUENCE, SIGNATURE_ALGORITHM, VERSION, element};
use crate::pki::{Pki, Shown};

const BAD: &str = "bad_encoding";

/// Returns the certificate with its last byte, which is part of the signature, changed.
fn corrupted(certificate: &[u8]) -> Vec<u8> {
    let mut bytes = certificate.to_vec();
    *bytes.last_mut().expect("a byte") ^= 1;
    bytes
}

/// An extension of a private arc, 1.3.6.1.4.1.99999.1.
fn unknown(critical: bool) -> CustomExtension {
    let oid = [1, 3, 6, 1, 4, 1, 99_999, 1];
    let mut extension = CustomExtension::from_oid_content(&oid, vec![5, 0]);
    extension.set_criticality(critical);
    extension
}

pub fn cases(pki: &Pki) -> Vec<Case> {
    let mut cases = bytes(pki);
    cases.extend(signatures(pki));
    cases.extend(fields(pki));
    cases
}

fn bytes(pki: &Pki) -> Vec<Case> {
    let good = pki.west.client();
    let leaf = |change: fn(&[u8]) -> Vec<u8>| good.clone().leaf(change);
    vec![
        case("garbage after the leaf", BAD, leaf(|der| [der, b"garbage"].concat())),
        case("a zero after the leaf", BAD, leaf(|der| [der, &[0]].concat())),
        case("the leaf cut short", BAD, leaf(|der| der[..der.len() - 1].to_vec())),
        case("half a leaf", BAD, leaf(|der| der[..der.len() / 2].to_vec())),
        case("an empty leaf", BAD, leaf(|_| Vec::new())),
        case("one byte", BAD, leaf(|_| vec![0x30])),
        case("zeros", BAD, leaf(|der| vec![0; der.len()])),
        case("text", BAD, leaf(|_| b"-----BEGIN CERTIFICATE-----\n".to_vec())),
        case(
            "a length of 4 GiB",
            BAD,
            leaf(|der| [&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff], der::content(der)].concat()),
        ),
        case(
            "an indefinite length",
            BAD,
            leaf(|der| [&[0x30, 0x80], der::content(der), &[0, 0]].concat()),
        ),
        case("a set for a sequence", BAD, leaf(|der| element(0x31, der::content(der)))),
        case(
            "deep nesting",
            BAD,
            leaf(|_| (0..5000).fold(Vec::new(), |inner, _| element(SEQUENCE, &inner))),
        ),
    ]
}

fn signatures(pki: &Pki) -> Vec<Case> {
    let good = pki.west.client();
    let above = |bytes: Vec<u8>| {
        let first = good.chain[0].clone();
        good.clone().chain([first, bytes.into()])
    };
    vec![
        case("a corrupted signature", "bad_signature", good.clone().leaf(corrupted)),
        case("a signature of nothing", "bad_signature", no_signature(&good)),
        case("a corrupted intermediate", "bad_signature", above(corrupted(&pki.west.der))),
        case("a garbled intermediate", BAD, above(b"garbage".to_vec())),
        case("an empty intermediate", BAD, above(Vec::new())),
    ]
}

fn no_signature(good: &Shown) -> Shown {
    let [tbs, algorithm, _] = der::parts(&good.chain[0]);
    let empty = der::certificate(&[tbs, algorithm, vec![3, 1, 0]]);
    good.clone().leaf(|_| empty.to_vec())
}

fn fields(pki: &Pki) -> Vec<Case> {
    let west = &pki.west;
    let rewritten = |change: fn(&mut Vec<Vec<u8>>)| west.rewrites(west.client(), change);
    let mismatch = {
        let good = west.client();
        let [tbs, _, signature] = der::parts(&good.chain[0]);
        // ecdsa-with-SHA384 outside, ecdsa-with-SHA256 inside.
        let other = element(SEQUENCE, &[6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 3]);
        let mixed = der::certificate(&[tbs, other, signature]);
        good.leaf(|_| mixed.to_vec())
    };
    let extra =
        |critical| west.client_but(move |params| params.custom_extensions.push(unknown(critical)));
    vec![
        case("rewritten without a change", ADMITTED, rewritten(|_| ())),
        case(
            "version 1",
            "no_uri_san",
            rewritten(|fields| {
                fields.truncate(EXTENSIONS);
                fields.remove(VERSION);
            }),
        ),
        case(
            "version 2 with extensions",
            BAD,
            rewritten(|fields| {
                fields[VERSION] = vec![0xa0, 3, 2, 1, 1];
            }),
        ),
        case("version 4", BAD, rewritten(|fields| fields[VERSION] = vec![0xa0, 3, 2, 1, 3])),
        case("no extensions", "no_uri_san", rewritten(|fields| fields.truncate(EXTENSIONS))),
        case("a negative serial", ADMITTED, rewritten(|fields| fields[1] = vec![2, 1, 0xff])),
        case(
            "an unknown algorithm",
            "bad_signature",
            rewritten(|fields| {
                fields[SIGNATURE_ALGORITHM] = element(SEQUENCE, &[6, 3, 0x2a, 3, 4]);
            }),
        ),
        case("two algorithms", BAD, mismatch),
        case("an unknown critical extension", BAD, extra(true)),
        case("an unknown extension", ADMITTED, extra(false)),
        case(
            "an unknown extension twice",
            BAD,
            west.client_but(|params| {
                params.custom_extensions.extend([unknown(false), unknown(false)]);
            }),
        ),
    ]
}
