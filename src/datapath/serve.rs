//! Connections of one worker: from an accepted socket to the end of its connection.
//!
//! It runs stages 2 and 3 of HBONE listeners, and leaves the others to `forward` and `passthrough`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::interval;

use crate::limits::turns::{self, Work};

use super::accept::{AcceptedConnection, WorkerQueue};
use super::forward::{self, connection};
use super::handshake::{HandshakeError, Session};
use super::identity::Peer;
use super::{DataPath, balancer, handshake, identity, passthrough};

/// Period of a timer that keeps tokio's driver from being woken. Arming the earliest timer of a
/// runtime wakes its driver (two system calls), even from the runtime's own thread. With a timer
/// that is always due within a second, deadlines of dials and handshakes cost no wake-up.
const TIMER_PERIOD: Duration = Duration::from_millis(500);

/// Serves the sockets that the acceptor hands over, each in a task of its own.
pub async fn run_worker(data_path: Arc<DataPath>, mut queue: WorkerQueue) {
    queue.turns.enter(turns::enter(&data_path.turns));
    let mut tick = interval(TIMER_PERIOD);
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = queue.accepted.recv() => accepted,
            _ = tick.tick() => {
                queue.turns.note();
                continue;
            }
        };
        let Some(mut accepted) = accepted else { return };
        let now = Instant::now();
        data_path.metrics.times().accepted(now.saturating_duration_since(accepted.since));
        accepted.since = now;
        let shared = Arc::clone(&data_path);
        let source = accepted.resources.descriptor.holders().source().clone();
        if accepted.listener.binding().is_some() {
            let served = forward::binding::run(shared, accepted);
            data_path.lifecycle.spawn(turns::of(&source, served));
        } else if accepted.balanced.is_some() {
            data_path.lifecycle.spawn(turns::of(&source, serve_balanced(shared, accepted)));
        } else if accepted.listener.rules().is_passthrough() {
            data_path.lifecycle.spawn(turns::of(&source, passthrough::run(shared, accepted)));
        } else {
            data_path.lifecycle.spawn(turns::of(&source, serve_hbone(shared, accepted)));
        }
    }
}

/// Serves a connection of a load balancer as that of the peer that its header states.
async fn serve_balanced(data_path: Arc<DataPath>, accepted: AcceptedConnection) {
    let balancer = accepted.address;
    // Boxed: a header needs more memory than the connection that follows.
    match Box::pin(balancer::identify(&data_path, accepted)).await {
        Ok(accepted) if accepted.listener.rules().is_passthrough() => {
            passthrough::run(data_path, accepted).await;
        }
        Ok(accepted) => serve_hbone(data_path, accepted).await,
        Err(refused) => {
            if let Some(refused) = refused {
                refused.close(&data_path, balancer).await;
            }
        }
    }
}

/// Serves one connection: handshake, identity, then CONNECTs until it ends. Counts and logs the
/// rejections of each stage. The peer sees no more than an alert or a closed connection.
async fn serve_hbone(data_path: Arc<DataPath>, accepted: AcceptedConnection) {
    let address = accepted.address;
    let served = async {
        // Boxed: a handshake needs far more memory than the connection that follows.
        let (session, peer) = Box::pin(authenticate(&data_path, accepted)).await?;
        turns::set_work(Work::Copy);
        connection::run(&data_path, session, peer).await
    };
    if let Err(refused) = served.await {
        refused.close(&data_path, address).await;
    }
}

/// Performs the handshake and authenticates the peer.
async fn authenticate(
    data_path: &DataPath,
    accepted: AcceptedConnection,
) -> Result<(Session, Arc<Peer>), HandshakeError> {
    let (address, listener) = (accepted.address, Arc::clone(&accepted.listener));
    let (balanced, since) = (accepted.balanced.clone(), accepted.since);
    let mut session = handshake::run(data_path, accepted).await?;
    let (certificates, resources) = (&session.peer_certificates, &mut session.resources);
    let from = (address, listener);
    let peer = identity::admit(data_path, certificates, from, &mut resources.descriptor)?;
    let handshake = Some(data_path.metrics.times().handshake_done(&peer.source, since));
    Ok((session, Arc::new(Peer { balanced, handshake, ..peer })))
}

#[cfg(test)]
mod tests {
    use super::super::tests::future_size;
    use super::*;

    #[test]
    fn a_connection_stays_small() {
        // Excludes `HboneConnection`, the connection after its handshake, which is boxed.
        let size = future_size(serve_hbone);
        // A task adds a header of 152 bytes, and is rounded up to a multiple of 128.
        assert!(size <= 2128, "{size}");
    }
}
