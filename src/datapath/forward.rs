//! Stages 5 to 9 as one function: from a target to the end of its tunnel.

use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::sync::watch;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use crate::lifecycle::{Phase, reached};
use crate::reason::Reason;
use crate::telemetry::{DestinationService, DestinationWorkload, Record};

use super::copy::Outcome;
use super::dial::{BUDGET, Upstream};
use super::identity::Peer;
use super::tunnel::{Requested, Target, Tunnel};
use super::window::StreamWindow;
use super::{Gateway, balance, copy, dial, linger, policy, route};

/// An endpoint that resets a tunnel this early, without having sent a byte, counts as failed.
const EARLY: Duration = Duration::from_secs(1);
/// Tunnels that lost their right end within this time, not all at once.
const REVOKE_JITTER: Duration = Duration::from_secs(1);

/// Forwards one CONNECT: resolve, judge, pick, dial, answer, copy. Everything that can fail
/// before the answer fails before the answer.
pub async fn run(
    gateway: &Gateway,
    peer: &Peer,
    window: &StreamWindow,
    mut requested: Requested,
    asked: &str,
    target: Result<Target, Reason>,
) {
    let mut record = Record::new(&gateway.metrics, &peer.source, asked);
    let generation = gateway.reader.generation();
    // Boxed, because what establishing needs is far larger than what an open tunnel needs.
    let establishing = Box::pin(establish(
        gateway,
        peer,
        target,
        &mut requested,
        &mut record,
    ));
    let upstream = match establishing.await {
        Ok(upstream) => upstream,
        Err(reason) => {
            record.finish(reason);
            return requested.refuse(reason);
        }
    };
    let connected = Instant::now();
    record.connected(describe(&upstream));
    let outcome = match requested.accept() {
        Ok(tunnel) => {
            let ends = Ends {
                gateway,
                peer,
                generation,
            };
            ends.copy(window, tunnel, &upstream, &mut record).await
        }
        Err(reason) => Outcome::broken(reason),
    };
    let early = connected.elapsed() < EARLY && record.sent_bytes() == 0;
    judge_endpoint(gateway, &upstream, &outcome, early);
    record.finish(outcome.ended.err().unwrap_or(Reason::Completed));
    drop(record);
    close(upstream, &outcome).await;
}

async fn establish(
    gateway: &Gateway,
    peer: &Peer,
    target: Result<Target, Reason>,
    requested: &mut Requested,
    record: &mut Record,
) -> Result<Upstream, Reason> {
    if !gateway.budget.has_room() {
        return Err(Reason::BuffersFull);
    }
    let permit = {
        let snapshot = gateway.reader.load();
        let route = route::run(&snapshot, target?)?;
        let service = route.service();
        record.routed(DestinationService {
            hostname: Arc::clone(&service.hostname),
            name: Arc::clone(&service.name),
            namespace: Arc::clone(&service.namespace),
        });
        policy::run(&snapshot, peer, route)?
    };
    let mut phases = gateway.lifecycle.phases();
    tokio::select! {
        upstream = connect(gateway, permit, record) => upstream,
        reason = requested.cancelled() => Err(reason),
        () = reached(&mut phases, Phase::Closing) => Err(Reason::DrainDeadline),
    }
}

/// Picks and dials until an endpoint answers, none is left, or the budget is used up.
async fn connect(
    gateway: &Gateway,
    mut permit: policy::Permit,
    record: &mut Record,
) -> Result<Upstream, Reason> {
    let deadline = Instant::now() + BUDGET;
    let mut tried = Vec::new();
    let mut reason = Reason::NoEndpoint;
    while Instant::now() < deadline {
        let Ok(pick) = balance::pick(permit, &tried) else {
            break;
        };
        let started = Instant::now();
        let failed = match dial::run(pick, gateway, deadline).await {
            Ok(upstream) => {
                gateway.metrics.dialled(started.elapsed());
                return Ok(upstream);
            }
            Err(failed) => failed,
        };
        reason = failed.reason;
        gateway.metrics.dial_failed(reason);
        record.detail(failed.detail);
        if !reason.retry_elsewhere() {
            break;
        }
        if reason != Reason::DialDenied {
            balance::failed(
                failed.permit.route().endpoints(),
                &failed.endpoint,
                &gateway.metrics,
            );
        }
        tried.push(failed.endpoint);
        permit = failed.permit;
    }
    Err(reason)
}

/// What may end an open tunnel besides its two sides.
struct Ends<'a> {
    gateway: &'a Gateway,
    peer: &'a Peer,
    generation: watch::Receiver<u64>,
}

impl Ends<'_> {
    /// Copies until the tunnel ends by itself, the drain's deadline comes, or its right is gone.
    async fn copy(
        mut self,
        window: &StreamWindow,
        mut tunnel: Tunnel,
        upstream: &Upstream,
        record: &mut Record,
    ) -> Outcome {
        let mut phases = self.gateway.lifecycle.phases();
        let outcome = tokio::select! {
            biased;
            outcome = copy::run(&mut tunnel, &upstream.stream, window, record) => outcome,
            () = reached(&mut phases, Phase::Closing) => Outcome::broken(Reason::DrainDeadline),
            () = self.revoked(&upstream.right) => Outcome::broken(Reason::Revoked),
        };
        if let Err(reason) = outcome.ended {
            if reason == Reason::UpstreamReset {
                // A reset drops what h2 has not written yet. What the endpoint said last has had
                // its window, so the connection writes it when it has its turn.
                yield_now().await;
                yield_now().await;
            }
            tunnel.reset(reason);
        }
        outcome
    }

    async fn revoked(&mut self, right: &policy::Right) {
        while self.generation.changed().await.is_ok() {
            let snapshot = self.gateway.reader.load();
            if policy::still_allowed(&snapshot, self.peer, right).is_err() {
                drop(snapshot);
                return sleep(REVOKE_JITTER.mul_f64(fastrand::f64())).await;
            }
        }
        std::future::pending().await
    }
}

/// Lets the endpoint's health learn from how its tunnel ended.
///
/// `early` says that the tunnel was short and the endpoint sent nothing: if it was the endpoint
/// that left, by reset or by FIN, it counts as a failed dial.
fn judge_endpoint(gateway: &Gateway, upstream: &Upstream, outcome: &Outcome, early: bool) {
    let left = matches!(outcome.ended, Err(Reason::UpstreamReset)) || outcome.endpoint_left_first;
    if early && left {
        balance::failed(&upstream.siblings, &upstream.endpoint, &gateway.metrics);
    } else if !early && !matches!(outcome.ended, Err(Reason::UpstreamReset)) {
        upstream.endpoint.state.restore(Instant::now());
    }
}

/// Closes the endpoint's side as the tunnel ended: by RST, unless it was sent everything.
async fn close(upstream: Upstream, outcome: &Outcome) {
    // The socket was dialled with zero linger, so that nothing but this looks clean.
    if outcome.delivered && SockRef::from(&upstream.stream).set_linger(None).is_ok() {
        match outcome.ended {
            Ok(()) => drop(upstream.stream),
            // What it still sends has no reader: closing at once would take back, by RST, what
            // it has not read yet.
            Err(_) => linger::close(upstream.stream, linger::ENDPOINT).await,
        }
    }
}

fn describe(upstream: &Upstream) -> DestinationWorkload {
    let endpoint = &upstream.endpoint;
    let labels = &endpoint.workload;
    DestinationWorkload {
        address: endpoint.address,
        workload: labels.workload.clone(),
        name: labels.name.clone(),
        namespace: labels.namespace.clone(),
        principal: labels.principal.clone(),
        cluster: labels.cluster.clone(),
        canonical_name: labels.canonical_name.clone(),
        canonical_revision: labels.canonical_revision.clone(),
        region: endpoint.locality.region.clone(),
        zone: endpoint.locality.zone.clone(),
    }
}
