//! Who gets in: refusals happen in the handshake, are counted by reason, and nothing is dialled.

use std::sync::Arc;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, SanType};
use rustls::ClientConfig;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use strait::hbone::{Client, ConnectError};
use strait::tls::dev::{Authority, Leaf};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, run, until,
};

/// A client without a certificate.
#[derive(Debug)]
struct Nobody;

impl ResolvesClientCert for Nobody {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// TLS of a client that shows whatever the test wants it to show.
fn showing(resolver: Arc<dyn ResolvesClientCert>) -> ClientConfig {
    let mut config = ClientConfig::clone(&identities().client(CLIENT, GATEWAY));
    config.client_auth_cert_resolver = resolver;
    config
}

fn leaf(leaf: &Leaf) -> Arc<dyn ResolvesClientCert> {
    let chain = CertificateDer::pem_slice_iter(leaf.chain_pem.as_bytes());
    let chain = chain.collect::<Result<_, _>>().expect("a chain");
    let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).expect("a key");
    let key = rustls::crypto::aws_lc_rs::sign::any_supported_type(&key).expect("a signing key");
    Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain, key)))
}

fn uri(text: &str) -> SanType {
    SanType::URI(text.to_owned().try_into().expect("ASCII"))
}

/// A leaf of cluster west that differs from a good one as `change` makes it.
fn west(change: impl FnOnce(&mut CertificateParams)) -> Arc<dyn ResolvesClientCert> {
    leaf(&identities().west.leaf_with(change).expect("a leaf"))
}

/// A good leaf of the client, changed by `change`.
fn client_but(change: impl FnOnce(&mut CertificateParams)) -> Arc<dyn ResolvesClientCert> {
    west(|params| {
        params.subject_alt_names = vec![uri(CLIENT)];
        change(params);
    })
}

/// A leaf with these SANs.
fn named<const N: usize>(names: [SanType; N]) -> Arc<dyn ResolvesClientCert> {
    west(|params| params.subject_alt_names = names.into())
}

fn cases() -> Vec<(&'static str, Arc<dyn ResolvesClientCert>)> {
    let stranger = "spiffe://stranger.example/ns/shop/sa/checkout";
    let other_root = Authority::new().and_then(|root| root.intermediate("west")?.leaf(CLIENT));
    let dns = SanType::DnsName("checkout.shop".to_owned().try_into().expect("ASCII"));
    let upper = uri("spiffe://West.local/ns/shop/sa/checkout");
    let now = time::OffsetDateTime::now_utc();
    vec![
        ("no_certificate", Arc::new(Nobody)),
        ("unknown_issuer", leaf(&other_root.expect("another root"))),
        ("untrusted_domain", named([uri(stranger)])),
        ("no_uri_san", named([])),
        ("no_uri_san", named([dns])),
        ("many_uri_sans", named([uri(CLIENT), uri(stranger)])),
        ("many_uri_sans", named([uri(CLIENT), uri(CLIENT)])),
        ("bad_spiffe_id", named([uri("spiffe://west.local")])),
        ("bad_spiffe_id", named([upper])),
        (
            "expired",
            client_but(|params| params.not_after = now - time::Duration::seconds(1)),
        ),
        (
            "not_yet_valid",
            client_but(|params| params.not_before = now + time::Duration::hours(1)),
        ),
        (
            "ca_as_leaf",
            client_but(|params| {
                params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            }),
        ),
        (
            "bad_key_usage",
            client_but(|params| {
                params.key_usages = vec![KeyUsagePurpose::KeyEncipherment];
            }),
        ),
        (
            "bad_key_usage",
            client_but(|params| {
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            }),
        ),
    ]
}

#[test]
fn each_bad_certificate_gets_an_alert_and_its_reason_and_nothing_is_dialled() {
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let trap = Endpoint::echo(net.listen(11, 9000).await);
        for (dialled, (reason, resolver)) in cases().into_iter().enumerate() {
            let before = gateway.refused(reason).await;
            let tls = Arc::new(showing(resolver));
            // With TLS 1.3 the client is done before the server has judged it: the alert comes
            // with the first thing that it waits for.
            let error = match Client::connect(gateway.address, &tls).await {
                Ok(client) => client.tunnel(ECHO).await.map(|_| ()),
                Err(error) => Err(error),
            };
            let error = error.expect_err("a refusal").to_string();
            assert!(error.contains("alert"), "{reason}: {error}");
            let refused = async || gateway.refused(reason).await;
            until(reason, refused, |&now| now == before + 1.0).await;
            assert_eq!(trap.accepted(), dialled, "{reason}");
            // A good client moves the trap: the gateway is alive, and the trap is one.
            let client = gateway.client(identities()).await;
            let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            drop(tunnel);
            until(
                "the trap",
                async || trap.accepted(),
                |&now| now == dialled + 1,
            )
            .await;
        }
        assert_eq!(gateway.refused("other").await, 0.0);
    });
}

#[test]
fn a_peer_without_alpn_h2_or_without_tls_13_is_refused() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let good = ClientConfig::clone(&identities().client(CLIENT, GATEWAY));
        for (protocols, expected) in [(vec![], 1.0), (vec![b"http/1.1".to_vec()], 2.0)] {
            let mut config = good.clone();
            config.alpn_protocols = protocols;
            let client = Client::connect(gateway.address, &Arc::new(config)).await;
            let error = match client {
                Ok(client) => client.tunnel(ECHO).await.expect_err("a refusal"),
                Err(error) => error,
            };
            assert!(!matches!(error, ConnectError::Refused(_)), "{error}");
            until(
                "no_alpn",
                async || gateway.refused("no_alpn").await,
                |&now| now == expected,
            )
            .await;
        }
        let mut plain = TcpStream::connect(gateway.address)
            .await
            .expect("a connection");
        tokio::io::AsyncWriteExt::write_all(&mut plain, b"GET / HTTP/1.1\r\n\r\n")
            .await
            .expect("a write");
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
        until(
            "other",
            async || gateway.refused("other").await,
            |&now| now == 1.0,
        )
        .await;
    });
}

#[test]
fn a_peer_that_says_nothing_is_gone_after_the_deadline() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let start = Instant::now();
        let mut silent = TcpStream::connect(gateway.address)
            .await
            .expect("a connection");
        let mut answer = Vec::new();
        let _ = silent.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
        let waited = start.elapsed().as_secs_f64();
        assert!((4.5..8.0).contains(&waited), "closed after {waited} s");
        assert_eq!(gateway.refused("timeout").await, 1.0);
    });
}
