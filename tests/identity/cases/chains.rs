//! Issuers and validity periods.

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, KeyPair,
    KeyUsagePurpose, NameConstraints,
};
use time::Duration;

use super::{ADMITTED, Case, case};
use crate::der::{DNS, URI};
use crate::pki::{Authority, Pki, Shown, self_signed};
use crate::support::CLIENT;

const UNKNOWN: &str = "unknown_issuer";

pub fn cases(pki: &Pki) -> Vec<Case> {
    [issuers(pki), rights(pki), order(pki), crossed(pki), dates(pki), limits(pki)]
        .into_iter()
        .flatten()
        .collect()
}

/// Returns a client below `depth` authorities of `root`, each signed by the previous one.
fn deep(root: &Authority, depth: usize) -> Shown {
    let mut chain = vec![root.below("level 0")];
    for level in 1..depth {
        let above = &chain[level - 1];
        chain.push(above.below(&format!("level {level}")));
    }
    let last = chain.last().expect("one");
    let shown = last.client();
    shown.and(chain.iter().rev().skip(1))
}

fn issuers(pki: &Pki) -> Vec<Case> {
    let (root, west) = (&pki.root, &pki.west);
    let twin = Authority::root("root of these tests", |_| ());
    let other_west = pki.foreign.below("west");
    let (other, by_twin) = (other_west.client(), twin.client());
    let leaf = other.chain[0].clone();
    let posing = other.clone().chain([leaf, west.der.clone()]);
    let none = west.client().chain([]);
    vec![
        case("no certificate", "no_certificate", Shown::nothing()),
        case("an empty chain", "no_certificate", none),
        case("straight from the root", ADMITTED, root.client()),
        case("another root", UNKNOWN, other.clone()),
        case("another root, sent along", UNKNOWN, other.and([&pki.foreign])),
        case("self-signed", UNKNOWN, self_signed()),
        case("a root of the same name", "bad_signature", by_twin.clone()),
        case("that root sent along", "bad_signature", by_twin.and([&twin])),
        case("an intermediate of the same name", "bad_signature", posing),
    ]
}

/// Returns cases with issuers that may not sign.
fn rights(pki: &Pki) -> Vec<Case> {
    let signed_by = |change: fn(&mut CertificateParams)| {
        let issuer = pki.root.below_but("an authority of a kind", change);
        issuer.client()
    };
    let leaf = signed_by(|params| params.is_ca = IsCa::ExplicitNoCa);
    let plain = signed_by(|params| params.is_ca = IsCa::NoCa);
    let mute = signed_by(|params| params.key_usages = vec![KeyUsagePurpose::CrlSign]);
    let silent = signed_by(|params| params.key_usages = vec![]);
    let servers = signed_by(|params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    vec![
        case("a leaf signed by a leaf", UNKNOWN, leaf),
        case("an issuer without BasicConstraints", UNKNOWN, plain),
        case("an issuer without keyCertSign", "bad_key_usage", mute),
        case("an issuer without KeyUsage", ADMITTED, silent),
        case("an issuer for servers only", "bad_key_usage", servers),
    ]
}

fn order(pki: &Pki) -> Vec<Case> {
    let (root, west) = (&pki.root, &pki.west);
    let below = west.below("below west");
    let leaf = |shown: &Shown| shown.chain[0].clone();
    let (good, lower) = (west.client(), below.client());
    vec![
        case("a missing intermediate", UNKNOWN, good.clone().chain([leaf(&good)])),
        case(
            "the wrong intermediate",
            UNKNOWN,
            good.clone().chain([leaf(&good), below.der.clone()]),
        ),
        case("the upper of two missing", UNKNOWN, lower.clone()),
        case(
            "the lower of two missing",
            UNKNOWN,
            lower.clone().chain([leaf(&lower), west.der.clone()]),
        ),
        case("two intermediates", ADMITTED, lower.clone().and([west])),
        case(
            "two intermediates in the wrong order",
            UNKNOWN,
            lower.clone().chain([leaf(&lower), west.der.clone(), below.der.clone()]),
        ),
        case("the root sent along", ADMITTED, good.clone().and([root])),
        case(
            "the leaf twice",
            ADMITTED,
            good.clone().chain([leaf(&good), leaf(&good), west.der.clone()]),
        ),
        case("the intermediate twice", ADMITTED, good.clone().and([west])),
        case("a stranger's authority too", ADMITTED, good.clone().and([&pki.foreign])),
        case("the leaf last", "ca_as_leaf", good.clone().chain([west.der.clone(), leaf(&good)])),
    ]
}

/// Returns authorities each of which could, by the names, have signed all those of the previous
/// name. With a single name, each could have signed all others. Many paths lead up, and none to a
/// root.
fn maze(foreign: &Authority, names: &[&str]) -> Shown {
    let mut above = foreign.below(names[names.len() - 1]);
    let mut shown = None;
    let mut found = Vec::new();
    for (index, name) in names.iter().enumerate().rev() {
        if names.get(index + 1).is_some_and(|next| next != name) {
            above = foreign.below(names[index + 1]);
        }
        let authority = above.below(name);
        shown = Some(authority.client());
        found.push(authority);
    }
    let mut shown = shown.expect("one authority");
    shown.chain.truncate(1);
    found.reverse();
    shown.and(&found)
}

fn crossed(pki: &Pki) -> Vec<Case> {
    let name = "an authority of two roots";
    let ours = pki.root.below(name);
    let theirs = pki.foreign.cross_signs(name, &ours);
    let shown = ours.client();
    let with = |issuers: &[&Authority]| {
        let leaf = shown.chain[0].clone();
        shown.clone().chain([leaf]).and(issuers.iter().copied())
    };
    // Every authority of this ring has signed every other one, and none leads to a root.
    let ring: Vec<_> = (0..3).map(|_| Authority::root("one of a ring", |_| ())).collect();
    let mut web = ring[0].client();
    web.chain.truncate(1);
    for (index, signer) in ring.iter().enumerate() {
        let others = ring.iter().enumerate().filter(|(other, _)| *other != index);
        let signed = others.map(|(_, other)| signer.cross_signs("one of a ring", other).der);
        web.chain.extend(signed);
    }
    let crowd = |number| maze(&pki.foreign, &vec!["one of many"; number]);
    let levels = ["level 1", "level 2", "level 3", "level 4", "level 5", "level 6"];
    let levels: Vec<_> = levels.into_iter().flat_map(|name| [name; 16]).collect();
    let levels = maze(&pki.foreign, &levels);
    vec![
        case("cross-signed, ours first", ADMITTED, with(&[&ours, &theirs])),
        case("cross-signed, theirs first", UNKNOWN, with(&[&theirs, &ours])),
        case("cross-signed, theirs only", UNKNOWN, with(&[&theirs])),
        case("cross-signed, theirs with its root", UNKNOWN, with(&[&theirs, &pki.foreign])),
        case("a ring that signed itself", UNKNOWN, web),
        case("six authorities of one name", UNKNOWN, crowd(6)),
        case("forty authorities of one name", UNKNOWN, crowd(40)),
        case("sixteen authorities on each of six levels", UNKNOWN, levels),
    ]
}

fn dates(pki: &Pki) -> Vec<Case> {
    let (root, west) = (&pki.root, &pki.west);
    let past = |params: &mut CertificateParams| {
        params.not_before -= Duration::days(2);
        params.not_after -= Duration::days(2);
    };
    let future = |params: &mut CertificateParams| {
        params.not_before += Duration::hours(1);
        params.not_after += Duration::hours(1);
    };
    let upside_down = |params: &mut CertificateParams| {
        params.not_after = params.not_before - Duration::SECOND;
    };
    let second_ago = |params: &mut CertificateParams| {
        params.not_after = params.not_before + Duration::seconds(59);
    };
    let forever = |params: &mut CertificateParams| {
        params.not_after = rcgen::date_time_ymd(9999, 12, 31);
    };
    vec![
        case("expired", "expired", west.client_but(past)),
        case("expired a second ago", "expired", west.client_but(second_ago)),
        case("not yet valid", "not_yet_valid", west.client_but(future)),
        case("expired before it began", "expired", west.client_but(upside_down)),
        case("valid until 9999", ADMITTED, west.client_but(forever)),
        case("an expired intermediate", "expired", root.below_but("old", past).client()),
        case(
            "an intermediate of tomorrow",
            "not_yet_valid",
            root.below_but("new", future).client(),
        ),
        // webpki does not check the dates of a root, because the operator decides about trust.
        case("an expired root", ADMITTED, pki.expired.client()),
    ]
}

fn limits(pki: &Pki) -> Vec<Case> {
    let root = &pki.root;
    let short = root.below_but("no authority below", |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    });
    let elsewhere = root.below_but("names of east", |params| {
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: vec![GeneralSubtree::DnsName("east.local".into())],
            excluded_subtrees: vec![],
        });
    });
    let names = |dns: &'static [u8]| {
        let key = KeyPair::generate().expect("a key");
        elsewhere.keyed(key, &[(URI, CLIENT.as_bytes()), (DNS, dns)], |_| ())
    };
    let crowded = |more: usize| pki.west.client().and(std::iter::repeat_n(&pki.foreign, more));
    vec![
        case("three intermediates", ADMITTED, deep(root, 3)),
        case("four intermediates", UNKNOWN, deep(root, 4)),
        case("six certificates above", ADMITTED, crowded(5)),
        case("seven certificates above", UNKNOWN, crowded(6)),
        case("20 intermediates", UNKNOWN, deep(root, 20)),
        case(
            "an authority below path length 0",
            UNKNOWN,
            short.below("too deep").client().and([&short]),
        ),
        case("names that the authority may sign", ADMITTED, names(b"a.east.local")),
        case("names that the authority may not sign", UNKNOWN, names(b"a.west.local")),
    ]
}
