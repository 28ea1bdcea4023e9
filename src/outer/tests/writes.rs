//! Small writes of one tunnel, which gather while earlier ones wait for the socket.

use std::future::poll_fn;

use tokio::task::yield_now;

use super::*;

/// Writes some of `bytes`, as the source of a tunnel does before it waits.
fn write_some(stream: &mut Stream, bytes: &mut Vec<u8>) {
    match stream.try_write(&[IoSlice::new(bytes)], |_| ()) {
        Ok(taken) => drop(bytes.drain(..taken)),
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
    }
}

#[tokio::test]
async fn small_writes_that_arrive_faster_than_the_socket_takes_them_become_few_frames() {
    const TURNS: usize = 50;
    const WRITES: usize = 100;
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    let (mut all, mut waiting) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        // The task of the connection runs between the turns only.
        for write in 0..WRITES {
            let byte = u8::try_from((turn + write) % 251).expect("a byte");
            all.push(byte);
            waiting.push(byte);
            write_some(&mut stream, &mut waiting);
        }
        let ready = timeout(SOON, poll_fn(|cx| stream.poll_write_ready(cx))).await;
        ready.expect("a wake-up").expect("an open tunnel");
    }
    while !waiting.is_empty() {
        let taken = timeout(SOON, stream.write(&waiting, |_| ())).await;
        waiting.drain(..taken.expect("room").expect("an open tunnel"));
    }
    stream.shut_down().expect("an open tunnel");
    let read = timeout(SOON, read_to_end(&mut stream)).await.expect("an answer");
    assert!(read.expect("a clean end") == all);
    // One for the first byte of each turn, and one for those that gathered in the turn before.
    let frames = gateway.frames.load(Ordering::SeqCst);
    assert!(frames <= 2 * TURNS, "{frames} frames");
}

#[tokio::test]
async fn a_small_write_is_sent_at_once_and_without_a_timer_if_no_other_waits() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut stream = world.open(&gateway).await.expect("a tunnel");
    let sent = Instant::now();
    for round in 1..=20 {
        let taken = stream.try_write(&[IoSlice::new(b"x")], |_| ());
        assert_eq!(taken.expect("room"), 1);
        let readable = timeout(SOON, poll_fn(|cx| stream.poll_read_ready(cx))).await;
        readable.expect("an echo").expect("an open tunnel");
        assert_eq!(stream.try_read(&mut [IoSliceMut::new(&mut [0; 2])]).expect("a byte"), 1);
        assert_eq!(gateway.frames.load(Ordering::SeqCst), round);
    }
    assert!(sent.elapsed() < SOON);
}

#[tokio::test]
async fn a_small_write_that_waits_fails_once_the_connection_ends() {
    let world = World::new();
    let (gateway, stop) = world.stoppable().await;
    let mut large = world.open(&gateway).await.expect("a tunnel");
    let mut small = world.open(&gateway).await.expect("a tunnel");
    stop.send_replace(Stop::Silence);
    robustness::fill(&mut large).await;
    small.try_write(&[IoSlice::new(b"x")], |_| ()).expect("the first small write");
    let waits = tokio::spawn(async move { small.write(b"y", |_| ()).await });
    for _ in 0..10 {
        yield_now().await;
    }
    assert!(!waits.is_finished(), "behind another write");
    drop(gateway);
    let ended = timeout(SOON, waits).await.expect("a wake-up").expect("no panic");
    ended.expect_err("the connection has ended");
}
