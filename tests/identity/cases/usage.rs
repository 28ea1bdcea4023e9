//! Permitted usages of a certificate.

use rcgen::ExtendedKeyUsagePurpose::{Any, ClientAuth, CodeSigning, ServerAuth};
use rcgen::KeyUsagePurpose::{
    CrlSign, DigitalSignature, KeyAgreement, KeyCertSign, KeyEncipherment,
};
use rcgen::{BasicConstraints, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose};

use super::{ADMITTED, Case, case};
use crate::pki::{Authority, Pki};

const BAD: &str = "bad_key_usage";
const CA: &str = "ca_as_leaf";

/// KeyUsage (X509-SVID section 4.3): digitalSignature, and neither keyCertSign nor cRLSign.
const USAGES: &[(&str, &str, &[KeyUsagePurpose])] = &[
    ("no KeyUsage", BAD, &[]),
    ("keyEncipherment only", BAD, &[KeyEncipherment]),
    ("keyAgreement only", BAD, &[KeyAgreement]),
    ("keyCertSign only", BAD, &[KeyCertSign]),
    ("cRLSign only", BAD, &[CrlSign]),
    ("keyCertSign too", BAD, &[DigitalSignature, KeyCertSign]),
    ("cRLSign too", BAD, &[DigitalSignature, CrlSign]),
    ("keyEncipherment too", ADMITTED, &[DigitalSignature, KeyEncipherment]),
];

/// ExtendedKeyUsage (X509-SVID section 4.4): if present, it has serverAuth and clientAuth.
const PURPOSES: &[(&str, &str, &[ExtendedKeyUsagePurpose])] = &[
    ("no ExtendedKeyUsage", ADMITTED, &[]),
    ("serverAuth only", BAD, &[ServerAuth]),
    ("clientAuth only", BAD, &[ClientAuth]),
    ("codeSigning only", BAD, &[CodeSigning]),
    ("anyExtendedKeyUsage only", BAD, &[Any]),
    ("codeSigning too", ADMITTED, &[ServerAuth, ClientAuth, CodeSigning]),
];

pub fn cases(pki: &Pki) -> Vec<Case> {
    let west = &pki.west;
    let usages = USAGES.iter().map(|&(name, expected, usages)| {
        case(name, expected, west.client_but(|params| params.key_usages = usages.to_vec()))
    });
    let purposes = PURPOSES.iter().map(|(name, expected, purposes)| {
        let shown = west.client_but(|params| params.extended_key_usages = purposes.to_vec());
        case(name, expected, shown)
    });
    let mut cases: Vec<_> = usages.chain(purposes).collect();
    let authority = |usages: &[KeyUsagePurpose], constraints| {
        west.client_but(|params| {
            params.key_usages = usages.to_vec();
            params.is_ca = IsCa::Ca(constraints);
        })
    };
    let own = |authority: &Authority| west.client().chain([authority.der.clone()]);
    cases.extend([
        case("no BasicConstraints", ADMITTED, west.client_but(|params| params.is_ca = IsCa::NoCa)),
        case("a CA as leaf", CA, authority(&[DigitalSignature], BasicConstraints::Unconstrained)),
        case(
            "a CA as leaf that may sign",
            CA,
            authority(&[DigitalSignature, KeyCertSign], BasicConstraints::Unconstrained),
        ),
        case(
            "a CA as leaf with path length 0",
            CA,
            authority(&[DigitalSignature], BasicConstraints::Constrained(0)),
        ),
        case("the intermediate as leaf", CA, own(west)),
        case("the root as leaf", CA, own(&pki.root)),
    ]);
    cases
}
