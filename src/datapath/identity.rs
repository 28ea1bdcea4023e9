//! Stage 3: the peer, derived from the verified certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use crate::limits::{self, turns};
use crate::reason::HandshakeRefusal;
use crate::snapshot::{Caller, PeerCluster, Snapshot};
use crate::telemetry::{Handshake, Source};
use crate::tls::{Chain, Identity, Issuer, leaf_identity};
use crate::wire::SpkiHash;

use super::DataPath;
use super::accept::Balanced;
use super::handshake::HandshakeError;
use super::limits::descriptors::{Descriptor, Holders};
use super::listener::Listener;

/// A downstream, usually with a verified certificate.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Labels of the peer in logs and metrics.
    pub source: Arc<Source>,
    /// Earliest expiry of a certificate in its chain; `UNIX_EPOCH` without a certificate.
    pub not_after: SystemTime,
    pub listener: Arc<Listener>,
    /// Server name in its ClientHello on a TLS listener, if there was one.
    pub server_name: Option<Arc<str>>,
    /// Holders that its tunnels are counted for. `None` for a peer of an explain query: it cannot
    /// dial.
    pub holders: Option<Holders>,
    /// Issuer of its certificate, which may determine its cluster.
    pub issuer: Option<Arc<Issuer>>,
    /// Chain that it presented, which may lose trust. `None` if nothing was verified.
    pub chain: Option<Arc<Chain>>,
    /// Handshake of its connection, for the trace of the first tunnel.
    pub handshake: Option<Handshake>,
    /// Load balancer that has stated its address.
    pub balanced: Option<Arc<Balanced>>,
}

impl Peer {
    /// Creates a peer without a certificate, as on a TLS listener.
    pub fn unauthenticated(
        address: SocketAddr,
        listener: Arc<Listener>,
        server_name: Option<Arc<str>>,
    ) -> Self {
        let nothing: Arc<str> = Arc::default();
        Self {
            source: Arc::new(Source {
                address,
                listener: Arc::clone(listener.rules().name()),
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
            holders: None,
            issuer: None,
            chain: None,
            handshake: None,
            balanced: None,
        }
    }

    /// Creates a peer with a verified identity.
    ///
    /// # Errors
    /// Fails if the trust domain is not in the set, or if the issuer has no cluster and needs one.
    pub fn authenticated(
        identity: Identity,
        issuer: Option<Arc<Issuer>>,
        address: SocketAddr,
        listener: Arc<Listener>,
        snapshot: &Snapshot,
    ) -> Result<Self, HandshakeRefusal> {
        let (trust, domain) = (&snapshot.trust, &identity.trust_domain);
        let spki = issuer.as_deref().map(|issuer| &issuer.spki);
        let cluster = trust.peer_cluster(domain, spki);
        let cluster = cluster.ok_or_else(|| {
            if trust.contains(domain) {
                HandshakeRefusal::UntrustedIssuer
            } else {
                HandshakeRefusal::UntrustedDomain
            }
        })?;
        let source = Source {
            address,
            listener: Arc::clone(listener.rules().name()),
            principal: identity.uri,
            trust_domain: identity.trust_domain,
            namespace: identity.namespace,
            service_account: identity.service_account,
            cluster: cluster.name,
            counted_cluster: cluster.metric_name,
        };
        Ok(Self {
            source: Arc::new(source),
            not_after: identity.not_after,
            listener,
            server_name: None,
            holders: None,
            issuer,
            chain: None,
            handshake: None,
            balanced: None,
        })
    }

    /// Returns the peer with its cluster by `snapshot`, if the cluster has changed. Labels and
    /// shares of its next tunnels are those of the new cluster.
    pub fn with_current_cluster(&self, snapshot: &Snapshot) -> Option<Self> {
        let source = &self.source;
        let (domain, spki) = (&source.trust_domain, self.spki());
        let PeerCluster { name, metric_name: counted } =
            snapshot.trust.peer_cluster(domain, spki)?;
        if (&name, &counted) == (&source.cluster, &source.counted_cluster) {
            return None;
        }
        let holders = self.holders.as_ref();
        Some(Self {
            holders: holders.map(|holders| holders.for_identity(&counted, &source.principal)),
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

    /// Returns the refusal if its certificate is no longer trusted.
    pub fn lost_trust(&self) -> Option<HandshakeRefusal> {
        self.chain.as_ref().and_then(|chain| chain.lost())
    }

    pub fn charged_source(&self) -> limits::Source {
        let source = &self.source;
        match &self.holders {
            Some(holders) => holders.source().clone(),
            None if self.is_unauthenticated() => limits::Source::prefix(source.address.ip()),
            None => limits::Source::cluster(&source.counted_cluster).identity(&source.principal),
        }
    }

    /// Returns true if it has presented no certificate.
    pub fn is_unauthenticated(&self) -> bool {
        self.source.principal.is_empty()
    }

    /// Returns true if the current `sources` of the listener contain its address, and `balancers`
    /// the load balancer that has stated it.
    pub fn is_admitted(&self) -> bool {
        let rules = self.listener.rules();
        let balancer = self.balanced.as_ref().map(|of| of.balancer);
        let is_trusted = balancer.is_none_or(|balancer| rules.is_balancer(balancer));
        is_trusted && rules.admits(self.source.address.ip())
    }

    /// Returns the peer in the form that policy evaluation takes.
    pub fn policy_source(&self) -> Caller<'_> {
        Caller {
            principal: &self.source.principal,
            trust_domain: &self.source.trust_domain,
            issuer: self.spki(),
            namespace: &self.source.namespace,
            service_account: &self.source.service_account,
        }
    }
}

/// Authenticates the peer of a connection by its chain, from which the strict parser of the
/// verifier reads its identity. The connection is then counted for that identity.
///
/// # Errors
/// The certificate is not one that the verifier accepts, or has just lost trust, or the peer
/// already has its share of connections.
pub fn admit(
    data_path: &DataPath,
    certificates: &[CertificateDer<'_>],
    (address, listener): (SocketAddr, Arc<Listener>),
    descriptor: &mut Descriptor,
) -> Result<Peer, HandshakeError> {
    let snapshot = data_path.reader.load();
    let leaf = certificates.first().ok_or(HandshakeRefusal::NoCertificate)?;
    let identity = leaf_identity(leaf)?;
    let chain = data_path.tls.register_chain(certificates)?;
    let issuer = Some(Arc::clone(chain.issuer()));
    let peer = Peer::authenticated(identity, issuer, address, listener, &snapshot)?;
    let source = &peer.source;
    let holders = descriptor.holders();
    let holders = holders.for_identity(&source.counted_cluster, &source.principal);
    descriptor.move_to(&holders).map_err(|full| {
        data_path.metrics.peer_shed(&source.counted_cluster, full.label());
        let detail = format!("{full}: {}", source.principal);
        HandshakeError::new(HandshakeRefusal::OverShare, &detail)
    })?;
    turns::charge_to(holders.source());
    Ok(Peer { not_after: chain.not_after(), holders: Some(holders), chain: Some(chain), ..peer })
}
