//! Tests of verdicts about chains, and of how often webpki computes one.

mod chains;

use rcgen::SanType;
use time::OffsetDateTime;

use super::super::{TrustedDomain, provider};
use super::*;
use crate::config::{Crl, CrlPolicy};
use crate::tls::identity::not_after;
use crate::tls::issuers::DISPLAY_CHARS_MAX;
use crate::tls::tests::samples::{
    OWN, authority, certificates, intermediate, leaf, leaf_between, material,
};
use crate::tools::dev;

const HOUR: Duration = Duration::from_secs(3600);

fn judged(verifier: &ClientVerifier) -> usize {
    verifier.webpki_verifications.load(Ordering::Relaxed)
}

/// Returns a verifier of west.local with `root`.
fn verifier(root: &str) -> ClientVerifier {
    verifier_with(root, None)
}

/// Returns a verifier of west.local with `root` and these revocation lists.
fn verifier_with(root: &str, lists: Option<&str>) -> ClientVerifier {
    let crls = lists.map(|text| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("a file");
        let config = Crl {
            files: vec![file.path().to_owned()],
            on_stale: CrlPolicy::Reject,
            on_missing: CrlPolicy::Reject,
        };
        Arc::new(Crls::load(&config).expect("lists"))
    });
    let domain = TrustedDomain { name: "west.local".into(), issuers: None, roots: None };
    let trust = PeerTrust { domains: vec![domain], crls, ..PeerTrust::default() };
    verifier_of(root, &trust)
}

/// Returns a verifier with `root` and this trust.
fn verifier_of(root: &str, trust: &PeerTrust) -> ClientVerifier {
    let material = material(&leaf(&authority(), "east", OWN), root);
    ClientVerifier::new(trust, &material, &provider()).expect("a verifier")
}

/// Returns a root, and the chain of a leaf that expires in ten seconds.
fn short_lived() -> (String, Vec<CertificateDer<'static>>) {
    let (authority, now) = (authority(), SystemTime::now());
    let west = intermediate(&authority, "west");
    let leaf = leaf_between(&west, WEST, now - HOUR, now + Duration::from_secs(10));
    (authority.root_pem(), certificates(&leaf.chain_pem))
}

fn after(seconds: u64) -> UnixTime {
    let now = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    UnixTime::since_unix_epoch(now + Duration::from_secs(seconds))
}

#[test]
fn a_domain_outside_the_set_is_named_for_people() {
    let (root, _) = short_lived();
    let verifier = verifier(&root);
    let leaf = leaf(&authority(), "north", "spiffe://north.local/ns/shop/sa/checkout");
    let chain = certificates(&leaf.chain_pem);
    let refused = verifier.verify_client_cert(&chain[0], &chain[1..], after(0));
    let refused = refused.expect_err("a refusal");
    assert_eq!(refusal_for_error(&refused), HandshakeRefusal::UntrustedDomain);
    assert_eq!(
        explain_error(&refused),
        "trust domain north.local (spiffe://north.local/ns/shop/sa/checkout) is not in \
         trust.domains"
    );
    assert!(escape_for_display(&"a\n".repeat(1000)).starts_with("a\\n"));
    assert!(escape_for_display(&"a".repeat(1000)).len() <= DISPLAY_CHARS_MAX);
    let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
    assert!(explain_error(&unknown).contains("not lead to a root"));
}

#[test]
fn a_chain_is_judged_once_and_refused_when_it_has_expired() {
    let (root, chain) = short_lived();
    let verifier = verifier(&root);
    for _ in 0..3 {
        let verdict = verifier.verify_client_cert(&chain[0], &chain[1..], after(0));
        assert!(verdict.is_ok(), "{verdict:?}");
    }
    assert_eq!(judged(&verifier), 1);
    for again in 2..4 {
        let refused = verifier.verify_client_cert(&chain[0], &chain[1..], after(11));
        let refused = refused.expect_err("it has expired");
        assert_eq!(refusal_for_error(&refused), HandshakeRefusal::Expired);
        assert_eq!(judged(&verifier), again);
    }
}

#[test]
fn what_differs_by_a_byte_or_was_refused_is_judged_anew() {
    let (root, chain) = short_lived();
    let verifier = verifier(&root);
    let judge =
        |leaf: &CertificateDer<'_>| verifier.verify_client_cert(leaf, &chain[1..], after(0));
    assert!(judge(&chain[0]).is_ok());
    let mut bytes = chain[0].to_vec();
    *bytes.last_mut().expect("a signature") ^= 1;
    for again in 2..4 {
        let refused = judge(&bytes.as_slice().into()).expect_err("a bad signature");
        assert_eq!(refusal_for_error(&refused), HandshakeRefusal::BadSignature);
        assert_eq!(judged(&verifier), again);
    }
    assert!(judge(&chain[0]).is_ok(), "it holds on");
    assert_eq!(judged(&verifier), 3);
}

#[test]
fn a_chain_ends_with_the_first_certificate_on_its_way_to_the_root() {
    let (root, mut chain) = short_lived();
    let verifier = verifier(&root);
    let end = |chain: &[CertificateDer<'_>]| {
        let judged = verifier.verify_chain(&chain[0], &chain[1..], after(0));
        time_of(judged.expect("a verdict").not_after)
    };
    let leaf = end(&chain);
    assert_eq!(leaf, not_after(&chain[0]));
    let authority = authority();
    chain.extend(certificates(&authority.root_pem()));
    assert_eq!(end(&chain), leaf);
}

#[test]
fn a_new_verifier_has_trusted_nobody_yet() {
    let (root, chain) = short_lived();
    for root in [root.as_str(), &authority().root_pem()] {
        let verifier = verifier(root);
        let verdict = verifier.verify_client_cert(&chain[0], &chain[1..], after(0));
        assert_eq!(judged(&verifier), 1, "{verdict:?}");
    }
}

/// Returns the time `seconds` from now.
fn ends(seconds: u64) -> SystemTime {
    time_of(after(seconds))
}

fn verdict(verifier: &ClientVerifier, chain: &[CertificateDer<'_>]) -> Option<HandshakeRefusal> {
    let judged = verifier.verify_chain(&chain[0], &chain[1..], after(0));
    judged.err().as_ref().map(refusal_for_error)
}

#[test]
fn peers_of_each_of_two_equally_named_roots_are_judged_by_its_own_list() {
    let old = authority();
    let new = old.successor().expect("a root");
    for has_key_ids in [true, false] {
        let issue = |root: &dev::Authority, name: &str| {
            let issuer = root.intermediate_with(name, |params| {
                params.use_authority_key_identifier_extension = has_key_ids;
            });
            let issuer = issuer.expect("an intermediate");
            let leaf = issuer.leaf("spiffe://west.local/ns/a/sa/b");
            (issuer, certificates(&leaf.expect("a leaf").chain_pem))
        };
        let peers = [(&old, "one"), (&new, "two")].map(|(root, name)| issue(root, name));
        let revoked = [(&old, "three"), (&new, "four")].map(|(root, name)| issue(root, name));
        let all = || peers.iter().chain(&revoked);
        let own = all().map(|(issuer, _)| issuer.crl(&[], 1, ends(3600)).expect("a list"));
        let own: String = own.collect();
        for numbers in [[1, 2], [2, 1]] {
            let lists = [&old, &new].into_iter().zip(&revoked).zip(numbers);
            let lists = lists.map(|((root, (issuer, _)), number)| {
                root.crl(&[&issuer.pem()], number, ends(3600))
            });
            let lists: Result<Vec<_>, _> = lists.collect();
            let lists = lists.expect("lists").concat() + &own;
            for roots in [[&old, &new], [&new, &old]] {
                let bundle = roots.map(dev::Authority::root_pem).concat();
                let verifier = verifier_with(&bundle, Some(&lists));
                let got = peers.each_ref().map(|(_, chain)| verdict(&verifier, chain));
                assert_eq!(got, [None; 2], "{has_key_ids} {numbers:?}");
                let got = revoked.each_ref().map(|(_, chain)| verdict(&verifier, chain));
                assert_eq!(got, [Some(HandshakeRefusal::Revoked); 2]);
            }
        }
    }
}

#[test]
fn peers_of_four_issuers_with_two_keys_each_are_trusted() {
    let authority = authority();
    let mut lists = authority.crl(&[], 1, ends(3600)).expect("a list");
    let mut chains = Vec::new();
    for name in ["a", "b", "c", "d", "a", "b", "c", "d"] {
        let issuer = intermediate(&authority, name);
        lists += &issuer.crl(&[], 1, ends(3600)).expect("a list");
        let leaf = issuer.leaf("spiffe://west.local/ns/a/sa/b");
        chains.push(certificates(&leaf.expect("a leaf").chain_pem));
    }
    let verifier = verifier_with(&authority.root_pem(), Some(&lists));
    for chain in &chains {
        assert_eq!(verdict(&verifier, chain), None);
    }
}

#[test]
fn a_stale_list_of_another_issuer_leaves_verdicts_in_force_until_the_next_is_stale() {
    let authority = authority();
    let [own, other] = ["own", "other"].map(|name| authority.intermediate(name));
    let (own, other) = (own.expect("an issuer"), other.expect("an issuer"));
    let leaf = own.leaf("spiffe://west.local/ns/a/sa/b");
    let chain = certificates(&leaf.expect("a leaf").chain_pem);
    let stale = SystemTime::now() - Duration::from_secs(3600);
    let lists = authority.crl(&[], 1, ends(3600)).expect("a list")
        + &own.crl(&[], 1, ends(60)).expect("a list")
        + &other.crl(&[], 1, stale).expect("a list");
    let verifier = verifier_with(&authority.root_pem(), Some(&lists));
    for _ in 0..3 {
        assert_eq!(verdict(&verifier, &chain), None);
    }
    assert_eq!(judged(&verifier), 1);
    let refused = verifier.verify_chain(&chain[0], &chain[1..], after(61));
    let refused = refused.expect_err("its own list is stale");
    assert_eq!(refusal_for_error(&refused), HandshakeRefusal::StaleCrl);
}

const WEST: &str = "spiffe://west.local/ns/shop/sa/checkout";

fn issuer(pem: &str) -> Issuer {
    let read = certificates(pem);
    Issuer::from_certificate(&read[0]).expect("an issuer")
}

#[test]
fn the_issuer_is_the_one_on_the_verified_way_and_none_that_is_sent_beside_it() {
    let (authority, other) = (authority(), authority());
    let own = intermediate(&authority, "west");
    let leaf = own.leaf(WEST).expect("a leaf");
    let [leaf, own_der] = &certificates(&leaf.chain_pem)[..] else {
        panic!("a leaf and its issuer");
    };
    let other_der = certificates(&other.root_pem()).remove(0);
    let root_der = certificates(&authority.root_pem()).remove(0);
    let verifier = verifier(&authority.root_pem());
    for sent in [
        vec![own_der.clone()],
        vec![root_der.clone(), own_der.clone()],
        vec![own_der.clone(), other_der],
    ] {
        let path = verifier.verify_chain(leaf, &sent, after(0)).expect("a verdict");
        assert_eq!(*path.issuer, issuer(&own.pem()));
        let again = verifier.verify_chain(leaf, &sent, after(0)).expect("a verdict");
        assert_eq!(again, path, "from memory");
    }
}

#[test]
fn a_leaf_without_intermediate_has_the_root_as_its_issuer() {
    let root = authority();
    // The intermediate is itself a root of the verifier: the same case as a root that signs
    // leaves.
    let west = intermediate(&root, "west");
    let chain = certificates(&west.leaf(WEST).expect("a leaf").chain_pem);
    let verifier = verifier(&west.pem());
    let path = verifier.verify_chain(&chain[0], &[], after(0)).expect("a verdict");
    assert_eq!(*path.issuer, issuer(&west.pem()));
}

#[test]
fn issuers_without_a_cluster_and_those_of_other_domains_are_refused() {
    let authority = authority();
    let [west, east] = ["west", "east"].map(|name| intermediate(&authority, name));
    let chain = |of: &dev::Issuer, id| certificates(&of.leaf(id).expect("a leaf").chain_pem);
    let spki = |of: &dev::Issuer| issuer(&of.pem()).spki;
    let domain = |name: &str, issuers: Option<SpkiHash>| TrustedDomain {
        name: name.into(),
        issuers: issuers.map(|issuer| Arc::new([issuer].into())),
        roots: None,
    };
    let restricted = PeerTrust {
        domains: vec![domain("west.local", Some(spki(&west))), domain("east.local", None)],
        ..PeerTrust::default()
    };
    let by_domain = verifier_of(&authority.root_pem(), &restricted);
    let untrusted = Some(HandshakeRefusal::UntrustedIssuer);
    assert_eq!(verdict(&by_domain, &chain(&west, WEST)), None);
    assert_eq!(verdict(&by_domain, &chain(&east, WEST)), untrusted);
    assert_eq!(verdict(&by_domain, &chain(&west, OWN)), None);

    for (rejects_unknown, want) in [(true, untrusted), (false, None)] {
        let listed = PeerTrust {
            domains: vec![domain("west.local", None)],
            clusters: [(spki(&west), "west".to_owned())].into(),
            rejects_unknown,
            ..PeerTrust::default()
        };
        let verifier = verifier_of(&authority.root_pem(), &listed);
        assert_eq!(verdict(&verifier, &chain(&west, WEST)), None);
        let of_east = chain(&east, WEST);
        assert_eq!(verdict(&verifier, &of_east), want);
        // A refusal is not cached.
        assert_eq!(verdict(&verifier, &of_east), want);
        if let Err(error) = verifier.verify_chain(&of_east[0], &of_east[1..], after(0)) {
            let why = explain_error(&error);
            let start = format!("issuer {} (CN=Strait development", spki(&east));
            assert!(why.starts_with(&start), "{why}");
            assert_eq!(issuer_of(&error).map(|one| one.spki), Some(spki(&east)));
        }
    }
}
