//! Stages 2 to 4 of a TLS listener: reads the ClientHello for routing and leaves it unchanged.

use std::sync::Arc;

use tokio::net::TcpStream;

use crate::limits::Place;
use crate::reason::HandshakeRefusal;
use crate::telemetry::{Record, report_refused_handshake};

use super::DataPath;
use super::accept::AcceptedConnection;
use super::client_hello::{self, ClientHello, ClientHelloError};
use super::forward::establish::NewTunnel;
use super::forward::passthrough::{self, ConnectionGuards, PassthroughConnection};
use super::identity::Peer;
use super::io::linger;
use super::limits::admission::EVICTED_DETAIL;

/// Serves one connection: ClientHello, target, then bytes until it ends. A failure before a
/// complete ClientHello is counted with the handshakes; later ends are counted with the tunnels.
pub async fn run(data_path: Arc<DataPath>, accepted: AcceptedConnection) {
    // Boxed: reading a ClientHello takes far more memory than the tunnel that follows.
    let connection = Box::pin(read_client_hello(data_path, accepted)).await;
    if let Some(connection) = connection {
        passthrough::run(connection).await;
    }
}

async fn read_client_hello(
    data_path: Arc<DataPath>,
    accepted: AcceptedConnection,
) -> Option<Box<PassthroughConnection>> {
    let refused = |refused: &ClientHelloError| {
        let (refusal, detail) = (refused.refusal, &refused.detail);
        report_refused_handshake(&data_path.metrics, accepted.address, refusal, detail);
    };
    let failed = |error| ClientHelloError::new(HandshakeRefusal::Other, &error);
    let stream = TcpStream::from_std(accepted.stream).map_err(failed);
    let mut stream = stream.inspect_err(refused).ok()?;
    let hello = match read(&mut stream, &accepted.handshake).await {
        Ok(hello) => hello,
        Err(error) => {
            refused(&error);
            if error.alert.is_empty() {
                linger::disable_reset_on_close(&stream);
            } else {
                linger::close_with_alert(stream, &error.alert).await;
            }
            // The slot and the resources are held until here.
            drop((accepted.handshake, accepted.resources));
            return None;
        }
    };
    let (listener, descriptor) = (accepted.listener, &accepted.resources.descriptor);
    let sni: Option<Arc<str>> = hello.sni.as_deref().map(Into::into);
    let peer = Arc::new(Peer {
        holders: Some(descriptor.holders().clone()),
        balanced: accepted.balanced,
        ..Peer::unauthenticated(accepted.address, Arc::clone(&listener), sni.clone())
    });
    let mut record = Record::for_client_hello(&data_path.metrics, &peer.source, sni);
    record.begin_trace(None, None);
    // Obtains the generation before the rules are read, so that no change of them is missed.
    let tunnel = NewTunnel::new(&data_path, &peer, record);
    let target = listener.rules().target(&hello);
    Some(Box::new(PassthroughConnection {
        tunnel,
        stream,
        client_hello: hello.bytes,
        random: hello.random,
        target,
        guards: ConnectionGuards {
            resources: accepted.resources,
            counted: data_path.metrics.connection_opened(),
            of_binding: None,
        },
    }))
}

async fn read(stream: &mut TcpStream, slot: &Place) -> Result<ClientHello, ClientHelloError> {
    tokio::select! {
        hello = client_hello::read_client_hello(stream) => hello,
        () = slot.evicted() => {
            Err(ClientHelloError::new(HandshakeRefusal::Evicted, &EVICTED_DETAIL))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::future_size;
    use super::*;

    #[test]
    fn an_idle_tunnel_stays_small() {
        // Excludes `Open`, which is boxed as for an HBONE tunnel.
        let size = future_size(run);
        assert!(size <= 1280, "{size}");
    }
}
