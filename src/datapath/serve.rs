//! Stages 1 to 4 as one function: from an accepted socket to the end of its connection.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::telemetry::handshake_refused;

use super::accept::Accepted;
use super::handshake::Refused;
use super::{Gateway, connect, handshake, identity, linger, passthrough};

/// A worker: serves the sockets that the acceptor hands over, each in a task of its own.
pub async fn worker(gateway: Arc<Gateway>, mut queue: mpsc::Receiver<Accepted>) {
    while let Some(accepted) = queue.recv().await {
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
        let (session, route_by) = Box::pin(handshake::run(&gateway, accepted)).await?;
        let peer = identity::run(&session, (address, route_by), &gateway.reader.load())
            .map_err(|refusal| Refused::new(refusal, &refusal))?;
        connect::run(&gateway, session, Arc::new(peer)).await
    };
    if let Err(refused) = served.await {
        handshake_refused(&gateway.metrics, address, refused.refusal, &refused.detail);
        if let Some((socket, _slot, _held)) = refused.alerted {
            linger::close(socket, linger::PEER).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::future_size;
    use super::*;

    #[test]
    fn a_connection_stays_small() {
        // Beside it stand h2's connection and the TLS session, boxed.
        let size = future_size(connection);
        assert!(size <= 2112, "{size}");
    }
}
