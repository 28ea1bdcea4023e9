//! Open tunnel, and the end of it.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::datapath::copy::backlog::Backlog;
use crate::datapath::copy::progress::InnerProgress;
use crate::datapath::copy::{
    ANSWER_DEADLINE, CopyOutcome, DELIVERY_DEADLINE, LAST_BYTES_DEADLINE, LAST_BYTES_MIN,
};
use crate::datapath::dial::{self, Upstream};
use crate::datapath::identity::Peer;
use crate::datapath::limits::load::LoadGuard;
use crate::datapath::{DataPath, balance};
use crate::reason::{Fault, Reason};
use crate::snapshot::Snapshot;
use crate::telemetry::Record;

/// Age of a tunnel below which a reset by the endpoint counts as a failure, if neither side has
/// sent a byte.
const EARLY_RESET_MAX_AGE: Duration = Duration::from_secs(1);
/// Wait for an answer in a tunnel that its peer has ended from which the wait counts. A peer that
/// ends its tunnels at once proves nothing.
const SILENCE_MIN: Duration = Duration::from_secs(1);
/// Upper bound of the random delay before a revoked tunnel ends, so that not all end at once.
const REVOKE_JITTER: Duration = Duration::from_secs(1);

/// Returns the delay before a revoked tunnel ends.
pub(super) fn revoke_delay() -> Duration {
    REVOKE_JITTER.mul_f64(fastrand::f64())
}

#[derive(Debug)]
pub struct Open {
    pub data_path: Arc<DataPath>,
    pub peer: Arc<Peer>,
    /// Generation of the snapshot before the tunnel was permitted.
    pub generation: u64,
    /// Endpoint, and the grant to use it.
    pub upstream: Upstream,
    pub record: Record,
    /// Time at which the tunnel was opened.
    pub since: Instant,
    /// Guards of a stream. None on a TLS listener, where the connection is the tunnel.
    pub guards: Option<StreamGuards>,
}

#[derive(Debug)]
pub struct StreamGuards {
    /// Tunnel in the load of its worker.
    pub load: LoadGuard,
    pub slot: StreamSlot,
}

/// Slot among the tunnels of a connection, held from the CONNECT until the socket to the endpoint
/// is closed. The stream may end earlier. It is half as large as the permit.
#[derive(Debug)]
pub struct StreamSlot(Arc<Semaphore>);

impl From<OwnedSemaphorePermit> for StreamSlot {
    fn from(permit: OwnedSemaphorePermit) -> Self {
        let slots = Arc::clone(permit.semaphore());
        permit.forget();
        Self(slots)
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

/// End of a stream's tunnel, as its connection has observed it.
#[derive(Debug)]
pub struct End {
    /// Clean end, or the reason for which the tunnel broke.
    pub result: Result<(), Reason>,
    /// Progress of the connection inside the tunnel.
    pub progress: InnerProgress,
    /// True if the peer did not get all bytes of the endpoint.
    pub is_lost: bool,
    /// True if the peer has sent END_STREAM.
    pub received_end: bool,
    /// Deadline for the endpoint to take everything, if it was sent FIN.
    pub delivery_deadline: Option<Instant>,
    /// Bytes that the endpoint has not taken.
    pub backlog: Backlog,
    /// Time for which the endpoint has owed an answer, if it still does.
    pub silence: Option<Duration>,
}

impl End {
    /// Returns the end of a tunnel that was never copied.
    pub fn before_copy(reason: Reason) -> Self {
        Self {
            result: Err(reason),
            progress: InnerProgress::default(),
            is_lost: false,
            received_end: false,
            delivery_deadline: None,
            backlog: Backlog::default(),
            silence: None,
        }
    }

    /// Returns true if the endpoint still has to get bytes of a peer that disconnected after
    /// END_STREAM, which was promised delivery (docs/wire-contract.md 1.6).
    fn needs_delivery(&self) -> bool {
        let is_peer_gone = matches!(
            self.result,
            Err(reason) if matches!(reason.blame(), Fault::None | Fault::Downstream)
        );
        is_peer_gone && self.received_end && self.delivery_deadline.is_none()
    }

    /// Returns the outcome, in which a reset may be the normal end of an inner connection.
    fn outcome(&self, upstream: &Upstream) -> CopyOutcome {
        let unsent = self.backlog.bytes().len();
        let classify = |reason| self.progress.classify_end(reason, unsent, self.is_lost);
        // A gateway of another network ends a tunnel as a peer does.
        let by_gateway = upstream.stream.is_cancelled();
        let classify = |reason| match classify(Reason::DownstreamCancelled) {
            Reason::Completed if by_gateway && reason == Reason::UpstreamReset => Reason::Completed,
            _ => classify(reason),
        };
        CopyOutcome {
            result: self.result.map_err(classify),
            delivery_deadline: self.delivery_deadline,
        }
    }
}

impl Open {
    /// Checks the tunnel against a new snapshot, and applies its limits.
    ///
    /// # Errors
    /// The change that revokes its grant.
    pub fn reevaluate(&mut self, snapshot: &Snapshot) -> Result<(), String> {
        self.upstream.reevaluate(snapshot, &self.data_path, &self.peer)
    }

    /// Checks the limits of time. Returns the time of the next check, if there is a limit.
    pub fn check_limits(&mut self) -> Result<Option<Instant>, Reason> {
        let bytes = self.record.received_bytes() + self.record.sent_bytes();
        match self.upstream.grant.limits() {
            Some(limits) => limits.check(self.since, bytes),
            None => Ok(None),
        }
    }

    /// Ends the tunnel of a stream. A task of its own delivers what the peer was promised.
    pub fn end(self, end: End) {
        let data_path = Arc::clone(&self.data_path);
        if end.needs_delivery() {
            data_path.lifecycle.spawn(self.deliver_rest(end));
            return;
        }
        let outcome = end.outcome(&self.upstream);
        if let Some(delivery) = self.finish(&outcome, end.silence) {
            data_path.lifecycle.spawn(delivery);
        }
    }

    /// Delivers the backlog and FIN unless that is evicted, and then finishes the tunnel.
    async fn deliver_rest(mut self, mut end: End) {
        let (deadline, peer) = (Instant::now() + DELIVERY_DEADLINE, Arc::clone(&self.peer));
        let account = end.backlog.account().cloned();
        let delivery = async {
            let stream = &mut self.upstream.stream;
            while !end.backlog.bytes().is_empty() {
                let taken = stream.write(end.backlog.bytes()).await?;
                self.record.add_received(taken as u64);
                end.backlog.advance(taken);
            }
            stream.shut_down()
        };
        let delivery = timeout_at(deadline, delivery);
        let evicted = async {
            match account {
                Some(account) => account.wait_until_evicted().await,
                None => pending().await,
            }
        };
        tokio::select! {
            delivered = peer.listener.drain.run_until_closed(delivery) => match delivered {
                Some(Ok(Ok(()))) => end.delivery_deadline = Some(deadline),
                Some(Ok(Err(_))) => end.result = Err(Reason::UpstreamReset),
                Some(Err(_)) => {}
                None => end.result = Err(Reason::DrainDeadline),
            },
            () = evicted => end.result = Err(Reason::BuffersFull),
        }
        let outcome = end.outcome(&self.upstream);
        if let Some(delivery) = self.finish(&outcome, end.silence) {
            delivery.await;
        }
    }

    /// Finishes the record, and closes the endpoint's side: by RST, unless the endpoint was sent
    /// everything. Returns the delivery that is left, after a clean end or if the peer has
    /// disconnected after its end.
    ///
    /// The endpoint has owed an answer for `silence`, if it still does.
    pub(super) fn finish(
        mut self,
        outcome: &CopyOutcome,
        silence: Option<Duration>,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.update_endpoint_health(outcome, silence);
        let Self { peer, upstream, mut record, guards, .. } = self;
        record.finish(outcome.result.err().unwrap_or(Reason::Completed));
        // The socket was dialled with zero linger, so every other close is an RST.
        let deadline = match outcome.result {
            Ok(()) if record.received_bytes() >= LAST_BYTES_MIN => {
                Some(Instant::now() + LAST_BYTES_DEADLINE)
            }
            Ok(()) => {
                upstream.stream.announce_close();
                None
            }
            Err(_) => outcome.delivery_deadline,
        };
        if let Some(deadline) = deadline {
            // A clean end is counted at once.
            let record = Some(record).filter(|_| outcome.result.is_err());
            return Some(deliver(peer, upstream, deadline, record, guards));
        }
        // The tunnel is counted as long as its socket.
        drop(upstream);
        None
    }

    /// Updates the endpoint's health.
    ///
    /// A reset counts as a failure if the tunnel was short and neither side has sent a byte, nor
    /// the peer FIN. So does an answer that the endpoint owes to a ClientHello. No other end does:
    /// a peer can provoke it by its bytes. As one source could provoke even these,
    /// [`EndpointState::is_to_blame`](crate::snapshot::EndpointState::is_to_blame) asks for
    /// another one.
    ///
    /// Provoked ends are not kept for the peer's own picks either. Envoy's outlier detection for
    /// TCP and ztunnel have no such memory, and it would take a table of peers and endpoints.
    fn update_endpoint_health(&mut self, outcome: &CopyOutcome, silence: Option<Duration>) {
        let (grant, now) = (&self.upstream.grant, Instant::now());
        let (endpoint, has_answered) = (&grant.endpoint, self.record.sent_bytes() > 0);
        // Inside the tunnel of a binding, the workload was verified, and not the gateway resets.
        let is_early = !self.peer.is_unauthenticated()
            && grant.binding.is_none()
            && now.saturating_duration_since(self.since) < EARLY_RESET_MAX_AGE
            && !has_answered;
        let is_unprovoked = self.record.received_bytes() == 0;
        // The endpoint owes it as long as the peer waits, and a gateway judges its own endpoints.
        let silence = silence.filter(|_| !has_answered && endpoint.remote.is_none());
        let has_failed = match outcome.result {
            Err(Reason::EndpointSilent) => true,
            Err(Reason::UpstreamReset) => {
                is_early && is_unprovoked && outcome.delivery_deadline.is_none()
            }
            Err(reason) if reason.blame() == Fault::Upstream => false,
            _ => silence.filter(|time| *time >= SILENCE_MIN).is_some_and(|time| {
                let detail = format!("the endpoint had not answered for {time:.1?}");
                self.record.set_detail(detail);
                endpoint.state.add_silence(time) >= ANSWER_DEADLINE
            }),
        };
        if has_failed {
            let source = dial::source_of(&self.peer, grant.first_peer());
            if endpoint.state.is_to_blame(source, now) {
                balance::eject_after_failed_tunnel(endpoint, &self.data_path.metrics);
            }
        } else if !is_early
            && (has_answered || outcome.result.is_ok())
            && !matches!(outcome.result, Err(why) if why.blame() == Fault::Upstream)
        {
            endpoint.state.restore(now);
        }
    }
}

/// Waits until the endpoint has taken everything, and holds what the tunnel has until then.
async fn deliver(
    peer: Arc<Peer>,
    upstream: Upstream,
    deadline: Instant,
    _record: Option<Record>,
    _guards: Option<StreamGuards>,
) {
    // Data that the endpoint still sends has no reader. Closing at once would send RST, and revoke
    // what the endpoint has not acknowledged yet.
    let delivery = upstream.stream.deliver(deadline);
    peer.listener.drain.run_until_closed(delivery).await;
}
