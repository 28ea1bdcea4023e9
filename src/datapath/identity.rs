//! Stage 3: from the verified certificate to the peer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::reason::HandshakeRefusal;
use crate::snapshot::{Caller, Snapshot};
use crate::telemetry::Source;
use crate::tls::{Identity, leaf_identity};
use crate::wire::sni::RouteBy;

use super::handshake::Session;
use super::pool::Holder;

/// A downstream: as a rule one whose certificate was verified.
#[derive(Debug)]
pub struct Peer {
    /// What logs and metrics say of it.
    pub source: Arc<Source>,
    /// When its certificate expires; long ago where there is none.
    pub not_after: SystemTime,
    /// By what its tunnels are routed, unless the service that they ask for says so itself.
    pub route_by: RouteBy,
    /// For whom its tunnels are counted. None of a peer that is only asked about, which can dial
    /// nobody.
    pub holder: Option<Holder>,
}

impl Peer {
    /// Somebody who has shown no certificate, as on a TLS listener.
    pub fn unknown(address: SocketAddr) -> Self {
        let nothing: Arc<str> = Arc::default();
        Self {
            source: Arc::new(Source {
                address,
                principal: Arc::clone(&nothing),
                trust_domain: Arc::clone(&nothing),
                namespace: Arc::clone(&nothing),
                service_account: Arc::clone(&nothing),
                cluster: nothing,
            }),
            not_after: SystemTime::UNIX_EPOCH,
            route_by: RouteBy::default(),
            holder: None,
        }
    }

    /// Somebody whose identity was verified, through a listener that routes by authority.
    ///
    /// # Errors
    /// The trust domain is not in the set.
    pub fn known(
        identity: Identity,
        address: SocketAddr,
        snapshot: &Snapshot,
    ) -> Result<Self, HandshakeRefusal> {
        let cluster = snapshot
            .trust
            .cluster(&identity.trust_domain)
            .ok_or(HandshakeRefusal::UntrustedDomain)?;
        let source = Source {
            address,
            principal: identity.uri,
            trust_domain: identity.trust_domain,
            namespace: identity.namespace,
            service_account: identity.service_account,
            cluster: Arc::clone(cluster),
        };
        Ok(Self {
            source: Arc::new(source),
            not_after: identity.not_after,
            route_by: RouteBy::default(),
            holder: None,
        })
    }

    /// Whether it has shown no certificate.
    pub fn is_unknown(&self) -> bool {
        self.source.principal.is_empty()
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

/// Reads the peer's identity from its certificate, by the same strict parse as the verifier. It
/// comes from an address, through a listener that routes its tunnels in some way.
///
/// # Errors
/// The certificate is not what the verifier let pass, or its trust domain has just left the set.
pub fn run(
    session: &Session,
    (address, route_by): (SocketAddr, RouteBy),
    snapshot: &Snapshot,
) -> Result<Peer, HandshakeRefusal> {
    let certificates = session.stream.get_ref().1.peer_certificates();
    let leaf = certificates
        .and_then(|certificates| certificates.first())
        .ok_or(HandshakeRefusal::NoCertificate)?;
    let identity = leaf_identity(leaf)?;
    let peer = Peer::known(identity, address, snapshot)?;
    Ok(Peer { route_by, ..peer })
}
