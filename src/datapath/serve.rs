//! Stages 1 to 4 as one function: from an accepted socket to the end of its connection.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::interval;

use crate::reason::HandshakeRefusal;
use crate::telemetry::handshake_refused;

use super::accept::Accepted;
use super::handshake::{Refused, Session};
use super::identity::Peer;
use super::{Gateway, connect, handshake, identity, linger, passthrough};

/// A timer that is due before all others of a runtime makes tokio wake that runtime, by two system
/// calls, also where it is awake and sets the timer itself. Next to one that is always due within a
/// second, the deadlines of dials and hellos cost none.
const TICK: Duration = Duration::from_secs(1);

/// A worker: serves the sockets that the acceptor hands over, each in a task of its own.
pub async fn worker(gateway: Arc<Gateway>, mut queue: mpsc::Receiver<Accepted>) {
    let mut tick = interval(TICK);
    loop {
        let accepted = tokio::select! {
            biased;
            accepted = queue.recv() => accepted,
            _ = tick.tick() => continue,
        };
        let Some(accepted) = accepted else { return };
        match accepted.listener.is_tls() {
            true => {
                let connection = passthrough::run(Arc::clone(&gateway), accepted);
                gateway.lifecycle.spawn(connection);
            }
            false => {
                let connection = connection(Arc::clone(&gateway), accepted);
                gateway.lifecycle.spawn(connection);
            }
        }
    }
}

/// One connection: handshake, identity, then CONNECTs until it ends. Each stage that refuses is
/// counted and logged here, and the peer learns no more than an alert or a closed connection.
async fn connection(gateway: Arc<Gateway>, accepted: Accepted) {
    let address = accepted.address;
    let served = async {
        // Boxed: a handshake needs far more room than the connection that it leads to.
        let (session, peer) = Box::pin(meet(&gateway, accepted)).await?;
        connect::run(&gateway, session, peer).await
    };
    if let Err(refused) = served.await {
        handshake_refused(&gateway.metrics, address, refused.refusal, &refused.detail);
        if let Some((socket, _slot, _held)) = refused.alerted {
            linger::close(socket, linger::PEER).await;
        }
    }
}

/// Handshake and identity.
async fn meet(gateway: &Gateway, accepted: Accepted) -> Result<(Session, Arc<Peer>), Refused> {
    let from = (accepted.address, Arc::clone(&accepted.listener));
    let mut session = handshake::run(gateway, accepted).await?;
    let mut peer = identity::run(&session, from, &gateway.tls, &gateway.reader.load())
        .map_err(|refusal| Refused::new(refusal, &refusal))?;
    let (source, descriptor) = (&peer.source, &mut session.held.descriptor);
    let holder = descriptor.holder();
    let holder = holder.identified(&source.counted_cluster, &source.principal);
    descriptor.hand_over(&holder).map_err(|full| {
        let detail = format!("{full}: {}", source.principal);
        Refused::new(HandshakeRefusal::OverShare, &detail)
    })?;
    peer.holder = Some(holder);
    Ok((session, Arc::new(peer)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::future_size;
    use super::*;

    #[test]
    fn a_connection_stays_small() {
        // Beside it stand h2's connection and the TLS session, boxed.
        let size = future_size(connection);
        // A task is a header of 152 bytes more, in steps of 128.
        assert!(size <= 2128, "{size}");
    }
}
