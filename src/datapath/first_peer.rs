//! Part of stage 5: the first peer of a tunnel that came through gateways of other networks.
//!
//! The gateway that verified the peer sends its identity in `x-strait-source`, and its cluster for
//! gateways where issuers determine clusters. The header is trusted from identities in
//! `trust.gateways`. Rules are then evaluated for the gateway and for the first peer, and both have
//! to pass (docs/wire-contract.md 1.10).

use std::sync::Arc;

use crate::config::parse_identity;
use crate::limits;
use crate::reason::Reason;
use crate::snapshot::{Caller, Snapshot};
use crate::telemetry::Source;
use crate::tls::Issuer;
use crate::wire::SpkiHash;

use super::http2::tunnel::Forwarded;
use super::identity::Peer;
use super::limits::descriptors::Holders;

/// Separator of the identity and its parameters. It cannot occur in a SPIFFE ID.
const SEPARATOR: char = ';';
const CLUSTER: &str = "cluster";
/// Limit of the bytes of the header. An identity takes up to 2 KiB.
const HEADER_BYTES_MAX: usize = 4 * 1024;

/// First peer of a tunnel, as a trusted gateway has verified it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstPeer {
    /// Identity, `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub principal: Box<str>,
    pub trust_domain: Box<str>,
    pub namespace: Box<str>,
    pub service_account: Box<str>,
    /// Cluster as the gateway has named it.
    pub cluster: Option<Box<str>>,
    /// An issuer of its cluster, if `trust.clusters` has the cluster.
    pub issuer: Option<SpkiHash>,
    /// Cluster by the trust set, which its resources are charged to.
    charged_cluster: Arc<str>,
}

impl FirstPeer {
    /// Returns the first peer of a tunnel, if the peer is in `trust.gateways` and has sent it.
    ///
    /// # Errors
    /// [`Reason::BadSource`] if the header is malformed: nobody is permitted.
    pub fn read(
        snapshot: &Snapshot,
        peer: &Peer,
        forwarded: Option<&Forwarded>,
    ) -> Result<Option<Box<Self>>, Reason> {
        let header = forwarded.and_then(|forwarded| forwarded.source.as_deref());
        let is_gateway = || snapshot.trust.is_gateway(&peer.source.principal);
        let Some(header) = header.filter(|_| is_gateway()) else {
            return Ok(None);
        };
        let parsed = Self::parse(snapshot, header).ok_or(Reason::BadSource)?;
        Ok(Some(Box::new(parsed)))
    }

    /// Parses `IDENTITY;cluster=NAME`. Other parameters are ignored, so that later versions can
    /// add some. A comma joins the values of several headers.
    fn parse(snapshot: &Snapshot, header: &[u8]) -> Option<Self> {
        let is_text = |octet: &u8| matches!(octet, b' '..=b'~') && *octet != b',';
        if header.len() > HEADER_BYTES_MAX || !header.iter().all(is_text) {
            return None;
        }
        let mut parts = std::str::from_utf8(header).ok()?.split(SEPARATOR);
        let principal = parts.next()?;
        let [trust_domain, namespace, service_account] = parse_identity(principal)?.map(Box::from);
        let mut cluster = None;
        for parameter in parts {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            if name.trim().eq_ignore_ascii_case(CLUSTER) {
                let is_only = !value.trim().is_empty() && cluster.is_none();
                cluster = Some(is_only.then_some(value.trim())?);
            }
        }
        let permitted = snapshot.trust.domain_issuers(&trust_domain);
        let is_permitted = |spki| permitted.is_none_or(|list| list.contains(spki));
        let mut issuers = snapshot.trust.issuers();
        let issuer = issuers.find(|(name, spki)| Some(*name) == cluster && is_permitted(spki));
        let issuer = issuer.map(|(_, spki)| *spki);
        let domain = Arc::from(&*trust_domain);
        let charged = snapshot.trust.peer_cluster(&domain, issuer.as_ref());
        Some(Self {
            principal: principal.into(),
            trust_domain,
            namespace,
            service_account,
            cluster: cluster.map(Box::from),
            issuer,
            // One without a cluster is refused.
            charged_cluster: charged.map(|it| it.metric_name).unwrap_or_default(),
        })
    }

    /// Returns the value of the header for a peer of this gateway. A cluster whose name the header
    /// cannot have is omitted.
    pub fn header(peer: &Peer) -> String {
        let (principal, cluster) = (&peer.source.principal, &peer.source.cluster);
        let is_text = |octet: u8| matches!(octet, b' '..=b'~') && !b",;".contains(&octet);
        let header = format!("{principal}{SEPARATOR}{CLUSTER}={cluster}");
        let is_name = !cluster.is_empty() && cluster.trim() == &**cluster;
        if is_name && cluster.bytes().all(is_text) && header.len() <= HEADER_BYTES_MAX {
            return header;
        }
        principal.to_string()
    }

    /// Returns the source that its tunnels are charged to: a part of the gateway.
    pub fn charged_source(&self, gateway: &limits::Source) -> limits::Source {
        let cluster = gateway.behind(&self.charged_cluster);
        cluster.identity(&Arc::from(&*self.principal))
    }

    pub fn holders(&self, gateway: &Holders) -> Holders {
        gateway.of(&self.charged_source(gateway.source()))
    }

    /// Returns the first peer as if it were the peer itself, for an explanation.
    pub fn as_peer(&self, gateway: &Peer, snapshot: &Snapshot) -> Peer {
        let source = Source {
            principal: (&*self.principal).into(),
            trust_domain: (&*self.trust_domain).into(),
            namespace: (&*self.namespace).into(),
            service_account: (&*self.service_account).into(),
            ..(*gateway.source).clone()
        };
        let subject = Box::default();
        let issuer = self.issuer.map(|spki| Arc::new(Issuer { spki, subject }));
        let peer = Peer { source: Arc::new(source), issuer, ..gateway.clone() };
        peer.with_current_cluster(snapshot).unwrap_or(peer)
    }

    /// Returns whether its trust domain and issuer are in the trust set, and whether the issuer may
    /// sign for the domain. Peers of this gateway have passed the same checks in their handshake.
    ///
    /// The gateway that has verified the first peer knows its issuer. If trust domains determine
    /// clusters here, only a cluster that contradicts the domain proves another issuer.
    pub fn is_trusted(&self, snapshot: &Snapshot) -> bool {
        let trust = &snapshot.trust;
        let is_permitted = match (trust.domain_issuers(&self.trust_domain), &self.issuer) {
            (None, _) => true,
            (Some(list), Some(issuer)) => list.contains(issuer),
            (Some(_), None) if trust.has_issuers() => false,
            (Some(_), None) => {
                let named = self.cluster.as_deref();
                named.is_none_or(|named| !trust.is_other_cluster(named, &self.trust_domain))
            }
        };
        is_permitted && trust.cluster(self.caller()).is_some()
    }

    /// Returns the first peer in the form that exposure rules and authorization policies take.
    pub fn caller(&self) -> Caller<'_> {
        Caller {
            principal: &self.principal,
            trust_domain: &self.trust_domain,
            issuer: self.issuer.as_ref(),
            namespace: &self.namespace,
            service_account: &self.service_account,
        }
    }
}
