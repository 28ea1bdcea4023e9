//! Chains as peers of every kind send them, and the signature checks that each costs.

use std::cell::Cell;
use std::slice::from_ref;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    CrlDistributionPoint, CrlIssuingDistributionPoint, DistinguishedName, DnType, IsCa,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
};
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{AlgorithmIdentifier, InvalidSignature, SignatureVerificationAlgorithm};

use super::*;

thread_local! {
    /// Number of signatures that this thread has verified.
    static SIGNATURES: Cell<usize> = const { Cell::new(0) };
}

/// Algorithm that counts its uses.
#[derive(Debug)]
struct Counted(&'static dyn SignatureVerificationAlgorithm);

impl SignatureVerificationAlgorithm for Counted {
    fn verify_signature(
        &self,
        key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        SIGNATURES.set(SIGNATURES.get() + 1);
        self.0.verify_signature(key, message, signature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        self.0.public_key_alg_id()
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.0.signature_alg_id()
    }
}

/// Returns the usual provider, which counts signatures.
fn counting() -> Arc<CryptoProvider> {
    let usual = provider();
    let WebPkiSupportedAlgorithms { all, mapping } = usual.signature_verification_algorithms;
    let counted = |one: &&'static dyn SignatureVerificationAlgorithm| {
        let counted: &'static dyn SignatureVerificationAlgorithm =
            Box::leak(Box::new(Counted(*one)));
        counted
    };
    let all: Vec<_> = all.iter().map(counted).collect();
    let all = Box::leak(all.into_boxed_slice());
    Arc::new(CryptoProvider {
        signature_verification_algorithms: WebPkiSupportedAlgorithms { all, mapping },
        ..CryptoProvider::clone(&usual)
    })
}

type Ca = CertifiedIssuer<'static, KeyPair>;

fn named(name: &str) -> CertificateParams {
    let now = OffsetDateTime::now_utc();
    let mut params = CertificateParams::default();
    params.not_before = now - Duration::from_secs(60);
    params.not_after = now + Duration::from_secs(3600);
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}

fn root(name: &str) -> Ca {
    Ca::self_signed(named(name), key()).expect("a root")
}

fn below(issuer: &Ca, name: &str) -> Ca {
    Ca::signed_by(named(name), key(), issuer).expect("an authority")
}

/// Returns a leaf of west.local.
fn leaf_of(issuer: &Ca) -> CertificateDer<'static> {
    leaf_with(issuer, |_| ())
}

fn leaf_with(issuer: &Ca, change: impl FnOnce(&mut CertificateParams)) -> CertificateDer<'static> {
    let mut params = named("");
    params.distinguished_name = DistinguishedName::new();
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.subject_alt_names = vec![SanType::URI(WEST.try_into().expect("a URI"))];
    change(&mut params);
    let signed = params.signed_by(&key(), issuer).expect("a leaf");
    signed.der().clone()
}

fn roots(of: &[&Ca]) -> String {
    of.iter().map(|root| root.pem()).collect()
}

/// Returns the certificates of authorities behind a leaf.
fn chain(leaf: &CertificateDer<'static>, above: &[&Ca]) -> Vec<CertificateDer<'static>> {
    let above = above.iter().map(|one| one.der().clone());
    [leaf.clone()].into_iter().chain(above).collect()
}

/// Returns a verifier that counts.
fn counting_verifier(roots: &str, depth: usize, lists: &str) -> ClientVerifier {
    let mut verifier = verifier_with(roots, (!lists.is_empty()).then_some(lists));
    verifier.provider = counting();
    verifier.depth = depth;
    verifier
}

/// Returns the verdict, and the number of verified signatures.
fn cost(
    verifier: &ClientVerifier,
    chain: &[CertificateDer<'_>],
) -> (Option<HandshakeRefusal>, usize) {
    SIGNATURES.set(0);
    let verdict = verdict(verifier, chain);
    (verdict, SIGNATURES.get())
}

const UNKNOWN: Option<HandshakeRefusal> = Some(HandshakeRefusal::UnknownIssuer);

#[test]
fn chains_of_istio_agent_are_accepted_with_every_bundle_of_roots_behind_them() {
    let [old, new, other] = ["root", "root", "another root"].map(root);
    let ca = below(&old, "cluster west");
    let leaf = leaf_of(&ca);
    let rotated = below(&new, "cluster west");
    // A plugged-in CA may have a CA of the company as its root, which no self-signed one is.
    let [company, next] = [&old, &new].map(|root| below(root, "company"));
    let (third, fourth) = (below(&company, "cluster"), below(&old, "the next company"));
    for (trusted, sent, signatures) in [
        (&[&old][..], chain(&leaf, &[&ca]), 2),
        (&[&old], chain(&leaf, &[&ca, &old]), 2),
        // `cert-chain.pem` contains the root, and so does `root-cert.pem`.
        (&[&old], chain(&leaf, &[&ca, &old, &old, &new]), 2),
        (&[&old, &other], chain(&leaf, &[&ca, &old, &other]), 2),
        (&[&other, &old], chain(&leaf, &[&ca, &other, &old, &new]), 2),
        (&[&new, &old], chain(&leaf, &[&ca, &new, &old]), 3),
        (&[&old, &new], chain(&leaf_of(&rotated), &[&rotated, &old, &new]), 3),
        (&[&company, &fourth], chain(&leaf_of(&third), &[&third, &company, &fourth, &company]), 2),
        (&[&next, &company], chain(&leaf_of(&third), &[&third, &next, &company]), 3),
        // Signed by the root itself, as by istiod's own.
        (&[&old, &new], chain(&leaf_of(&old), &[&old, &new]), 1),
    ] {
        let verifier = counting_verifier(&roots(trusted), 1, "");
        assert_eq!(cost(&verifier, &sent), (None, signatures), "{}", sent.len());
    }
}

#[test]
fn a_chain_of_nested_spire_servers_is_accepted_up_to_the_configured_depth() {
    let root = root("spire upstream");
    let upstream = below(&root, "SPIRE of the company");
    let nested = below(&upstream, "SPIRE of the region");
    let inner = below(&nested, "SPIRE of the cluster");
    let leaf = leaf_of(&inner);
    let sent = chain(&leaf, &[&inner, &nested, &upstream, &root]);
    for (depth, wanted) in [(3, (None, 4)), (6, (None, 4)), (2, (UNKNOWN, 0)), (0, (UNKNOWN, 0))] {
        let verifier = counting_verifier(&roots(&[&root]), depth, "");
        assert_eq!(cost(&verifier, &sent), wanted, "{depth}");
    }
    let direct = chain(&leaf_of(&root), &[&root]);
    let verifier = counting_verifier(&roots(&[&root]), 0, "");
    assert_eq!(cost(&verifier, &direct), (None, 1));
}

#[test]
fn certificates_that_are_not_each_the_issuer_of_the_one_before_cost_no_signature() {
    let (root, foreign) = (root("root"), root("foreign"));
    let (upper, unrelated) = (below(&root, "upper"), below(&foreign, "unrelated"));
    let lower = below(&upper, "lower");
    let leaf = leaf_of(&lower);
    let verifier = counting_verifier(&roots(&[&root]), 3, "");
    for wrong in [
        &[&upper, &lower][..],
        &[&lower, &unrelated],
        &[&unrelated, &lower, &upper],
        &[&lower, &upper, &unrelated],
        &[&lower, &root, &unrelated],
    ] {
        assert_eq!(cost(&verifier, &chain(&leaf, wrong)), (UNKNOWN, 0));
    }
    // At most 6 are received, whatever they are.
    let six = chain(&leaf, &[&lower, &upper, &root, &root, &root, &root]);
    assert_eq!(cost(&verifier, &six), (None, 3));
    let seven = [&six[..], from_ref(&six[6])].concat();
    assert_eq!(cost(&verifier, &seven), (UNKNOWN, 0));
}

/// Names of forged authorities, from the one above the leaf upwards, and of the one at the top.
const FORGED: &[&[&str]] = &[
    &["root"],
    &["root", "root"],
    &["root", "root", "root", "root", "root", "root", "root"],
    &["root", "a", "root", "a", "root", "a", "root"],
    &["root", "a", "root", "b", "root", "c", "root"],
    &["a", "root", "b", "root"],
    &["a", "b", "c", "root"],
    &["a", "a", "a", "a", "a", "a", "root"],
    &["root", "a", "b", "second root"],
    &["second root", "a", "root"],
];

/// Returns a chain with these names, none of which a trusted authority has signed.
fn forged(names: &[&str]) -> Vec<CertificateDer<'static>> {
    let mut issuer = root(names[names.len() - 1]);
    let mut above = Vec::new();
    for name in names.iter().rev().skip(1) {
        issuer = below(&issuer, name);
        above.insert(0, issuer.der().clone());
    }
    let leaf = leaf_of(&issuer);
    [leaf].into_iter().chain(above).collect()
}

#[test]
fn forged_intermediates_cost_at_most_one_signature_for_each_root() {
    let trusted = [root("root"), root("root"), root("second root")];
    let bundle = roots(&trusted.each_ref());
    let ca = below(&trusted[0], "cluster west");
    let lists: String = trusted.iter().map(|root| list(root, &[], None)).collect();
    for lists in ["", &*lists] {
        let verifier = counting_verifier(&bundle, 6, lists);
        for names in FORGED {
            let (verdict, signatures) = cost(&verifier, &forged(names));
            assert!(verdict.is_some(), "{names:?}");
            assert!(signatures <= trusted.len(), "{names:?}: {signatures}");
        }
        // The authority is real, and the leaf is not: its signature is verified too.
        let posing = chain(&leaf_of(&below(&root("root"), "cluster west")), &[&ca]);
        let (verdict, signatures) = cost(&verifier, &posing);
        assert_eq!(verdict, Some(HandshakeRefusal::BadSignature));
        assert!(signatures <= 3, "{signatures}");
    }
}

/// Returns a list of one scope.
fn list(
    issuer: &Ca,
    revoked: &[&CertificateDer<'_>],
    scope: Option<CrlIssuingDistributionPoint>,
) -> String {
    let now = OffsetDateTime::now_utc();
    let entry = |der: &&CertificateDer<'_>| {
        let (_, parsed) = X509Certificate::from_der(der).expect("a certificate");
        RevokedCertParams {
            serial_number: parsed.raw_serial().to_vec().into(),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        }
    };
    let params = CertificateRevocationListParams {
        this_update: now - Duration::from_secs(60),
        next_update: now + Duration::from_secs(3600),
        crl_number: 1.into(),
        issuing_distribution_point: scope,
        revoked_certs: revoked.iter().map(entry).collect(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    let signed = params.signed_by(issuer).expect("a list");
    signed.pem().expect("PEM")
}

fn part(number: usize, scope: Option<rcgen::CrlScope>) -> Option<CrlIssuingDistributionPoint> {
    let uris = vec![format!("http://crl.example/{number}")];
    Some(CrlIssuingDistributionPoint { distribution_point: CrlDistributionPoint { uris }, scope })
}

#[test]
fn a_leaf_is_looked_up_in_every_partition_that_covers_it() {
    let root = root("root");
    let ca = below(&root, "west");
    let in_part = |number: usize| {
        leaf_with(&ca, |params| {
            let uris = vec![format!("http://crl.example/{number}")];
            params.crl_distribution_points = vec![CrlDistributionPoint { uris }];
        })
    };
    let revoked = Some(HandshakeRefusal::Revoked);
    let unknown = Some(HandshakeRefusal::UnknownRevocation);
    let (leaf, first, second) = (leaf_of(&ca), in_part(1), in_part(2));
    let of_root = list(&root, &[], None);
    let parts = |revoked: [&[&CertificateDer<'_>]; 2]| {
        let [one, two] = revoked;
        [list(&ca, one, part(1, None)), list(&ca, two, part(2, None))]
    };
    let verdicts = |lists: &[String]| {
        let verifier = counting_verifier(&roots(&[&root]), 3, &(of_root.clone() + &lists.concat()));
        [&leaf, &first, &second].map(|leaf| verdict(&verifier, &chain(leaf, &[&ca])))
    };
    let all = [&leaf, &first, &second];
    for is_first in [true, false] {
        let ordered = |mut lists: [String; 2]| {
            if !is_first {
                lists.reverse();
            }
            verdicts(&lists)
        };
        assert_eq!(ordered(parts([&[], &[]])), [None; 3]);
        assert_eq!(ordered(parts([&[], &all])), [revoked, None, revoked]);
        assert_eq!(ordered(parts([&all, &[]])), [revoked, revoked, None]);
    }
    let [one, _] = parts([&[], &[]]);
    assert_eq!(verdicts(&[one]), [None, None, unknown]);
    // A complete list beside a partition, in both orders.
    let (complete, [one, _]) = (list(&ca, &all, None), parts([&[], &[]]));
    assert_eq!(verdicts(&[complete.clone(), one.clone()]), [revoked; 3]);
    assert_eq!(verdicts(&[one, complete]), [revoked; 3]);
    // Scopes by role: a list of authorities covers no leaf.
    let authorities = list(&ca, &all, part(1, Some(rcgen::CrlScope::CaCertsOnly)));
    assert_eq!(verdicts(from_ref(&authorities)), [unknown; 3]);
    let leaves = list(&ca, &all, part(1, Some(rcgen::CrlScope::UserCertsOnly)));
    assert_eq!(verdicts(&[authorities, leaves]), [revoked, revoked, unknown]);
}

#[test]
fn a_list_that_another_issuer_of_the_name_signed_neither_accepts_nor_refuses() {
    let root = root("root");
    let [ca, twin] = [0, 1].map(|_| below(&root, "west"));
    let (leaf, of_twin) = (leaf_of(&ca), leaf_of(&twin));
    let of_root = list(&root, &[], None);
    let twins = list(&twin, &[&leaf, &of_twin], None);
    let unknown = Some(HandshakeRefusal::UnknownRevocation);
    let verifier = counting_verifier(&roots(&[&root]), 3, &(of_root.clone() + &twins));
    // In both orders of the peers: a verified signer is remembered.
    for _ in 0..2 {
        assert_eq!(verdict(&verifier, &chain(&leaf, &[&ca])), unknown);
        let revoked = Some(HandshakeRefusal::Revoked);
        assert_eq!(verdict(&verifier, &chain(&of_twin, &[&twin])), revoked);
    }
    let own = of_root + &twins + &list(&ca, &[], None);
    let verifier = counting_verifier(&roots(&[&root]), 3, &own);
    assert_eq!(cost(&verifier, &chain(&leaf, &[&ca])), (None, 5));
    // The signatures of lists are verified once, and those of a chain for each chain.
    let next = leaf_of(&ca);
    let (verdict, signatures) = cost(&verifier, &chain(&next, &[&ca]));
    assert_eq!(verdict, None);
    assert!(signatures <= 3, "{signatures}");
}

#[test]
fn new_keys_of_a_lists_issuer_cost_a_verification_of_the_list_a_second() {
    let root = root("root");
    let [ca, compromised] = ["west", "compromised"].map(|name| below(&root, name));
    let leaf = leaf_of(&ca);
    let lists: String = [&root, &ca].map(|issuer| list(issuer, &[], None)).concat();
    let mut verifier = counting_verifier(&roots(&[&root]), 3, &lists);
    // Leaf, intermediate, and each of their lists.
    assert_eq!(cost(&verifier, &chain(&leaf, &[&ca])), (None, 4));
    let posing = || {
        let twin = below(&compromised, "west");
        // Without a key identifier nothing but the signature distinguishes the two.
        let leaf = leaf_with(&twin, |params| params.use_authority_key_identifier_extension = false);
        chain(&leaf, &[&twin, &compromised])
    };
    let (began, mut of_lists) = (std::time::Instant::now(), 0);
    for _ in 0..20 {
        let (verdict, signatures) = cost(&verifier, &posing());
        assert_eq!(verdict, Some(HandshakeRefusal::UnknownRevocation));
        of_lists += signatures - 3;
    }
    let seconds = usize::try_from(began.elapsed().as_secs()).expect("few seconds");
    assert!((1..=1 + seconds).contains(&of_lists), "{of_lists} in {seconds} s");

    // An issuer that is refused anyway costs no list.
    verifier.known_issuers = Some([issuer(&ca.pem()).spki].into());
    let untrusted = Some(HandshakeRefusal::UntrustedIssuer);
    assert_eq!(cost(&verifier, &posing()), (untrusted, 3));
}
