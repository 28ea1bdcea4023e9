//! Driver of one HTTP/2 connection, which starts a task for each CONNECT and ends tunnels when an
//! event from outside requires it.

use std::future::poll_fn;
use std::mem::replace;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use arc_swap::Guard;
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::datapath::DataPath;
use crate::datapath::accept::ConnectionResources;
use crate::datapath::copy::LAST_BYTES_DEADLINE;
use crate::datapath::handshake::{HandshakeError, Session, Transport};
use crate::datapath::http2::server::ConnectionError;
use crate::datapath::http2::streams::{STREAMS_MAX, StreamKey};
use crate::datapath::http2::tunnel::Target;
use crate::datapath::identity::Peer;
use crate::datapath::io::gate::WakeGate;
use crate::datapath::io::linger;
use crate::datapath::limits::aging::Aged;
use crate::limits::turns;
use crate::reason::{HandshakeRefusal, Reason, RetirementReason};
use crate::snapshot::{Reader, Snapshot};
use crate::telemetry::Record;

use super::downstream::ConnectionEnd;
use super::establish::NewTunnel;
use super::hbone::{self, ConnectRequest};
use super::open::revoke_delay;
use super::setup::PendingConnect;
use super::turn::{HboneConnection, NewRequest};

/// Deadline from TLS to the HTTP/2 preface, which a client sends without waiting for us.
const PREFACE_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for the first CONNECT. ztunnel and Envoy connect only when they have one to send.
const FIRST_CONNECT_DEADLINE: Duration = Duration::from_secs(30);
const GOAWAY_DEADLINE: Duration = Duration::from_secs(1);
/// Time from a GOAWAY to the first tunnel that is rejected: two round trips between far regions,
/// and the peer's own time. Without it, a peer that acknowledges no PING would open tunnels
/// through the whole drain.
const GOAWAY_GRACE: Duration = Duration::from_secs(1);
/// Time from the GOAWAY to a peer that lost trust to the end of its connection. Its tunnels are
/// reset within a second of the GOAWAY.
const UNTRUSTED_CLOSE_DELAY: Duration = Duration::from_millis(1500);
/// Pause before another attempt to retire an aged connection whose peer has enough retiring ones.
const RETIREMENT_RETRY: Duration = Duration::from_secs(10);
/// Pause between PINGs, the same as in ztunnel and Istio's Envoy on both sides.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Deadline for an answer. A peer that stops for 10 s is kept; a dead one is detected within 30 s.
const PING_DEADLINE: Duration = Duration::from_secs(20);

/// Serves CONNECTs until the session ends.
///
/// # Errors
/// Fails if the HTTP/2 preface is invalid or late.
pub async fn run(
    data_path: &Arc<DataPath>,
    session: Session,
    peer: Arc<Peer>,
) -> Result<(), HandshakeError> {
    let listener = Arc::clone(&peer.listener);
    let (socket, is_clean): (TcpStream, _) =
        serve_stream(data_path, session.transport, &session.resources, peer).await?;
    if is_clean {
        let closed = linger::close_gracefully(socket, LAST_BYTES_DEADLINE);
        listener.drain.run_until_closed(closed).await;
    } else {
        // Also at the deadline of a drain: a close with unread input would drop the last frames.
        linger::close_gracefully(socket, linger::PEER_CLOSE_DEADLINE).await;
    }
    Ok(())
}

/// Serves CONNECTs as [`run`] does, on any byte stream to the peer. Returns the stream, and true if
/// the connection has ended by itself.
///
/// # Errors
/// Fails if the HTTP/2 preface is invalid or late.
pub async fn serve_stream<S>(
    data_path: &Arc<DataPath>,
    transport: Box<Transport<S>>,
    held: &ConnectionResources,
    peer: Arc<Peer>,
) -> Result<(S, bool), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let source = data_path.budget.source(&peer.charged_source());
    let cluster = data_path.turns.limited(&peer.charged_source());
    let mut connection = Box::new(HboneConnection::new(*transport, source, cluster));
    let established = poll_fn(|cx| match connection.poll(cx) {
        Poll::Ready(end) => Poll::Ready(Err(end)),
        Poll::Pending if connection.downstream.server.is_established() => Poll::Ready(Ok(())),
        Poll::Pending => Poll::Pending,
    });
    let established = timeout(PREFACE_DEADLINE, established).await;
    let end = match established {
        Ok(Ok(())) => None,
        Ok(Err(end)) if connection.downstream.server.has_preface() => Some(end),
        Ok(Err(end)) => {
            return Err(HandshakeError::new(HandshakeRefusal::Other, &describe(&end)));
        }
        Err(_) => {
            let late = &"no HTTP/2 preface within 5 s";
            return Err(HandshakeError::new(HandshakeRefusal::Timeout, late));
        }
    };
    let (open, aging) = (data_path.metrics.connection_opened(), data_path.aging.as_ref());
    let driver = ConnectionDriver {
        data_path,
        // The peer is older than this connection: the first tunnel looks up its cluster again.
        peer_generation: u64::MAX,
        is_for_gateway: false,
        generation: data_path.reader.generation(),
        held,
        slots: Arc::new(Semaphore::new(STREAMS_MAX as usize)),
        is_used: false,
        aged: aging.map(|aging| Box::new(aging.open(peer.charged_source(), &held.load))),
        goaway_at: None,
        ping_at: Instant::now(),
        peer,
    };
    let closed = match end {
        None => driver.run(connection).await,
        Some(end) => driver.close(connection, end).await,
    };
    drop(open);
    Ok(closed)
}

/// Event of a connection other than input from its peer. All events are rare.
enum ConnectionEvent {
    /// A PING is due, or the answer to the last one.
    PingDue,
    /// The deadline for the first CONNECT has passed.
    FirstConnectTimeout,
    /// The age of connections is reached.
    Aged,
    /// The reserved time to retire a connection has come.
    RetirementDue(RetirementReason),
    GoAwayDue,
    /// The certificate of the peer is no longer trusted.
    Untrusted(HandshakeRefusal),
    /// The grace period after GOAWAY has passed, and the tunnels have been reset.
    Closed,
    DrainDeadline,
    /// Trust, exposure or policy has changed.
    Changed,
    /// The grant of a tunnel was revoked by this change.
    Revoked(StreamKey, String),
}

type PendingEvent = Pin<Box<dyn Future<Output = ConnectionEvent> + Send>>;

/// Events that have not occurred yet.
struct PendingEvents(Vec<PendingEvent>);

impl PendingEvents {
    /// Adds an event that occurs after `delay`.
    fn push_after(&mut self, delay: Duration, event: ConnectionEvent) {
        self.0.push(Box::pin(async move {
            sleep(delay).await;
            event
        }));
    }

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

/// Driver of a connection, and the state that its events change.
struct ConnectionDriver<'a> {
    data_path: &'a Arc<DataPath>,
    peer: Arc<Peer>,
    held: &'a ConnectionResources,
    slots: Arc<Semaphore>,
    /// Generation of the snapshot that the cluster of the peer was last looked up in.
    peer_generation: u64,
    /// True if the peer is in `trust.gateways`.
    is_for_gateway: bool,
    /// Generation of the snapshot that the tunnels were last checked against.
    generation: watch::Receiver<u64>,
    /// True once a CONNECT was received.
    is_used: bool,
    /// Count of the connection, if connections are retired.
    aged: Option<Box<Aged>>,
    goaway_at: Option<Instant>,
    /// Time of the last PING.
    ping_at: Instant,
}

/// Reason for which a driver runs.
enum Wake {
    Event(ConnectionEvent),
    End(ConnectionEnd),
}

impl ConnectionDriver<'_> {
    async fn run<S>(mut self, mut connection: Box<HboneConnection<S>>) -> (S, bool)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let gate = Arc::new(WakeGate::default());
        let mut events = self.events();
        connection.generation = *self.generation.borrow();
        loop {
            let wake = poll_fn(|cx| {
                // Events come before requests, which may arrive without a pause.
                let waker = || Waker::from(Arc::clone(&gate));
                if let Poll::Ready(event) = gate.poll(cx, waker, |cx| events.poll(cx)) {
                    return Poll::Ready(Wake::Event(event));
                }
                let end = connection.poll(cx);
                for request in connection.take_requests() {
                    self.accept(request, &mut connection);
                }
                end.map(Wake::End)
            });
            let end = match wake.await {
                Wake::Event(event) => match self.handle(event, &mut connection, &mut events) {
                    None => {
                        gate.open();
                        continue;
                    }
                    Some(end) => end,
                },
                Wake::End(end) => end,
            };
            return self.close(connection, end).await;
        }
    }

    /// Handles an event. Returns the end of the connection, if it ends by this event.
    fn handle<S>(
        &mut self,
        event: ConnectionEvent,
        connection: &mut HboneConnection<S>,
        events: &mut PendingEvents,
    ) -> Option<ConnectionEnd>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        match event {
            ConnectionEvent::PingDue => {
                check_endpoints(connection);
                if connection.downstream.server.ping() {
                    self.ping_at = Instant::now();
                    let load = self.load();
                    if let Some(wait) = self.aged.as_mut().and_then(|aged| aged.leave(load)) {
                        let due = ConnectionEvent::RetirementDue(RetirementReason::WorkerLoad);
                        events.push_after(wait, due);
                    }
                    events.push_after(PING_INTERVAL, ConnectionEvent::PingDue);
                } else if self.ping_at.elapsed() >= PING_DEADLINE {
                    return Some(ConnectionEnd::Silent);
                } else {
                    let due = self.ping_at + PING_DEADLINE;
                    events.push_after(due - Instant::now(), ConnectionEvent::PingDue);
                }
            }
            ConnectionEvent::FirstConnectTimeout if self.is_used => {}
            ConnectionEvent::FirstConnectTimeout | ConnectionEvent::Closed => {
                return Some(ConnectionEnd::ClosedByGateway);
            }
            ConnectionEvent::Aged => {
                let wait = self.aged.as_ref().map(|aged| aged.reserve()).unwrap_or_default();
                events.push_after(wait, ConnectionEvent::RetirementDue(RetirementReason::Age));
            }
            ConnectionEvent::RetirementDue(reason) => self.retire(reason, events),
            ConnectionEvent::GoAwayDue => {
                self.goaway_at = Some(Instant::now());
                connection.downstream.server.shut_down_gracefully();
            }
            ConnectionEvent::DrainDeadline => {
                connection.end_all(Reason::DrainDeadline);
                events.push_after(GOAWAY_DEADLINE, ConnectionEvent::Closed);
            }
            ConnectionEvent::Untrusted(refusal) => {
                self.data_path.metrics.untrusted.inc(refusal.label());
                self.log_end(&refusal.description());
                connection.downstream.server.shut_down_gracefully();
                events.push_after(UNTRUSTED_CLOSE_DELAY, ConnectionEvent::Closed);
            }
            ConnectionEvent::Changed => {
                self.reevaluate(connection, events);
                events.0.push(self.wait_for_change());
            }
            ConnectionEvent::Revoked(key, why) => connection.revoke(key, why),
        }
        None
    }

    /// Begins the end of the connection, unless it has begun. Open tunnels continue.
    fn retire(&mut self, reason: RetirementReason, events: &mut PendingEvents) {
        if self.goaway_at.is_some() {
            return;
        }
        let load = self.load();
        let is_retired = self.aged.as_mut().is_some_and(|aged| aged.retire(reason, load));
        if is_retired {
            self.data_path.metrics.retired.inc(reason.label());
            let (peer, reason) = (&self.peer.source.principal, reason.label());
            debug!(%peer, reason, "connection retired");
            events.push_after(Duration::ZERO, ConnectionEvent::GoAwayDue);
        } else if reason == RetirementReason::Age {
            events.push_after(RETIREMENT_RETRY, ConnectionEvent::Aged);
        }
    }

    /// Returns its load: the connection, and its tunnels.
    fn load(&self) -> usize {
        1 + STREAMS_MAX as usize - self.slots.available_permits()
    }

    /// Checks all tunnels against the current snapshot. Those whose grant is revoked end after a
    /// random delay.
    fn reevaluate<S>(&mut self, connection: &mut HboneConnection<S>, events: &mut PendingEvents)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let (generation, snapshot) = load_current(&self.data_path.reader, &mut self.generation);
        connection.generation = generation;
        for tunnel in connection.open_tunnels() {
            if let Err(why) = tunnel.tunnel().reevaluate(&snapshot) {
                let revoked = ConnectionEvent::Revoked(tunnel.key, why);
                events.push_after(revoke_delay(), revoked);
            }
        }
        connection.check_limits();
    }

    /// Ends the connection. Returns its socket, and true unless an error or this gateway ends it.
    async fn close<S>(self, connection: Box<HboneConnection<S>>, end: ConnectionEnd) -> (S, bool)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        self.log_end(&describe(&end));
        if let ConnectionEnd::Http2(ConnectionError::EXHAUSTED) = end {
            self.data_path.metrics.frame_floods.inc();
        }
        let is_clean = matches!(end, ConnectionEnd::Closed);
        (close(connection, end).await, is_clean)
    }

    /// Returns the initial events in the order of their priority.
    fn events(&self) -> PendingEvents {
        let listener = Arc::clone(&self.peer.listener);
        let not_after = self.peer.not_after;
        let mut events = PendingEvents(Vec::with_capacity(6));
        events.push_after(PING_INTERVAL, ConnectionEvent::PingDue);
        events.push_after(FIRST_CONNECT_DEADLINE, ConnectionEvent::FirstConnectTimeout);
        // Drain of the process or the listener, or expiry of the peer's certificate: GOAWAY ends
        // new tunnels, and open ones continue.
        events.0.push(Box::pin(async move {
            tokio::select! {
                () = listener.drain.draining() => {}
                () = wait_for_expiry(not_after) => {}
            }
            ConnectionEvent::GoAwayDue
        }));
        if let Some(lifetime) = self.data_path.aging.as_ref().and_then(|aging| aging.lifetime()) {
            events.push_after(lifetime, ConnectionEvent::Aged);
        }
        events.0.push(self.wait_for_drain_deadline());
        events.0.push(self.wait_for_change());
        if let Some(chain) = self.peer.chain.clone() {
            events.0.push(Box::pin(async move {
                ConnectionEvent::Untrusted(chain.wait_trust_lost().await)
            }));
        }
        events
    }

    /// Waits for the end of the drain, at which all tunnels are reset. The connection of a peer
    /// that ignores GOAWAY ends after that.
    fn wait_for_drain_deadline(&self) -> PendingEvent {
        let listener = Arc::clone(&self.peer.listener);
        Box::pin(async move {
            listener.drain.closing().await;
            ConnectionEvent::DrainDeadline
        })
    }

    /// Waits for a change that may revoke a grant.
    fn wait_for_change(&self) -> PendingEvent {
        let mut generation = self.generation.clone();
        Box::pin(async move {
            if generation.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            ConnectionEvent::Changed
        })
    }

    fn log_end(&self, error: &dyn std::fmt::Display) {
        debug!(peer = %self.peer.source.principal, %error, "connection ended");
    }

    /// Starts the task that opens a tunnel, or resets the stream.
    fn accept<S>(&mut self, new: NewRequest, connection: &mut HboneConnection<S>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let NewRequest { key, request, setup, price } = new;
        let is_first = !replace(&mut self.is_used, true);
        self.refresh_peer();
        let server = &mut connection.downstream.server;
        server.meter.set_for_gateway(self.is_for_gateway);
        let first_peer = request.first_peer().filter(|_| self.is_for_gateway);
        let charged = first_peer.map(|it| (it, server.charge_first_peer(key, it, price)));
        let exhausted = charged.and_then(|(it, charged)| Some((it, charged.err()?)));
        for reset in exhausted.iter().flat_map(|(_, reset)| reset) {
            connection.receive_reset(*reset, Reason::CreditExhausted);
        }
        let mailbox = Arc::clone(&connection.mailbox);
        let connect = PendingConnect::new(key, setup, mailbox, self.is_for_gateway);
        let is_late = self.goaway_at.is_some_and(|at| at.elapsed() >= GOAWAY_GRACE);
        // GOAWAY was sent, but the peer may not have received it yet.
        let is_expired = self.peer.not_after <= SystemTime::now();
        if is_late || is_expired || self.peer.lost_trust().is_some() {
            return connect.refuse_stream();
        }
        let source = &self.peer.source;
        let claimed = request.source_cluster.as_deref();
        if claimed.is_some_and(|cluster| cluster != source.cluster.as_bytes()) {
            self.data_path.metrics.baggage_mismatch(source);
        }
        let mut record = Record::new(&self.data_path.metrics, source, &request.authority);
        let forwarded = request.target.as_ref().ok().and_then(Target::forwarded);
        let traceparent = forwarded.and_then(|it| it.traceparent.as_deref());
        record.begin_trace(traceparent, self.peer.handshake.filter(|_| is_first));
        let connect = match connect.if_open() {
            Ok(connect) => connect,
            Err(reason) => return record.finish(reason),
        };
        if let Some((first_peer, _)) = exhausted {
            let name = String::from_utf8_lossy(first_peer);
            record.set_detail(format!("first peer {name}"));
            return record.finish(connect.reject(Reason::CreditExhausted));
        }
        let connect = ConnectRequest {
            tunnel: NewTunnel::new(self.data_path, &self.peer, record),
            slots: Arc::clone(&self.slots),
            connect,
            load: self.held.load.clone(),
            // Before the dial, as its client sends as soon as it is answered.
            slot: Arc::clone(&self.slots).try_acquire_owned().ok(),
        };
        let forward = hbone::run(Box::new(connect), request.target);
        self.data_path.lifecycle.spawn(turns::of(self.held.descriptor.holders().source(), forward));
    }

    /// Looks up the cluster and the role of the peer again if the snapshot has changed.
    fn refresh_peer(&mut self) {
        let snapshot = self.data_path.reader.load();
        if self.peer_generation != snapshot.generation {
            self.peer_generation = snapshot.generation;
            self.is_for_gateway = snapshot.trust.is_gateway(&self.peer.source.principal);
            if let Some(moved) = self.peer.with_current_cluster(&snapshot) {
                self.peer = Arc::new(moved);
            }
        }
    }
}

/// Turns keepalive on for the endpoints, and ends the tunnels of those that have vanished.
fn check_endpoints<S>(connection: &mut HboneConnection<S>)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let checks = connection.open_tunnels().map(|copy| (copy.key, copy.check_endpoint()));
    let vanished: Vec<_> = checks.filter(|(_, check)| check.is_err()).collect();
    for (key, check) in vanished {
        connection.end(key, check);
    }
}

/// Sends the last frames, and ends all tunnels. Returns the socket. The time is bounded: a peer
/// that does not read must not hold the connection.
pub(super) async fn close<S>(mut connection: Box<HboneConnection<S>>, end: ConnectionEnd) -> S
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut alert = AlertDescription::CloseNotify;
    match end {
        ConnectionEnd::Closed | ConnectionEnd::ClosedByGateway => {
            connection.downstream.server.shut_down(h2::Reason::NO_ERROR);
        }
        ConnectionEnd::Http2(error) => connection.downstream.server.shut_down(error.code),
        ConnectionEnd::Record(error) => match error.alert() {
            Some(fatal) => alert = fatal,
            None => return connection.into_socket(Reason::DownstreamLost),
        },
        ConnectionEnd::Evicted => return connection.into_socket(Reason::BuffersFull),
        ConnectionEnd::Lost(_) | ConnectionEnd::Silent => {
            return connection.into_socket(Reason::DownstreamLost);
        }
    }
    let mut alert = Some(alert);
    let closed = poll_fn(|cx| connection.poll_close(cx, &mut alert));
    let _ = timeout(GOAWAY_DEADLINE, closed).await;
    connection.into_socket(Reason::DownstreamLost)
}

/// Returns the current snapshot and a generation that is not newer, which becomes seen. In this
/// order, a change in between is reported once more. In the other it would be missed.
pub(super) fn load_current(
    reader: &Reader,
    seen: &mut watch::Receiver<u64>,
) -> (u64, Guard<Arc<Snapshot>>) {
    let generation = *seen.borrow_and_update();
    (generation, reader.load())
}

/// Returns the cause of the end of a connection, for the log.
fn describe(end: &ConnectionEnd) -> String {
    match end {
        ConnectionEnd::Closed => "the peer has closed it".to_owned(),
        ConnectionEnd::ClosedByGateway => {
            "closed by this gateway: no CONNECT in time, or drain".to_owned()
        }
        ConnectionEnd::Evicted => "the peer does not read, and buffers are full".to_owned(),
        ConnectionEnd::Silent => "PING not acknowledged".to_owned(),
        ConnectionEnd::Lost(error) => error.to_string(),
        ConnectionEnd::Record(error) => error.to_string(),
        ConnectionEnd::Http2(error) => format!("{}, {:?}", error.rule, error.code),
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
