//! Connections whose peer takes nothing, or whose tunnels pause: what goes on meanwhile.

use std::os::unix::net::UnixStream;

use super::mended::frames;
use super::rig::{CONNECT, Rig, TestGateway};
use super::wire::{DATA, END_HEADERS, END_STREAM, Frame, HEADERS, PING, RST_STREAM};
use super::*;

const KIB: usize = 1024;
/// Bytes that a peer uploads in a tunnel: less than its window.
const UPLOAD: usize = 200 * KIB;
const INTERNAL_ERROR: u32 = 2;

/// Opens a tunnel to an endpoint that reads nothing, and whose socket takes little.
async fn stalled_tunnel(rig: &mut Rig, id: u32) -> UnixStream {
    rig.send(Frame::new(HEADERS, END_HEADERS, id, CONNECT)).await;
    rig.accept(id).expect("an open stream");
    let far = rig.open(id, Some(4 * KIB)).expect("an open stream");
    rig.pump().await;
    far
}

/// Makes the peer take nothing more. The answer to a PING blocks the output.
async fn block(rig: &mut Rig) {
    frames(rig);
    rig.peer.set_room(0);
    rig.send(Frame::new(PING, 0, 0, &[0; 8])).await;
}

async fn upload(rig: &mut Rig, id: u32, bytes: usize) {
    for part in vec![7; bytes].chunks(8 * KIB) {
        rig.peer.send(&Frame::new(DATA, 0, id, part).encode());
    }
    rig.pump().await;
}

/// Limits the buffers, and evicts for some seconds.
async fn evict(rig: &mut Rig, limit: usize) {
    let budget = Arc::clone(&rig.data_path.budget);
    budget.set_limit(limit);
    let evicts = tokio::spawn(async move { budget.run().await });
    for _ in 0..5 {
        rig.wait(Duration::from_secs(1)).await;
    }
    evicts.abort();
}

#[tokio::test(start_paused = true)]
async fn tunnels_are_evicted_although_their_peer_takes_nothing() {
    const LIMIT: usize = 512 * KIB;
    let gateway = TestGateway::new();
    let mut rig = Rig::established(&gateway).await;
    let mut ends = Vec::new();
    for id in [1, 3, 5, 7, 9, 11] {
        ends.push(stalled_tunnel(&mut rig, id).await);
    }
    block(&mut rig).await;
    for id in [1, 3, 5, 7, 9, 11] {
        upload(&mut rig, id, UPLOAD).await;
    }
    assert!(rig.data_path.budget.held() > 2 * LIMIT);
    evict(&mut rig, LIMIT).await;
    let evicted = metric(&rig.data_path, "strait_tunnels_total{reason=\"buffers_full\",");
    assert!(evicted > 0 && rig.data_path.budget.held() <= LIMIT, "{evicted}");
    assert!(rig.is_running(), "the connection holds less than its tunnels");
}

#[tokio::test(start_paused = true)]
async fn the_rest_of_a_tunnel_is_evicted_although_its_delivery_was_promised() {
    let gateway = TestGateway::new();
    let mut rig = Rig::established(&gateway).await;
    let _far = stalled_tunnel(&mut rig, 1).await;
    upload(&mut rig, 1, UPLOAD).await;
    rig.send(Frame::new(DATA, END_STREAM, 1, b"last")).await;
    rig.send(Frame::new(RST_STREAM, 0, 1, &INTERNAL_ERROR.to_be_bytes())).await;
    assert_eq!(rig.data_path.lifecycle.tasks(), 1, "the rest is delivered");
    evict(&mut rig, 64 * KIB).await;
    assert_eq!((rig.data_path.lifecycle.tasks(), rig.data_path.budget.held()), (0, 0));
    assert_eq!(metric(&rig.data_path, "strait_tunnels_total{reason=\"buffers_full\","), 1);
}
