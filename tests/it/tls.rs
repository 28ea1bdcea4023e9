//! Outer TLS of different peers, and the inner one, which the gateway never sees.

use std::sync::Arc;

use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::{NamedGroup, SupportedCipherSuite};
use strait::tls;
use strait::tools::hbone::{self, Client, IncomingTunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{
    CLIENT, ECHO, ENDPOINT, GATEWAY, Gateway, Net, Settings, bytes, identities, run, until,
};

/// TLS of a good client that offers one group and one suite.
fn offering(group: &'static dyn SupportedKxGroup, suite: SupportedCipherSuite) -> ClientConfig {
    let provider =
        CryptoProvider { cipher_suites: vec![suite], kx_groups: vec![group], ..default_provider() };
    let good = identities().client(CLIENT, GATEWAY);
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(tls::server_verifier(
            &identities().material(&identities().leaf(CLIENT)),
            &[GATEWAY],
        ))
        .with_client_cert_resolver(Arc::clone(&good.client_auth_cert_resolver));
    config.alpn_protocols.clone_from(&good.alpn_protocols);
    config.enable_sni = false;
    config
}

#[test]
fn every_group_and_suite_of_the_contract_is_served_without_sni() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let groups: [(&'static dyn SupportedKxGroup, NamedGroup); 4] = [
            (kx_group::X25519MLKEM768, NamedGroup::X25519MLKEM768),
            (kx_group::X25519, NamedGroup::X25519),
            (kx_group::SECP256R1, NamedGroup::secp256r1),
            (kx_group::SECP384R1, NamedGroup::secp384r1),
        ];
        let suites =
            [cipher_suite::TLS13_AES_256_GCM_SHA384, cipher_suite::TLS13_AES_128_GCM_SHA256];
        for (group, name) in groups {
            for suite in suites {
                let tls = Arc::new(offering(group, suite));
                let client = Client::connect(gateway.address, &tls).await;
                let client = client.unwrap_or_else(|error| panic!("{name:?}: {error}"));
                let answer = client.tunnel(ECHO).await.expect_err("no endpoint");
                assert!(answer.to_string().contains("503"), "{name:?}: {answer}");
            }
        }
        let chacha = cipher_suite::TLS13_CHACHA20_POLY1305_SHA256;
        let tls = Arc::new(offering(kx_group::X25519, chacha));
        assert!(Client::connect(gateway.address, &tls).await.is_err(), "an unlisted suite");
    });
}

#[test]
fn a_peer_of_tls_12_is_refused_by_that_name() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        // A ClientHello as RFC 5246 has it: no supported_versions, one ECDSA suite.
        let mut hello = vec![3, 3];
        hello.extend([7; 32]);
        hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]);
        // signature_algorithms: ecdsa_secp256r1_sha256.
        hello.extend([0, 8, 0, 13, 0, 4, 0, 2, 4, 3]);
        let mut message = vec![22, 3, 1, 0, u8::try_from(hello.len() + 4).expect("short")];
        message.extend([1, 0, 0, u8::try_from(hello.len()).expect("short")]);
        message.extend(&hello);
        let mut stream = TcpStream::connect(gateway.address).await.expect("a connection");
        stream.write_all(&message).await.expect("a write");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.expect("an end");
        assert_eq!(answer.first(), Some(&21), "an alert");
        until(
            "tls_version",
            async || gateway.refused_handshakes("tls_version").await,
            |&now| now == 1.0,
        )
        .await;
    });
}

#[test]
fn double_hbone_carries_an_inner_session_that_the_gateway_cannot_read() {
    run(async {
        const SIZE: u64 = 1 << 20;
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "HBONE")]);
        let gateway = Gateway::start(&settings).await;
        let listener = net.listen(11, 15008).await;
        let echo = |incoming: IncomingTunnel| async move {
            assert_eq!(incoming.authority, ECHO);
            let (mut read, mut write) = tokio::io::split(incoming.tunnel);
            tokio::io::copy(&mut read, &mut write).await.expect("all bytes");
            write.shutdown().await.expect("an end");
        };
        let _endpoint = tokio::spawn(hbone::serve(listener, identities().server(ENDPOINT), echo));
        let outer = gateway.client(identities()).await;
        let inner_tls = identities().client(CLIENT, ENDPOINT);
        for id in 0..10 {
            let tunnel = outer.tunnel(ECHO).await.expect("an outer tunnel");
            let inner =
                Client::connect_over(tunnel, &inner_tls).await.expect("an inner connection");
            let stream = inner.tunnel(ECHO).await.expect("an inner tunnel");
            let (mut read, mut write) = tokio::io::split(stream);
            let up = async {
                bytes::send(&mut write, id, 0, SIZE).await?;
                write.shutdown().await
            };
            tokio::try_join!(up, bytes::expect(&mut read, id, 0, SIZE)).expect("all bytes");
            bytes::expect_end(&mut read).await;
            drop((read, write));
            inner.close().await.expect("a clean end");
        }
        until("completed", async || gateway.tunnels("completed").await, |&now| now == 10.0).await;
        // An inner client that expects another identity detects it end to end.
        let tunnel = outer.tunnel(ECHO).await.expect("an outer tunnel");
        let wrong = identities().client(CLIENT, GATEWAY);
        assert!(Client::connect_over(tunnel, &wrong).await.is_err());
    });
}
