//! Peers in memory, for tests of handshakes and records.

mod accept;
pub(crate) mod samples;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::cipher_suite;
use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, ServerConfig, SupportedCipherSuite};
use tokio::io::{DuplexStream, duplex};
use tokio_rustls::TlsConnector;

use self::samples::MATERIAL;
use super::{Accepted, client_config_with, server_config_with, verifier};

/// Every suite of TLS 1.3 that a layer accepts.
pub(super) const SUITES: [SupportedCipherSuite; 3] = [
    cipher_suite::TLS13_AES_128_GCM_SHA256,
    cipher_suite::TLS13_AES_256_GCM_SHA384,
    cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
];

fn provider(suite: SupportedCipherSuite) -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![suite],
        ..CryptoProvider::clone(&super::provider())
    })
}

/// Returns a configuration like that of a listener, for one suite.
pub(super) fn server(suite: SupportedCipherSuite) -> ServerConfig {
    let roots = Arc::clone(&MATERIAL.roots);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider(suite));
    let verifier = verifier.build().unwrap();
    let mut config = server_config_with(&MATERIAL, provider(suite), verifier).unwrap();
    config.enable_secret_extraction = true;
    config
}

/// Returns the configuration of a client for one suite.
pub(super) fn client(suite: SupportedCipherSuite) -> ClientConfig {
    let verifier = verifier::ClientVerifier::of_servers(None, &MATERIAL.roots, &provider(suite));
    let config = client_config_with(&MATERIAL, provider(suite), Arc::new(verifier));
    ClientConfig::clone(&config.unwrap())
}

pub(super) fn server_name() -> ServerName<'static> {
    ServerName::try_from("0.0.0.0").unwrap()
}

/// Performs the handshake of two peers over a link that holds `link_bytes`.
pub(super) async fn connect(
    server: ServerConfig,
    client: ClientConfig,
    link_bytes: usize,
) -> (Accepted, DuplexStream, ClientConnection) {
    let (mut near, far) = duplex(link_bytes);
    let connector = TlsConnector::from(Arc::new(client));
    let (accepted, connected) = tokio::join!(
        super::accept(Arc::new(server), &mut near),
        connector.connect(server_name(), far)
    );
    let (_, session) = connected.unwrap().into_inner();
    (accepted.unwrap(), near, session)
}
