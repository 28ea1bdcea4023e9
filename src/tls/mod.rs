//! Certificates, and the rustls configurations built from them.
//!
//! This module owns certificates from disk ([`files`], `crl`) or from an authority ([`issue`]), and
//! the chains of open connections (`inbound`). It verifies peers (`verifier`, `path`) and their
//! issuers (`issuers`), and parses identities ([`leaf_identity`]). It performs the handshakes of
//! HBONE listeners ([`accept()`]) and protects their records ([`record`]).

mod accept;
mod chains;
mod crl;
mod error;
pub mod files;
mod identity;
mod inbound;
pub mod issue;
mod issuers;
mod own;
mod path;
pub mod record;
mod verifier;

use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite, kx_group};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, NamedGroup};
use rustls::{ServerConfig, version::TLS13};

pub use accept::{AcceptError, Accepted, INCOMING_BYTES_MAX, accept};
pub use crl::Crls;
pub use error::TlsError;
pub use files::{Bundles, DomainRoots, IdentityMaterial, PeerTrust, TrustedDomain};
pub use identity::{Identity, leaf_identity};
pub use inbound::{Chain, InboundTls, LostTrust, OutboundTls, ServerTls};
pub use issuers::{Issuer, IssuerCounter};
pub use verifier::{explain_error, is_rejection_of_us, refusal_for_error};

/// The only application protocol of HBONE listeners.
pub const ALPN_H2: &[u8] = b"h2";

/// Returns the algorithms of docs/wire-contract.md 1.1: both AES-GCM suites, and the four groups
/// that peers use.
///
/// A rustls server follows the client's order of groups. The post-quantum group first therefore
/// costs a client that did not send its key share no extra round trip.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_AES_128_GCM_SHA256,
        ],
        kx_groups: vec![
            kx_group::X25519MLKEM768,
            kx_group::X25519,
            kx_group::SECP256R1,
            kx_group::SECP384R1,
        ],
        ..aws_lc_rs::default_provider()
    })
}

/// Gathers the entropy of the process, for which AWS-LC times the processor for some 50 ms. Without
/// this, the first handshake does it, and its worker stands still.
pub fn gather_entropy() {
    // A failure occurs again in the handshake, which reports it.
    let _ = provider().secure_random.fill(&mut [0]);
}

/// Builds the configuration of an HBONE listener: TLS 1.3, ALPN h2, required client certificates
/// that `trust` accepts, no resumption. Connections to gateways of other networks get one by the
/// same rules.
///
/// # Errors
/// The material is unusable: the key does not match the certificate, or there is no root.
pub fn listener_server_config(
    material: &IdentityMaterial,
    trust: &PeerTrust,
) -> Result<ServerTls, TlsError> {
    let provider = provider();
    let verifier = Arc::new(verifier::ClientVerifier::new(trust, material, &provider)?);
    let mut config =
        server_config_with(material, Arc::clone(&provider), Arc::clone(&verifier) as _)?;
    // For `record`. The secrets never leave it.
    config.enable_secret_extraction = true;
    let outbound = OutboundTls {
        config: client_config_with(material, provider, Arc::clone(&verifier) as _)?,
        identity: Arc::clone(&material.identity.uri),
    };
    Ok(ServerTls { config: Arc::new(config), verifier, outbound: Some(Arc::new(outbound)) })
}

/// Builds a configuration like [`listener_server_config`], for an endpoint with a fixed set of
/// trust domains.
pub fn endpoint_server_config(
    material: &IdentityMaterial,
    domains: Vec<TrustedDomain>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let trust = PeerTrust { domains, ..PeerTrust::default() };
    let provider = provider();
    let verifier = verifier::ClientVerifier::new(&trust, material, &provider)?;
    server_config_with(material, provider, Arc::new(verifier)).map(Arc::new)
}

/// Builds a configuration that fails every handshake, for a listener without a certificate yet.
pub fn rejecting_server_config() -> Result<ServerTls, TlsError> {
    /// Resolver without a certificate.
    #[derive(Debug)]
    struct NoCertificate;

    impl ResolvesServerCert for NoCertificate {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            None
        }
    }

    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Provider)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(NoCertificate));
    Ok(ServerTls {
        config: Arc::new(config),
        verifier: Arc::new(verifier::ClientVerifier::rejecting(&provider())),
        outbound: None,
    })
}

/// Builds a configuration like [`endpoint_server_config`], which accepts any client under
/// `material`'s roots, regardless of its identity. For tools only, never for a gateway.
pub fn server_config_any_client(
    material: &IdentityMaterial,
) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = provider();
    let roots = Arc::clone(&material.roots);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
        .build()
        .map_err(TlsError::Verifier)?;
    server_config_with(material, provider, verifier).map(Arc::new)
}

fn server_config_with(
    material: &IdentityMaterial,
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ServerConfig, TlsError> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Provider)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(material.chain.clone(), material.key.clone_key())
        .map_err(TlsError::KeyMismatch)?;
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    // ztunnel and Envoy peers never resume, and a ticket would survive a change of trust.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

/// Builds the configuration of an HBONE client. It presents `material` and sends no SNI. It
/// accepts a server with one of the `expected` identities; an empty set accepts no server.
pub fn client_config(
    material: &IdentityMaterial,
    expected: &[&str],
) -> Result<Arc<ClientConfig>, TlsError> {
    client_config_with(material, provider(), server_verifier(material, expected))
}

/// Builds a configuration like [`client_config`], which accepts any server under `material`'s
/// roots, regardless of its SPIFFE identity. For tools that connect to gateways of any mesh.
/// With `group`, it offers only that key exchange group.
pub fn client_config_any_server(
    material: &IdentityMaterial,
    group: Option<NamedGroup>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let mut provider = provider();
    let groups = &mut Arc::make_mut(&mut provider).kx_groups;
    groups.retain(|one| group.is_none_or(|group| one.name() == group));
    let verifier = verifier::ClientVerifier::of_servers(None, &material.roots, &provider);
    client_config_with(material, provider, Arc::new(verifier))
}

fn client_config_with(
    material: &IdentityMaterial,
    provider: Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Provider)?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_auth_cert(material.chain.clone(), material.key.clone_key())
        .map_err(TlsError::KeyMismatch)?;
    config.alpn_protocols = vec![ALPN_H2.to_vec()];
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns a verifier that accepts servers under `material`'s roots with one of the `expected`
/// identities, for clients with their own configuration.
pub fn server_verifier(
    material: &IdentityMaterial,
    expected: &[&str],
) -> Arc<dyn ServerCertVerifier> {
    let roots = &material.roots;
    Arc::new(verifier::ClientVerifier::of_servers(Some(expected), roots, &provider()))
}

#[cfg(test)]
pub(crate) mod tests;
