//! Stages 5 to 10 of an HBONE tunnel as one function: from a target to the end of its tunnel.

pub mod connection;
mod ending;
pub mod open;
pub mod raw;
pub mod setup;
mod sni;
pub mod tunnel_copy;
pub mod turn;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::reason::Reason;
use crate::snapshot::{Endpoint, Service, ServicePort};
use crate::telemetry::{Destination, DestinationService, Record};
use crate::wire::sni::RouteBy;

use super::accept::LoadGuard;
use super::copy::CopyOutcome;
use super::dial::{self, TOTAL_DIAL_TIMEOUT, Upstream};
use super::http2::slots::{StreamSlot, StreamSlots};
use super::http2::streams::STREAMS_MAX;
use super::http2::tunnel::Target;
use super::identity::Peer;
use super::limits::budget::Evicted;
use super::{DataPath, authorize, balance, policy, route};
use open::{End, Open};
use setup::{PendingConnect, Tunnel};

/// Deadline for a slot among the connection's tunnels. As a rule the tunnel that ended last
/// frees its slot within a round trip to its endpoint.
const SLOT_DEADLINE: Duration = Duration::from_secs(1);
/// Upper bound of the random delay before a revoked tunnel ends, so that not all end at once.
pub const REVOKE_JITTER: Duration = Duration::from_secs(1);

/// Number of endpoints whose policies may refuse one tunnel before the tunnel is rejected.
///
/// Policies usually apply to a whole service and refuse at each of its endpoints. More tries
/// would only be work that a peer can cause. Policies that apply to some endpoints, such as a
/// canary, are likely to leave others.
pub const POLICY_REFUSALS_MAX: usize = 3;

/// CONNECT request whose headers were read, with everything that is needed to forward it.
#[derive(Debug)]
pub struct ConnectRequest {
    /// State shared by all connections.
    pub gateway: Arc<DataPath>,
    /// Peer that sent the request.
    pub peer: Arc<Peer>,
    /// Slots of the connection's tunnels.
    pub slots: Arc<StreamSlots>,
    /// Stream, not answered yet.
    pub requested: PendingConnect,
    /// Telemetry record of the tunnel.
    pub record: Record,
    /// Counts the tunnel in the load of its worker.
    pub load: LoadGuard,
    /// Slot among the connection's tunnels; none if all are taken.
    pub slot: Option<StreamSlot>,
}

/// Opens one CONNECT: resolves, evaluates policy, picks, dials, answers, and hands the open tunnel
/// over to its connection, which copies. All failures precede the answer, except where the TLS
/// inside the tunnel takes part in routing.
pub async fn run(asked: Box<ConnectRequest>, target: Result<Target, Reason>) {
    let Some((tunnel, open)) = open(asked, target).await else {
        return;
    };
    if let Err((open, reason)) = tunnel.open(open) {
        open.end(End::before_copy(reason));
    }
}

/// Resolves, evaluates policy, dials and answers.
async fn open(
    asked: Box<ConnectRequest>,
    target: Result<Target, Reason>,
) -> Option<(Tunnel, Box<Open>)> {
    let ConnectRequest {
        gateway,
        peer,
        slots,
        requested,
        mut record,
        load,
        slot,
    } = *asked;
    let slot = match slot {
        Some(slot) => slot,
        None => match Box::pin(wait_for_slot(&peer, &slots, &requested)).await {
            Ok(slot) => slot,
            Err((reason, detail)) => {
                if !detail.is_empty() {
                    record.set_detail(detail);
                }
                record.finish(requested.reject(reason));
                return None;
            }
        },
    };
    let generation = *gateway.reader.generation().borrow();
    let opened = match resolve_and_evaluate(&gateway, &peer, target, &mut record) {
        Err(reason) => Err(requested.reject(reason)),
        Ok((permit, own)) => match own.unwrap_or_else(|| peer.listener.rules().route_by()) {
            RouteBy::Authority => {
                dial_and_answer(&gateway, &peer, requested, permit, &mut record).await
            }
            // Boxed: reading a ClientHello takes far more memory than dialling.
            RouteBy::Sni => {
                let routed =
                    sni::route_by_server_name(&gateway, &peer, requested, permit, &mut record);
                Box::pin(routed).await
            }
            RouteBy::Strict => {
                let checked = sni::dial_and_check_server_name(
                    &gateway,
                    &peer,
                    requested,
                    permit,
                    &mut record,
                );
                Box::pin(checked).await
            }
        },
    };
    match opened {
        Ok((tunnel, upstream)) => {
            let endpoint = upstream.grant.endpoint();
            record.set_open(destination(endpoint), endpoint.labels());
            let counted = (load, slot);
            let open = Open::new(gateway, peer, generation, upstream, record, counted);
            Some((tunnel, Box::new(open)))
        }
        Err(reason) => {
            record.finish(reason);
            None
        }
    }
}

/// Waits for a slot among the connection's tunnels.
///
/// A stream that was reset no longer counts for HTTP/2. A peer at the limit may therefore open the
/// next stream before its previous tunnel has ended here.
async fn wait_for_slot(
    peer: &Peer,
    slots: &Arc<StreamSlots>,
    requested: &PendingConnect,
) -> Result<StreamSlot, (Reason, String)> {
    tokio::select! {
        slot = timeout(SLOT_DEADLINE, slots.take()) => slot.map_err(|_| {
            (Reason::Overloaded, format!("the connection has {STREAMS_MAX} tunnels"))
        }),
        reason = requested.cancelled() => Err((reason, String::new())),
        () = peer.listener.drain.closing() => Err((Reason::DrainDeadline, String::new())),
    }
}

/// Resolves and evaluates policy. Also returns the service's own routing mode, if it has one.
fn resolve_and_evaluate(
    gateway: &DataPath,
    peer: &Peer,
    target: Result<Target, Reason>,
    record: &mut Record,
) -> Result<(policy::Permit, Option<RouteBy>), Reason> {
    // Checked after `generation` was obtained: a later loss of trust changes the generation.
    if peer.lost_trust().is_some() {
        return Err(Reason::Revoked);
    }
    if !gateway.budget.has_room() {
        return Err(Reason::BuffersFull);
    }
    let snapshot = gateway.reader.load();
    let route = route::resolve(&snapshot, peer, target?)?;
    record.set_service(destination_service(route.service()));
    let of = ServicePort {
        host: &route.service().hostname,
        port: route.port(),
    };
    let route_by = snapshot.route_by(route.asked(), of, route.means());
    Ok((policy::run(&snapshot, peer, route)?, route_by))
}

/// Dials, and answers 200 or rejects.
async fn dial_and_answer(
    gateway: &DataPath,
    peer: &Peer,
    requested: PendingConnect,
    permit: policy::Permit,
    record: &mut Record,
) -> Result<(Tunnel, Upstream), Reason> {
    let reached = tokio::select! {
        upstream = establish(gateway, peer, permit, record) => upstream,
        reason = requested.cancelled() => Err(reason),
        () = peer.listener.drain.closing() => Err(Reason::DrainDeadline),
    };
    match reached {
        Ok(_) if peer.lost_trust().is_some() => Err(requested.reject(Reason::Revoked)),
        Ok(upstream) => Ok((requested.accept()?, upstream)),
        Err(reason) => Err(requested.reject(reason)),
    }
}

/// Picks and dials until an endpoint answers, none is left, or the time budget is used up.
async fn establish(
    gateway: &DataPath,
    peer: &Peer,
    mut permit: policy::Permit,
    record: &mut Record,
) -> Result<Upstream, Reason> {
    let deadline = Instant::now() + TOTAL_DIAL_TIMEOUT;
    if let Some(category) = balance::draw_drop_category(permit.route()) {
        record.set_detail(format!(
            "dropped by drop_overloads of the control plane: {category:?}"
        ));
        return Err(Reason::DropOverload);
    }
    let (mut tried, mut refused) = (Vec::new(), 0);
    let mut reason = permit.route().reason_without_endpoint();
    if permit.route().endpoints().endpoints.is_empty()
        && let Some(why) = permit.route().detail()
    {
        record.set_detail(why);
    }
    while Instant::now() < deadline {
        let Ok(pick) = balance::pick(permit, &tried) else {
            break;
        };
        let authorized = match authorize::run(gateway, peer, pick) {
            Ok(authorized) => authorized,
            Err((pick, why)) => {
                reason = Reason::PolicyDenied;
                record.set_detail(why);
                refused += 1;
                if refused == POLICY_REFUSALS_MAX {
                    break;
                }
                tried.push(Arc::clone(pick.endpoint()));
                permit = pick.into_permit();
                continue;
            }
        };
        let failed = match dial::run(authorized, (gateway, peer), deadline).await {
            Ok(upstream) => return Ok(upstream),
            Err(failed) => failed,
        };
        reason = failed.reason;
        gateway.metrics.dial_failed(reason);
        record.set_detail(failed.detail);
        if !reason.is_retriable() {
            break;
        }
        if reason != Reason::DialDenied {
            gateway.reader.request_refresh(&failed.endpoint);
            balance::eject_after_failure(
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

/// Waits until an open tunnel has to be stopped. Returns the reason and an optional detail.
async fn wait_for_stop(
    gateway: &DataPath,
    generation: &mut watch::Receiver<u64>,
    peer: &Peer,
    right: &policy::Grant,
) -> (Reason, Option<String>) {
    tokio::select! {
        () = peer.listener.drain.closing() => (Reason::DrainDeadline, None),
        why = wait_for_revocation(gateway, generation, peer, right) => (Reason::Revoked, Some(why)),
    }
}

/// Returns the outcome of a tunnel that was stopped, or evicted because memory ran short.
fn stopped_outcome(
    ended: Result<(Reason, Option<String>), Evicted>,
    record: &mut Record,
) -> CopyOutcome {
    let (reason, why) = ended.unwrap_or((Reason::BuffersFull, None));
    if let Some(why) = why {
        record.set_detail(why);
    }
    CopyOutcome::broken(reason)
}

/// Waits until a change of trust, exposure or policy revokes the tunnel's grant. Returns the
/// change.
async fn wait_for_revocation(
    gateway: &DataPath,
    generation: &mut watch::Receiver<u64>,
    peer: &Peer,
    right: &policy::Grant,
) -> String {
    while generation.changed().await.is_ok() {
        let snapshot = gateway.reader.load();
        let judged = policy::still_allowed(&snapshot, peer, right)
            .map_err(str::to_owned)
            .and_then(|()| authorize::reevaluate(&snapshot, gateway, peer, right));
        drop(snapshot);
        if let Err(why) = judged {
            Box::pin(sleep(REVOKE_JITTER.mul_f64(fastrand::f64()))).await;
            return why;
        }
    }
    std::future::pending().await
}

fn destination_service(service: &Service) -> DestinationService {
    DestinationService {
        hostname: Arc::clone(&service.hostname),
        name: Arc::clone(&service.name),
        namespace: Arc::clone(&service.namespace),
    }
}

fn destination(endpoint: &Endpoint) -> Destination {
    Destination {
        address: endpoint.address,
        pod: Arc::clone(&endpoint.definition) as _,
    }
}

#[cfg(test)]
mod tests;
