//! Connections whose peer takes nothing, or whose tunnels pause: what goes on meanwhile.

use std::os::unix::net::UnixStream;

use super::mended::frames;
use super::paused;
use super::rig::{CONNECT, Rig, TestGateway, fill};
use super::wire::{DATA, END_HEADERS, END_STREAM, Frame, HEADERS, PING, RST_STREAM};
use super::*;
use crate::datapath::io::buffer::BUFFER_BYTES;
use crate::datapath::io::endpoint::EndpointStream;
use crate::outer::tests::echo_tunnel;

/// Limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(8);
const KIB: usize = 1024;
/// Bytes that another gateway echoes: less than a window.
const ECHOED: usize = 60 * KIB;
/// Bytes that the account of a tunnel, or of a connection, may hold unreported.
const UNREPORTED: usize = 4 * KIB;
/// Polls for which a number of bytes is held if none are under way.
const SETTLED: usize = 300;
/// Bytes that a peer uploads in a tunnel: less than its window.
const UPLOAD: usize = 200 * KIB;
const INTERNAL_ERROR: u32 = 2;
const CANCEL: u32 = 8;

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

/// Waits until the gateway holds as many bytes, and goes on to.
async fn until_held(rig: &mut Rig, bytes: usize) {
    let settled = async {
        let mut polls = 0;
        while polls < SETTLED {
            rig.pump().await;
            let is_held = rig.data_path.budget.held() + UNREPORTED >= bytes;
            polls = if is_held { polls + 1 } else { 0 };
        }
    };
    let settled = timeout(SOON, settled).await;
    assert!(settled.is_ok(), "{} of {bytes} bytes", rig.data_path.budget.held());
}

#[tokio::test]
async fn what_another_gateway_has_sent_is_charged_though_the_peer_takes_nothing() {
    let (_gateway, stream) = echo_tunnel().await;
    let mut rig = Rig::established(&TestGateway::new()).await;
    rig.tunnel_through(1, stream).await;
    block(&mut rig).await;
    upload(&mut rig, 1, ECHOED).await;
    until_held(&mut rig, BUFFER_BYTES + ECHOED).await;
}

#[tokio::test]
async fn what_another_gateway_has_sent_is_charged_to_a_tunnel_that_opens_meanwhile() {
    let (_gateway, mut stream) = echo_tunnel().await;
    let mut rig = Rig::established(&TestGateway::new()).await;
    block(&mut rig).await;
    let sent = stream.write(&[7; ECHOED], |_| ()).await.expect("an open tunnel");
    rig.tunnel_through(1, stream).await;
    until_held(&mut rig, BUFFER_BYTES + sent).await;
}

#[tokio::test]
async fn what_another_gateway_has_sent_is_charged_during_a_pause() {
    let (_gateway, stream) = echo_tunnel().await;
    let mut rig = Rig::established(&paused::gateway(Some(1000))).await;
    rig.tunnel_through(1, stream).await;
    upload(&mut rig, 1, ECHOED).await;
    until_held(&mut rig, ECHOED).await;
}

#[tokio::test]
async fn what_another_gateway_sends_before_the_copy_is_charged_and_can_be_evicted() {
    let (_gateway, mut stream) = echo_tunnel().await;
    let sent = stream.write(&[7; ECHOED], |_| ()).await.expect("an open tunnel");
    let gateway = TestGateway::new();
    let budget = Arc::clone(&gateway.data_path.budget);
    let account = budget.account(&gateway.peer.charged_source());
    let mut endpoint = EndpointStream::outer(stream, account);
    let charged = async {
        while budget.held() + UNREPORTED < sent {
            yield_now().await;
        }
    };
    let charged = async {
        tokio::select! {
            () = endpoint.hold_received() => panic!("evicted"),
            () = charged => {}
        }
    };
    timeout(SOON, charged).await.expect("a charge");
    budget.set_limit(KIB);
    let evicts = Arc::clone(&budget);
    tokio::spawn(async move { evicts.run().await });
    timeout(SOON, endpoint.hold_received()).await.expect("an eviction");
}

/// Returns a ClientHello with this random.
fn hello(random: u8) -> Vec<u8> {
    [&[22, 3, 1, 0, 38, 1, 0, 0, 34, 3, 3][..], &[random; 32]].concat()
}

#[tokio::test(start_paused = true)]
async fn an_endpoint_whose_answer_the_peer_does_not_take_is_not_silent() {
    let mut rig = Rig::established(&TestGateway::new()).await;
    let mut ends = [rig.tunnel(1).await, rig.tunnel(3).await];
    block(&mut rig).await;
    for (id, far) in [1, 3].into_iter().zip(&mut ends) {
        rig.send(Frame::new(DATA, 0, id, &hello(0xb1))).await;
        assert_eq!(fill(far, b"answer"), 6);
    }
    rig.wait(Duration::from_secs(3)).await;
    let connection = rig.connection().expect("an open connection");
    let copy = connection.open_tunnels().next().expect("a tunnel");
    let state = Arc::clone(&copy.tunnel().upstream.grant.endpoint.state);
    rig.send(Frame::new(RST_STREAM, 0, 3, &CANCEL.to_be_bytes())).await;
    assert_eq!(state.add_silence(Duration::ZERO), Duration::ZERO);
    rig.wait(Duration::from_secs(3)).await;
    rig.peer.set_room(usize::MAX);
    rig.pump().await;
    let answers = frames(&mut rig).into_iter().filter(|frame| frame.stream == 1);
    let answers: Vec<_> = answers.map(|frame| (frame.kind, frame.payload)).collect();
    assert_eq!(answers, [(DATA, b"answer".to_vec())]);
}
