//! TLS, by docs/wire-contract.md 1.1.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, NamedGroup, SignatureScheme};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use crate::tls::{IdentityMaterial, client_config_any_server};
use crate::tools::dev::Authority;

use super::case::{Case, Group, script};
use super::peer::{Peer, RESULT_DEADLINE, Target, session};
use super::raw;

const GROUPS: [NamedGroup; 4] =
    [NamedGroup::X25519MLKEM768, NamedGroup::X25519, NamedGroup::secp256r1, NamedGroup::secp384r1];
/// Type of a record (RFC 8446 section 5.1).
pub(super) const ALERT: u8 = 21;
/// Identity of the certificate of an unknown root.
const FOREIGN: &str = "spiffe://conformance.test/ns/test/sa/foreign";

pub(super) fn cases() -> Vec<Case> {
    let line = |name: &str, change: fn(&mut ClientConfig) -> anyhow::Result<()>| {
        script(Group::Tls, "1.1", name, move |to| async move {
            let mut tls = ClientConfig::clone(&to.tls);
            change(&mut tls)?;
            rejects(to.address, &Arc::new(tls)).await
        })
    };
    let mut cases = vec![
        script(Group::Tls, "1.1", "ALPN h2, valid certificate", accepts),
        line("ALPN http/1.1", |tls| {
            tls.alpn_protocols = vec![b"http/1.1".to_vec()];
            Ok(())
        }),
        line("no ALPN", |tls| {
            tls.alpn_protocols.clear();
            Ok(())
        }),
        line("no client certificate", |tls| {
            tls.client_auth_cert_resolver = Arc::new(FixedCertificate(None));
            Ok(())
        }),
        line("client certificate of an unknown root", |tls| {
            tls.client_auth_cert_resolver =
                Arc::new(FixedCertificate(Some(foreign_certificate(tls)?)));
            Ok(())
        }),
        script(Group::Tls, "1.1", "TLS 1.2 alone", |to| async move {
            rejects_hello(to.address, &hello_of_tls_1_2()).await
        }),
    ];
    cases.extend(GROUPS.map(|group| {
        script(Group::Tls, "1.1", format!("{group:?} alone"), move |to| async move {
            let tls = client_config_any_server(&to.material, Some(group))?;
            accepts(Target { tls, ..to }).await
        })
    }));
    cases
}

/// Certificate that a client presents to every server, or none.
#[derive(Debug)]
pub struct FixedCertificate(pub Option<Arc<CertifiedKey>>);

impl ResolvesClientCert for FixedCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.clone()
    }

    fn has_certs(&self) -> bool {
        self.0.is_some()
    }
}

/// Creates a certificate under a root that the gateway does not know.
fn foreign_certificate(tls: &ClientConfig) -> anyhow::Result<Arc<CertifiedKey>> {
    let authority = Authority::new()?;
    let leaf = authority.intermediate("conformance")?.leaf(FOREIGN)?;
    let own = IdentityMaterial::from_pem(&leaf.chain_pem, &leaf.key_pem, &authority.root_pem())?;
    let key = CertifiedKey::from_der(own.chain, own.key, tls.crypto_provider())?;
    Ok(Arc::new(key))
}

async fn accepts(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    peer.open(&to, 1).await
}

/// Fails if the gateway answers HTTP/2. With TLS 1.3, it rejects a certificate after the handshake.
async fn rejects(address: SocketAddr, tls: &Arc<ClientConfig>) -> anyhow::Result<()> {
    let mut stream = match session(address, tls).await {
        Ok(stream) => stream,
        Err(error) if error.is::<Elapsed>() => return Err(error),
        Err(_) => return Ok(()),
    };
    let opening = [raw::PREFACE, &raw::frame(raw::SETTINGS, 0, 0, &[])].concat();
    let served = async {
        stream.write_all(&opening).await.ok()?;
        raw::read_frame(&mut stream).await
    };
    match timeout(RESULT_DEADLINE, served).await {
        Ok(None) => Ok(()),
        Ok(Some(frame)) => bail!("the gateway serves HTTP/2: {frame:?}"),
        Err(_) => bail!("the connection is neither served nor closed in {RESULT_DEADLINE:?}"),
    }
}

/// Sends a ClientHello, and fails if anything but an alert or the end follows.
async fn rejects_hello(address: SocketAddr, hello: &[u8]) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(hello).await?;
    let mut kind = [0];
    let read = timeout(RESULT_DEADLINE, stream.read(&mut kind)).await;
    let read = read.context("no answer to the ClientHello")?;
    ensure!(read.is_err() || kind[0] == 0 || kind[0] == ALERT, "a record of type {}", kind[0]);
    Ok(())
}

/// Returns a ClientHello that a server of TLS 1.2 accepts (RFC 5246 section 7.4.1.2).
fn hello_of_tls_1_2() -> Vec<u8> {
    // TLS_ECDHE_{ECDSA,RSA}_WITH_AES_128_GCM_SHA256, and no compression.
    let suites = [0, 0, 4, 0xc0, 0x2b, 0xc0, 0x2f, 1, 0];
    let extensions = [
        // supported_groups: secp256r1, x25519.
        &[0, 10, 0, 6, 0, 4, 0, 23, 0, 29][..],
        // signature_algorithms: ecdsa_secp256r1_sha256, rsa_pss_rsae_sha256, rsa_pkcs1_sha256.
        &[0, 13, 0, 8, 0, 6, 4, 3, 8, 4, 4, 1],
        // ALPN: h2. extended_main_secret.
        &[0, 16, 0, 5, 0, 3, 2, b'h', b'2', 0, 23, 0, 0],
    ]
    .concat();
    let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    let body = [&[3, 3][..], &[0x5a; 32], &suites, &[0, length(&extensions)], &extensions].concat();
    let message = [&[1, 0, 0, length(&body)][..], &body].concat();
    [&[22, 3, 1, 0, length(&message)][..], &message].concat()
}
