//! Pool of the connections to all gateways of other networks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use aws_lc_rs::digest::{Context as Digest, SHA256};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::lifecycle::Lifecycle;
use crate::limits::{self, OwnedPool, Source};
use crate::snapshot::{Reader, Snapshot};
use crate::status::GatewayRow;
use crate::tls::InboundTls;
use crate::wire::GatewayHash;

use super::gateway::{Context, GatewayConnections};
use super::ranks::Ranks;
use super::request::{self, Answer, Refused, Request};
use super::{AddressFilter, OpenError, Target};

/// Limit of connections that one tunnel tries at one gateway.
const CONNECTIONS_TRIED: usize = 3;
/// Wait after which a missing answer counts against the gateway. It gives an endpoint that cannot
/// be dialled up earlier.
const SILENCE_MIN: Duration = Duration::from_millis(2500);
/// Minimum number of gateways before those without connections that have left the mesh are
/// forgotten.
const PRUNE_ENTRIES_MIN: usize = 64;
/// Pause between two comparisons of gateways, as between PINGs.
const COMPARISON_PAUSE: Duration = Duration::from_secs(10);

/// Pool, shared by all workers. A lock is held only to look up a gateway, to take a place
/// or to note an answer.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    context: Context,
    gateways: Mutex<Gateways>,
    /// Locked only by comparisons.
    ranks: Mutex<Ranks>,
}

#[derive(Debug, Default)]
struct Gateways {
    by_target: HashMap<Target, Arc<GatewayConnections>>,
    prune_at: usize,
    next_comparison: Option<Instant>,
}

impl Pool {
    /// Creates a pool whose connections use the current certificate and trust. A drain waits until
    /// they have sent everything. Each has a descriptor of the pool.
    pub fn new(
        tls: Arc<InboundTls>,
        reader: Reader,
        lifecycle: Lifecycle,
        filter: AddressFilter,
        descriptors: Arc<limits::Pool>,
    ) -> Self {
        let context = Context { tls, reader, filter, lifecycle, descriptors };
        Self(Arc::new(Shared { context, gateways: Mutex::default(), ranks: Mutex::default() }))
    }

    /// Opens a tunnel of a source through a gateway. Requests that the gateway has not processed
    /// are repeated on another connection of the source.
    ///
    /// # Errors
    /// The gateway has failed or rejected the tunnel, and no byte of it was sent.
    pub async fn open(
        &self,
        (target, source): (&Target, &Source),
        request: &Request,
        deadline: Instant,
    ) -> Result<Answer, OpenError> {
        let gateway = self.ranked(target);
        let weight_factor = gateway.weight_factor();
        let mut tries = 0;
        loop {
            let slot = gateway.take(source, &self.0.context, deadline).await;
            let slot = slot.map_err(|failure| gateway.classify(failure))?;
            tries += 1;
            let opened = slot.state().epoch;
            let asked_at = Instant::now();
            let sent = request::send(slot, request, deadline).await;
            if matches!(sent, Ok(_) | Err(Refused::Processed(_))) {
                gateway.connections.lock().answered(source, opened);
            }
            if matches!(sent, Err(Refused::Silent(_))) {
                gateway.note_proof();
            }
            match sent {
                Ok((stream, load)) => {
                    return Ok(Answer { stream, load, weight_factor });
                }
                Err(Refused::Unprocessed(_) | Refused::Silent(_)) if tries < CONNECTIONS_TRIED => {}
                Err(Refused::Unprocessed(failure) | Refused::Silent(failure)) => {
                    return Err(gateway.classify(failure));
                }
                Err(Refused::Broken(failure)) => {
                    return Err(gateway.note_loss((source, request.authority()), failure));
                }
                Err(Refused::Unanswered(failure)) if asked_at.elapsed() >= SILENCE_MIN => {
                    return Err(gateway.note_silence((source, request.authority()), failure));
                }
                Err(
                    Refused::Unanswered(failure)
                    | Refused::Processed(failure)
                    | Refused::Unsent(failure),
                ) => {
                    return Err(OpenError::Tunnel(failure));
                }
            }
        }
    }

    /// Returns a gateway. The factors of the weights of all are computed again from time to time.
    fn ranked(&self, target: &Target) -> Arc<GatewayConnections> {
        let mut gateways = self.0.gateways.lock();
        let gateway = gateways.get_or_insert(target, &self.0.context.reader);
        let is_due = gateways.is_comparison_due(Instant::now());
        drop(gateways);
        if is_due {
            self.rank(GatewayConnections::rtt);
        }
        gateway
    }

    /// Compares the gateways of the current snapshot by their round trip times. Connections to
    /// earlier ones may still be open.
    fn rank(&self, time: impl Fn(&GatewayConnections) -> Option<Duration>) {
        let all = self.all();
        let snapshot = self.0.context.reader.load();
        let is_current = |target: &Target| snapshot.has_gateway(&target.gateway, target.address);
        let current = all.iter().filter(|one| is_current(&one.target));
        let times: Vec<_> = current.map(|one| (one.target.clone(), time(one))).collect();
        let mut ranks = self.0.ranks.lock();
        ranks.compare(&times);
        for one in &all {
            one.weight_factor.store(ranks.weight_factor(&one.target), Ordering::Relaxed);
        }
    }

    pub(super) fn gateway(&self, target: &Target) -> Arc<GatewayConnections> {
        let mut gateways = self.0.gateways.lock();
        gateways.get_or_insert(target, &self.0.context.reader)
    }

    pub(super) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(super) fn known(&self, target: &Target) -> Option<Arc<GatewayConnections>> {
        self.0.gateways.lock().by_target.get(target).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<GatewayConnections>> {
        let gateways = self.0.gateways.lock();
        gateways.by_target.values().cloned().collect()
    }

    /// Returns true if connections to the gateway have failed and it is ejected.
    pub fn is_ejected(&self, target: &Target) -> bool {
        self.known(target).is_some_and(|known| known.is_ejected())
    }

    /// Ejects a gateway for all services.
    pub fn eject(&self, target: &Target) {
        self.gateway(target).eject();
    }

    /// Compares the gateways as if they had these round trip times.
    #[cfg(test)]
    pub(super) fn simulate_times(&self, time: impl Fn(&Target) -> Duration) {
        self.rank(|gateway| Some(time(&gateway.target)));
    }

    /// Starts or ends an attempt to connect that opens no socket.
    #[cfg(test)]
    pub(crate) fn simulate_attempt(&self, target: &Target, is_running: bool) {
        self.gateway(target).simulate_attempt(is_running);
    }

    #[cfg(test)]
    pub(super) fn simulate_limits(&self, target: &Target, places: usize, connections: usize) {
        self.gateway(target).simulate_limits(places, connections);
    }

    #[cfg(test)]
    pub(super) fn descriptors(&self) -> &Arc<limits::Pool> {
        &self.0.context.descriptors
    }

    /// Starts an attempt to connect that panics.
    #[cfg(test)]
    pub(super) fn simulate_panic(&self, target: &Target, source: &Source) {
        self.gateway(target).simulate_panic(source, &self.0.context);
    }

    /// Forgets failures of a gateway, as after a successful attempt.
    #[cfg(test)]
    pub(crate) fn simulate_connection(&self, target: &Target) {
        self.gateway(target).simulate_connection();
    }

    /// Returns the state of all gateways, in the order of their addresses.
    pub fn status(&self) -> Vec<GatewayRow> {
        let mut rows: Vec<_> = self.all().iter().map(|one| one.status()).collect();
        rows.sort_by_key(|row| row.address);
        rows
    }

    /// Returns the pools of tunnels and connections of each gateway.
    pub fn pools(&self) -> Vec<OwnedPool> {
        self.all().iter().flat_map(|gateway| gateway.pools()).collect()
    }

    /// Returns the hash by which `x-strait-via` names this gateway; none without a certificate.
    pub fn own_hash(&self, snapshot: &Snapshot) -> Option<GatewayHash> {
        let own = self.0.context.tls.outbound()?;
        let cluster = &snapshot.balancing.position.cluster;
        let mut digest = Digest::new(&SHA256);
        for part in [&**cluster, snapshot.network(), &*own.identity] {
            digest.update(part.as_bytes());
            digest.update(&[0]);
        }
        let mut hash = [0; 8];
        hash.copy_from_slice(digest.finish().as_ref().get(..8)?);
        Some(GatewayHash::new(hash))
    }
}

impl Gateways {
    fn get_or_insert(&mut self, target: &Target, reader: &Reader) -> Arc<GatewayConnections> {
        if let Some(known) = self.by_target.get(target) {
            return Arc::clone(known);
        }
        if self.by_target.len() >= self.prune_at.max(PRUNE_ENTRIES_MIN) {
            let snapshot = reader.load();
            self.by_target.retain(|known, one| {
                !one.is_unused() || snapshot.has_gateway(&known.gateway, known.address)
            });
            self.prune_at = 2 * self.by_target.len();
        }
        let new = Arc::new(GatewayConnections::new(target.clone()));
        self.by_target.insert(target.clone(), Arc::clone(&new));
        new
    }

    /// Returns true once for each pause.
    fn is_comparison_due(&mut self, now: Instant) -> bool {
        let is_due = self.next_comparison.is_none_or(|next| next <= now);
        if is_due {
            self.next_comparison = Some(now + COMPARISON_PAUSE);
        }
        is_due
    }
}
