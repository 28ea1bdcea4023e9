//! Tests of files of lists, and of their replacement.

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
    let config =
        Crl { files: files.iter().enumerate().map(file).collect(), on_stale: STRICT, on_missing };
    Crls::load(&config).map_err(|error| error.to_string())
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
    for crls in [of(&[Some(both.as_bytes())]), of(&[Some(first.as_bytes()), Some(&der)])] {
        let shown = crls.status();
        let numbers: Vec<_> = shown.iter().filter_map(|one| one.number.as_deref()).collect();
        assert_eq!(numbers, ["8", "7"], "the newest first");
        assert!(shown[0].issuer.contains("intermediate of west"), "{shown:?}");
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
fn a_scope_by_role_alone_covers_certificates_of_any_distribution_point() {
    // issuingDistributionPoint, critical, with onlyContainsUserCerts and no distributionPoint.
    let extension = [
        0x30, 0x0f, 0x06, 0x03, 0x55, 0x1d, 0x1c, 0x01, 0x01, 0xff, 0x04, 0x05, 0x30, 0x03, 0x81,
        0x01, 0xff,
    ];
    let (_, extension) = X509Extension::from_der(&extension).expect("an extension");
    let scope = Scope::new(&extension).expect("a scope");
    let authority = Authority::new().expect("a root");
    let leaf = authority.intermediate("west").expect("an intermediate").leaf_with(|params| {
        let uris = vec!["http://crl.example/1".to_owned()];
        params.crl_distribution_points = vec![rcgen::CrlDistributionPoint { uris }];
    });
    let leaf = CertificateDer::from_pem_slice(leaf.expect("a leaf").chain_pem.as_bytes());
    let leaf = leaf.expect("a certificate");
    let (_, leaf) = X509Certificate::from_der(&leaf).expect("a certificate");
    assert!(scope.covers(&leaf, true) && !scope.covers(&leaf, false));
}

#[test]
fn a_newer_list_replaces_an_older_one_of_the_same_key_and_scope() {
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
}
