//! What passes through, how much of it, and how it ends.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Instant;

use tokio::task::JoinSet;

use crate::mesh::{Ends, Mesh};
use crate::support::run;
use crate::traffic::{Moved, Order, start};

const REQUESTS: u64 = 1000;
const REQUESTS_AT_ONCE: usize = 16;
const BODY_BYTES: u64 = 200_000_000;
const TUNNELS: u64 = 100;
/// More than all buffers on the way hold together, so that the endpoint has seen some of it.
const MIDDLE_BYTES: u64 = 64 << 20;
const ENDLESS_BYTES: u64 = 1 << 40;

/// Requests of growing size, of which every other one ends at the application's side first.
async fn requests(mesh: &Mesh) {
    let address = mesh.address();
    let mut running = JoinSet::new();
    for seed in 0..REQUESTS {
        if running.len() == REQUESTS_AT_ONCE {
            running.join_next().await.expect("one").expect("an answer");
        }
        let order = Order {
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

fn counted(reasons: &[(&str, u64)]) -> BTreeMap<String, u64> {
    let counted = reasons.iter();
    counted
        .map(|&(reason, count)| (reason.to_owned(), count))
        .collect()
}

#[test]
fn a_thousand_requests_are_answered_and_their_tunnels_end_cleanly() {
    run(async {
        let Some(mesh) = Mesh::start("a thousand requests", Ends::Cleanly).await else {
            return;
        };
        requests(&mesh).await;
        let ended = mesh.ended(REQUESTS).await;
        mesh.say(&format!("{REQUESTS} requests, {}", summary(&ended)));
        assert_eq!(ended, counted(&[("completed", REQUESTS)]));
    });
}

#[test]
fn a_thousand_requests_are_answered_though_envoy_ends_their_tunnels_by_reset() {
    run(async {
        let Some(mesh) = Mesh::start("a thousand resets", Ends::AsEnvoyDoes).await else {
            return;
        };
        requests(&mesh).await;
        let ended = mesh.ended(REQUESTS).await;
        mesh.say(&format!("{REQUESTS} requests, {}", summary(&ended)));
        mesh.say(&format!(
            "{ended:?}, {}",
            mesh.gateway.metric("strait_connections_total").await
        ));
    });
}

/// `2 tunnels at the gateway, 0 failed`.
fn summary(ended: &BTreeMap<String, u64>) -> String {
    let tunnels: u64 = ended.values().sum();
    let failed = tunnels - ended.get("completed").unwrap_or(&0);
    format!("{tunnels} tunnels at the gateway, {failed} failed")
}

#[test]
fn a_large_body_arrives_whole_in_either_direction() {
    run(async {
        let Some(mesh) = Mesh::start("a large body", Ends::Cleanly).await else {
            return;
        };
        let begun = Instant::now();
        for (seed, up_bytes, down_bytes) in [(1, BODY_BYTES, 0), (2, 0, BODY_BYTES)] {
            let order = Order {
                seed,
                up_bytes,
                down_bytes,
                client_ends_first: true,
            };
            let started = start(mesh.address(), order).await.expect("a tunnel");
            started.finish(&Moved::new(0)).await.expect("a whole body");
        }
        let ended = mesh.ended(2).await;
        mesh.say(&format!(
            "200 MB up and down with equal SHA-256 in {:.1?}, {}",
            begun.elapsed(),
            summary(&ended)
        ));
        assert_eq!(ended, counted(&[("completed", 2)]));
    });
}

#[test]
fn a_hundred_tunnels_share_one_outer_connection() {
    run(async {
        let Some(mesh) = Mesh::start("a hundred tunnels", Ends::Cleanly).await else {
            return;
        };
        let address = mesh.address();
        let mut starting = JoinSet::new();
        for seed in 0..TUNNELS {
            let order = Order {
                seed,
                up_bytes: 256 << 10,
                down_bytes: 256 << 10,
                client_ends_first: seed % 2 == 0,
            };
            starting.spawn(async move { start(address, order).await.expect("a tunnel") });
        }
        let started = starting.join_all().await;
        assert_eq!(mesh.gateway.metric("strait_tunnels_open").await, 100.0);
        assert_eq!(mesh.gateway.metric("strait_connections_open").await, 1.0);
        let mut running = JoinSet::new();
        for tunnel in started {
            running
                .spawn(async move { tunnel.finish(&Moved::new(0)).await.expect("its own bytes") });
        }
        running.join_all().await;
        let ended = mesh.ended(TUNNELS).await;
        mesh.say(&format!(
            "{TUNNELS} tunnels at once on one connection, {}",
            summary(&ended)
        ));
        assert_eq!(ended, counted(&[("completed", TUNNELS)]));
        assert_eq!(mesh.gateway.metric("strait_connections_total").await, 1.0);
    });
}

async fn killed(what: &str, ends: Ends, up_bytes: u64, down_bytes: u64) {
    let Some(mut mesh) = Mesh::start(what, ends).await else {
        return;
    };
    let order = Order {
        seed: 1,
        up_bytes,
        down_bytes,
        client_ends_first: true,
    };
    let started = start(mesh.address(), order).await.expect("a tunnel");
    let moved = Moved::new(0);
    let mut progress = moved.subscribe();
    let running = tokio::spawn(async move { started.finish(&moved).await });
    progress
        .wait_for(|&bytes| bytes >= MIDDLE_BYTES)
        .await
        .expect("bytes");
    mesh.endpoint.kill().await;
    let error = running
        .await
        .expect("no panic")
        .expect_err("an endpoint that died");
    let ended = mesh.ended(1).await;
    mesh.say(&format!(
        "{what} {ends:?}: {:?} {error}, {ended:?}",
        error.kind()
    ));
    let _ = ErrorKind::ConnectionReset;
}

#[test]
fn killed_download() {
    run(killed(
        "killed download",
        Ends::AsEnvoyDoes,
        0,
        ENDLESS_BYTES,
    ));
    run(killed("killed download", Ends::Cleanly, 0, ENDLESS_BYTES));
}

#[test]
fn killed_upload() {
    run(killed("killed upload", Ends::AsEnvoyDoes, ENDLESS_BYTES, 0));
    run(killed("killed upload", Ends::Cleanly, ENDLESS_BYTES, 0));
}
