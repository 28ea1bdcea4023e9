//! Open tunnel of an HBONE stream, and the end of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::datapath::DataPath;
use crate::datapath::accept::LoadGuard;
use crate::datapath::copy::backlog::Backlog;
use crate::datapath::copy::progress::InnerProgress;
use crate::datapath::copy::{CopyOutcome, DELIVERY_DEADLINE};
use crate::datapath::dial::Upstream;
use crate::datapath::http2::slots::StreamSlot;
use crate::datapath::identity::Peer;
use crate::reason::{Fault, Reason};
use crate::snapshot::Snapshot;
use crate::telemetry::Record;

use super::super::{authorize, policy};
use super::ending::{close, update_endpoint_health};

/// Age of a tunnel below which a reset by the endpoint counts as a failure, if neither side has
/// sent a byte.
const EARLY_RESET_MAX_AGE: Duration = Duration::from_secs(1);

/// Open tunnel.
#[derive(Debug)]
pub struct Open {
    /// State shared by all connections.
    pub gateway: Arc<DataPath>,
    /// Peer that requested the tunnel.
    pub peer: Arc<Peer>,
    /// Generation of the snapshot before the tunnel was permitted.
    pub generation: u64,
    /// Endpoint, and the grant to use it.
    pub upstream: Upstream,
    /// Telemetry record.
    pub record: Record,
    /// Time at which the tunnel was opened.
    pub since: Instant,
    /// Guards that count the tunnel: in the load of its worker, and among those of its connection.
    pub counted: (LoadGuard, StreamSlot),
}

/// End of a tunnel, as its connection has observed it.
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
        }
    }
}

impl Open {
    /// Creates the tunnel at the time at which its endpoint was reached.
    pub fn new(
        gateway: Arc<DataPath>,
        peer: Arc<Peer>,
        generation: u64,
        upstream: Upstream,
        record: Record,
        counted: (LoadGuard, StreamSlot),
    ) -> Self {
        Self {
            gateway,
            peer,
            generation,
            upstream,
            record,
            since: Instant::now(),
            counted,
        }
    }

    /// Checks a tunnel against a new snapshot.
    ///
    /// # Errors
    /// The change that revokes its grant.
    pub fn reevaluate(&self, snapshot: &Snapshot) -> Result<(), String> {
        let grant = &self.upstream.grant;
        policy::still_allowed(snapshot, &self.peer, grant)
            .map_err(str::to_owned)
            .and_then(|()| authorize::reevaluate(snapshot, &self.gateway, &self.peer, grant))
    }

    /// Ends the endpoint's side in the way in which the tunnel ended, and finishes the record. A
    /// task of its own delivers what the peer was promised.
    pub fn end(self, end: End) {
        let peer_gone = matches!(
            end.result,
            Err(reason) if matches!(reason.blame(), Fault::Nobody | Fault::Downstream)
        );
        let is_owed = peer_gone && end.received_end && end.delivery_deadline.is_none();
        let is_delivered = end.result.is_ok() || end.delivery_deadline.is_none();
        let lifecycle = self.gateway.lifecycle.clone();
        if is_owed {
            lifecycle.spawn(self.deliver_rest(end));
        } else if is_delivered {
            self.finish(end);
        } else {
            lifecycle.spawn(async move {
                let (upstream, outcome, held) = self.record_end(end);
                close(upstream, &outcome).await;
                drop(held);
            });
        }
    }

    /// Delivers the bytes of a peer that disconnected after END_STREAM, which was promised
    /// delivery (docs/wire-contract.md 1.6).
    async fn deliver_rest(mut self, mut end: End) {
        let deadline = Instant::now() + DELIVERY_DEADLINE;
        let delivery = async {
            let stream = &mut self.upstream.stream;
            while !end.backlog.bytes().is_empty() {
                let taken = stream.write(end.backlog.bytes()).await?;
                self.record.add_received(taken as u64);
                end.backlog.advance(taken);
            }
            stream.shut_down()
        };
        match timeout_at(deadline, delivery).await {
            Ok(Ok(())) => end.delivery_deadline = Some(deadline),
            Ok(Err(_)) => end.result = Err(Reason::UpstreamReset),
            Err(_) => {}
        }
        let (upstream, outcome, held) = self.record_end(end);
        close(upstream, &outcome).await;
        drop(held);
    }

    /// Ends a tunnel that owes its endpoint nothing.
    fn finish(self, end: End) {
        let (upstream, outcome, _held) = self.record_end(end);
        if outcome.result.is_ok() {
            upstream.stream.close();
        }
    }

    /// Records the end. Returns the endpoint, which is still open, and the guards that count the
    /// tunnel as long as its socket.
    fn record_end(self, end: End) -> (Upstream, CopyOutcome, impl Sized + Send) {
        let Self {
            gateway,
            upstream,
            mut record,
            since,
            counted,
            ..
        } = self;
        let unsent = end.backlog.bytes().len();
        let classify = |reason| end.progress.classify_end(reason, unsent, end.is_lost);
        // A gateway of another network ends a tunnel as a peer does.
        let by_gateway = upstream.stream.is_cancelled();
        let classify = |reason| match classify(Reason::DownstreamCancelled) {
            Reason::Completed if by_gateway && reason == Reason::UpstreamReset => Reason::Completed,
            _ => classify(reason),
        };
        let outcome = CopyOutcome {
            result: end.result.map_err(classify),
            delivery_deadline: end.delivery_deadline,
        };
        let early = since.elapsed() < EARLY_RESET_MAX_AGE && record.sent_bytes() == 0;
        let unprovoked = record.received_bytes() == 0 && outcome.delivery_deadline.is_none();
        update_endpoint_health(&gateway, &upstream, &outcome, early, unprovoked);
        record.finish(outcome.result.err().unwrap_or(Reason::Completed));
        (upstream, outcome, (record, counted))
    }
}
