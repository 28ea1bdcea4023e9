//! One HBONE connection to a gateway: its handshake, its PINGs and its end.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use h2::{Ping, PingPong};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::io::InspectReader;

use crate::lifecycle::DrainScope;
use crate::limits::Held;
use crate::reason::Reason;
use crate::snapshot::Reader;
use crate::sock_diag::{TcpCounters, explain_stall};
use crate::tls::{
    ALPN_H2, InboundTls, OutboundTls, explain_error, is_rejection_of_us, refusal_for_error,
};

use super::rtt::MinRtt;
use super::verify::{ServerIdentity, Verified};
use super::{AddressFilter, Failure, Target};

/// Limit of our tunnels on one connection. Envoy accepts as many
/// (docs/wire-contract.md 1.2).
pub(super) const STREAMS_MAX: usize = 100;
/// Flow-control window of a stream. The windows of all streams fit into that of the connection, so
/// tunnels that are not read never stall others.
const STREAM_WINDOW: u32 = 640 * 1024;
const CONNECTION_WINDOW: u32 = 64 << 20;
/// Limit of bytes of one tunnel that wait for the socket.
const SEND_BUFFER: usize = 128 * 1024;
/// Size of frames that a gateway may send.
const FRAME_BYTES_MAX: u32 = 64 * 1024;
/// Limit of the headers and trailers of an answer. The default of the h2 crate is 16 MiB.
pub(super) const HEADER_LIST_MAX: u32 = 16 * 1024;
/// Limits of streams that were reset here. They count for long, and the defaults of the h2 crate
/// end a busy connection (docs/wire-contract.md 1.2).
const RESET_STREAMS_MAX: usize = 4096;
const LOCAL_RESETS_MAX: usize = 100_000;

/// Deadline for a new connection, from TCP to the answer to the first PING.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Deadline for TCP. One lost SYN fits: the kernel sends the next one after 1 s.
const TCP_DEADLINE: Duration = Duration::from_secs(2);
/// Delay after which the next address of a gateway is tried too (RFC 8305 section 8).
const ADDRESS_DELAY: Duration = Duration::from_millis(250);
/// Pause between PINGs, as in ztunnel and Istio's Envoy.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Silence after a PING from which a connection gets no new tunnels until the PING is acknowledged.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);
/// Silence after a PING at which a connection ends with all its tunnels.
const PING_DEADLINE: Duration = Duration::from_secs(20);
/// Silence after which a new tunnel also sends a PING: a dead connection is detected by the first
/// tunnel on it.
const QUIET: Duration = Duration::from_secs(1);
/// Age from which another connection takes the new tunnels.
pub(super) const AGE_MAX: Duration = Duration::from_secs(60 * 60);
/// Time without tunnels after which a connection is closed.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(60);
/// The same during a drain. A tunnel that waits for the connection takes its place before.
const DRAIN_IDLE_MAX: Duration = Duration::from_millis(100);

/// Cause of the end of a connection that has not failed.
pub(super) const CLOSED: &str = "closed";

type Socket = InspectReader<TcpStream, Box<dyn Fn(&[u8]) + Send>>;
type Http2 = h2::client::Connection<TlsStream<Socket>, Bytes>;

/// Connection that takes tunnels. It closes once it is dropped and its tunnels have ended.
#[derive(Debug)]
pub(super) struct Connection {
    send: SendRequest<Bytes>,
    pub(super) state: Arc<State>,
    /// Its place among those of the gateway, and its descriptor. They are given back when no
    /// tunnel uses it any more, up to a PING deadline before the socket is closed.
    _charges: [Held; 2],
}

/// State that a connection, its tunnels and its task share.
#[derive(Debug)]
pub(super) struct State {
    /// Number of tunnels, open or being opened.
    streams: AtomicUsize,
    /// True once no new tunnel may use the connection.
    is_retired: AtomicBool,
    /// True while a PING is late, and after the end.
    is_suspect: watch::Sender<bool>,
    /// True once the gateway or TCP has ended the connection by an error.
    is_broken: AtomicBool,
    probe: Notify,
    pub(super) epoch: Instant,
    reads: Arc<AtomicU64>,
    /// Milliseconds after `epoch` of the last answer to anything.
    answered_ms: AtomicU64,
    /// Milliseconds after `epoch` at which the last tunnel has ended.
    emptied_ms: AtomicU64,
    /// Least round trip time of the gateway, of all its connections.
    rtt: Arc<Mutex<MinRtt>>,
    pub(super) tls: Arc<OutboundTls>,
    /// Gateway at the other end.
    pub(super) peer: Verified,
}

pub(super) struct Driver {
    /// Boxed, as each function that passes it on would have a place for its kibibytes.
    http2: Pin<Box<Http2>>,
    pings: PingPong,
    state: Arc<State>,
    connection: Weak<Connection>,
}

/// Tunnel's place among the streams of a connection.
#[derive(Debug)]
pub(super) struct Slot {
    connection: Arc<Connection>,
    charge: Option<Held>,
}

/// Opens a connection. It is usable: the gateway has accepted our certificate and sent its
/// SETTINGS, as it has acknowledged a PING.
pub(super) async fn open(
    (target, rtt): (&Target, Arc<Mutex<MinRtt>>),
    tls: &InboundTls,
    (reader, filter): (&Reader, &AddressFilter),
    charges: [Held; 2],
) -> Result<(Arc<Connection>, Driver), Failure> {
    let unreachable =
        |detail: String| Failure::new(Reason::GatewayUnreachable, detail).at(target.address);
    let end = Instant::now() + CONNECT_DEADLINE;
    let own = tls.outbound();
    let own = own.ok_or_else(|| unreachable("this gateway has no certificate yet".to_owned()))?;
    let addresses = admitted(target, filter)?;
    let stream = timeout(TCP_DEADLINE, connect_any(addresses)).await;
    let stream = stream.map_err(|_| unreachable("did not answer in time".to_owned()))?;
    let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream));
    let stream = stream.map_err(|error| {
        let failure = unreachable(error.to_string());
        match Reason::of_dial(&error) {
            Reason::Overloaded => Failure { reason: Reason::Overloaded, ..failure },
            _ => failure,
        }
    })?;
    let ends = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?)));
    let reads = Arc::<AtomicU64>::default();
    let counter = Arc::clone(&reads);
    let count = move |_: &[u8]| {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let stream = Socket::new(stream, Box::new(count));
    let check = |server: ServerIdentity<'_>| server.check_gateway(&target.gateway, &reader.load());
    let opened = async {
        let reasons = [Reason::GatewayUntrusted, Reason::GatewayUnreachable];
        let opened = handshake(stream, &own, (tls, reader), check, reasons).await;
        let (stream, verified) = opened.map_err(|failure| failure.at(target.address))?;
        let opened = establish((stream, reads), Arc::clone(&own), (verified, rtt), charges).await;
        opened.map_err(|error| {
            let failure = unreachable(error.to_string());
            let is_rejection = is_rejection_of_us(&error);
            if is_rejection {
                Failure { reason: Reason::PeerRejectedUs, ..failure }
            } else {
                failure
            }
        })
    };
    // Pinned here, so that the socket is still open when its counters are read.
    let mut opened = pin!(opened);
    timeout_at(end, opened.as_mut()).await.unwrap_or_else(|_| {
        let counters = ends.and_then(|(local, remote)| TcpCounters::between(local, remote));
        Err(unreachable(explain_stall("no HBONE connection within 5 s", counters)))
    })
}

/// Returns the addresses of a gateway that the filter admits.
///
/// # Errors
/// The last failure, if it admits none.
fn admitted(target: &Target, filter: &AddressFilter) -> Result<Vec<SocketAddr>, Failure> {
    let (mut admitted, mut failure) = (Vec::new(), None);
    for address in target.addresses() {
        match filter.check(address) {
            Ok(()) => admitted.push(address),
            Err(denied) => failure = Some(denied),
        }
    }
    match failure {
        Some(failure) if admitted.is_empty() => Err(failure),
        _ => Ok(admitted),
    }
}

/// Performs the TLS handshake for HTTP/2, and identifies the server, which `check` may reject. The
/// first reason is that of a server whose certificate is not valid or another one's, the second
/// that of any other failure.
pub(super) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    own: &OutboundTls,
    (tls, reader): (&InboundTls, &Reader),
    check: impl FnOnce(ServerIdentity<'_>) -> Result<(), String>,
    [untrusted, failed]: [Reason; 2],
) -> Result<(TlsStream<S>, Verified), Failure> {
    // The name is never sent, and verification uses SPIFFE identities.
    let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
    let connector = TlsConnector::from(Arc::clone(&own.config));
    let stream = connector.connect(name, stream).await.map_err(|error| {
        let rejected = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
        match rejected {
            Some(rejected @ rustls::Error::InvalidCertificate(_)) => {
                let refusal = refusal_for_error(rejected);
                Failure::new(untrusted, format!("{refusal}: {}", explain_error(rejected)))
            }
            _ => Failure::new(failed, error.to_string()),
        }
    })?;
    if stream.get_ref().1.alpn_protocol() != Some(ALPN_H2) {
        return Err(Failure::new(failed, "does not offer ALPN h2"));
    }
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let verified = Verified::new(certificates, tls, reader);
    let verified = verified.and_then(|verified| check(verified.server()).map(|()| verified));
    Ok((stream, verified.map_err(|detail| Failure::new(untrusted, detail))?))
}

/// Connects to the first address that answers. The next one is tried after [`ADDRESS_DELAY`], or
/// at once if all before have failed (RFC 8305 section 5).
async fn connect_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let (mut rest, mut attempts) = (addresses.into_iter(), JoinSet::new());
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        if let Some(address) = rest.next() {
            attempts.spawn(TcpStream::connect(address));
        }
        loop {
            let has_more = rest.len() > 0;
            tokio::select! {
                ended = attempts.join_next() => match ended {
                    Some(Ok(Ok(stream))) => return Ok(stream),
                    // A lack of this host does not hide a failure of another address.
                    Some(Ok(Err(error))) if Reason::of_dial(&failure) == Reason::Overloaded => {
                        failure = error;
                    }
                    Some(Ok(Err(_))) => {}
                    Some(Err(_)) => {}
                    None => return Err(failure),
                },
                () = sleep(ADDRESS_DELAY), if has_more => break,
            }
            if has_more && attempts.is_empty() {
                break;
            }
        }
    }
}

/// Performs the HTTP/2 preface, and waits for the answer to a PING.
async fn establish(
    (stream, reads): (TlsStream<Socket>, Arc<AtomicU64>),
    tls: Arc<OutboundTls>,
    (verified, rtt): (Verified, Arc<Mutex<MinRtt>>),
    charges: [Held; 2],
) -> Result<(Arc<Connection>, Driver), h2::Error> {
    let mut settings = Builder::new();
    settings
        .enable_push(false)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADER_LIST_MAX)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS_MAX)
        .max_local_error_reset_streams(Some(LOCAL_RESETS_MAX));
    let (send, mut http2) = settings.handshake(stream).await?;
    let mut pings = http2.ping_pong().ok_or(h2::Reason::INTERNAL_ERROR)?;
    let since = Instant::now();
    tokio::select! {
        ended = &mut http2 => {
            ended?;
            return Err(h2::Reason::NO_ERROR.into());
        }
        pong = pings.ping(Ping::opaque()) => {
            pong?;
        }
    }
    let state = Arc::new(State {
        streams: AtomicUsize::new(0),
        is_retired: AtomicBool::new(false),
        is_suspect: watch::Sender::new(false),
        is_broken: AtomicBool::new(false),
        probe: Notify::new(),
        epoch: Instant::now(),
        reads,
        answered_ms: AtomicU64::new(0),
        emptied_ms: AtomicU64::new(0),
        rtt,
        tls,
        peer: verified,
    });
    state.record_rtt(since);
    let connection = Arc::new(Connection { send, state: Arc::clone(&state), _charges: charges });
    let driver =
        Driver { http2: Box::pin(http2), pings, state, connection: Arc::downgrade(&connection) };
    Ok((connection, driver))
}

impl Driver {
    /// Runs the connection until it ends. Returns the cause. `on_idle` drops the other handles of
    /// retired connections, and the last one ends the connection once everything is sent.
    /// `on_goaway` is called when the gateway has sent GOAWAY while tunnels are open.
    pub(super) async fn run(
        mut self,
        drain: &DrainScope,
        on_idle: impl Fn(),
        on_goaway: impl Fn(),
    ) -> String {
        let state = Arc::clone(&self.state);
        let (http2, connection) = (&mut self.http2, &self.connection);
        let run = poll_fn(|cx| {
            let ended = http2.as_mut().poll(cx);
            if let Poll::Ready(Err(error)) = &ended {
                state.note_error(error);
            }
            if !state.is_retired() {
                let open = connection.upgrade();
                let is_over = open.is_some_and(|open| open.retire_after_goaway());
                if is_over && ended.is_pending() && state.streams() > 0 {
                    on_goaway();
                }
            }
            ended
        });
        let why = tokio::select! {
            ended = run => match ended {
                Ok(()) => CLOSED.to_owned(),
                Err(error) => error.to_string(),
            },
            why = keep_alive(&mut self.pings, &state, &on_idle) => why,
            never = retire_in_drain(&state, drain, &on_idle) => match never {},
            refusal = state.peer.chain.wait_trust_lost() => refusal.description().to_owned(),
        };
        state.retire();
        state.is_suspect.send_replace(true);
        why
    }
}

/// Sends PINGs until one is not acknowledged. Returns the cause of the end.
async fn keep_alive(pings: &mut PingPong, state: &State, on_idle: &impl Fn()) -> String {
    loop {
        tokio::select! {
            () = sleep(PING_INTERVAL) => {}
            () = state.probe.notified() => {}
        }
        if state.retire_if_idle(IDLE_MAX) {
            on_idle();
        }
        let since = Instant::now();
        match wait_for_pong(pings.ping(Ping::opaque()), state).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => return error.to_string(),
            None => return "PING not acknowledged".to_owned(),
        }
        state.is_suspect.send_replace(false);
        state.record_rtt(since);
    }
}

/// Waits for the answer to a PING. Marks the connection as suspect after silence of the gateway for
/// [`PROBE_DEADLINE`], and returns `None` after [`PING_DEADLINE`].
///
/// With tunnels, other bytes end the silence: on a slow link, megabytes of DATA may precede the
/// answer. They are looked for once per [`PROBE_DEADLINE`], so the silence may last as much longer.
async fn wait_for_pong<T>(pong: impl Future<Output = T>, state: &State) -> Option<T> {
    let mut pong = std::pin::pin!(pong);
    let (mut reads, mut since) = (state.reads.load(Ordering::Relaxed), Instant::now());
    while since.elapsed() < PING_DEADLINE {
        if let Ok(answer) = timeout(PROBE_DEADLINE, pong.as_mut()).await {
            return Some(answer);
        }
        let before = std::mem::replace(&mut reads, state.reads.load(Ordering::Relaxed));
        if reads != before && state.streams() > 0 {
            since = Instant::now();
        } else {
            state.is_suspect.send_replace(true);
        }
    }
    None
}

/// Retires the connection once a drain has begun and it has no tunnels. Never returns.
async fn retire_in_drain(state: &State, drain: &DrainScope, on_idle: &impl Fn()) -> Infallible {
    drain.draining().await;
    loop {
        if state.retire_if_idle(DRAIN_IDLE_MAX) || state.is_retired() {
            on_idle();
        }
        sleep(DRAIN_IDLE_MAX).await;
    }
}

impl State {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the time since a number of milliseconds after `epoch`.
    fn time_since(&self, millis: &AtomicU64) -> Duration {
        let millis = Duration::from_millis(millis.load(Ordering::Relaxed));
        self.epoch.elapsed().saturating_sub(millis)
    }

    fn record_rtt(&self, since: Instant) {
        let now = Instant::now();
        self.rtt.lock().record(now - since, now);
        self.answered();
    }

    pub(super) fn streams(&self) -> usize {
        self.streams.load(Ordering::SeqCst)
    }

    /// Notes an answer of the gateway.
    pub(super) fn answered(&self) {
        self.answered_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Sends a PING if the gateway has been silent.
    pub(super) fn probe_if_quiet(&self) {
        if self.time_since(&self.answered_ms) >= QUIET {
            self.probe.notify_one();
        }
    }

    /// Waits until a PING is late or the connection has ended.
    pub(super) async fn suspected(&self) {
        let mut suspect = self.is_suspect.subscribe();
        // The sender lives as long as `self`.
        let _ = suspect.wait_for(|is_suspect| *is_suspect).await;
    }

    pub(super) fn note_error(&self, error: &h2::Error) {
        let is_code = error.reason().is_some_and(|code| code != h2::Reason::NO_ERROR);
        let io = error.get_io().map(io::Error::kind);
        if is_code || io == Some(io::ErrorKind::ConnectionReset) {
            self.is_broken.store(true, Ordering::SeqCst);
        }
    }

    /// Returns true if an error has ended the connection.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::SeqCst)
    }

    /// Keeps new tunnels off the connection. Open ones go on.
    pub(super) fn retire(&self) {
        self.is_retired.store(true, Ordering::SeqCst);
    }

    /// Returns true if new tunnels must not use the connection.
    pub(super) fn is_unusable(&self) -> bool {
        self.is_retired() || *self.is_suspect.borrow()
    }

    /// Returns true if no tunnel will ever use the connection again.
    pub(super) fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::SeqCst)
    }

    /// Returns true if another connection should replace it: by its age, a new certificate or
    /// changed trust.
    pub(super) fn is_aged(&self, tls: Option<&Arc<OutboundTls>>) -> bool {
        let is_current = tls.is_some_and(|tls| Arc::ptr_eq(tls, &self.tls));
        !is_current || self.epoch.elapsed() >= AGE_MAX || self.peer.not_after() <= SystemTime::now()
    }

    /// Returns the time since the last tunnel has ended, if there is none.
    pub(super) fn idle_time(&self) -> Option<Duration> {
        (self.streams() == 0).then(|| self.time_since(&self.emptied_ms))
    }

    /// Retires the connection if it has had no tunnel for this time.
    pub(super) fn retire_if_idle(&self, time: Duration) -> bool {
        if self.is_retired() || self.streams() > 0 || self.time_since(&self.emptied_ms) < time {
            return false;
        }
        // A tunnel that comes meanwhile is counted before it looks whether this is retired.
        self.retire();
        true
    }
}

impl Connection {
    /// Takes a place for a tunnel, if the connection has one.
    pub(super) fn try_take(self: &Arc<Self>) -> Option<Slot> {
        let max = self.send.current_max_send_streams().min(STREAMS_MAX);
        let taken = self.state.streams.fetch_add(1, Ordering::SeqCst);
        // The drop of the slot gives the place back.
        let slot = Slot { connection: Arc::clone(self), charge: None };
        if taken >= max || self.state.is_unusable() {
            return None;
        }
        match self.poll_ready() {
            Poll::Ready(Ok(())) => Some(slot),
            Poll::Ready(Err(_)) => {
                self.state.retire();
                None
            }
            Poll::Pending => None,
        }
    }

    /// Returns true unless the gateway allows no streams.
    pub(super) fn has_places(&self) -> bool {
        self.send.current_max_send_streams() > 0
    }

    /// Polls whether the connection takes a request. It never does after GOAWAY.
    fn poll_ready(&self) -> Poll<Result<(), h2::Error>> {
        let mut send = self.send.clone();
        send.poll_ready(&mut Context::from_waker(Waker::noop()))
    }

    /// Retires the connection if the gateway has sent GOAWAY. Returns true if it has.
    fn retire_after_goaway(&self) -> bool {
        let Poll::Ready(Err(error)) = self.poll_ready() else {
            return false;
        };
        self.state.note_error(&error);
        self.state.retire();
        true
    }
}

impl Slot {
    pub(super) fn state(&self) -> &Arc<State> {
        &self.connection.state
    }

    /// Charges the place for as long as the tunnel holds it.
    pub(super) fn charge(mut self, charge: Held) -> Self {
        self.charge = Some(charge);
        self
    }

    pub(super) fn sender(&self) -> SendRequest<Bytes> {
        self.connection.send.clone()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let state = &self.connection.state;
        if state.streams.fetch_sub(1, Ordering::SeqCst) == 1 {
            state.emptied_ms.store(state.now_ms(), Ordering::Relaxed);
        }
    }
}
