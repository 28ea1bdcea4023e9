//! Stage 3: from the verified certificate to the peer.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::reason::HandshakeRefusal;
use crate::snapshot::{Caller, PeerCluster, Snapshot};
use crate::telemetry::Source;
use crate::tls::{Chain, Identity, Inbound, Issuer, leaf_identity};
use crate::wire::SpkiHash;

use super::handshake::Session;
use super::listener::Listener;
use super::pool::Holder;

/// A downstream: as a rule one whose certificate was verified.
#[derive(Clone, Debug)]
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
    /// The issuer of its certificate, which may say its cluster.
    pub issuer: Option<Arc<Issuer>>,
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
            issuer: None,
            chain: None,
        }
    }

    /// Returns a peer whose identity was verified.
    ///
    /// # Errors
    /// The trust domain is not in the set, or the issuer has no cluster and needs one.
    pub fn known(
        identity: Identity,
        issuer: Option<Arc<Issuer>>,
        (address, listener): (SocketAddr, Arc<Listener>),
        snapshot: &Snapshot,
    ) -> Result<Self, HandshakeRefusal> {
        let (trust, domain) = (&snapshot.trust, &identity.trust_domain);
        let spki = issuer.as_deref().map(|issuer| &issuer.spki);
        let cluster = trust.peer_cluster(domain, spki);
        let cluster = cluster.ok_or_else(|| match trust.contains(domain) {
            true => HandshakeRefusal::UntrustedIssuer,
            false => HandshakeRefusal::UntrustedDomain,
        })?;
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
            issuer,
            chain: None,
        })
    }

    /// Returns the peer in its cluster by `snapshot`, if that is another one than before: labels
    /// and shares of its next tunnels are those of that cluster.
    pub fn moved(&self, snapshot: &Snapshot) -> Option<Self> {
        let source = &self.source;
        let (domain, spki) = (&source.trust_domain, self.spki());
        let PeerCluster { name, counted } = snapshot.trust.peer_cluster(domain, spki)?;
        if (&name, &counted) == (&source.cluster, &source.counted_cluster) {
            return None;
        }
        let holder = self.holder.as_ref();
        Some(Self {
            holder: holder.map(|holder| holder.identified(&counted, &source.principal)),
            source: Arc::new(Source {
                cluster: name,
                counted_cluster: counted,
                ..(**source).clone()
            }),
            ..self.clone()
        })
    }

    fn spki(&self) -> Option<&SpkiHash> {
        self.issuer.as_deref().map(|issuer| &issuer.spki)
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
            issuer: self.spki(),
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
    let issuer = Some(Arc::clone(chain.issuer()));
    let peer = Peer::known(identity, issuer, from, snapshot)?;
    Ok(Peer {
        not_after: chain.not_after(),
        chain: Some(chain),
        ..peer
    })
}
