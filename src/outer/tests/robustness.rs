//! Memory of tunnels, several addresses of a gateway, and gateways that cannot be replaced.

use std::future::poll_fn;

use tokio::io::AsyncWriteExt;

use super::inner::{self, Carrier};
use super::*;
use crate::lifecycle::{Phase, wait_for_phase};
use crate::outer::connection::{AGE_MAX, IDLE_MAX};

/// Time without progress after which a write is blocked.
const BLOCKED: Duration = Duration::from_millis(300);

/// Bytes of a write on a counter until they are dropped.
struct Charge {
    counter: Arc<AtomicUsize>,
    bytes: usize,
}

impl Charge {
    fn new(counter: &Arc<AtomicUsize>, bytes: usize) -> Self {
        counter.fetch_add(bytes, Ordering::SeqCst);
        Self { counter: Arc::clone(counter), bytes }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.bytes, Ordering::SeqCst);
    }
}

/// As [`echo_tunnel`], to a gateway whose endpoint ends its direction at once.
pub(crate) async fn ended_tunnel() -> (impl Sized, Stream) {
    let (world, gateway) = World::with(Answer::EndAtOnce).await;
    let stream = world.open(&gateway).await.expect("a tunnel");
    ((world, gateway), stream)
}

#[tokio::test]
async fn bytes_that_wait_for_the_socket_are_charged_and_their_writes_are_bounded() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    let mut large = world.open(&gateway).await.expect("a tunnel");
    let mut small = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::Silence);
    let counter = Arc::new(AtomicUsize::new(0));
    let charge = |bytes| Charge::new(&counter, bytes);
    let (bytes, mut sent) = (vec![7; 64 * 1024], 0);
    while let Ok(written) = timeout(BLOCKED, large.write(&bytes, charge)).await {
        sent += written.expect("an open tunnel");
    }
    assert!(sent < WINDOW as usize, "the socket is full, not the window");
    let held = counter.load(Ordering::SeqCst);
    // A write that was sent in part is held as a whole.
    let most = 128 * 1024 + bytes.len();
    assert!((bytes.len()..=most).contains(&held), "{held} of {sent}");
    small.try_write(&[IoSlice::new(b"x")], charge).expect("the first small write");
    let refused = small.try_write(&[IoSlice::new(&[7; 1000])], charge);
    assert_eq!(refused.expect_err("a small write").kind(), io::ErrorKind::WouldBlock);
    let room = timeout(BLOCKED, poll_fn(|cx| small.poll_write_ready(cx))).await;
    assert!(room.is_err(), "{room:?} behind another write");
    let mut writes = 0;
    while small.try_write(&[IoSlice::new(&bytes[..2048])], charge).is_ok() {
        writes += 1;
        assert!(writes <= 64, "writes without bound");
    }
    let room = timeout(BLOCKED, poll_fn(|cx| small.poll_write_ready(cx))).await;
    assert!(room.is_err(), "{room:?} after {writes} writes");
    drop((large, small));
    // The write that is being sent may outlive its stream until the connection goes on.
    let left = counter.load(Ordering::SeqCst);
    assert!(left <= bytes.len(), "{left} are left");
}

/// Opens a tunnel to a gateway that then goes silent, and returns it with the script's sender.
async fn silenced(world: &World) -> (Scripted, Stream) {
    let (gateway, stop) = world.stoppable().await;
    let stream = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::Silence);
    (gateway, stream)
}

/// Opens a connection to a workload and a tunnel in it, as inside the tunnel of a gateway.
async fn open_inner(world: &World, workload: &Scripted, lifecycle: &Lifecycle) -> Stream {
    let opened = try_open_inner(world, workload, lifecycle).await;
    opened.expect("a tunnel")
}

async fn try_open_inner(
    world: &World,
    workload: &Scripted,
    lifecycle: &Lifecycle,
) -> Result<Stream, Failure> {
    let gateway = world.open(workload).await.expect("a tunnel").servers();
    let target = InnerTarget {
        authority: "echo.app:80",
        cluster: "west",
        workloads: &ExpectedWorkloads::default(),
    };
    let socket = TcpStream::connect(workload.address).await.expect("a socket");
    let verified_by = (&*world.tls, &world.publisher.reader());
    let connected = inner::connect(socket, &target, verified_by).await;
    let (connection, verified) = connected.expect("a connection");
    let servers = (gateway.gateway, Arc::new(verified));
    inner::request(connection, target.authority, servers, lifecycle).await
}

/// Writes until the socket of a silent gateway takes no more.
pub(super) async fn fill(stream: &mut Stream) {
    let bytes = vec![7; 64 * 1024];
    while let Ok(written) = timeout(BLOCKED, stream.write(&bytes, |_| ())).await {
        written.expect("an open tunnel");
    }
}

#[tokio::test]
async fn an_answer_with_more_headers_than_the_limit_opens_no_tunnel() {
    let (world, gateway) = World::with(Answer::LargeHeader).await;
    let mut open = world.open(&gateway).await.expect("a tunnel");
    assert_refused(world.open(&gateway).await, Reason::RemoteUnavailable);
    echoes(&mut open, b"hello").await;
    let workload = world.west(Script::new(Answer::LargeHeader)).await;
    let refused = try_open_inner(&world, &workload, &world.lifecycle).await;
    assert_refused(refused, Reason::WorkloadUnreachable);
}

#[tokio::test]
async fn bytes_of_an_inner_connection_that_wait_for_the_socket_are_charged() {
    let world = World::new();
    let (_gateway, tunnel) = silenced(&world).await;
    let counter = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&counter);
    let mut carrier = Carrier {
        tunnel: Some(tunnel),
        charge: move |bytes| Charge::new(&counted, bytes),
        tasks: Lifecycle::default(),
    };
    let bytes = vec![7; 64 * 1024];
    while let Ok(written) = timeout(BLOCKED, carrier.write(&bytes)).await {
        written.expect("an open tunnel");
    }
    let held = counter.load(Ordering::SeqCst);
    assert!(held >= bytes.len(), "{held} are charged");
}

#[tokio::test]
async fn a_drain_waits_for_the_delivery_of_an_inner_connection() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let lifecycle = Lifecycle::default();
    let mut carrier = Carrier {
        tunnel: Some(world.open(&gateway).await.expect("a tunnel")),
        charge: |_| (),
        tasks: lifecycle.clone(),
    };
    carrier.write_all(b"last").await.expect("an open tunnel");
    carrier.shutdown().await.expect("an open tunnel");
    drop(carrier);
    assert_eq!(lifecycle.tasks(), 1);
    let delivered = async {
        while lifecycle.tasks() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, delivered).await.expect("an end by the gateway");
}

/// Ends the drain of a lifecycle at once. Returns the number of tasks that did not end.
async fn left_after_drain(lifecycle: &Lifecycle) -> usize {
    lifecycle.stop();
    let drained = lifecycle.run(Duration::ZERO, Duration::ZERO);
    timeout(SOON, drained).await.expect("the end of the drain")
}

#[tokio::test]
async fn the_delivery_of_an_inner_connection_to_a_silent_gateway_ends_with_the_drain() {
    let world = World::new();
    let (_gateway, tunnel) = silenced(&world).await;
    let lifecycle = Lifecycle::default();
    let mut carrier = Carrier { tunnel: Some(tunnel), charge: |_| (), tasks: lifecycle.clone() };
    carrier.write_all(b"last").await.expect("an open tunnel");
    carrier.shutdown().await.expect("an open tunnel");
    drop(carrier);
    assert_eq!(lifecycle.tasks(), 1);
    assert_eq!(left_after_drain(&lifecycle).await, 0);
}

#[tokio::test]
async fn the_driver_of_an_inner_connection_to_a_silent_workload_ends_with_the_drain() {
    let world = World::new();
    let (workload, stop) = world.stoppable().await;
    let lifecycle = Lifecycle::default();
    let mut stream = open_inner(&world, &workload, &lifecycle).await;
    stop.send_replace(Stop::Silence);
    fill(&mut stream).await;
    drop(stream);
    assert_eq!(lifecycle.tasks(), 1);
    assert_eq!(left_after_drain(&lifecycle).await, 0);
}

#[tokio::test]
async fn a_pooled_connection_to_a_silent_gateway_ends_with_the_drain() {
    let world = World::new();
    let (_gateway, mut stream) = silenced(&world).await;
    fill(&mut stream).await;
    drop(stream);
    assert_eq!(world.lifecycle.tasks(), 1);
    assert_eq!(left_after_drain(&world.lifecycle).await, 0);
}

#[tokio::test]
async fn a_drain_waits_for_a_pooled_connection_until_its_tunnels_have_ended() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    world.lifecycle.stop();
    let drained = world.lifecycle.run(Duration::ZERO, 2 * SOON);
    let tunnel = async {
        let mut phases = world.lifecycle.phases();
        wait_for_phase(&mut phases, Phase::Draining).await;
        // deadline: an idle connection would have ended by then.
        sleep(BLOCKED).await;
        assert_eq!(world.lifecycle.tasks(), 1);
        echoes(&mut stream, b"hello").await;
        drop(stream);
    };
    let both = timeout(SOON, async { tokio::join!(drained, tunnel) });
    let (left, ()) = both.await.expect("an end before the deadline");
    assert_eq!((left, gateway.connections()), (0, 1));
}

#[tokio::test]
async fn a_pooled_connection_that_no_longer_proves_its_gateway_gets_no_tunnel() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut open = world.open(&gateway).await.expect("a tunnel");
    world.publisher.update(Change {
        trust: Some(TrustSet::new([("east.local", "east"), ("west.local", "north")])),
        ..Change::default()
    });
    assert_refused(world.open(&gateway).await, Reason::GatewayUntrusted);
    assert_eq!(gateway.requests.load(Ordering::SeqCst), 1);
    echoes(&mut open, b"hello").await;
}

#[tokio::test]
async fn a_connection_that_cannot_be_replaced_serves_and_attempts_back_off() {
    const TUNNELS: usize = 50;
    let world = World::new();
    let script = Script { connections_max: 1, ..Script::new(Answer::Echo) };
    let gateway = world.west(script).await;
    drop(world.open(&gateway).await.expect("a tunnel"));
    world.renew();
    let since = Instant::now();
    for _ in 0..TUNNELS {
        let mut stream = world.open(&gateway).await.expect("a tunnel");
        echoes(&mut stream, b"hello").await;
    }
    let attempts = gateway.connections() - 1;
    // One at once, and others after pauses of at least a second.
    let most = 1 + usize::try_from(since.elapsed().as_secs()).expect("a short time");
    assert!((1..=most).contains(&attempts), "{attempts} of {most}");
}

#[tokio::test]
async fn a_renewed_certificate_gets_a_new_connection() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut old = world.open(&gateway).await.expect("a tunnel");
    world.renew();
    let replaced = async {
        while gateway.connections() < 2 {
            let mut stream = world.open(&gateway).await.expect("a tunnel");
            echoes(&mut stream, b"hello").await;
        }
    };
    timeout(SOON, replaced).await.expect("a second connection");
    echoes(&mut old, b"hello").await;
}

/// Returns a gateway that has another address too.
fn at(other: SocketAddr) -> RemoteGateway {
    RemoteGateway { other_addresses: [other].into(), ..remote("west", &[WEST]) }
}

#[tokio::test]
async fn addresses_of_a_gateway_are_tried_in_turn() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let nobody = closed_port().await;
    let first = world.open_at(nobody, at(gateway.address)).await;
    echoes(&mut first.expect("a tunnel"), b"hello").await;
    let second = world.open_at(gateway.address, at(nobody)).await;
    echoes(&mut second.expect("a tunnel"), b"hello").await;
    let refused = world.open_at(nobody, at(nobody)).await;
    assert_refused(refused, Reason::GatewayUnreachable);
    assert_eq!(gateway.connections(), 2);
}

#[tokio::test]
async fn a_denied_address_of_a_gateway_is_passed_over() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let trap = TcpListener::bind((DENIED, 0)).await.expect("a port");
    let denied = trap.local_addr().expect("an address");
    for (first, other) in [(denied, gateway.address), (gateway.address, denied)] {
        let opened = world.open_at(first, at(other)).await;
        echoes(&mut opened.expect("a tunnel"), b"hello").await;
    }
    world.open_at(denied, at(denied)).await.expect_err("no address");
    let dialled = timeout(Duration::from_millis(100), trap.accept()).await;
    dialled.expect_err("no connection to the denied address");
}

#[tokio::test]
async fn an_open_tunnel_is_checked_against_the_gateway_of_now() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let stream = world.open(&gateway).await.expect("a tunnel");
    let snapshot = world.publisher.reader().snapshot();
    for (wanted, why) in [
        (remote("west", &[WEST]), None),
        (remote("", &[]), Some("neither the cluster")),
        (remote("north", &[]), Some("belongs to cluster west")),
        (remote("west", &["spiffe://west.local/ns/a/sa/b"]), Some("is not an identity")),
    ] {
        let checked = stream.servers().check_gateway(&wanted, &snapshot);
        match (checked, why) {
            (Ok(()), None) => {}
            (Err(error), Some(why)) => assert!(error.contains(why), "{error}"),
            (checked, _) => panic!("{checked:?} for {wanted:?}"),
        }
    }
}

#[tokio::test]
async fn an_open_connection_is_checked_against_the_workloads_of_now() {
    let (world, workload) = World::with(Answer::Echo).await;
    let stream = open_inner(&world, &workload, &Lifecycle::default()).await;
    let list = |names: &[&str]| names.iter().map(|&name| name.into()).collect();
    let (other, foreign) = ("spiffe://west.local/ns/a/sa/b", "is not one of the binding's");
    for (identities, namespaces, cluster, why) in [
        (&[][..], &[][..], "west", None),
        (&[WEST], &[], "west", None),
        (&[other], &["edge"], "west", None),
        (&[other], &[], "west", Some(foreign)),
        (&[], &["app"], "west", Some(foreign)),
        (&[WEST], &[], "north", Some("belongs to cluster west, not to north")),
    ] {
        let wanted =
            ExpectedWorkloads { identities: list(identities), namespaces: list(namespaces) };
        let snapshot = world.publisher.reader().snapshot();
        let checked = stream.servers().check_workload(&wanted, cluster, &snapshot);
        match (checked, why) {
            (Ok(()), None) => {}
            (Err(error), Some(why)) => assert!(error.contains(why), "{error}"),
            (checked, _) => panic!("{checked:?} for {wanted:?}"),
        }
    }
    let any = ExpectedWorkloads::default();
    world.publisher.update(Change {
        trust: Some(TrustSet::new([("west.local", "north")])),
        ..Change::default()
    });
    let snapshot = world.publisher.reader().snapshot();
    let checked = stream.servers().check_workload(&any, "west", &snapshot);
    let error = checked.expect_err("its trust domain is of another cluster now");
    assert!(error.contains("belongs to cluster north"), "{error}");
    // A tunnel that ends at the gateway has no workload.
    let outer = world.open_at(workload.address, remote("north", &[])).await.expect("a tunnel");
    let checked = outer.servers().check_workload(&any, "west", &snapshot);
    assert_eq!(checked, Ok(()));
}

/// Returns the number of connections that take tunnels.
pub(super) fn usable(world: &World) -> usize {
    world.pool.status().iter().map(|row| row.connections).sum()
}

/// Keeps the runtime busy, so that the paused clock moves by the test alone and not while bytes are
/// on the way.
pub(super) fn stop_auto_advance() -> JoinSet<()> {
    let mut busy = JoinSet::new();
    busy.spawn(async {
        loop {
            tokio::task::yield_now().await;
        }
    });
    busy
}

/// Advances the paused clock, and lets the PINGs that are then due be acknowledged: the next
/// advance could otherwise pass their deadline.
pub(super) async fn advance(time: Duration) {
    tokio::time::advance(time).await;
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// Lets the tasks run until a condition holds.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    assert!(timeout(SOON, wait).await.is_ok(), "{what}");
}

#[tokio::test]
async fn a_goaway_while_a_tunnel_is_open_opens_a_connection_for_the_next_one() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    let mut old = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::GoAway);
    until("a second connection", || gateway.connections() == 2 && usable(&world) == 1).await;
    let mut new = world.open(&gateway).await.expect("a tunnel");
    for stream in [&mut old, &mut new] {
        echoes(stream, b"hello").await;
    }
    assert_eq!(gateway.connections(), 2);
}

#[tokio::test]
async fn a_goaway_without_tunnels_opens_no_connection() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    drop(world.open(&gateway).await.expect("a tunnel"));
    stop.send_replace(Stop::GoAway);
    until("the connection is retired", || usable(&world) == 0).await;
    assert_eq!(gateway.connections(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_its_maximum_age_a_connection_is_replaced_and_keeps_its_tunnels() {
    let _busy = stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut first = world.open(&gateway).await.expect("a tunnel");
    advance(AGE_MAX - Duration::from_secs(60)).await;
    let mut second = world.open(&gateway).await.expect("a tunnel");
    assert_eq!(gateway.connections(), 1);
    advance(Duration::from_secs(60)).await;
    let mut third = world.open(&gateway).await.expect("a tunnel");
    until("a second connection", || gateway.connections() == 2 && usable(&world) == 1).await;
    let mut fourth = world.open(&gateway).await.expect("a tunnel");
    for stream in [&mut first, &mut second, &mut third, &mut fourth] {
        echoes(stream, b"hello").await;
    }
    assert_eq!(gateway.connections(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_connection_without_tunnels_is_closed_at_the_idle_limit() {
    let _busy = stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    drop(world.open(&gateway).await.expect("a tunnel"));
    let since = Instant::now();
    while usable(&world) == 1 {
        assert!(since.elapsed() < 2 * IDLE_MAX, "it is closed");
        advance(Duration::from_secs(1)).await;
    }
    let time = since.elapsed();
    assert!(time >= IDLE_MAX, "{time:?}");
    assert!(time <= IDLE_MAX + Duration::from_secs(15), "{time:?}");
    drop(world.open(&gateway).await.expect("a tunnel"));
    assert_eq!(gateway.connections(), 2);
}
