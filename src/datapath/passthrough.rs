//! Stages 2 to 4 of a TLS listener: reads the ClientHello for routing and leaves it unchanged.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::reason::HandshakeRefusal;
use crate::telemetry::{Record, handshake_refused};

use super::DataPath;
use super::accept::{AcceptedConnection, ConnectionResources};
use super::client_hello::{self, ClientHelloError};
use super::forward::raw::{self, PassthroughConnection};
use super::http2::tunnel::{Origin, Target};
use super::identity::Peer;
use super::io::linger;
use super::limits::admission::HandshakeSlot;

/// Deadline for writing an alert.
const ALERT_DEADLINE: Duration = Duration::from_secs(1);

/// Serves one connection: ClientHello, target, then bytes until it ends. A failure before a
/// complete ClientHello is counted with the handshakes; later ends are counted with the tunnels.
pub async fn run(gateway: Arc<DataPath>, accepted: AcceptedConnection) {
    // Boxed: reading a ClientHello takes far more memory than the tunnel that follows.
    let arrived = Box::pin(read_client_hello(gateway, accepted)).await;
    if let Some(arrived) = arrived {
        raw::run(arrived).await;
    }
}

async fn read_client_hello(
    gateway: Arc<DataPath>,
    accepted: AcceptedConnection,
) -> Option<Box<PassthroughConnection>> {
    let refused = |refused: &ClientHelloError| {
        let (refusal, detail) = (refused.refusal, &refused.detail);
        handshake_refused(&gateway.metrics, accepted.address, refusal, detail);
    };
    let failed = |error| ClientHelloError::new(HandshakeRefusal::Other, &error);
    let stream = TcpStream::from_std(accepted.stream).map_err(failed);
    let mut stream = stream.inspect_err(refused).ok()?;
    let hello = match read(&mut stream, &accepted.handshake).await {
        Ok(hello) => hello,
        Err(error) => {
            refused(&error);
            let held = (accepted.handshake, accepted.resources);
            send_alert(stream, &error.alert, held).await;
            return None;
        }
    };
    // Obtained before the rules are read, so that no change of them is missed.
    let generation = gateway.reader.generation();
    let wanted = accepted.listener.rules().target(&hello);
    let sni: Option<Arc<str>> = hello.sni.map(Into::into);
    let peer = Arc::new(Peer {
        holder: Some(accepted.resources.descriptor.holder().clone()),
        ..Peer::unauthenticated(accepted.address, accepted.listener, sni.clone())
    });
    Some(Box::new(PassthroughConnection {
        record: Record::for_client_hello(&gateway.metrics, &peer.source, sni),
        wanted: wanted.map(|wanted| {
            let target = Target {
                authority: wanted.authority,
                origin: Origin::Workload,
                forwarded: None,
                via_gateway: false,
            };
            (target, wanted.granted_by_listener)
        }),
        client_hello: hello.bytes,
        held: (accepted.resources, gateway.metrics.connection_opened()),
        gateway,
        peer,
        generation,
        stream,
    }))
}

async fn read(
    stream: &mut TcpStream,
    slot: &HandshakeSlot,
) -> Result<client_hello::ClientHello, ClientHelloError> {
    tokio::select! {
        hello = client_hello::read_client_hello(stream) => hello,
        () = slot.evicted() => Err(ClientHelloError::new(
            HandshakeRefusal::Evicted,
            &"handshake evicted: limit of concurrent handshakes reached, oldest of the source with \
              the most",
        )),
    }
}

/// Sends an alert, and closes once the peer has read it.
async fn send_alert(
    mut stream: TcpStream,
    alert: &[u8],
    _held: (HandshakeSlot, ConnectionResources),
) {
    linger::disable_reset_on_close(&stream);
    if alert.is_empty() {
        return;
    }
    if let Ok(Ok(())) = timeout(ALERT_DEADLINE, stream.write_all(alert)).await {
        linger::close_gracefully(stream, linger::PEER_DRAIN_LIMITS).await;
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
