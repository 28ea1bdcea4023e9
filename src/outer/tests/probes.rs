//! Probes of gateways without connections.

use std::sync::atomic::AtomicUsize;

use super::super::gateway::GatewayConnections;
use super::robustness::{advance, stop_auto_advance};
use super::*;
use crate::snapshot::tests::hosts;
use crate::snapshot::traffic::{Drained, Override};
use crate::snapshot::{Network, NetworkTable};
use crate::status::{GatewayRow, ProbeResult};
use crate::wire::DrainTarget;

/// Number of gateways that are more than probes of an interval.
const GATEWAYS: u16 = 200;
/// Limit of the pause between two probes.
const PAUSE_MAX: Duration = Duration::from_millis(1250);
const INTERVAL: Duration = Duration::from_secs(60);

impl World {
    /// Makes these the gateways of network west.
    fn set_gateways(&self, addresses: impl IntoIterator<Item = SocketAddr>) {
        let addresses = addresses.into_iter();
        let rule = Network {
            cluster: Some("west".into()),
            gateways: addresses.flat_map(|one| hosts(&[&one.to_string()])).collect(),
            ..Network::default()
        };
        let networks = Some(NetworkTable::from_iter([("west".into(), rule)]));
        self.publisher.update(Change { networks, ..Change::default() });
    }

    fn next(&self) -> Option<Arc<GatewayConnections>> {
        self.pool.next_to_probe(INTERVAL)
    }

    async fn probe(&self) -> ProbeResult {
        self.probe_with(None).await
    }

    /// Probes the next gateway, with a CONNECT to this authority.
    async fn probe_with(&self, authority: Option<&str>) -> ProbeResult {
        let next = self.next().expect("a gateway whose probe is due");
        let authority = authority.map(str::to_owned);
        next.probe(&self.pool, authority).await.expect("a result")
    }

    /// Returns the only gateway that is known.
    fn known(&self) -> Target {
        self.pool.all().swap_remove(0).target.clone()
    }

    fn row(&self) -> GatewayRow {
        self.pool.status().swap_remove(0)
    }
}

#[tokio::test(start_paused = true)]
async fn an_unused_gateway_is_healthy_after_a_probe_that_keeps_no_connection() {
    let _busy = stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    assert!(world.next().is_none(), "no gateway of the snapshot");
    world.set_gateways([gateway.address]);
    assert_eq!(world.probe().await, ProbeResult::Healthy);
    let row = world.row();
    assert_eq!((&*row.state, row.connections, row.sources), ("healthy", 0, 0));
    assert_eq!(world.pool.descriptors().used(), 0);
    assert!(world.next().is_none(), "the interval has not passed");
    tokio::time::advance(INTERVAL.mul_f64(1.1)).await;
    let shorter = world.pool.next_to_probe(Duration::from_secs(1));
    assert!(shorter.is_some_and(|next| next.target == target(&gateway)));
    tokio::time::advance(INTERVAL.mul_f64(1.1)).await;
    assert!(world.next().is_some(), "another is due");
    let open = world.open(&gateway).await.expect("a tunnel");
    assert!(world.next().is_none(), "its connection shows its state");
    assert_eq!((&*world.row().state, gateway.connections()), ("ready", 2));
    // It ends because no tunnel uses it.
    drop(open);
    for _ in 0..8 {
        advance(Duration::from_secs(10)).await;
    }
    settle(|| world.row().connections == 0).await;
    let row = world.row();
    assert_eq!((&*row.state, row.connections, &*row.error), ("healthy", 0, "closed"));
    // Nothing confirms it any more.
    tokio::time::advance(3 * INTERVAL).await;
    assert_eq!(&*world.row().state, "idle");
}

#[tokio::test(start_paused = true)]
async fn a_failed_probe_ejects_the_gateway_until_one_succeeds() {
    let _busy = stop_auto_advance();
    let world = World::new();
    let address = closed_port().await;
    world.set_gateways([address]);
    for ejected_secs in [5, 10] {
        assert_eq!(world.probe().await, ProbeResult::Failed);
        let row = world.row();
        assert_eq!(&*row.state, "ejected");
        assert!(row.error.contains("refused"), "{}", row.error);
        let target = world.known();
        assert!(world.pool.is_ejected(&target));
        tokio::time::advance(Duration::from_secs(ejected_secs - 1)).await;
        assert!(world.next().is_none(), "ejected");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(&*world.row().state, "failed");
    }
    let listener = TcpListener::bind(address).await.expect("the port");
    let material = material(&world.west.leaf(WEST).expect("a leaf"), &world.authority.root_pem());
    let tls = tls::endpoint_server_config(&material, vec![domain("east.local")]);
    let tls = TlsAcceptor::from(tls.expect("a configuration"));
    let serve = async {
        let (stream, _) = listener.accept().await.expect("a connection");
        let stream = tls.accept(stream).await.expect("a handshake");
        let mut http2 = h2::server::handshake(stream).await.expect("HTTP/2");
        while let Some(Ok(_)) = http2.accept().await {}
    };
    let (result, ()) = tokio::join!(world.probe(), serve);
    assert_eq!((result, &*world.row().state), (ProbeResult::Healthy, "healthy"));
    let gateway = world.known();
    world.pool.simulate_attempt(&gateway, true);
    assert!(!world.pool.is_ejected(&gateway), "the failures are forgotten");
}

#[tokio::test]
async fn a_gateway_with_another_certificate_fails_a_probe() {
    let world = World::new();
    let leaf = leaf(&world.authority, "east", EAST);
    let gateway = world.gateway(&leaf, Script::new(Answer::Echo)).await;
    world.set_gateways([gateway.address]);
    assert_eq!(world.probe().await, ProbeResult::Failed);
    let row = world.row();
    assert_eq!(&*row.state, "ejected");
    assert!(row.error.contains("cluster"), "{}", row.error);
}

#[tokio::test]
async fn a_rejected_certificate_and_what_a_tunnel_refutes_eject_nothing() {
    let world = World::new();
    world.set_gateways([closed_port().await]);
    let next = world.next().expect("a gateway");
    let failed = |reason, started| {
        next.simulate_attempt(true);
        next.note_failed_probe(Failure::new(reason, "why"), started)
    };
    assert_eq!(failed(Reason::PeerRejectedUs, Instant::now()), ProbeResult::Failed);
    assert!(!next.is_ejected());
    let started = Instant::now();
    next.connections.lock().opened_at = Some(started);
    assert_eq!(failed(Reason::GatewayUnreachable, started), ProbeResult::Skipped);
    assert!(!next.is_ejected());
    next.connections.lock().opened_at = None;
    assert_eq!(failed(Reason::GatewayUnreachable, started), ProbeResult::Failed);
    assert!(next.is_ejected());
}

#[tokio::test(start_paused = true)]
async fn a_probe_refutes_no_lost_connect() {
    let _busy = stop_auto_advance();
    let (world, gateway) = World::with(Answer::Echo).await;
    world.set_gateways([gateway.address]);
    let target = target(&gateway);
    let known = world.pool.gateway(&target);
    let lost = || {
        let failure = Failure::new(Reason::GatewayReset, "reset");
        known.note_loss((&source("a"), "echo.app:80"), failure);
    };
    let causes: [&dyn Fn(); 2] = [&lost, &|| known.note_proof()];
    for cause in causes {
        // The connection of the last turn ends.
        tokio::time::advance(2 * INTERVAL).await;
        settle(|| world.row().connections == 0).await;
        cause();
        world.pool.eject(&target);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(world.probe().await, ProbeResult::Healthy);
        world.pool.simulate_attempt(&target, true);
        assert!(world.pool.is_ejected(&target), "others avoid it while a tunnel tries it");
        world.pool.simulate_attempt(&target, false);
        drop(world.open(&gateway).await.expect("a tunnel"));
        world.pool.simulate_attempt(&target, true);
        assert!(!world.pool.is_ejected(&target));
        world.pool.simulate_attempt(&target, false);
    }
    // The answer to the CONNECT of a probe does.
    tokio::time::advance(2 * INTERVAL).await;
    settle(|| world.row().connections == 0).await;
    lost();
    world.pool.eject(&target);
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(world.probe_with(Some("echo.app:80")).await, ProbeResult::Healthy);
    world.pool.simulate_attempt(&target, true);
    assert!(!world.pool.is_ejected(&target));
}

#[tokio::test(start_paused = true)]
async fn a_probe_with_an_authority_needs_the_answer_200_and_sends_no_byte() {
    let _busy = stop_auto_advance();
    for (answer, authority, error) in [
        (Answer::Echo, "echo.app:80", ""),
        (Answer::EndAtOnce, "echo.app:80", ""),
        (Answer::Reject(503, Some("no_endpoint")), "echo.app:80", "503, outcome no_endpoint"),
        (Answer::Reject(404, None), "echo.app:80", "answered 404"),
        (Answer::Reset(h2::Reason::PROTOCOL_ERROR), POISON, "reset the CONNECT"),
        (Answer::EchoOrNone, "other.app:80", "did not answer"),
    ] {
        let (world, gateway) = World::with(answer).await;
        world.set_gateways([gateway.address]);
        let late = async {
            settle(|| gateway.requests.load(Ordering::SeqCst) == 1).await;
            if matches!(answer, Answer::EchoOrNone) {
                tokio::time::advance(CONNECT_DEADLINE).await;
            }
        };
        let (result, ()) = tokio::join!(world.probe_with(Some(authority)), late);
        let row = world.row();
        let wanted = if error.is_empty() {
            (ProbeResult::Healthy, "healthy", 0)
        } else {
            assert!(row.error.contains(&format!("CONNECT to {authority}: ")), "{}", row.error);
            (ProbeResult::Failed, "ejected", 1)
        };
        assert_eq!((result, &*row.state, row.ejections), wanted, "{error}");
        assert!(row.error.contains(error), "{}", row.error);
        assert_eq!((gateway.frames.load(Ordering::SeqCst), row.connections), (0, 0));
        assert_eq!(world.pool.descriptors().used(), 0);
    }
}

/// Waits for something that happens without a change of the clock.
async fn settle(is_done: impl Fn() -> bool) {
    for _ in 0..1_000_000 {
        if is_done() {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("it did not happen");
}

#[tokio::test]
async fn a_gateway_without_streams_is_failed_and_not_ejected() {
    let world = World::new();
    let script = Script { streams_max: 0, ..Script::new(Answer::Echo) };
    let gateway = world.west(script).await;
    world.set_gateways([gateway.address]);
    assert_eq!(world.probe().await, ProbeResult::Skipped);
    let row = world.row();
    assert_eq!((&*row.state, row.ejections), ("failed", 0));
    assert!(row.error.contains("no stream"), "{}", row.error);
}

#[tokio::test]
async fn evacuated_and_removed_gateways_are_not_probed() {
    let world = World::new();
    let address = closed_port().await;
    world.set_gateways([address]);
    for part in [DrainTarget::Address(address.ip()), DrainTarget::Cluster("west".into())] {
        let order = |order| Change { overrides: Some(order), ..Change::default() };
        world.publisher.update(order(Override::Drain(part.clone(), Drained::now(false))));
        assert!(world.next().is_none(), "{part}");
        world.publisher.update(order(Override::Restore(part)));
    }
    assert!(world.next().is_some());
    world.set_gateways([closed_port().await]);
    assert!(world.next().is_some_and(|next| next.target.address != address));
    world.set_gateways([]);
    assert!(world.next().is_none());
}

#[tokio::test]
async fn a_probe_without_room_says_nothing_about_the_gateway() {
    let (world, gateway) = World::with(Answer::Echo).await;
    world.set_gateways([gateway.address]);
    world.pool.simulate_limits(&target(&gateway), 1, 0);
    assert_eq!(world.probe().await, ProbeResult::Skipped);
    assert_eq!((&*world.row().state, gateway.connections()), ("idle", 0));
}

#[tokio::test(start_paused = true)]
async fn one_probe_per_second_starts_and_a_drain_ends_them() {
    let world = World::new();
    world.set_gateways((1..=GATEWAYS).map(|port| (DENIED, port).into()));
    let (counted, enabled) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let (count, is_enabled) = (Arc::clone(&counted), Arc::clone(&enabled));
    let settings = move || (is_enabled.load(Ordering::SeqCst) > 0).then_some((INTERVAL, None));
    let count = move |result| {
        assert_eq!(result, ProbeResult::Skipped);
        count.fetch_add(1, Ordering::SeqCst);
    };
    let running = tokio::spawn(run_probes(world.pool.clone(), settings, count));
    sleep(INTERVAL).await;
    assert_eq!(counted.load(Ordering::SeqCst), 0, "off by the configuration");
    enabled.store(1, Ordering::SeqCst);
    sleep(INTERVAL).await;
    let probes = counted.load(Ordering::SeqCst);
    assert!((45..=60).contains(&probes), "{probes}");
    let rows = world.pool.status();
    assert_eq!(rows.len(), probes, "each another gateway");
    assert!(rows.iter().all(|row| row.state == "failed" && row.ejections == 0));
    sleep(u32::from(GATEWAYS) * PAUSE_MAX).await;
    assert_eq!(world.pool.status().len(), usize::from(GATEWAYS), "one entry of each");
    assert_eq!(world.pool.descriptors().used(), 0);
    world.lifecycle.stop();
    world.lifecycle.run(Duration::ZERO, Duration::ZERO).await;
    timeout(SOON, running).await.expect("an end").expect("no panic");
}
