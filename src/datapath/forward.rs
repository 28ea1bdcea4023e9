//! Stages 5 to 9 as one function: from a target to the end of its tunnel.

use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::lifecycle::{Phase, reached};
use crate::reason::Reason;
use crate::telemetry::{DestinationService, DestinationWorkload, Record};

use super::dial::{BUDGET, Upstream};
use super::identity::Peer;
use super::tunnel::{Requested, Target, Tunnel};
use super::window::StreamWindow;
use super::{Gateway, balance, copy, dial, policy, route};

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
    let _open = window.open();
    record.connected(describe(&upstream));
    let ended = match requested.accept() {
        Ok(tunnel) => {
            tunnel_until_it_ends(
                gateway,
                peer,
                window,
                tunnel,
                &upstream,
                generation,
                &mut record,
            )
            .await
        }
        Err(reason) => Err(reason),
    };
    settle(gateway, &upstream, &record, ended);
    record.finish(ended.err().unwrap_or(Reason::Completed));
}

async fn establish(
    gateway: &Gateway,
    peer: &Peer,
    target: Result<Target, Reason>,
    requested: &mut Requested,
    record: &mut Record,
) -> Result<Upstream, Reason> {
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
        let failed = match dial::run(pick, &gateway.deny, deadline).await {
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

/// Copies until the tunnel ends by itself, the drain's deadline comes, or its right is gone.
async fn tunnel_until_it_ends(
    gateway: &Gateway,
    peer: &Peer,
    window: &StreamWindow,
    mut tunnel: Tunnel,
    upstream: &Upstream,
    generation: watch::Receiver<u64>,
    record: &mut Record,
) -> Result<(), Reason> {
    let mut phases = gateway.lifecycle.phases();
    let ended = tokio::select! {
        biased;
        ended = copy::run(&mut tunnel, &upstream.stream, window, record) => ended,
        () = reached(&mut phases, Phase::Closing) => Err(Reason::DrainDeadline),
        () = revoked(gateway, peer, &upstream.right, generation) => Err(Reason::Revoked),
    };
    if let Err(reason) = ended {
        tunnel.reset(reason);
    }
    ended
}

async fn revoked(
    gateway: &Gateway,
    peer: &Peer,
    right: &policy::Right,
    mut generation: watch::Receiver<u64>,
) {
    while generation.changed().await.is_ok() {
        if policy::still_allowed(&gateway.reader.load(), peer, right).is_err() {
            return sleep(REVOKE_JITTER.mul_f64(fastrand::f64())).await;
        }
    }
    std::future::pending().await
}

/// Closes the endpoint's side as the tunnel ended, and lets its health learn from it.
fn settle(gateway: &Gateway, upstream: &Upstream, record: &Record, ended: Result<(), Reason>) {
    let now = Instant::now();
    match ended {
        Ok(()) => {
            // The socket was dialled with zero linger, so that nothing but this looks clean.
            let _ = SockRef::from(&upstream.stream).set_linger(None);
            upstream.endpoint.state.restore(now);
        }
        Err(Reason::UpstreamReset) if record.sent_bytes() == 0 && record.age() < EARLY => {
            balance::failed(&upstream.siblings, &upstream.endpoint, &gateway.metrics);
        }
        Err(_) if record.sent_bytes() > 0 => upstream.endpoint.state.restore(now),
        Err(_) => {}
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
