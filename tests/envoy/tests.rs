//! Forwarded bytes between real Envoys, their volume, and the ends of tunnels.

use std::io::ErrorKind;
use std::time::Instant;

use tokio::task::JoinSet;

use crate::mesh::{Ended, Ends, Mesh, STREAMS};
use crate::support::{ECHO, identities, run};
use crate::traffic::{Moved, Started, TransferRequest, start};

const REQUESTS: u64 = 1000;
const REQUESTS_AT_ONCE: usize = 16;
const TUNNELS: u64 = 100;
/// Connections that retire by age: one per second.
const RETIRED: u64 = 4;
/// Connections that retire by the load of their worker, which is compared every 10 s.
const RETIRED_BY_LOAD: u64 = 2;
/// Tunnels of another client, which make a load above that of all connections of Envoy.
const OTHER_LOAD: u64 = 60;
const BODY_BYTES: u64 = 200_000_000;
/// More bytes than all buffers on the path hold together.
const MIDDLE_BYTES: u64 = 64 << 20;
const ENDLESS_BYTES: u64 = 1 << 40;

/// Asserts that no tunnel failed, none was dialled twice, and the gateway itself reset none. Prints
/// a summary.
async fn assert_clean(mesh: &Mesh, tunnels: u64, done: &str) -> Ended {
    let ended = mesh.ended(tunnels).await;
    mesh.print_uncaptured(&format!("{done}, {ended}"));
    assert_eq!((ended.tunnels(), ended.failed()), (tunnels, 0), "{ended}");
    let dials = mesh.gateway.metric("strait_dials_total{result=\"ok\"}").await;
    assert_eq!(dials, tunnels as f64, "dials");
    let resets = mesh.client.stat("cluster.outer_connect.http2.rx_reset");
    assert_eq!(resets.await, 0, "resets that Envoy received");
    let connections = mesh.gateway.metric("strait_connections_total").await;
    assert_eq!(connections, 1.0, "outer connections");
    ended
}

/// Runs requests and answers of growing size. Every other tunnel ends at the application's side
/// first.
async fn requests(mesh: &Mesh) {
    let address = mesh.address();
    let mut running = JoinSet::new();
    for seed in 0..REQUESTS {
        if running.len() == REQUESTS_AT_ONCE {
            let request = running.join_next().await.expect("a request");
            request.expect("the right answer");
        }
        let order = TransferRequest {
            seed,
            up_bytes: 7 * seed,
            down_bytes: 13 * seed,
            client_ends_first: seed % 2 == 0,
        };
        running.spawn(async move {
            let started = start(address, order).await.expect("a tunnel");
            started.finish(&Moved::new(0)).await.expect("an answer");
        });
    }
    running.join_all().await;
}

#[test]
fn a_thousand_requests_are_answered_and_nearly_all_tunnels_complete() {
    run(async {
        let Some(mesh) = Mesh::start("a thousand requests", Ends::Cleanly).await else {
            return;
        };
        requests(&mesh).await;
        let ended = assert_clean(&mesh, REQUESTS, "1000 requests").await;
        assert!(ended.count("completed") > REQUESTS / 2, "{ended}");
    });
}

#[test]
fn tunnels_that_envoy_resets_once_they_have_done_their_work_are_completed() {
    run(async {
        let Some(mesh) = Mesh::start("a thousand resets", Ends::ByReset).await else {
            return;
        };
        requests(&mesh).await;
        let ended = assert_clean(&mesh, REQUESTS, "1000 requests, ended by reset").await;
        assert!(ended.count("completed") > REQUESTS / 2, "{ended}");
    });
}

#[test]
fn a_body_of_200_mb_arrives_whole_in_either_direction() {
    run(async {
        let Some(mesh) = Mesh::start("a large body", Ends::Cleanly).await else {
            return;
        };
        let begun = Instant::now();
        for (seed, up_bytes, down_bytes) in [(1, BODY_BYTES, 0), (2, 0, BODY_BYTES)] {
            let order = TransferRequest { seed, up_bytes, down_bytes, client_ends_first: true };
            let started = start(mesh.address(), order).await.expect("a tunnel");
            let moved = Moved::new(0);
            started.finish(&moved).await.expect("equal SHA-256");
            assert_eq!(*moved.borrow(), BODY_BYTES);
        }
        let took = begun.elapsed();
        let done = format!("200 MB up and 200 MB down with equal SHA-256 in {took:.1?}");
        assert_clean(&mesh, 2, &done).await;
    });
}

#[test]
fn a_hundred_tunnels_at_once_share_one_outer_connection() {
    run(async {
        let Some(mesh) = Mesh::start("a hundred tunnels", Ends::Cleanly).await else {
            return;
        };
        let address = mesh.address();
        let mut starting = JoinSet::new();
        for seed in 0..TUNNELS {
            let order = TransferRequest {
                seed,
                up_bytes: 512 << 10,
                down_bytes: 512 << 10,
                client_ends_first: seed % 2 == 0,
            };
            starting.spawn(async move { start(address, order).await.expect("a tunnel") });
        }
        let started = starting.join_all().await;
        // The application has answered on each of them, and none has ended.
        assert_eq!(mesh.gateway.metric("strait_tunnels_open").await, 100.0);
        assert_eq!(mesh.gateway.metric("strait_connections_open").await, 1.0);
        let mut running = JoinSet::new();
        for tunnel in started {
            running.spawn(async move {
                let finished = tunnel.finish(&Moved::new(0)).await;
                finished.expect("its own bytes, both ways");
            });
        }
        running.join_all().await;
        assert_clean(&mesh, TUNNELS, "100 tunnels at once on one connection").await;
    });
}

/// Tunnels on connections that retire, and how many there were.
struct Retiring<'a> {
    mesh: &'a Mesh,
    tunnels: u64,
    /// Tunnel from the beginning to the end.
    long: Started,
}

impl<'a> Retiring<'a> {
    async fn start(mesh: &'a Mesh) -> Self {
        let long = start(mesh.address(), Self::order(0)).await.expect("a tunnel");
        Self { mesh, tunnels: 1, long }
    }

    fn order(seed: u64) -> TransferRequest {
        let client_ends_first = seed.is_multiple_of(2);
        TransferRequest { seed, up_bytes: 4096, down_bytes: 4096, client_ends_first }
    }

    /// Runs several tunnels at once.
    async fn round(&mut self) {
        let (address, mut running) = (self.mesh.address(), JoinSet::new());
        for _ in 0..REQUESTS_AT_ONCE {
            let order = Self::order(self.tunnels);
            self.tunnels += 1;
            running.spawn(async move {
                let started = start(address, order).await.expect("a tunnel");
                started.finish(&Moved::new(0)).await.expect("an answer");
            });
        }
        while let Some(request) = running.join_next().await {
            request.expect("the right answer");
        }
    }

    /// Runs tunnels until this many connections have retired. Asserts that no tunnel has noticed,
    /// besides those of others at the same gateway.
    async fn finish(mut self, reason: &str, retired: u64, others: &Ended) {
        let name = format!("strait_connections_retired_total{{reason=\"{reason}\"}}");
        while self.mesh.gateway.metric(&name).await < retired as f64 {
            self.round().await;
        }
        let Self { mesh, tunnels, long } = self;
        long.finish(&Moved::new(0)).await.expect("an answer");
        let ended = mesh.ended(others.tunnels() + tunnels).await;
        let count = mesh.gateway.metric(&name).await;
        mesh.print_uncaptured(&format!("{count} connections retired by {reason}, {ended}"));
        assert_eq!(ended.tunnels(), others.tunnels() + tunnels, "{ended}");
        // Envoy closes a retired connection with its last stream, and drops what it has not written
        // yet (`CodecClient::close`). The end of that stream may be among it, so that its tunnel is
        // lost. All bytes of both directions have arrived.
        assert!((ended.failed() - others.failed()) as f64 <= count, "{ended}");
        let resets = mesh.client.stat("cluster.outer_connect.http2.rx_reset");
        assert_eq!(resets.await, 0, "resets that Envoy received");
        let lost = "cluster.outer_connect.upstream_cx_destroy_remote_with_active_rq";
        assert_eq!(mesh.client.stat(lost).await, 0, "connections that ended under a tunnel");
    }
}

/// GOAWAY in two steps: Envoy opens its next tunnels on a new connection, and no CONNECT is in
/// flight to one that is no longer accepted. Envoy's tcp_proxy does not try again.
#[test]
fn every_tunnel_opens_while_connections_retire_by_age() {
    run(async {
        let aged = "limits: {connection_age: 1s}\n";
        let test = "connections that retire by age";
        let Some(mesh) = Mesh::start_with(test, Ends::Cleanly, aged, STREAMS).await else {
            return;
        };
        // Its connection is retired first, and waits for it.
        let retiring = Retiring::start(&mesh).await;
        retiring.finish("age", RETIRED, &Ended::default()).await;
        let connections = mesh.gateway.metric("strait_connections_total").await;
        assert!(connections >= RETIRED as f64, "{connections}");
    });
}

#[test]
fn every_tunnel_opens_while_connections_retire_by_the_load_of_their_worker() {
    run(async {
        let loaded = "workers: 2\nlimits: {worker_load: 110%}\n";
        let test = "connections that retire by load";
        // Two tunnels on each connection of Envoy, so that it opens eight.
        let Some(mesh) = Mesh::start_with(test, Ends::Cleanly, loaded, 2).await else {
            return;
        };
        // Envoy's connections get the worker without this load, which then ends.
        let client = mesh.gateway.client(identities()).await;
        let mut others = Vec::new();
        for _ in 0..OTHER_LOAD {
            others.push(client.tunnel(ECHO).await.expect("a tunnel"));
        }
        let mut retiring = Retiring::start(&mesh).await;
        retiring.round().await;
        drop((others, client));
        let others = mesh.ended(OTHER_LOAD + REQUESTS_AT_ONCE as u64).await;
        let others = others.without("completed").without("downstream_reset");
        assert_eq!(others.tunnels(), OTHER_LOAD, "{others}");
        retiring.finish("worker_load", RETIRED_BY_LOAD, &others).await;
    });
}

/// The gateway resets the outer stream by CONNECT_ERROR, and Envoy handles it as a reset: its inner
/// connection breaks during a request. However, its inner tcp_proxy ends the plain client's
/// connection by FIN, not by RST. It cannot distinguish a stream whose connection has gone
/// (`ConnectionTermination`) from one that ended locally, and so sends no RST. The plain client
/// sees too few bytes.
#[test]
fn an_endpoint_killed_in_the_middle_is_a_reset_to_envoy_and_never_an_end() {
    run(async {
        let Some(mut mesh) = Mesh::start("a killed endpoint", Ends::ByReset).await else {
            return;
        };
        let order = TransferRequest {
            seed: 1,
            up_bytes: ENDLESS_BYTES,
            down_bytes: ENDLESS_BYTES,
            client_ends_first: true,
        };
        let started = start(mesh.address(), order).await.expect("a tunnel");
        let moved = Moved::new(0);
        let mut progress = moved.subscribe();
        let running = tokio::spawn(async move { started.finish(&moved).await });
        let middle = progress.wait_for(|&bytes| bytes >= MIDDLE_BYTES).await;
        drop(middle.expect("bytes"));
        let endpoint = mesh.net.address(11, 15008);
        mesh.endpoint.kill_in_the_middle(endpoint).await;
        let error = running.await.expect("no panic").expect_err("a break");
        let ended = mesh.ended(1).await;
        let reset = ended.count("upstream_reset");
        mesh.print_uncaptured(&format!(
            "an endpoint killed in the middle: {error}, {reset} upstream_reset"
        ));
        let broken = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
        assert!(broken.contains(&error.kind()), "{error}");
        assert_eq!((ended.tunnels(), reset), (1, 1), "{ended}");
        let resets = mesh.client.stat("cluster.outer_connect.http2.rx_reset");
        assert_eq!(resets.await, 1, "resets that Envoy received");
        let broken = "cluster.inner_connect.upstream_cx_destroy_remote_with_active_rq";
        assert_eq!(mesh.client.stat(broken).await, 1, "under a request");
    });
}
