//! Stages 5 to 9 of a CONNECT request: its tunnel opens, or the request is rejected.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::datapath::dial::Upstream;
use crate::datapath::http2::streams::STREAMS_MAX;
use crate::datapath::http2::tunnel::Target;
use crate::datapath::limits::load::LoadGuard;
use crate::datapath::policy::Permit;
use crate::limits::turns::{self, Work};
use crate::reason::Reason;
use crate::wire::ServiceLoad;
use crate::wire::sni::RouteBy;

use super::establish::NewTunnel;
use super::open::{End, StreamGuards};
use super::setup::{AnsweredConnect, PendingConnect};
use super::sni;

/// Deadline for a slot among the connection's tunnels. As a rule the tunnel that ended last
/// frees its slot within a round trip to its endpoint.
const SLOT_DEADLINE: Duration = Duration::from_secs(1);

/// CONNECT request whose headers were read, with everything that is needed to forward it.
#[derive(Debug)]
pub struct ConnectRequest {
    pub tunnel: NewTunnel,
    /// Slots of the connection's tunnels, [`STREAMS_MAX`] in all.
    pub slots: Arc<Semaphore>,
    /// Stream, not answered yet.
    pub connect: PendingConnect,
    /// Counts the tunnel in the load of its worker.
    pub load: LoadGuard,
    /// Slot among the connection's tunnels; none if all are taken.
    pub slot: Option<OwnedSemaphorePermit>,
}

/// Opens one CONNECT: resolves, evaluates policy, picks, dials, answers, and hands the open tunnel
/// over to its connection, which copies. All failures precede the answer, except where the TLS
/// inside the tunnel takes part in routing.
pub async fn run(request: Box<ConnectRequest>, target: Result<Target, Reason>) {
    turns::set_work(Work::Connect);
    let ConnectRequest { mut tunnel, slots, connect, load, slot } = *request;
    let slot = match slot {
        Some(slot) => Ok(slot),
        None => Box::pin(wait_for_slot(&mut tunnel, &slots, &connect)).await,
    };
    let opened = match slot {
        Ok(slot) => {
            let established = establish(&mut tunnel, connect, target).await;
            established.map(|answered| (answered, StreamGuards { load, slot: slot.into() }))
        }
        Err(reason) => Err(connect.reject(reason)),
    };
    match opened {
        Ok(((stream, upstream), guards)) => {
            let open = Box::new(tunnel.open(upstream, Some(guards)));
            if let Err((open, reason)) = stream.open(open) {
                open.end(End::before_copy(reason));
            }
        }
        Err(reason) => tunnel.record.finish(reason),
    }
}

/// Waits for a slot among the connection's tunnels.
///
/// A stream that was reset no longer counts for HTTP/2. A peer at the limit may therefore open the
/// next stream before its previous tunnel has ended here.
async fn wait_for_slot(
    tunnel: &mut NewTunnel,
    slots: &Arc<Semaphore>,
    connect: &PendingConnect,
) -> Result<OwnedSemaphorePermit, Reason> {
    let slot = tokio::select! {
        slot = timeout(SLOT_DEADLINE, Arc::clone(slots).acquire_owned()) => slot,
        reason = connect.cancelled() => return Err(reason),
        () = tunnel.peer.listener.drain.closing() => return Err(Reason::DrainDeadline),
    };
    slot.ok().and_then(Result::ok).ok_or_else(|| {
        let detail = format!("the connection has {STREAMS_MAX} tunnels");
        tunnel.record.set_detail(detail);
        Reason::Overloaded
    })
}

/// Resolves, evaluates policy and dials, and answers at the time that the routing mode requires.
async fn establish(
    tunnel: &mut NewTunnel,
    connect: PendingConnect,
    target: Result<Target, Reason>,
) -> Result<(AnsweredConnect, Upstream), Reason> {
    let (permit, route_by) = match resolve(tunnel, &connect, target) {
        Ok(resolved) => resolved,
        Err(reason) => return Err(connect.reject(reason)),
    };
    let load = connect.is_for_gateway().then(|| tunnel.load(&permit));
    // Boxed: reading a ClientHello takes far more memory than dialling.
    let (stream, checked) = match route_by {
        RouteBy::Authority => return dial_and_answer(tunnel, (connect, load), permit).await,
        RouteBy::Sni => {
            let stream = connect.accept(load)?;
            let dialled = Box::pin(sni::establish(tunnel, &stream, permit)).await;
            (stream, dialled)
        }
        RouteBy::Strict => {
            let (stream, mut upstream) = dial_and_answer(tunnel, (connect, load), permit).await?;
            let checked = Box::pin(sni::check(tunnel, &stream, &mut upstream)).await;
            (stream, checked.map(|()| upstream))
        }
    };
    match checked {
        Ok(upstream) => Ok((stream, upstream)),
        Err(reason) => Err(stream.refuse(reason)),
    }
}

/// Resolves and evaluates policy, and charges the stream to the source of the tunnel.
fn resolve(
    tunnel: &mut NewTunnel,
    connect: &PendingConnect,
    target: Result<Target, Reason>,
) -> Result<(Permit, RouteBy), Reason> {
    let (permit, route_by) = tunnel.resolve(target)?;
    connect.charge_to(&permit)?;
    Ok((permit, route_by))
}

/// Dials, and answers 200 or rejects.
async fn dial_and_answer(
    tunnel: &mut NewTunnel,
    (connect, load): (PendingConnect, Option<ServiceLoad>),
    permit: Permit,
) -> Result<(AnsweredConnect, Upstream), Reason> {
    match tunnel.establish(permit, connect.cancelled()).await {
        Ok(upstream) => Ok((connect.accept(load)?, upstream)),
        Err(reason) => Err(connect.reject(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::tests::future_size;

    #[test]
    fn a_request_stays_small() {
        let size = future_size(run);
        // A task adds a header of 152 bytes. Together they fit into a size class of 2,048 bytes.
        assert!(size <= 1896, "{size}");
    }
}
