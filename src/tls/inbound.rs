//! TLS state of HBONE connections: the configuration in force, and the chains of open connections.
//!
//! A change of trust replaces the configuration. The control path then verifies the chains of
//! open connections again, each chain once.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{ClientConfig, ServerConfig};
use tokio::sync::{Notify, SetOnce};

use crate::reason::HandshakeRefusal;

use super::chains::{ChainFingerprint, VerifiedPath};
use super::identity::leaf_identity;
use super::issuers::{Issuer, IssuerCounter, IssuerCounters};
use super::verifier::{ClientVerifier, explain_error, issuer_of, refusal_for_error};

/// Interval at which `recheck` reports the chains that have lost trust.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum number of entries before chains without a connection are pruned.
const PRUNE_ENTRIES_MIN: usize = 64;

/// Configuration of HBONE listeners, with its verifier.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// Configuration for new handshakes.
    pub config: Arc<ServerConfig>,
    pub(super) verifier: Arc<ClientVerifier>,
    /// Configuration of connections to gateways of other networks; none without a certificate.
    pub(super) outbound: Option<Arc<OutboundTls>>,
}

/// Configuration of connections to gateways of other networks.
///
/// The handshake verifies the chain, the trust domain, the issuer and revocation. The caller
/// verifies the cluster and the identity.
#[derive(Debug)]
pub struct OutboundTls {
    /// Configuration for new handshakes.
    pub config: Arc<ClientConfig>,
    /// Identity in our certificate.
    pub identity: Arc<str>,
}

/// Configuration in force and chains of open connections.
#[derive(Debug)]
pub struct InboundTls {
    served: ArcSwap<ServerTls>,
    open: Mutex<OpenChains>,
    /// Requests of rechecks of open connections, for example because a revocation list has become
    /// stale.
    pub recheck: Notify,
}

/// Chains by fingerprint. Once their number has doubled, those without a connection are pruned.
#[derive(Debug, Default)]
struct OpenChains {
    chains: HashMap<ChainFingerprint, Weak<Chain>>,
    prune_at: usize,
    issuers: IssuerCounters,
}

/// Verified chain of one or more open connections; all that presented it share it.
#[derive(Debug)]
pub struct Chain {
    /// The leaf, then the intermediates.
    certificates: Box<[CertificateDer<'static>]>,
    /// Last start of the validity of a certificate on the path to the root, in seconds since 1970.
    /// Different roots can lead to a different path.
    not_before: AtomicU64,
    /// First expiry of a certificate on that path, likewise.
    not_after: AtomicU64,
    /// Issuer of the leaf: the holder of the key that signed it, on any path.
    issuer: Arc<Issuer>,
    trust_lost: SetOnce<HandshakeRefusal>,
}

/// Chain that is no longer trusted.
#[derive(Debug)]
pub struct LostTrust {
    pub identity: Arc<str>,
    /// Reason for the loss of trust.
    pub refusal: HandshakeRefusal,
    /// The root, trust domain, issuer or revocation list that caused it.
    pub cause: String,
}

impl Chain {
    /// Returns the first expiry of a certificate on the path to the root.
    pub fn not_after(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.not_after.load(Ordering::Relaxed))
    }

    fn set_validity(&self, path: &VerifiedPath) {
        self.not_before.store(path.not_before.as_secs(), Ordering::Relaxed);
        self.not_after.store(path.not_after.as_secs(), Ordering::Relaxed);
    }

    /// Returns the time in the validity of the path that is nearest to `now`.
    fn nearest_valid(&self, now: UnixTime) -> UnixTime {
        let [start, end] = [&self.not_before, &self.not_after].map(|it| it.load(Ordering::Relaxed));
        UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs().min(end).max(start)))
    }

    pub fn issuer(&self) -> &Arc<Issuer> {
        &self.issuer
    }

    /// Returns the reason if the chain is no longer trusted.
    pub fn lost(&self) -> Option<HandshakeRefusal> {
        self.trust_lost.get().copied()
    }

    /// Waits until the chain is no longer trusted, and returns the reason.
    pub async fn wait_trust_lost(&self) -> HandshakeRefusal {
        *self.trust_lost.wait().await
    }

    fn parts(&self) -> Option<(&CertificateDer<'static>, &[CertificateDer<'static>])> {
        self.certificates.split_first()
    }
}

impl InboundTls {
    /// Creates the state of listeners without connections.
    pub fn new(served: ServerTls) -> Self {
        Self {
            served: ArcSwap::from_pointee(served),
            open: Mutex::default(),
            recheck: Notify::new(),
        }
    }

    /// Returns the configuration for a new handshake.
    pub fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.served.load().config)
    }

    /// Returns the configuration for a connection to a gateway of another network. It is another
    /// `Arc` after each change of our certificate or of trust.
    pub fn outbound(&self) -> Option<Arc<OutboundTls>> {
        self.served.load().outbound.clone()
    }

    /// Replaces the configuration and requests a recheck of open connections.
    pub fn replace(&self, served: ServerTls) {
        self.served.store(Arc::new(served));
        self.recheck.notify_one();
    }

    /// Registers the chain of a connection after its handshake.
    ///
    /// The configuration may have changed since the handshake began. The chain is therefore
    /// verified again, until the configuration used is still in force after registration. A
    /// later change then finds the chain among the registered ones. The usual cost is one cache
    /// lookup, because the verifier has the chain from the handshake.
    ///
    /// # Errors
    /// The peer presented no certificate, or is no longer trusted.
    pub fn register_chain(
        &self,
        certificates: &[CertificateDer<'_>],
    ) -> Result<Arc<Chain>, HandshakeRefusal> {
        let (leaf, intermediates) =
            certificates.split_first().ok_or(HandshakeRefusal::NoCertificate)?;
        let key = ChainFingerprint::new(leaf, intermediates);
        loop {
            let served = self.served.load_full();
            let now = UnixTime::now();
            let judged = served.verifier.verify_chain(leaf, intermediates, now);
            let path = judged.map_err(|error| self.refusal(&error))?;
            let chain = self.open.lock().get_or_insert(key, path, certificates);
            if Arc::ptr_eq(&served, &self.served.load()) {
                self.open.lock().issuers.accept(chain.issuer());
                return Ok(chain);
            }
        }
    }

    /// Returns the refusal of a failed handshake, and counts it for the issuer that caused it,
    /// if any.
    pub fn refusal(&self, error: &rustls::Error) -> HandshakeRefusal {
        if let Some(issuer) = issuer_of(error) {
            self.open.lock().issuers.refuse(issuer);
        }
        refusal_for_error(error)
    }

    /// Returns the issuers of leaves seen since the start, at most a fixed number.
    pub fn issuers(&self) -> Vec<IssuerCounter> {
        self.open.lock().issuers.all()
    }

    /// Verifies the chains of all open connections under the configuration in force. Reports, in
    /// batches, those that have lost trust. Neither an expired certificate nor a clock that is set
    /// back ends a tunnel: a chain is verified as of its nearest valid moment.
    pub fn recheck(&self, mut report: impl FnMut(&[LostTrust])) {
        let open: Vec<_> = {
            let open = self.open.lock();
            open.chains.values().filter_map(Weak::upgrade).collect()
        };
        let (mut batch, mut since) = (Vec::new(), Instant::now());
        for chain in open {
            if chain.lost().is_none()
                && let Some(lost) = self.verify_again(&chain, UnixTime::now())
                && chain.trust_lost.set(lost.refusal).is_ok()
            {
                batch.push(lost);
            }
            if !batch.is_empty() && since.elapsed() >= REPORT_INTERVAL {
                report(&batch);
                batch.clear();
                since = Instant::now();
            }
        }
        if !batch.is_empty() {
            report(&batch);
        }
    }

    fn verify_again(&self, chain: &Chain, now: UnixTime) -> Option<LostTrust> {
        let (leaf, intermediates) = chain.parts()?;
        let served = self.served.load_full();
        let judged = served.verifier.verify_chain(leaf, intermediates, chain.nearest_valid(now));
        let error = match judged {
            Ok(path) => {
                chain.set_validity(&path);
                return None;
            }
            Err(error) => error,
        };
        Some(LostTrust {
            identity: leaf_identity(leaf).map_or_else(|_| Arc::default(), |leaf| leaf.uri),
            refusal: refusal_for_error(&error),
            cause: explain_error(&error),
        })
    }
}

impl OpenChains {
    /// Returns the chain of an earlier connection that is still trusted, or registers a new one.
    fn get_or_insert(
        &mut self,
        key: ChainFingerprint,
        path: VerifiedPath,
        certificates: &[CertificateDer<'_>],
    ) -> Arc<Chain> {
        let known = self.chains.get(&key).and_then(Weak::upgrade);
        if let Some(known) = known.filter(|known| known.lost().is_none()) {
            known.set_validity(&path);
            return known;
        }
        if self.chains.len() >= self.prune_at.max(PRUNE_ENTRIES_MIN) {
            self.chains.retain(|_, chain| chain.strong_count() > 0);
            self.prune_at = 2 * self.chains.len();
        }
        let certificates = certificates.iter();
        let chain = Arc::new(Chain {
            certificates: certificates.map(|one| one.clone().into_owned()).collect(),
            not_before: AtomicU64::new(path.not_before.as_secs()),
            not_after: AtomicU64::new(path.not_after.as_secs()),
            issuer: path.issuer,
            trust_lost: SetOnce::new(),
        });
        self.chains.insert(key, Arc::downgrade(&chain));
        chain
    }
}

#[cfg(test)]
mod tests {
    use super::super::rejecting_server_config;
    use super::*;
    use crate::tls::tests::samples::{
        OWN, authority, certificates, intermediate, leaf, material, trusting,
    };
    use crate::tools::dev::Authority;

    const WEST: &str = "spiffe://west.local/ns/shop/sa/checkout";

    /// Returns the configuration of a gateway that trusts these domains.
    fn served(authority: &Authority, domains: &[&str]) -> ServerTls {
        trusting(&material(&leaf(authority, "east", OWN), &authority.root_pem()), domains)
    }

    fn chain(authority: &Authority, id: &str) -> Vec<CertificateDer<'static>> {
        certificates(&leaf(authority, "west", id).chain_pem)
    }

    fn rechecked(inbound: &InboundTls) -> Vec<(Arc<str>, HandshakeRefusal)> {
        let mut all = Vec::new();
        inbound.recheck(|batch| {
            all.extend(batch.iter().map(|one| (Arc::clone(&one.identity), one.refusal)));
        });
        all
    }

    #[test]
    fn connections_of_one_chain_share_it_and_lose_trust_together_and_once() {
        let authority = authority();
        let inbound = InboundTls::new(served(&authority, &["west.local", "north.local"]));
        let west = chain(&authority, WEST);
        let north = chain(&authority, "spiffe://north.local/ns/a/sa/b");
        let (first, second) = (inbound.register_chain(&west), inbound.register_chain(&west));
        let (first, second) = (first.expect("a chain"), second.expect("a chain"));
        let other = inbound.register_chain(&north).expect("a chain");
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        assert_eq!(rechecked(&inbound), []);
        inbound.replace(served(&authority, &["north.local"]));
        let lost = (Arc::from(WEST), HandshakeRefusal::UntrustedDomain);
        assert_eq!(rechecked(&inbound), [lost]);
        assert_eq!(rechecked(&inbound), []);
        assert_eq!(first.lost(), Some(HandshakeRefusal::UntrustedDomain));
        assert_eq!(other.lost(), None);
        // Restored trust applies to new connections only.
        inbound.replace(served(&authority, &["west.local"]));
        let again = inbound.register_chain(&west).expect("a chain");
        assert!(again.lost().is_none() && first.lost().is_some());
    }

    #[test]
    fn a_handshake_under_an_older_configuration_is_judged_by_the_one_in_force() {
        let (authority, other) = (authority(), authority());
        let inbound = InboundTls::new(served(&authority, &["west.local"]));
        let west = chain(&authority, WEST);
        inbound.register_chain(&west).expect("a chain");
        inbound.replace(served(&other, &["west.local"]));
        let refused = inbound.register_chain(&west).expect_err("another root");
        assert_eq!(refused, HandshakeRefusal::UnknownIssuer);
        inbound.replace(rejecting_server_config().expect("a configuration"));
        let refused = inbound.register_chain(&west).expect_err("nobody");
        assert_eq!(refused, HandshakeRefusal::UntrustedDomain);
        let none = inbound.register_chain(&[]).expect_err("no certificate");
        assert_eq!(none, HandshakeRefusal::NoCertificate);
    }

    #[test]
    fn the_end_of_a_known_chain_is_that_of_the_configuration_in_force() {
        let authority = authority();
        let inbound = InboundTls::new(served(&authority, &["west.local"]));
        let west = chain(&authority, WEST);
        let first = inbound.register_chain(&west).expect("a chain");
        let end = first.not_after();
        // The path to a different root, under another configuration.
        let other = VerifiedPath {
            not_before: UnixTime::since_unix_epoch(Duration::ZERO),
            not_after: UnixTime::since_unix_epoch(Duration::from_secs(1)),
            issuer: Arc::clone(first.issuer()),
        };
        let key = ChainFingerprint::new(&west[0], &west[1..]);
        let same = inbound.open.lock().get_or_insert(key, other, &west);
        assert!(Arc::ptr_eq(&first, &same));
        assert_eq!(same.not_after(), SystemTime::UNIX_EPOCH + Duration::from_secs(1));
        let again = inbound.register_chain(&west).expect("a chain");
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(first.not_after(), end);
    }

    #[test]
    fn a_clock_that_is_set_back_before_the_certificates_ends_no_trust_but_that_of_removed_roots() {
        let (authority, other) = (authority(), authority());
        let inbound = InboundTls::new(served(&authority, &["west.local"]));
        let chain = inbound.register_chain(&chain(&authority, WEST)).expect("a chain");
        let day = Duration::from_secs(24 * 3600);
        let now = UnixTime::now().as_secs();
        let yesterday = UnixTime::since_unix_epoch(Duration::from_secs(now) - day);
        let end = chain.not_after();
        // A new verifier has no verdict in its cache.
        inbound.replace(served(&authority, &["west.local"]));
        assert!(inbound.verify_again(&chain, yesterday).is_none());
        assert_eq!(chain.not_after(), end);
        inbound.replace(served(&other, &["west.local"]));
        let lost = inbound.verify_again(&chain, yesterday).map(|lost| lost.refusal);
        assert_eq!(lost, Some(HandshakeRefusal::UnknownIssuer));
    }

    #[test]
    fn chains_without_a_connection_do_not_pile_up() {
        let authority = authority();
        let inbound = InboundTls::new(served(&authority, &["west.local"]));
        let issuer = intermediate(&authority, "west");
        for _ in 0..3 * PRUNE_ENTRIES_MIN {
            let chain = certificates(&issuer.leaf(WEST).expect("a leaf").chain_pem);
            drop(inbound.register_chain(&chain).expect("a chain"));
            assert!(inbound.open.lock().chains.len() <= PRUNE_ENTRIES_MIN);
        }
    }
}
