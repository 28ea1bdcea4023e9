//! Stages 5 to 10 for a connection of a local client, which a binding leads to a service of other
//! clusters.
//!
//! The listener has checked the address of the client. A binding with `to` verifies its identity
//! besides. The gateway and, inside its tunnel, the workload are verified before a byte of the
//! client is sent.

use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use crate::datapath::DataPath;
use crate::datapath::accept::{AcceptedConnection, ConnectionResources};
use crate::datapath::binding::Binding;
use crate::datapath::dial::Upstream;
use crate::datapath::handshake::{self, HandshakeError};
use crate::datapath::identity::{self, Peer};
use crate::datapath::io::shared_socket::SharedSocket;
use crate::limits::Held;
use crate::limits::turns::{self, Work};
use crate::reason::{HandshakeRefusal, Reason};
use crate::telemetry::Record;

use super::establish::{NewTunnel, labels};
use super::passthrough::{ConnectionGuards, ConnectionTunnel};

/// Accepted connection of a client that may use the binding as far as its certificate decides.
struct VerifiedClient {
    peer: Peer,
    socket: SharedSocket,
    tls: Option<Box<TlsStream<SharedSocket>>>,
    resources: ConnectionResources,
}

/// Forwards one connection: verifies the client, picks a gateway, opens the tunnel, copies. A
/// connection that fails is reset, as no answer in its protocol is known.
pub fn run(data_path: Arc<DataPath>, accepted: AcceptedConnection) -> impl Future<Output = ()> {
    // Boxed, as the end: both need far more memory than the copy between them.
    let established = Box::pin(establish(data_path, accepted));
    async move {
        let Some(mut tunnel) = established.await else {
            return;
        };
        let outcome = tunnel.copy(None).await;
        Box::pin(tunnel.end(outcome)).await;
    }
}

/// Verifies the client and opens the tunnel, or records the reason for which that failed.
async fn establish(
    data_path: Arc<DataPath>,
    accepted: AcceptedConnection,
) -> Option<Box<ConnectionTunnel>> {
    let (address, listener) = (accepted.address, Arc::clone(&accepted.listener));
    let binding = listener.binding()?;
    let VerifiedClient { peer, socket, tls, resources } =
        match Box::pin(verify_client(&data_path, accepted, &binding)).await {
            Ok(session) => session,
            Err(refused) => {
                refused.close(&data_path, address).await;
                return None;
            }
        };
    let counted = data_path.metrics.connection_opened();
    let mut record = Record::new(&data_path.metrics, &peer.source, &binding.authority);
    record.begin_trace(None, peer.handshake);
    record.set_service(labels(&binding.service), None);
    let mut tunnel = NewTunnel::new(&data_path, &Arc::new(peer), record);
    let of_binding = listener.clients.open(address.ip(), &binding.config).map_err(|full| {
        tunnel.record.set_detail(full);
        Reason::BindingFull
    });
    let opened = open(&mut tunnel, binding, of_binding, &socket).await;
    match opened {
        Ok((upstream, of_binding)) => {
            let guards =
                ConnectionGuards { resources, counted, of_binding: Some(Box::new(of_binding)) };
            Some(ConnectionTunnel::new(tunnel.open(upstream, None), (socket, tls), guards))
        }
        Err(reason) => {
            tunnel.record.finish(reason);
            None
        }
    }
}

/// Opens the tunnel, unless the client resets its connection before.
async fn open(
    tunnel: &mut NewTunnel,
    binding: Arc<Binding>,
    counted: Result<Held, Reason>,
    socket: &SharedSocket,
) -> Result<(Upstream, Held), Reason> {
    turns::set_work(Work::Connect);
    let (permit, counted) = tunnel.resolve_binding(binding, counted)?;
    // A client that has sent FIN may still wait for the answer.
    let reset = async {
        let _ = socket.ready(Interest::ERROR).await;
        Reason::DownstreamReset
    };
    let upstream = tunnel.establish(permit, reset).await?;
    Ok((upstream, counted))
}

/// Performs the handshake and authenticates the client, if the binding requires an identity.
async fn verify_client(
    data_path: &DataPath,
    accepted: AcceptedConnection,
    binding: &Binding,
) -> Result<VerifiedClient, HandshakeError> {
    let (address, listener) = (accepted.address, Arc::clone(&accepted.listener));
    if binding.requires_identity() {
        let since = accepted.since;
        let (stream, mut resources) = handshake::run_local(data_path, accepted).await?;
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let descriptor = &mut resources.descriptor;
        let peer = identity::admit(data_path, certificates, (address, listener), descriptor)?;
        let handshake = Some(data_path.metrics.times().handshake_done(&peer.source, since));
        return Ok(VerifiedClient {
            peer: Peer { handshake, ..peer },
            socket: stream.get_ref().0.clone(),
            tls: Some(Box::new(stream)),
            resources,
        });
    }
    // Nothing is read from the client before the tunnel is open.
    let resources = accepted.resources;
    let socket = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let peer = Peer {
        holders: Some(resources.descriptor.holders().clone()),
        ..Peer::unauthenticated(address, listener, None)
    };
    Ok(VerifiedClient { peer, socket: SharedSocket::new(socket), tls: None, resources })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::tests::future_size;

    #[test]
    fn an_idle_connection_stays_small() {
        let size = future_size(run);
        // Excludes `Connection`, which is boxed. A task adds a header of 152 bytes, and is rounded
        // up to a multiple of 128.
        assert!(size <= 872, "{size}");
    }
}
