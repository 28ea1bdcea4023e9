//! The pool against scripted gateways, over sockets and TLS.

mod partitions;
mod pings;
mod places;
mod probes;
pub(crate) mod robustness;
mod shares;
mod sources;
mod writes;

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::server::{Connection, SendResponse};
use http::{Request as HttpRequest, Response};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::*;
use crate::lifecycle::Lifecycle;
use crate::limits::{self, Resource, Source};
use crate::reason::OUTCOME_HEADER;
use crate::snapshot::builder::Change;
use crate::snapshot::traffic::Position;
use crate::snapshot::{Publisher, TrustSet};
use crate::tls::tests::samples::{self, domain, leaf, material, trusting};
use crate::tls::{self, IdentityMaterial, InboundTls};
use crate::tools::dev::{Authority, Issuer, Leaf};
use crate::wire::Via;

/// Address that is never dialled.
const DENIED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 77));
/// Address whose check fails.
const UNCHECKED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 78));

const EAST: &str = "spiffe://east.local/ns/edge/sa/gateway";
const WEST: &str = "spiffe://west.local/ns/edge/sa/gateway";
/// Limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(10);
/// Authority of a request that some gateways answer by an error.
const POISON: &str = "poison.app:80";
/// Number of descriptors of a pool.
const DESCRIPTORS: usize = 4096;
/// Window that is larger than the buffers of a socket.
const WINDOW: u32 = 64 << 20;

/// Certificates of two clusters, and a pool of a gateway of cluster east.
struct World {
    authority: Authority,
    west: Issuer,
    own: IdentityMaterial,
    tls: Arc<InboundTls>,
    publisher: Publisher,
    lifecycle: Lifecycle,
    pool: Pool,
}

/// Opens a tunnel to a gateway that echoes. The gateway ends with the first value.
pub(crate) async fn echo_tunnel() -> (impl Sized, Stream) {
    let (world, gateway) = World::with(Answer::Echo).await;
    let stream = world.open(&gateway).await.expect("a tunnel");
    ((world, gateway), stream)
}

/// Gateway that ends each CONNECT by a reset, for a data path of cluster east.
pub(crate) struct ResettingGateway {
    pub(crate) target: Target,
    /// Authority of these CONNECTs.
    pub(crate) authority: &'static str,
    pub(crate) tls: InboundTls,
    world: World,
    _gateway: Scripted,
}

impl ResettingGateway {
    pub(crate) async fn start() -> Self {
        let world = World::new();
        let gateway = world.west(Script::new(Answer::Reset(h2::Reason::PROTOCOL_ERROR))).await;
        let target = target(&gateway);
        let tls = InboundTls::new(server_tls(&world.own));
        Self { target, authority: POISON, tls, world, _gateway: gateway }
    }

    pub(crate) fn reader(&self) -> crate::snapshot::Reader {
        self.world.publisher.reader()
    }
}

impl World {
    fn new() -> Self {
        let authority = samples::authority();
        let west = samples::intermediate(&authority, "west");
        let own = material(&leaf(&authority, "east", EAST), &authority.root_pem());
        let tls = Arc::new(InboundTls::new(server_tls(&own)));
        let publisher = Publisher::default();
        publisher.update(Change {
            trust: Some(TrustSet::new([("east.local", "east"), ("west.local", "west")])),
            position: Some(Position { cluster: "east".into(), ..Position::default() }),
            ..Change::default()
        });
        let lifecycle = Lifecycle::default();
        let pool = Pool::new(
            Arc::clone(&tls),
            publisher.reader(),
            lifecycle.clone(),
            AddressFilter::new(|address| match address.ip() {
                DENIED => Err(Failure::new(Reason::DialDenied, "an address that is never dialled")),
                UNCHECKED => Err(Failure::new(Reason::Overloaded, "no descriptor for the check")),
                _ => Ok(()),
            }),
            limits::Pool::new(Resource::Descriptors, DESCRIPTORS),
        );
        Self { authority, west, own, tls, publisher, lifecycle, pool }
    }

    /// Starts a gateway of cluster west that answers like this.
    async fn with(answer: Answer) -> (Self, Scripted) {
        let world = Self::new();
        let gateway = world.west(Script::new(answer)).await;
        (world, gateway)
    }

    /// Replaces the configuration of new connections, as a new certificate does.
    fn renew(&self) {
        self.tls.replace(server_tls(&self.own));
    }

    /// Starts a gateway with this certificate.
    async fn gateway(&self, leaf: &Leaf, script: Script) -> Scripted {
        let material = material(leaf, &self.authority.root_pem());
        let tls = tls::endpoint_server_config(&material, vec![domain("east.local")]);
        Scripted::start(TlsAcceptor::from(tls.expect("a configuration")), script).await
    }

    async fn west(&self, script: Script) -> Scripted {
        self.gateway(&self.west.leaf(WEST).expect("a leaf"), script).await
    }

    /// Starts a gateway with a large window, whose connections the sender stops.
    async fn stoppable(&self) -> (Scripted, watch::Sender<Stop>) {
        let (stop, stopped) = watch::channel(Stop::No);
        let script = Script { window: WINDOW, stop: stopped, ..Script::new(Answer::Echo) };
        (self.west(script).await, stop)
    }

    async fn open(&self, at: &Scripted) -> Result<Stream, Failure> {
        self.open_as(at, remote("west", &[])).await
    }

    async fn open_as(&self, at: &Scripted, gateway: RemoteGateway) -> Result<Stream, Failure> {
        self.open_at(at.address, gateway).await
    }

    async fn open_at(
        &self,
        address: SocketAddr,
        gateway: RemoteGateway,
    ) -> Result<Stream, Failure> {
        let target = Target { address, gateway: Arc::new(gateway) };
        self.open_for("a", &target, "echo.app:80").await
    }

    /// Opens a tunnel of a source.
    async fn open_for(
        &self,
        account: &str,
        target: &Target,
        authority: &str,
    ) -> Result<Stream, Failure> {
        self.try_open(&source(account), target, authority).await.map_err(Failure::from)
    }

    async fn try_open(
        &self,
        source: &Source,
        target: &Target,
        authority: &str,
    ) -> Result<Stream, OpenError> {
        let request = Request::new(authority.to_owned(), &Via::default());
        let opened = self.pool.open((target, source), &request, Instant::now() + SOON);
        opened.await.map(|answer| answer.stream)
    }
}

/// Returns the source of a workload.
fn source(account: &str) -> Source {
    let principal = format!("spiffe://east.local/ns/shop/sa/{account}");
    Source::cluster(&"east".into()).identity(&principal.into())
}

fn server_tls(own: &IdentityMaterial) -> tls::ServerTls {
    trusting(own, &["east.local", "west.local"])
}

fn remote(cluster: &str, identities: &[&str]) -> RemoteGateway {
    RemoteGateway {
        network: "west".into(),
        cluster: cluster.into(),
        identities: identities.iter().map(|&id| id.into()).collect(),
        other_addresses: Box::default(),
    }
}

fn target(gateway: &Scripted) -> Target {
    Target { address: gateway.address, gateway: Arc::new(remote("west", &[])) }
}

/// Returns an address at which nothing listens.
async fn closed_port() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    listener.local_addr().expect("an address")
}

/// Asserts that a tunnel fails for this reason.
#[track_caller]
fn assert_refused<T>(opened: Result<T, Failure>, reason: Reason) {
    let refused = opened.err().expect("a refusal");
    assert_eq!(refused.reason, reason, "{refused:?}");
}

/// Behaviour of a gateway.
#[derive(Clone)]
struct Script {
    streams_max: u32,
    /// Number of connections that are accepted; later ones are closed at once.
    connections_max: usize,
    /// Time before each handshake.
    delay: Duration,
    /// Window of each stream.
    window: u32,
    answer: Answer,
    /// Once true, connections that were open before send GOAWAY, or are no longer read.
    stop: watch::Receiver<Stop>,
}

#[derive(Clone, Copy, PartialEq)]
enum Stop {
    No,
    GoAway,
    Silence,
}

#[derive(Clone, Copy)]
enum Answer {
    /// 200, and every byte comes back.
    Echo,
    /// 200 and END_STREAM.
    EndAtOnce,
    /// A status and an outcome.
    Reject(u16, Option<&'static str>),
    /// REFUSED_STREAM for the first request of all connections.
    RefuseFirst,
    /// 200, after the first request of all connections with a header of 20 KiB.
    LargeHeader,
    /// As `Echo`, but a request for [`POISON`] ends its connection by GOAWAY with this code.
    GoAwayAfter(h2::Reason),
    /// As `Echo`, but a request for [`POISON`] ends its connection by a reset of TCP.
    Abort,
    /// As `Echo`, but the stream of a request for [`POISON`] is reset with this code.
    Reset(h2::Reason),
    /// As `Echo` for `echo.app:80`. Other requests get no answer.
    EchoOrNone,
}

impl Script {
    fn new(answer: Answer) -> Self {
        Self {
            streams_max: 100,
            connections_max: usize::MAX,
            delay: Duration::ZERO,
            window: 65_535,
            answer,
            stop: watch::channel(Stop::No).1,
        }
    }
}

/// Running gateway.
struct Scripted {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    /// Number of DATA frames with bytes.
    frames: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Scripted {
    async fn start(tls: TlsAcceptor, script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let (connections, counts) = (Arc::<AtomicUsize>::default(), Counts::default());
        let (counted, Counts { requests, frames }) = (Arc::clone(&connections), counts.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                if counted.fetch_add(1, Ordering::SeqCst) >= script.connections_max {
                    continue;
                }
                // Tests with a paused clock cannot wait for delayed ACKs.
                stream.set_nodelay(true).expect("an option");
                if matches!(script.answer, Answer::Abort) {
                    let socket = socket2::SockRef::from(&stream);
                    socket.set_linger(Some(Duration::ZERO)).expect("an option");
                }
                let (tls, script) = (tls.clone(), script.clone());
                let counts = counts.clone();
                running.spawn(async move {
                    sleep(script.delay).await;
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, script, counts).await;
                    }
                });
            }
        });
        Self { address, connections, requests, frames, _tasks: tasks }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

/// Counters of all connections of a gateway.
#[derive(Clone, Default)]
struct Counts {
    requests: Arc<AtomicUsize>,
    frames: Arc<AtomicUsize>,
}

type Http2 = Connection<TlsStream<TcpStream>, Bytes>;

async fn serve(stream: TlsStream<TcpStream>, script: Script, counts: Counts) {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(script.streams_max)
        .initial_window_size(script.window)
        .initial_connection_window_size(script.window.max(1 << 20));
    let handshake: Result<Http2, _> = builder.handshake(stream).await;
    let Ok(mut http2) = handshake else { return };
    let before = *script.stop.borrow();
    let mut stop = script.stop.clone();
    let mut is_stopped = before != Stop::No;
    let mut tunnels = JoinSet::new();
    loop {
        tokio::select! {
            changed = stop.changed(), if !is_stopped => {
                is_stopped = true;
                let now = *stop.borrow();
                match now {
                    _ if changed.is_err() => {}
                    Stop::GoAway => http2.graceful_shutdown(),
                    Stop::Silence => std::future::pending::<()>().await,
                    Stop::No => {}
                }
            }
            request = http2.accept() => {
                let Some(Ok((request, respond))) = request else { return };
                let count = counts.requests.fetch_add(1, Ordering::SeqCst);
                let frames = Arc::clone(&counts.frames);
                let is_poison = request.uri().authority().is_some_and(|of| of == POISON);
                match script.answer {
                    Answer::GoAwayAfter(code) if is_poison => http2.abrupt_shutdown(code),
                    Answer::Abort if is_poison => return,
                    _ => {}
                }
                let answered = answer((request, respond), script.answer, count, frames);
                tunnels.spawn(answered);
            }
        }
    }
}

async fn answer(
    (request, mut respond): (HttpRequest<RecvStream>, SendResponse<Bytes>),
    answer: Answer,
    count: usize,
    frames: Arc<AtomicUsize>,
) {
    if request.uri().authority().is_some_and(|of| of == POISON) {
        return match answer {
            Answer::Reset(code) => respond.send_reset(code),
            _ => std::future::pending().await,
        };
    }
    let is_echo = request.uri().authority().is_some_and(|of| of == "echo.app:80");
    if matches!(answer, Answer::EchoOrNone) && !is_echo {
        return std::future::pending().await;
    }
    let large = "x".repeat(20 * 1024);
    let (status, outcome) = match answer {
        Answer::Reject(status, outcome) => (status, outcome),
        Answer::RefuseFirst if count == 0 => {
            return respond.send_reset(h2::Reason::REFUSED_STREAM);
        }
        Answer::LargeHeader if count > 0 => (200, Some(&*large)),
        _ => (200, None),
    };
    let response = Response::builder().status(status);
    let response = match outcome {
        None => response,
        Some(outcome) => response.header(OUTCOME_HEADER, outcome),
    };
    let response = response.body(()).expect("a response");
    let send = respond.send_response(response, status != 200);
    let (Ok(mut send), mut receive) = (send, request.into_body()) else {
        return;
    };
    if matches!(answer, Answer::EndAtOnce) {
        let _ = send.send_data(Bytes::new(), true);
    }
    while let Some(Ok(bytes)) = receive.data().await {
        frames.fetch_add(usize::from(!bytes.is_empty()), Ordering::SeqCst);
        let _ = receive.flow_control().release_capacity(bytes.len());
        // The tests send less than a window.
        let _ = send.send_data(bytes, false);
    }
    let _ = send.send_data(Bytes::new(), true);
}

/// Reads until the end of the stream.
async fn read_to_end(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        std::future::poll_fn(|cx| stream.poll_read_ready(cx)).await?;
        let mut buffer = [0; 1000];
        let count = stream.try_read(&mut [IoSliceMut::new(&mut buffer)])?;
        if count == 0 {
            return Ok(all);
        }
        all.extend_from_slice(&buffer[..count]);
    }
}

async fn echoes(stream: &mut Stream, bytes: &[u8]) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let taken = stream.write(rest, |_| ()).await.expect("an open tunnel");
        rest = &rest[taken..];
    }
    stream.shut_down().expect("an open tunnel");
    let read = timeout(SOON, read_to_end(stream)).await.expect("an answer").expect("a clean end");
    assert!(read == bytes, "{} of {}", read.len(), bytes.len());
    assert_eq!(stream.held(), 0);
}

#[tokio::test]
async fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    let bytes: Vec<u8> = (0..300_000_u32).map(|index| index.to_le_bytes()[1]).collect();
    let empty = stream.try_read(&mut [IoSliceMut::new(&mut [0])]);
    assert_eq!(empty.expect_err("no byte").kind(), io::ErrorKind::WouldBlock);
    let empty = stream.try_write(&[IoSlice::new(&[])], |_| ());
    assert_eq!(empty.expect("room"), 0);
    echoes(&mut stream, &bytes).await;
    let rows = world.pool.status();
    assert_eq!((&*rows[0].state, rows[0].tunnels, rows[0].connections), ("ready", 1, 1));
    assert_eq!(rows[0].identity.as_deref(), Some(WEST));
    drop(stream);
    assert_eq!(world.pool.status()[0].tunnels, 0);
}

#[tokio::test]
async fn tunnels_share_a_connection_and_a_full_one_gets_a_second() {
    let world = World::new();
    let script = Script { streams_max: 3, ..Script::new(Answer::Echo) };
    let gateway = world.west(script).await;
    let opens = (0..3).map(|_| world.open(&gateway));
    let mut open = Vec::new();
    for stream in opens {
        open.push(stream.await.expect("a tunnel"));
    }
    assert_eq!(gateway.connections(), 1);
    open.push(world.open(&gateway).await.expect("a tunnel"));
    assert_eq!(gateway.connections(), 2);
    open.pop();
    open.pop();
    open.push(world.open(&gateway).await.expect("a tunnel"));
    assert_eq!(gateway.connections(), 2, "a free place is used again");
    for mut stream in open {
        echoes(&mut stream, b"hello").await;
    }
}

#[tokio::test]
async fn tunnels_that_arrive_together_wait_for_one_connection() {
    let world = Arc::new(World::new());
    let gateway = Arc::new(world.west(Script::new(Answer::Echo)).await);
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let (world, gateway) = (Arc::clone(&world), Arc::clone(&gateway));
        tasks.spawn(async move { world.open(&gateway).await });
    }
    let streams = tasks.join_all().await;
    assert!(streams.iter().all(Result::is_ok));
    assert_eq!(gateway.connections(), 1);
}

#[tokio::test]
async fn only_the_expected_gateway_gets_a_request() {
    let world = World::new();
    let west = world.west.leaf(WEST).expect("a leaf");
    let pod = world.west.leaf("spiffe://west.local/ns/shop/sa/checkout");
    let south = world.west.leaf("spiffe://south.local/ns/edge/sa/gateway");
    let own = world.authority.intermediate("east").expect("an intermediate");
    let own = own.leaf("spiffe://east.local/ns/shop/sa/checkout");
    let past = time::OffsetDateTime::UNIX_EPOCH;
    let expired = world.west.leaf_with(|params| {
        params.subject_alt_names = vec![rcgen::SanType::URI(WEST.try_into().expect("a URI"))];
        params.not_before = past;
        params.not_after = past + Duration::from_secs(1);
    });
    let cases = [
        (&west, remote("north", &[]), "belongs to cluster west"),
        (&west, remote("", &["spiffe://west.local/ns/a/sa/b"]), "is not an identity"),
        (&pod.expect("a leaf"), remote("west", &[WEST]), "is not an identity"),
        (&own.expect("a leaf"), remote("", &[]), "neither the cluster"),
        (&west, remote("", &[]), "neither the cluster"),
        (&south.expect("a leaf"), remote("west", &[]), "untrusted_domain"),
        (&expired.expect("a leaf"), remote("west", &[]), "expired"),
    ];
    for (leaf, expected, why) in cases {
        let gateway = world.gateway(leaf, Script::new(Answer::Echo)).await;
        let refused = world.open_as(&gateway, expected).await.expect_err("a refusal");
        assert_eq!(refused.reason, Reason::GatewayUntrusted, "{refused:?}");
        assert!(refused.detail.contains(why), "{refused:?}");
        assert_eq!(gateway.requests.load(Ordering::SeqCst), 0);
    }
    let other = World::new();
    let gateway = other.west(Script::new(Answer::Echo)).await;
    assert_refused(world.open(&gateway).await, Reason::GatewayUntrusted);
    for expected in [remote("west", &[WEST]), remote("", &[WEST])] {
        let gateway = world.west(Script::new(Answer::Echo)).await;
        let opened = world.open_as(&gateway, expected).await;
        assert!(opened.is_ok(), "{opened:?}");
    }
}

#[tokio::test]
async fn a_rejection_says_whom_to_avoid() {
    let world = World::new();
    for (status, outcome, reason) in [
        (503, Some("unknown_service"), Reason::RemoteRejected),
        (503, Some("no_endpoint"), Reason::RemoteUnavailable),
        (503, Some("gateway_loop"), Reason::GatewayLoop),
        (503, None, Reason::RemoteUnavailable),
        (404, None, Reason::RemoteRejected),
    ] {
        let gateway = world.west(Script::new(Answer::Reject(status, outcome))).await;
        assert_refused(world.open(&gateway).await, reason);
    }
    let address = closed_port().await;
    let target = Target { address, gateway: Arc::new(remote("west", &[])) };
    let refused = world.try_open(&source("a"), &target, "echo.app:80").await.err();
    let Some(OpenError::Gateway(Failure { reason: Reason::GatewayUnreachable, .. })) = refused
    else {
        panic!("{refused:?}");
    };
    assert!(!world.pool.is_ejected(&target));
    world.pool.eject(&target);
    assert!(world.pool.is_ejected(&target));
    let row = &world.pool.status().into_iter().find(|row| row.address == target.address);
    let row = row.as_ref().expect("a row");
    assert_eq!((&*row.state, row.ejections), ("ejected", 1));
}

#[tokio::test]
async fn after_goaway_open_tunnels_go_on_and_new_ones_use_another_connection() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    let mut old = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::GoAway);
    let mut new = Vec::new();
    while gateway.connections() == 1 {
        new.push(world.open(&gateway).await.expect("a tunnel"));
        assert!(new.len() < 90, "GOAWAY is noticed");
        tokio::task::yield_now().await;
    }
    echoes(&mut old, b"hello").await;
    for mut stream in new {
        echoes(&mut stream, b"hello").await;
    }
}
