//! Verification of the server of a connection, after its handshake.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use crate::reason::HandshakeRefusal;
pub use crate::snapshot::ExpectedWorkloads;
use crate::snapshot::{Reader, RemoteGateway, Snapshot};
use crate::tls::{Chain, Identity, InboundTls, leaf_identity};
use crate::wire::SpkiHash;

/// Identity and chain of a server, as the handshake has verified them.
#[derive(Debug)]
pub(super) struct Verified {
    pub(super) chain: Arc<Chain>,
    pub(super) identity: Identity,
}

#[derive(Clone, Copy, Debug)]
pub struct ServerIdentity<'a> {
    pub identity: &'a Identity,
    pub issuer: Option<&'a SpkiHash>,
}

impl Verified {
    /// Identifies a server. The handshake has verified its chain, trust domain, issuer and
    /// revocation.
    ///
    /// # Errors
    /// The chain has just lost trust, or its identity is not one of the mesh.
    pub(super) fn new(
        certificates: &[CertificateDer<'_>],
        tls: &InboundTls,
        reader: &Reader,
    ) -> Result<Self, String> {
        let refused = |refusal: HandshakeRefusal| format!("{refusal}: {}", refusal.description());
        let leaf = certificates.first().ok_or_else(|| refused(HandshakeRefusal::NoCertificate))?;
        let identity = leaf_identity(leaf).map_err(refused)?;
        let chain = tls.register_chain(certificates).map_err(refused)?;
        let verified = Self { chain, identity };
        verified.server().cluster(&reader.load())?;
        Ok(verified)
    }

    pub(super) fn server(&self) -> ServerIdentity<'_> {
        ServerIdentity { identity: &self.identity, issuer: Some(&self.chain.issuer().spki) }
    }

    /// Returns the first expiry in the chain.
    pub(super) fn not_after(&self) -> SystemTime {
        self.chain.not_after()
    }
}

impl ServerIdentity<'_> {
    /// Checks that the server is the wanted gateway.
    ///
    /// The root alone proves nothing: each workload of the mesh has a certificate below it.
    pub fn check_gateway(self, wanted: &RemoteGateway, snapshot: &Snapshot) -> Result<(), String> {
        if !wanted.is_verifiable() {
            let network = &wanted.network;
            return Err(format!(
                "neither the cluster nor an identity of this gateway is known; write `cluster` for \
                 network {network} into `networks`"
            ));
        }
        let uri = &self.identity.uri;
        if !wanted.identities.is_empty() && !wanted.identities.contains(uri) {
            return Err(format!("{uri} is not an identity of this gateway"));
        }
        if wanted.cluster.is_empty() {
            return self.cluster(snapshot).map(drop);
        }
        self.check_cluster(&wanted.cluster, snapshot)
    }

    /// Checks that the server is an expected workload of a cluster.
    pub fn check_workload(
        self,
        wanted: &ExpectedWorkloads,
        (cluster, snapshot): (&str, &Snapshot),
    ) -> Result<(), String> {
        self.check_cluster(cluster, snapshot)?;
        let Identity { uri, namespace, .. } = self.identity;
        let ExpectedWorkloads { identities, namespaces } = wanted;
        let is_any = identities.is_empty() && namespaces.is_empty();
        let has = |list: &[String], own: &str| list.iter().any(|one| one == own);
        if is_any || has(identities, uri) || has(namespaces, namespace) {
            return Ok(());
        }
        Err(format!("{uri} is not one of the binding's `workloads`"))
    }

    /// Returns the cluster of the issuer or trust domain.
    fn cluster(self, snapshot: &Snapshot) -> Result<Arc<str>, String> {
        let cluster = snapshot.trust.peer_cluster(&self.identity.trust_domain, self.issuer);
        let refusal = HandshakeRefusal::UntrustedDomain;
        let cluster = cluster.ok_or_else(|| format!("{refusal}: {}", refusal.description()))?;
        Ok(cluster.name)
    }

    fn check_cluster(self, wanted: &str, snapshot: &Snapshot) -> Result<(), String> {
        let (uri, found) = (&self.identity.uri, self.cluster(snapshot)?);
        if *found == *wanted {
            return Ok(());
        }
        Err(format!("{uri} belongs to cluster {found}, not to {wanted}"))
    }
}
