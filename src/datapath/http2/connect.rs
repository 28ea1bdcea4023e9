//! Stage 4: the HTTP/2 server of one session, which starts a tunnel for each CONNECT.

use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use h2::server::{Builder, Connection, SendResponse};
use h2::{PingPong, RecvStream};
use http::{HeaderMap, HeaderValue, Method, Request};
use tokio::io::AsyncRead;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::datapath::DataPath;
use crate::datapath::accept::ConnectionResources;
use crate::datapath::forward::{self, ConnectRequest};
use crate::datapath::handshake::{HandshakeError, Session};
use crate::datapath::identity::Peer;
use crate::datapath::io::gate::WakeGate;
use crate::datapath::io::linger;
use crate::datapath::limits::budget;
use crate::reason::{HandshakeRefusal, Reason};
use crate::telemetry::Record;
use crate::wire::{Authority, baggage};

use super::buffered_tls::seal::BufferedWrite;
use super::buffered_tls::stream::{BufferedTls, BufferedTlsOwner};
use super::keepalive;
use super::tunnel::{Origin, PendingConnect, Target};
use super::window::{CONNECTION_WINDOW, STREAM_WINDOW_MIN, STREAMS_MAX, StreamWindow};

/// Deadline from TLS to the HTTP/2 preface, which a client sends without waiting for us.
const PREFACE_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for the first CONNECT. ztunnel and Envoy connect only when they have one to send.
const FIRST_CONNECT_DEADLINE: Duration = Duration::from_secs(30);
/// Deadline for a GOAWAY to be written.
const GOAWAY_DEADLINE: Duration = Duration::from_secs(1);
/// Time from a GOAWAY to the first tunnel that is refused: two round trips between far regions,
/// and the peer's own time. Without it, a peer that acknowledges no PING would open tunnels
/// through the whole drain.
const GOAWAY_GRACE: Duration = Duration::from_secs(1);
/// Time from the GOAWAY to a peer that lost trust to the end of its connection. Its tunnels are
/// reset within a second of the GOAWAY.
const UNTRUSTED_CLOSE_DELAY: Duration = Duration::from_millis(1500);
/// Delay before a change of the window is retried that h2 refused while another was in flight.
const WINDOW_RETRY: Duration = Duration::from_millis(50);
/// Limit of received DATA frames in bytes. Larger frames would delay the bytes of other tunnels.
const FRAME_BYTES_MAX: u32 = 64 * 1024;
/// Limit of bytes that h2 may hold for a stream with a slow reader.
const SEND_BUFFER_BYTES: usize = 256 * 1024;
/// Limit of a decoded header list in bytes. Istio's own headers take under 1 KiB.
const HEADER_LIST_BYTES: u32 = 16 * 1024;
/// Header by which Istio's waypoints and gateways identify themselves. It is trusted only from the
/// waypoints of the requested service and from `trust.waypoints`.
const SOURCE_HEADER: &str = "x-istio-source";
/// Header by which Istio's clients describe the source. It is a hint: no decision depends on it.
const BAGGAGE_HEADER: &str = "baggage";
/// Limit of fields in a header list: HPACK encodes a field in one byte, and each costs an
/// allocation.
const HEADER_FIELDS_MAX: usize = 64;

/// Returns h2's settings, all of them by docs/wire-contract.md 1.2.
fn settings() -> Builder {
    let mut builder = Builder::new();
    builder
        .max_concurrent_streams(STREAMS_MAX)
        .initial_window_size(STREAM_WINDOW_MIN)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_LIST_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(4096)
        .reset_stream_duration(Duration::from_secs(30))
        // h2 counts these over the whole life of a connection. With its default of 1,024, a
        // connection would end after as many tunnels that we reset while their client was sending.
        .max_local_error_reset_streams(Some(100_000))
        .max_pending_accept_reset_streams(200);
    builder
}

/// Serves CONNECTs until the session ends. Forwards each of them in its own task.
///
/// # Errors
/// Fails if the HTTP/2 preface is invalid or late.
pub async fn run(
    gateway: &Arc<DataPath>,
    session: Session,
    peer: Arc<Peer>,
) -> Result<(), HandshakeError> {
    let stream = serve_stream(gateway, session.stream, &session.resources, peer).await?;
    if let Some(stream) = stream {
        linger::close_gracefully(
            stream.into_inner().0.into_inner(),
            linger::PEER_DRAIN_LIMITS,
        )
        .await;
    }
    Ok(())
}

/// Serves CONNECTs as [`run`] does, on any byte stream to the peer. Returns the stream unless h2
/// still holds it.
pub async fn serve_stream<S>(
    gateway: &Arc<DataPath>,
    stream: S,
    held: &ConnectionResources,
    peer: Arc<Peer>,
) -> Result<Option<S>, HandshakeError>
where
    S: AsyncRead + BufferedWrite,
{
    let (buffered, owner) = BufferedTls::new(stream);
    let handshake = timeout(PREFACE_DEADLINE, settings().handshake(buffered));
    let connection = Box::pin(owner.run(handshake))
        .await
        .map_err(|_| {
            HandshakeError::new(HandshakeRefusal::Timeout, &"no HTTP/2 preface within 5 s")
        })?
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let _open = gateway.metrics.connection_opened();
    let server = Server {
        gateway,
        peer,
        held,
        window: Arc::default(),
        owner: &owner,
        // The peer is older than this connection: the first tunnel looks up its cluster again.
        generation: u64::MAX,
    };
    server.run(Box::new(connection)).await;
    Ok(owner.into_stream())
}

/// Event of a connection other than input from its peer. All events are rare.
enum ConnectionEvent {
    /// The frame credit is used up.
    CreditExhausted,
    /// The peer does not answer PING.
    PeerDead,
    /// The deadline for the first CONNECT has passed.
    FirstConnectTimeout,
    /// GOAWAY is due.
    GoAwayDue,
    /// The certificate of the peer is no longer trusted.
    Untrusted(HandshakeRefusal),
    /// The time to leave has passed, and the tunnels have been reset.
    Closed,
    /// A tunnel requests a larger window.
    WindowRequested,
}

/// Events that have not occurred yet.
struct PendingEvents(Vec<Pin<Box<dyn Future<Output = ConnectionEvent> + Send>>>);

impl PendingEvents {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEvent> {
        for index in 0..self.0.len() {
            if let Poll::Ready(event) = self.0[index].as_mut().poll(cx) {
                drop(self.0.remove(index));
                return Poll::Ready(event);
            }
        }
        Poll::Pending
    }
}

/// Waits until a change of the window that h2 refused may be retried.
async fn wait_for_window_retry(settled: bool) {
    if settled {
        return pending().await;
    }
    sleep(WINDOW_RETRY).await;
}

struct Server<'a, S> {
    gateway: &'a Arc<DataPath>,
    peer: Arc<Peer>,
    held: &'a ConnectionResources,
    window: Arc<StreamWindow>,
    owner: &'a BufferedTlsOwner<S>,
    /// Generation of the snapshot that the cluster of the peer was last looked up in.
    generation: u64,
}

impl<S: AsyncRead + BufferedWrite> Server<'_, S> {
    async fn run(mut self, mut connection: Box<Connection<BufferedTls<S>, budget::ChargedBytes>>) {
        let gate = Arc::new(WakeGate::default());
        let mut events = self.events(connection.ping_pong());
        let (mut used, mut window_applied) = (false, true);
        let mut goaway: Option<Instant> = None;
        loop {
            let event = poll_fn(|cx| {
                let waker = || Waker::from(Arc::clone(&gate));
                gate.poll(cx, waker, |cx| events.poll(cx))
            });
            // Events come before requests, which may arrive without a pause.
            tokio::select! {
                biased;
                event = event => match event {
                    ConnectionEvent::CreditExhausted => {
                        self.gateway.metrics.connection_exhausted();
                        self.log_end(&"frame credit exhausted: more frames than its tunnels \
                                       account for");
                        return self.shut_down(connection, h2::Reason::ENHANCE_YOUR_CALM).await;
                    }
                    ConnectionEvent::PeerDead => return self.log_end(&"PING not acknowledged"),
                    ConnectionEvent::FirstConnectTimeout if used => {}
                    ConnectionEvent::FirstConnectTimeout | ConnectionEvent::Closed => {
                        return self.shut_down(connection, h2::Reason::NO_ERROR).await;
                    }
                    ConnectionEvent::GoAwayDue => {
                        goaway = Some(Instant::now());
                        connection.graceful_shutdown();
                        events.0.push(self.wait_for_close());
                    }
                    ConnectionEvent::Untrusted(refusal) => {
                        self.gateway.metrics.connection_untrusted(refusal);
                        self.log_end(&refusal.description());
                        connection.graceful_shutdown();
                        events.0.push(Box::pin(async {
                            sleep(UNTRUSTED_CLOSE_DELAY).await;
                            ConnectionEvent::Closed
                        }));
                    }
                    ConnectionEvent::WindowRequested => {
                        window_applied = self.window.adjust(&mut connection);
                        events.0.push(self.wait_for_window_request());
                    }
                },
                () = wait_for_window_retry(window_applied) => {
                    window_applied = self.window.adjust(&mut connection);
                }
                request = self.owner.run(connection.accept()) => match request {
                    Some(Ok((request, mut respond))) => {
                        used = true;
                        match goaway.is_some_and(|at| at.elapsed() >= GOAWAY_GRACE) {
                            true => respond.send_reset(h2::Reason::REFUSED_STREAM),
                            false => self.spawn_tunnel(request, respond),
                        }
                        window_applied = self.window.adjust(&mut connection);
                    }
                    Some(Err(error)) => return self.log_end(&error),
                    None => return,
                },
            }
        }
    }

    /// Returns the initial events in the order of their priority.
    fn events(&self, pings: Option<PingPong>) -> PendingEvents {
        let listener = Arc::clone(&self.peer.listener);
        let exhausted = Arc::clone(&self.owner.exhausted);
        let not_after = self.peer.not_after;
        let untrusted = self.peer.chain.clone().map(|chain| {
            let untrusted =
                async move { ConnectionEvent::Untrusted(chain.wait_trust_lost().await) };
            Box::pin(untrusted) as Pin<Box<dyn Future<Output = ConnectionEvent> + Send>>
        });
        let mut events: Vec<Pin<Box<dyn Future<Output = ConnectionEvent> + Send>>> = vec![
            Box::pin(async move {
                exhausted.notified().await;
                ConnectionEvent::CreditExhausted
            }),
            Box::pin(async move {
                keepalive::wait_for_dead_peer(pings).await;
                ConnectionEvent::PeerDead
            }),
            Box::pin(async {
                sleep(FIRST_CONNECT_DEADLINE).await;
                ConnectionEvent::FirstConnectTimeout
            }),
            // Drain of the process or the listener, or expiry of the peer's certificate: GOAWAY
            // ends new tunnels, and open ones continue.
            Box::pin(async move {
                tokio::select! {
                    () = listener.drain.draining() => {}
                    () = wait_for_expiry(not_after) => {}
                }
                ConnectionEvent::GoAwayDue
            }),
            self.wait_for_window_request(),
        ];
        events.extend(untrusted);
        PendingEvents(events)
    }

    /// Waits for the end of the drain, for a peer that ignores GOAWAY. The resets of its tunnels
    /// are written before.
    fn wait_for_close(&self) -> Pin<Box<dyn Future<Output = ConnectionEvent> + Send>> {
        let listener = Arc::clone(&self.peer.listener);
        Box::pin(async move {
            listener.drain.closing().await;
            sleep(GOAWAY_DEADLINE).await;
            ConnectionEvent::Closed
        })
    }

    fn wait_for_window_request(&self) -> Pin<Box<dyn Future<Output = ConnectionEvent> + Send>> {
        let window = Arc::clone(&self.window);
        Box::pin(async move {
            window.growth_requested().await;
            ConnectionEvent::WindowRequested
        })
    }

    /// Sends GOAWAY and ends the connection with all its tunnels. The time is bounded: a peer that
    /// does not read must not hold the connection.
    async fn shut_down(
        &self,
        mut connection: Box<Connection<BufferedTls<S>, budget::ChargedBytes>>,
        code: h2::Reason,
    ) {
        connection.abrupt_shutdown(code);
        let closed = self.owner.run(poll_fn(|cx| connection.poll_closed(cx)));
        let _ = timeout(GOAWAY_DEADLINE, closed).await;
    }

    fn log_end(&self, why: &dyn std::fmt::Display) {
        debug!(peer = %self.peer.source.principal, %why, "connection ended");
    }

    fn spawn_tunnel(
        &mut self,
        request: Request<RecvStream>,
        mut respond: SendResponse<budget::ChargedBytes>,
    ) {
        if self.peer.not_after <= SystemTime::now() || self.peer.lost_trust().is_some() {
            // GOAWAY was sent, but the peer may not have received it yet.
            return respond.send_reset(h2::Reason::REFUSED_STREAM);
        }
        self.refresh_peer_cluster();
        let source = &self.peer.source;
        let values = request.headers().get_all(BAGGAGE_HEADER).iter();
        let claimed = baggage::source_cluster(values.map(HeaderValue::as_bytes));
        if claimed.is_some_and(|cluster| cluster != source.cluster.as_bytes()) {
            self.gateway.metrics.baggage_mismatch(source);
        }
        let (authority, target) = parse_target(&request);
        // The header map is dropped here, before the first wait. Otherwise a peer could make us
        // hold thousands of fields for the duration of a dial.
        let account = self.gateway.budget.account();
        let request = ConnectRequest {
            gateway: Arc::clone(self.gateway),
            peer: Arc::clone(&self.peer),
            window: Arc::clone(&self.window),
            requested: PendingConnect::new(request.into_body(), respond, account),
            record: Record::new(&self.gateway.metrics, &self.peer.source, &authority),
            load: self.held.load.add_tunnel(),
            slot: self.window.try_take_slot(),
        };
        let forward = forward::run(Box::new(request), target);
        self.gateway.lifecycle.spawn(forward);
    }

    /// Looks up the cluster of the peer again if the snapshot has changed.
    fn refresh_peer_cluster(&mut self) {
        let snapshot = self.gateway.reader.load();
        if self.generation != snapshot.generation {
            self.generation = snapshot.generation;
            if let Some(moved) = self.peer.with_current_cluster(&snapshot) {
                self.peer = Arc::new(moved);
            }
        }
    }
}

/// Waits until the wall clock has passed `at`.
async fn wait_for_expiry(at: SystemTime) {
    // Sleeps at most a day, to notice a clock that was set or a machine that was suspended.
    const STEP: Duration = Duration::from_secs(24 * 60 * 60);
    while let Ok(left) = at.duration_since(SystemTime::now()) {
        sleep(left.min(STEP)).await;
    }
}

/// Returns the authority as received, for the log, and the target if the request is valid.
fn parse_target(request: &Request<RecvStream>) -> (Box<str>, Result<Target, Reason>) {
    let asked = request
        .uri()
        .authority()
        .map_or("", |authority| authority.as_str());
    let target = if request.headers().len() > HEADER_FIELDS_MAX {
        Err(Reason::TooManyFields)
    } else if request.method() != Method::CONNECT {
        Err(Reason::NotConnect)
    } else {
        let origin = claimed_origin(request.headers());
        let authority = Authority::parse(asked).map_err(|_| Reason::BadAuthority);
        authority.map(|authority| Target { authority, origin })
    };
    (asked.into(), target)
}

/// Returns the origin that the header claims. Two values count as none.
fn claimed_origin(headers: &HeaderMap) -> Origin {
    let mut values = headers
        .get_all(SOURCE_HEADER)
        .iter()
        .map(HeaderValue::as_bytes);
    match (values.next(), values.next()) {
        (Some(b"waypoint"), None) => Origin::Waypoint,
        (Some(b"gateway"), None) => Origin::Gateway,
        _ => Origin::Workload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_value_that_we_know_says_where_a_tunnel_comes_from() {
        for (values, want) in [
            (&[][..], Origin::Workload),
            (&["waypoint"], Origin::Waypoint),
            (&["gateway"], Origin::Gateway),
            (&["sidecar"], Origin::Workload),
            (&["Waypoint"], Origin::Workload),
            (&["waypoint,gateway"], Origin::Workload),
            (&["waypoint", "waypoint"], Origin::Workload),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(SOURCE_HEADER, HeaderValue::from_static(value));
            }
            assert_eq!(claimed_origin(&headers), want, "{values:?}");
        }
    }
}
