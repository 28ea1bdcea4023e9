//! Bounds of a turn, and what runs between turns.

use std::os::unix::net::UnixStream as StdStream;

use tokio::net::UnixStream;

use super::rig::{Rig, TestGateway, drain};
use super::wire::{DATA, Frame};
use super::*;
use crate::limits::turns::yield_turn;
use crate::outer::tests::echo_tunnel;

#[tokio::test(start_paused = true)]
async fn a_turn_forwards_few_small_frames_and_later_turns_the_others_in_order() {
    const FRAMES: usize = 2_000;
    const BYTES: usize = 32;
    let mut rig = Rig::established(&TestGateway::new()).await;
    let mut far = rig.tunnel(1).await;
    let number = |index: usize| u8::try_from(index % 251).expect("a byte");
    for first in (0..FRAMES).step_by(200) {
        let frames = first..first + 200;
        let frames =
            frames.flat_map(|index| Frame::new(DATA, 0, 1, &[number(index); BYTES]).encode());
        rig.peer.send(&frames.collect::<Vec<_>>());
    }
    let mut received = Vec::new();
    let mut turns = 0;
    while received.len() < FRAMES * BYTES {
        let connection = rig.connection().expect("an open connection");
        let before = received.len();
        assert!(connection.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drain(&mut far, &mut received);
        // 256 frames, less the work of their records.
        assert!(received.len() - before <= 256 * BYTES);
        turns += 1;
        assert!(turns < 100, "{} bytes", received.len());
        yield_now().await;
    }
    let expected = (0..FRAMES).flat_map(|index| [number(index); BYTES]);
    assert!(received.into_iter().eq(expected));
}

#[tokio::test]
async fn small_tails_of_bulk_data_to_another_gateway_do_not_stop_the_window() {
    const BULK: usize = 16_000;
    const TAIL: usize = 100;
    let (_gateway, stream) = echo_tunnel().await;
    let mut rig = Rig::established(&TestGateway::new()).await;
    rig.tunnel_through(1, stream).await;
    let window = |rig: &mut Rig| {
        let connection = rig.connection().expect("an open connection");
        let key = connection.open_tunnels().next().expect("a tunnel").key;
        connection.downstream.server.window(key)
    };
    let before = window(&mut rig);
    for _ in 0..20 {
        for bytes in [BULK, TAIL] {
            rig.peer.send(&Frame::new(DATA, 0, 1, &vec![7; bytes]).encode());
            // Nothing leaves for the gateway meanwhile, so the tail has to wait.
            let connection = rig.connection().expect("an open connection");
            assert!(connection.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        rig.pump().await;
    }
    assert!(window(&mut rig) > before, "{before}");
}

#[tokio::test]
async fn a_socket_that_becomes_ready_is_served_after_the_turn_of_a_busy_connection() {
    let (near, far) = StdStream::pair().expect("a pair");
    near.set_nonblocking(true).expect("a socket");
    let mut near = UnixStream::from_std(near).expect("a socket");
    let waiting = tokio::spawn(async move { near.read_u8().await });
    // The task waits for the socket.
    for _ in 0..3 {
        yield_now().await;
    }
    std::io::Write::write_all(&mut &far, &[7]).expect("a byte");
    let mut turns = 0;
    poll_fn(|cx| {
        if waiting.is_finished() {
            return Poll::Ready(());
        }
        turns += 1;
        yield_turn(cx);
        Poll::Pending
    })
    .await;
    assert!(turns <= 3, "{turns}");
}
