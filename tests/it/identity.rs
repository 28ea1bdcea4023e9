//! Handshakes that fail before any certificate matters. The certificates are in tests/identity.

use std::sync::Arc;

use rustls::ClientConfig;
use strait::tools::hbone::{Client, ConnectError};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::support::{CLIENT, ECHO, GATEWAY, Gateway, Net, Settings, identities, run, until};

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
            assert!(!matches!(error, ConnectError::Status(_)), "{error}");
            until(
                "no_alpn",
                async || gateway.refused_handshakes("no_alpn").await,
                |&now| now == expected,
            )
            .await;
        }
        let mut plain = TcpStream::connect(gateway.address).await.expect("a connection");
        tokio::io::AsyncWriteExt::write_all(&mut plain, b"GET / HTTP/1.1\r\n\r\n")
            .await
            .expect("a write");
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
        until("other", async || gateway.refused_handshakes("other").await, |&now| now == 1.0).await;
    });
}

#[test]
fn a_peer_that_says_nothing_is_gone_after_the_deadline() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let start = Instant::now();
        let mut silent = TcpStream::connect(gateway.address).await.expect("a connection");
        let mut answer = Vec::new();
        let _ = silent.read_to_end(&mut answer).await;
        assert!(answer.is_empty());
        let waited = start.elapsed().as_secs_f64();
        assert!((4.5..8.0).contains(&waited), "closed after {waited} s");
        let refused = async || gateway.refused_handshakes("timeout").await;
        until("timeout", refused, |&now| now == 1.0).await;
    });
}
