//! Forwarded bytes between real Envoys, their volume, and the ends of tunnels.

use std::io::ErrorKind;
use std::time::Instant;

use tokio::task::JoinSet;

use crate::mesh::{Ended, Ends, Mesh};
use crate::support::run;
use crate::traffic::{Moved, TransferRequest, start};

const REQUESTS: u64 = 1000;
const REQUESTS_AT_ONCE: usize = 16;
const TUNNELS: u64 = 100;
/// Connections that retire: one per second.
const RETIRED: u64 = 4;
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

/// GOAWAY in two steps: Envoy opens its next tunnels on a new connection, and no CONNECT is in
/// flight to one that is no longer accepted. Envoy's tcp_proxy does not try again.
#[test]
fn every_tunnel_opens_while_connections_retire_by_age() {
    run(async {
        let aged = "limits: {connection_age: 1s}\n";
        let test = "connections that retire";
        let Some(mesh) = Mesh::start_with(test, Ends::Cleanly, aged).await else {
            return;
        };
        let address = mesh.address();
        let order = |seed, client_ends_first| TransferRequest {
            seed,
            up_bytes: 4096,
            down_bytes: 4096,
            client_ends_first,
        };
        // Its connection is retired first, and waits for it.
        let long = start(address, order(0, true)).await.expect("a tunnel");
        let (mut running, mut tunnels) = (JoinSet::new(), 1);
        let retired =
            async || mesh.gateway.metric("strait_connections_retired_total{reason=\"age\"}").await;
        while retired().await < RETIRED as f64 {
            for _ in 0..REQUESTS_AT_ONCE {
                tunnels += 1;
                running.spawn(async move {
                    let started = start(address, order(tunnels, tunnels % 2 == 0)).await;
                    started.expect("a tunnel").finish(&Moved::new(0)).await.expect("an answer");
                });
            }
            while let Some(request) = running.join_next().await {
                request.expect("the right answer");
            }
        }
        long.finish(&Moved::new(0)).await.expect("an answer");
        let ended = mesh.ended(tunnels).await;
        let connections = mesh.gateway.metric("strait_connections_total").await;
        mesh.print_uncaptured(&format!("{connections} connections that retire, {ended}"));
        assert_eq!(ended.tunnels(), tunnels, "{ended}");
        // Envoy closes a retired connection with its last stream, and drops what it has not written
        // yet (`CodecClient::close`). The end of that stream may be among it, so that its tunnel is
        // lost. All bytes of both directions have arrived.
        assert!(ended.failed() <= RETIRED, "{ended}");
        let resets = mesh.client.stat("cluster.outer_connect.http2.rx_reset");
        assert_eq!(resets.await, 0, "resets that Envoy received");
        let lost = "cluster.outer_connect.upstream_cx_destroy_remote_with_active_rq";
        assert_eq!(mesh.client.stat(lost).await, 0, "connections that ended under a tunnel");
        assert!(connections >= RETIRED as f64, "{connections}");
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
