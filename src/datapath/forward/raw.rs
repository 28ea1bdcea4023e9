//! Stages 5 to 10 for a connection of a TLS listener, which is one tunnel.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::datapath::client_hello;
use crate::datapath::http2::tunnel::Target;
use crate::datapath::io::endpoint::EndpointStream;
use crate::datapath::io::linger;
use crate::datapath::limits::budget::BufferAccount;
use crate::datapath::limits::hellos::{self, InFlight};
use crate::reason::Reason;
use crate::telemetry::{ConnectionGuard, Record};

use super::super::accept::ConnectionResources;
use super::super::copy::raw::InitialState;
use super::super::copy::{self, CopyOutcome};
use super::super::dial::Upstream;
use super::super::identity::Peer;
use super::super::{DataPath, policy, route};
use super::ending::{close, update_endpoint_health};
use super::{destination, destination_service, establish, stopped_outcome, wait_for_stop};

/// Deadline for writing an alert.
const ALERT_DEADLINE: Duration = Duration::from_secs(1);

/// Connection whose ClientHello was read, with everything that is needed to forward it.
#[derive(Debug)]
pub struct PassthroughConnection {
    /// State shared by all connections.
    pub gateway: Arc<DataPath>,
    /// Peer: an address without an identity.
    pub peer: Arc<Peer>,
    /// Changes whenever a grant may have been revoked since the ClientHello was evaluated.
    pub generation: watch::Receiver<u64>,
    /// Downstream socket.
    pub stream: TcpStream,
    /// Bytes read from the socket so far.
    pub client_hello: Vec<u8>,
    /// Target of the ClientHello, and true if the listener's own route grants it.
    pub wanted: Result<(Target, bool), Reason>,
    /// Telemetry record of the tunnel.
    pub record: Record,
    /// Guards that count the connection while it lives.
    pub held: (ConnectionResources, ConnectionGuard),
}

/// Forwards one connection: resolves, evaluates policy, picks, dials, replays the ClientHello,
/// copies. As with a CONNECT, only `Open` and the state of the copy live as long as the tunnel.
pub async fn run(arrived: Box<PassthroughConnection>) {
    let open = Box::pin(open(arrived)).await;
    let Some(mut open) = open else {
        return;
    };
    let outcome = open.copy().await;
    Box::pin(open.end(outcome)).await;
}

/// Resolves, evaluates policy and dials, or rejects.
async fn open(mut arrived: Box<PassthroughConnection>) -> Option<Box<Open>> {
    let reached = resolve_and_dial(&mut arrived).await;
    let PassthroughConnection {
        gateway,
        peer,
        generation,
        stream,
        client_hello: hello,
        mut record,
        held,
        ..
    } = *arrived;
    let (upstream, in_flight) = match reached {
        Ok(reached) => reached,
        Err(reason) => {
            record.finish(reason);
            drop(record);
            refuse(stream, reason, held).await;
            return None;
        }
    };
    let endpoint = upstream.grant.endpoint();
    record.set_open(destination(endpoint), endpoint.labels());
    let account = gateway.budget.account();
    Some(Box::new(Open {
        gateway,
        peer,
        generation,
        stream,
        opening: Some(Box::new(InitialState {
            client_hello: hello,
            loop_entry: in_flight,
        })),
        upstream,
        record,
        account,
        held,
    }))
}

/// Resolves, evaluates policy and dials, unless the ClientHello is in a forwarding loop.
async fn resolve_and_dial(
    arrived: &mut PassthroughConnection,
) -> Result<(Upstream, Option<InFlight>), Reason> {
    let PassthroughConnection {
        gateway,
        peer,
        stream,
        client_hello: hello,
        wanted,
        record,
        ..
    } = arrived;
    if !gateway.budget.has_room() {
        return Err(Reason::BuffersFull);
    }
    let in_flight = hellos::register(hello).map_err(|found| found.record(record))?;
    let (target, granted) = std::mem::replace(wanted, Err(Reason::Panic))?;
    let permit = {
        let snapshot = gateway.reader.load();
        let route = route::resolve_passthrough(&snapshot, peer, target)?;
        record.set_service(destination_service(route.service()));
        match granted {
            true => policy::permit_listener_route(peer, route)?,
            false => policy::run(&snapshot, peer, route)?,
        }
    };
    let upstream = tokio::select! {
        upstream = establish(gateway, peer, permit, record) => upstream,
        // Only a reset ends the dial: a peer that has sent FIN may still wait for the answer.
        _ = stream.ready(Interest::ERROR) => Err(Reason::DownstreamReset),
        () = peer.listener.drain.closing() => Err(Reason::DrainDeadline),
    };
    Ok((upstream?, in_flight))
}

/// Rejects with an alert, and closes once the peer has read it.
async fn refuse(
    mut stream: TcpStream,
    reason: Reason,
    _held: (ConnectionResources, ConnectionGuard),
) {
    linger::disable_reset_on_close(&stream);
    let alert = client_hello::alert(reason.alert());
    if let Ok(Ok(())) = timeout(ALERT_DEADLINE, stream.write_all(&alert)).await {
        linger::close_gracefully(stream, linger::PEER_DRAIN_LIMITS).await;
    }
}

/// Open tunnel.
#[derive(Debug)]
struct Open {
    gateway: Arc<DataPath>,
    peer: Arc<Peer>,
    generation: watch::Receiver<u64>,
    stream: TcpStream,
    /// Taken by the copy.
    opening: Option<Box<InitialState>>,
    upstream: Upstream,
    record: Record,
    account: Arc<BufferAccount>,
    held: (ConnectionResources, ConnectionGuard),
}

impl Open {
    /// Copies until the tunnel ends by itself, the drain deadline passes, its grant is revoked,
    /// or memory runs short.
    async fn copy(&mut self) -> CopyOutcome {
        let account = Arc::clone(&self.account);
        account.open_gate();
        let Upstream {
            stream,
            grant: right,
            ..
        } = &mut self.upstream;
        let mut ended = pin!(wait_for_stop(
            &self.gateway,
            &mut self.generation,
            &self.peer,
            right
        ));
        let ended = poll_fn(|cx| account.poll_gated(cx, |cx| ended.as_mut().poll(cx)));
        // Only HBONE listeners reach endpoints of other networks (`dial::remote`).
        let (Some(opening), EndpointStream::Tcp(stream)) = (self.opening.take(), stream) else {
            return CopyOutcome::broken(Reason::Panic);
        };
        let copy = copy::raw::run(
            &mut self.stream,
            stream,
            opening,
            (&self.account, &self.gateway.admission),
            &mut self.record,
        );
        tokio::select! {
            biased;
            outcome = copy => outcome,
            ended = ended => stopped_outcome(ended, &mut self.record),
        }
    }

    /// Ends both sides in the way in which the tunnel ended, and finishes the record.
    async fn end(self: Box<Self>, outcome: CopyOutcome) {
        let Self {
            gateway,
            stream,
            upstream,
            mut record,
            account,
            held,
            ..
        } = *self;
        // Early resets do not count against the endpoint: unauthenticated clients could provoke
        // them with any bytes.
        update_endpoint_health(&gateway, &upstream, &outcome, false, false);
        record.finish(match outcome.result {
            Ok(()) => {
                // FIN was received from and sent to both sides; the kernel delivers the rest.
                linger::disable_reset_on_close(&stream);
                Reason::Completed
            }
            Err(reason) => reason,
        });
        drop((stream, account));
        close(upstream, &outcome).await;
        // The tunnel is open and counted as long as its socket.
        drop((record, held));
    }
}
