//! Stage 3: from the verified certificate to the peer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::reason::HandshakeRefusal;
use crate::snapshot::{Caller, Snapshot};
use crate::telemetry::Source;
use crate::tls::{Chain, Identity, Inbound, leaf_identity};

use super::handshake::Session;
use super::listener::Listener;
use super::pool::Holder;

/// A downstream: as a rule one whose certificate was verified.
#[derive(Debug)]
pub struct Peer {
    /// Labels of the peer in logs and metrics.
    pub source: Arc<Source>,
    /// Earliest expiry of a certificate of its chain; `UNIX_EPOCH` without a certificate.
    pub not_after: SystemTime,
    /// The listener that it came through.
    pub listener: Arc<Listener>,
    /// The server name of its hello on a TLS listener, if there was one.
    pub server_name: Option<Arc<str>>,
    /// Holder that its tunnels are counted for. None for a peer that is only asked about: it cannot
    /// dial.
    pub holder: Option<Holder>,
    /// The chain that it presented, which may lose trust; none where nothing was verified.
    pub chain: Option<Arc<Chain>>,
}

impl Peer {
    /// Returns a peer without a certificate, as on a TLS listener.
    pub fn unknown(
        address: SocketAddr,
        listener: Arc<Listener>,
        server_name: Option<Arc<str>>,
    ) -> Self {
        let nothing: Arc<str> = Arc::default();
        Self {
            source: Arc::new(Source {
                address,
                principal: Arc::clone(&nothing),
                trust_domain: Arc::clone(&nothing),
                namespace: Arc::clone(&nothing),
                service_account: Arc::clone(&nothing),
                cluster: Arc::clone(&nothing),
                counted_cluster: nothing,
            }),
            not_after: SystemTime::UNIX_EPOCH,
            listener,
            server_name,
            holder: None,
            chain: None,
        }
    }

    /// Returns a peer whose identity was verified.
    ///
    /// # Errors
    /// The trust domain is not in the set.
    pub fn known(
        identity: Identity,
        (address, listener): (SocketAddr, Arc<Listener>),
        snapshot: &Snapshot,
    ) -> Result<Self, HandshakeRefusal> {
        let cluster = snapshot
            .trust
            .peer_cluster(&identity.trust_domain)
            .ok_or(HandshakeRefusal::UntrustedDomain)?;
        let source = Source {
            address,
            principal: identity.uri,
            trust_domain: identity.trust_domain,
            namespace: identity.namespace,
            service_account: identity.service_account,
            cluster: cluster.name,
            counted_cluster: cluster.counted,
        };
        Ok(Self {
            source: Arc::new(source),
            not_after: identity.not_after,
            listener,
            server_name: None,
            holder: None,
            chain: None,
        })
    }

    /// Returns why its certificate is no longer trusted, if it is not.
    pub fn lost_trust(&self) -> Option<HandshakeRefusal> {
        self.chain.as_ref().and_then(|chain| chain.lost())
    }

    /// Returns whether it has shown no certificate.
    pub fn is_unknown(&self) -> bool {
        self.source.principal.is_empty()
    }

    /// Returns whether the listener's `sources` contain its address now.
    pub fn is_admitted(&self) -> bool {
        self.listener.rules().admits(self.source.address.ip())
    }

    /// The peer as policy judges it.
    pub fn caller(&self) -> Caller<'_> {
        Caller {
            trust_domain: &self.source.trust_domain,
            namespace: &self.source.namespace,
            service_account: &self.source.service_account,
        }
    }
}

/// Reads the peer's identity from its certificate, by the same strict parse as the verifier. The
/// peer comes from an address, through a listener.
///
/// # Errors
/// The certificate is not what the verifier let pass, or has just lost trust.
pub fn run(
    session: &Session,
    from: (SocketAddr, Arc<Listener>),
    tls: &Inbound,
    snapshot: &Snapshot,
) -> Result<Peer, HandshakeRefusal> {
    let certificates = session.stream.get_ref().1.peer_certificates();
    let certificates = certificates.ok_or(HandshakeRefusal::NoCertificate)?;
    let leaf = certificates
        .first()
        .ok_or(HandshakeRefusal::NoCertificate)?;
    let identity = leaf_identity(leaf)?;
    let chain = tls.admit(certificates)?;
    let peer = Peer::known(identity, from, snapshot)?;
    Ok(Peer {
        not_after: chain.not_after(),
        chain: Some(chain),
        ..peer
    })
}
