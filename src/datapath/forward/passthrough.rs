//! Stages 5 to 10 for a connection of a TLS listener, which is one tunnel, and the open tunnel of
//! such a connection, which is that of a binding too.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_rustls::server::TlsStream;

use crate::datapath::accept::ConnectionResources;
use crate::datapath::client_hello;
use crate::datapath::copy::bidirectional::{self, CopyLimits, InitialState};
use crate::datapath::copy::{CopyOutcome, LAST_BYTES_DEADLINE, LAST_BYTES_MIN};
use crate::datapath::dial::Upstream;
use crate::datapath::identity::Peer;
use crate::datapath::io::linger;
use crate::datapath::io::shared_socket::SharedSocket;
use crate::datapath::limits::budget::BufferAccount;
use crate::datapath::limits::loop_detection::{self, InFlight};
use crate::datapath::listener::ListenerTarget;
use crate::datapath::policy::Grant;
use crate::datapath::{DataPath, authorize};
use crate::limits::Held;
use crate::limits::turns::{self, Work};
use crate::outer::Servers;
use crate::reason::Reason;
use crate::telemetry::{ConnectionGuard, Record};
use crate::wire::client_hello::ClientRandom;
use crate::wire::proxy_protocol;

use super::establish::NewTunnel;
use super::open::{Open, revoke_delay};

/// Connection whose ClientHello was read, with everything that is needed to forward it.
#[derive(Debug)]
pub struct PassthroughConnection {
    /// Tunnel of the connection. Its peer is an address without an identity.
    pub tunnel: NewTunnel,
    pub stream: TcpStream,
    /// Bytes read from the socket so far.
    pub client_hello: Vec<u8>,
    pub random: ClientRandom,
    /// Target of the ClientHello.
    pub target: Result<ListenerTarget, Reason>,
    /// Guards that count the connection while it lives.
    pub guards: ConnectionGuards,
}

#[derive(Debug)]
pub struct ConnectionGuards {
    /// Load and descriptor.
    pub resources: ConnectionResources,
    pub counted: ConnectionGuard,
    /// Connection among those of a binding. Boxed, as those of TLS listeners have none.
    pub of_binding: Option<Box<Held>>,
}

/// Forwards one connection: resolves, evaluates policy, picks, dials, replays the ClientHello,
/// copies. As with a CONNECT, only the open tunnel and the state of its copy live until the end.
pub async fn run(connection: Box<PassthroughConnection>) {
    turns::set_work(Work::Connect);
    let Some((mut tunnel, initial)) = Box::pin(open(connection)).await else {
        return;
    };
    let outcome = tunnel.copy(Some(initial)).await;
    Box::pin(tunnel.end(outcome)).await;
}

// A tunnel is one allocation. Size classes of the allocator are 512 and 640 bytes.
const _: () = assert!(size_of::<ConnectionTunnel>() <= 512);

/// Open tunnel of a whole connection: of a TLS listener, or of a binding.
#[derive(Debug)]
pub(super) struct ConnectionTunnel {
    open: Open,
    socket: SharedSocket,
    /// TLS above the socket, of a local client with an identity.
    tls: Option<Box<TlsStream<SharedSocket>>>,
    account: Arc<BufferAccount>,
    /// Number of bytes that the copy has moved.
    moved: AtomicU64,
    guards: ConnectionGuards,
}

/// Resolves, evaluates policy and dials, or rejects with an alert.
async fn open(
    connection: Box<PassthroughConnection>,
) -> Option<(Box<ConnectionTunnel>, Box<InitialState>)> {
    let PassthroughConnection { mut tunnel, stream, mut client_hello, random, target, guards } =
        *connection;
    match establish(&mut tunnel, &stream, (&mut client_hello, random), target).await {
        Ok((upstream, loop_entry)) => {
            let initial = InitialState { client_hello, loop_entry: Some(loop_entry) };
            let client = (SharedSocket::new(stream), None);
            let tunnel = ConnectionTunnel::new(tunnel.open(upstream, None), client, guards);
            Some((tunnel, Box::new(initial)))
        }
        Err(reason) => {
            tunnel.record.finish(reason);
            drop(tunnel);
            linger::close_with_alert(stream, &client_hello::alert(reason.alert())).await;
            drop(guards);
            None
        }
    }
}

/// Resolves, evaluates policy and dials, unless the ClientHello is in a forwarding loop. Puts a
/// PROXY header before the ClientHello if the service asks for it.
async fn establish(
    tunnel: &mut NewTunnel,
    stream: &TcpStream,
    (client_hello, random): (&mut Vec<u8>, ClientRandom),
    target: Result<ListenerTarget, Reason>,
) -> Result<(Upstream, InFlight), Reason> {
    let register = |record: &mut Record| loop_detection::register(random, record);
    let (permit, loop_entry) = tunnel.resolve_passthrough(register, target)?;
    let sends_header = permit.route().sends_proxy_header(&tunnel.data_path.reader.load());
    // Only a reset ends the dial: a peer that has sent FIN may still wait for the answer.
    let reset = async {
        let _ = stream.ready(Interest::ERROR).await;
        Reason::DownstreamReset
    };
    let upstream = tunnel.establish(permit, reset).await?;
    if sends_header {
        let header = proxy_header(&tunnel.peer, stream).map_err(|_| Reason::DownstreamLost)?;
        client_hello.splice(..0, header);
    }
    Ok((upstream, loop_entry))
}

/// Returns the header with the addresses of the peer and of its destination, which is this gateway
/// or, behind a load balancer, what that states.
fn proxy_header(peer: &Peer, stream: &TcpStream) -> io::Result<Vec<u8>> {
    let stated = peer.balanced.as_ref().and_then(|balanced| balanced.destination);
    let destination = stated.map_or_else(|| stream.local_addr(), Ok)?;
    let destination = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    Ok(proxy_protocol::header(peer.source.address, destination))
}

impl ConnectionTunnel {
    /// Creates the tunnel of a client, which is TLS above a socket or the socket alone.
    pub(super) fn new(
        open: Open,
        (socket, tls): (SharedSocket, Option<Box<TlsStream<SharedSocket>>>),
        guards: ConnectionGuards,
    ) -> Box<Self> {
        let account = open.upstream.stream.account().cloned();
        let of_source = || open.data_path.budget.account(open.upstream.source());
        let account = account.unwrap_or_else(of_source);
        Box::new(Self { open, socket, tls, account, moved: AtomicU64::new(0), guards })
    }

    /// Copies until the tunnel ends by itself, the drain deadline passes, its grant is revoked, a
    /// limit of time is reached, or memory runs short.
    pub(super) async fn copy(&mut self, initial: Option<Box<InitialState>>) -> CopyOutcome {
        turns::set_work(Work::Copy);
        let Open { data_path, peer, generation, upstream, record, since, .. } = &mut self.open;
        let Upstream { stream, grant, .. } = upstream;
        let (socket, account, moved) = (&*self.socket, &self.account, &self.moved);
        account.open_gate();
        let limits = &CopyLimits { account, admission: &data_path.admission };
        let servers = stream.servers().map(Box::new);
        let open = OpenConnection { data_path, peer, generation, grant, servers, since, moved };
        // Boxed with its state, which is polled only when something behind the gate has woken.
        let mut stop = Box::pin(open.wait_for_stop());
        let stop = poll_fn(|cx| account.poll_gated(cx, |cx| stop.as_mut().poll(cx)));
        let copy = async {
            match &mut self.tls {
                Some(tls) => {
                    let peer = (socket, &mut **tls);
                    let copy = bidirectional::run(peer, stream, initial, limits, record, moved);
                    Box::pin(copy).await
                }
                None => {
                    let peer = (socket, &mut SharedSocket::from(socket));
                    bidirectional::run(peer, stream, initial, limits, record, moved).await
                }
            }
        };
        let stopped = tokio::select! {
            biased;
            outcome = copy => return outcome,
            stopped = stop => stopped,
        };
        let (reason, why) = stopped.unwrap_or((Reason::BuffersFull, None));
        if let Some(why) = why {
            record.set_detail(why);
        }
        CopyOutcome::broken(reason)
    }

    /// Ends both sides in the way in which the tunnel ended, and finishes the record.
    pub(super) async fn end(self: Box<Self>, outcome: CopyOutcome) {
        let Self { mut open, socket, tls, account, guards, .. } = *self;
        let is_clean = outcome.result.is_ok();
        if is_clean {
            // The end was received from and sent to both sides; the kernel delivers the rest.
            linger::disable_reset_on_close(&socket);
        }
        // An endpoint of a TLS listener was sent the ClientHello as soon as it was dialled. That of
        // a binding is behind a gateway, which judges it.
        let mut silence = None;
        if open.record.sent_bytes() > 0 {
            open.upstream.grant.endpoint.state.record_answer();
        } else {
            let mut cx = Context::from_waker(Waker::noop());
            let has_answered = open.upstream.stream.poll_read_ready(&mut cx).is_ready();
            silence = (!has_answered).then(|| open.since.elapsed());
        }
        let (sent, peer) = (open.record.sent_bytes(), Arc::clone(&open.peer));
        // Before the sockets, so that a client that sees the end finds it counted.
        let delivery = open.finish(&outcome, silence);
        drop((tls, account));
        let client = socket.into_inner().filter(|_| is_clean && sent >= LAST_BYTES_MIN);
        let client = async {
            if let Some(client) = client {
                let closed = linger::close_gracefully(client, LAST_BYTES_DEADLINE);
                peer.listener.drain.run_until_closed(closed).await;
            }
        };
        match delivery {
            Some(delivery) => drop(tokio::join!(client, delivery)),
            None => client.await,
        }
        drop(guards);
    }
}

/// Borrowed parts of an open tunnel, for the future that waits for revocation and limits.
struct OpenConnection<'a> {
    data_path: &'a DataPath,
    peer: &'a Peer,
    /// Generation of the snapshot that the tunnel was last checked against.
    generation: &'a mut u64,
    grant: &'a mut Grant,
    /// Boxed, as endpoints of TLS listeners have none.
    servers: Option<Box<Servers>>,
    since: &'a Instant,
    /// Number of bytes that the copy has moved.
    moved: &'a AtomicU64,
}

impl<'a> OpenConnection<'a> {
    /// Waits until the tunnel has to be stopped. Returns the reason, and the change that revoked
    /// its grant. The future owns this value: an `async fn` would keep a second copy.
    fn wait_for_stop(mut self) -> impl Future<Output = (Reason, Option<String>)> + use<'a> {
        let peer = self.peer;
        async move {
            let untrusted = async {
                match &peer.chain {
                    // Boxed: no peer of a TLS listener has one.
                    Some(chain) => Box::pin(chain.wait_trust_lost()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = peer.listener.drain.closing() => (Reason::DrainDeadline, None),
                why = untrusted => (Reason::Revoked, Some(why.to_string())),
                stopped = self.wait_for_end() => stopped,
            }
        }
    }

    /// Waits until a change of trust, exposure or policy revokes the grant, or a limit of time is
    /// reached.
    async fn wait_for_end(&mut self) -> (Reason, Option<String>) {
        let mut changes = self.data_path.reader.generation();
        loop {
            let current = *changes.borrow_and_update();
            if current != *self.generation {
                *self.generation = current;
                let snapshot = self.data_path.reader.snapshot();
                let (data_path, peer) = (self.data_path, self.peer);
                let servers = self.servers.as_deref();
                let revoked =
                    authorize::reevaluate(&snapshot, data_path, peer, self.grant, servers);
                drop(snapshot);
                if let Err(why) = revoked {
                    Box::pin(sleep(revoke_delay())).await;
                    return (Reason::Revoked, Some(why));
                }
            }
            tokio::select! {
                changed = changes.changed() => if changed.is_err() {
                    std::future::pending::<()>().await;
                },
                reason = self.wait_for_limit() => return (reason, None),
            }
        }
    }

    /// Waits until a limit of time is reached. Allocates only if the tunnel has one.
    async fn wait_for_limit(&mut self) -> Reason {
        if self.grant.limits().is_none() {
            return std::future::pending().await;
        }
        Box::pin(async {
            loop {
                let bytes = self.moved.load(Ordering::Relaxed);
                let limits = self.grant.limits();
                match limits.map_or(Ok(None), |limits| limits.check(*self.since, bytes)) {
                    Ok(Some(next)) => sleep_until(next).await,
                    Ok(None) => std::future::pending().await,
                    Err(reason) => return reason,
                }
            }
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn what_stops_an_idle_tunnel_stays_small() {
        let size = size_of_future(|open: OpenConnection<'static>| open.wait_for_stop());
        // A size class of the allocator; the next ones are 448 and 512.
        assert!(size <= 384, "{size}");
    }
}
