//! Receive windows of streams, in virtual time: they grow to what the path of the peer needs.

use std::os::unix::net::UnixStream;

use super::mended::frames;
use super::rig::{CONNECT, Rig, TestGateway, drain};
use super::wire::{ACK, DATA, END_HEADERS, Frame, HEADERS, PING, SETTINGS, WINDOW_UPDATE};
use super::*;

/// Initial and largest window of a stream.
const WINDOW: usize = 256 * 1024;
const WINDOW_MAX: usize = 16 * WINDOW;
const FRAME: usize = 8 * 1024;
/// Send buffer of an endpoint that blocks whatever it is sent.
const SMALL: usize = 8 * 1024;

/// Connection of a peer whose upload always fills the window.
struct Upload {
    rig: Rig,
    far: UnixStream,
    rtt: Duration,
    allowed: usize,
    waiting: usize,
}

impl Upload {
    async fn new(rtt: Duration) -> Self {
        let mut rig = Rig::established(&TestGateway::new()).await;
        rig.wait(rtt).await;
        rig.send(Frame::new(SETTINGS, ACK, 0, &[])).await;
        rig.send(Frame::new(HEADERS, END_HEADERS, 1, CONNECT)).await;
        rig.accept(1).expect("an open stream");
        let far = rig.open(1, Some(SMALL)).expect("an open stream");
        rig.pump().await;
        Self { rig, far, rtt, allowed: WINDOW, waiting: 0 }
    }

    /// Sends what the window allows a round trip after the last increments.
    async fn send(&mut self) {
        self.rig.wait(self.rtt).await;
        let updates = frames(&mut self.rig).into_iter();
        let updates = updates.filter(|frame| (frame.kind, frame.stream) == (WINDOW_UPDATE, 1));
        self.allowed += updates.map(|frame| frame.number(0) as usize).sum::<usize>();
        self.waiting += self.allowed;
        while self.allowed > 0 {
            let part = FRAME.min(self.allowed);
            self.rig.peer.send(&Frame::new(DATA, 0, 1, &vec![7; part]).encode());
            self.allowed -= part;
        }
        self.rig.pump().await;
    }

    /// Lets the endpoint take what its socket holds. Returns the number of bytes.
    async fn take(&mut self) -> usize {
        let mut taken = Vec::new();
        drain(&mut self.far, &mut taken);
        assert!(!taken.is_empty(), "{} bytes wait", self.waiting);
        self.waiting -= taken.len();
        self.rig.pump().await;
        taken.len()
    }

    fn window(&mut self) -> usize {
        let connection = self.rig.connection().expect("an open connection");
        let key = connection.open_tunnels().next().expect("a tunnel").key;
        connection.downstream.server.window(key) as usize
    }
}

#[tokio::test(start_paused = true)]
async fn a_window_that_a_far_peer_uses_in_a_round_trip_grows_though_the_endpoint_blocks() {
    let mut upload = Upload::new(Duration::from_millis(100)).await;
    let mut trips = 0;
    while upload.window() < WINDOW_MAX {
        upload.send().await;
        upload.take().await;
        assert!(upload.waiting > 0, "the endpoint blocks");
        while upload.waiting > 0 {
            upload.take().await;
        }
        trips += 1;
        assert!(trips < 10, "{}", upload.window());
    }
}

#[tokio::test(start_paused = true)]
async fn a_window_does_not_grow_for_an_endpoint_that_takes_less_than_half_of_it_in_four_trips() {
    let rtt = Duration::from_millis(5);
    let mut upload = Upload::new(rtt).await;
    let mut taken = 0;
    while taken < 4 * WINDOW {
        upload.send().await;
        let now = upload.take().await;
        assert!(now < WINDOW / 8, "the socket is small");
        taken += now;
    }
    assert_eq!(upload.window(), WINDOW);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_cannot_answer_a_ping() {
    let mut upload = Upload::new(Duration::from_millis(1)).await;
    for payload in [b"alive...", b"drained?", &[0; 8]] {
        let connection = upload.rig.connection().expect("an open connection");
        assert_eq!(connection.downstream.server.ping(), payload == b"alive...");
        upload.rig.send(Frame::new(PING, ACK, 0, payload)).await;
    }
    let connection = upload.rig.connection().expect("an open connection");
    assert!(!connection.downstream.server.ping(), "the first one has no answer");
}

#[tokio::test(start_paused = true)]
async fn a_ping_that_is_answered_sooner_than_the_settings_corrects_the_round_trip() {
    // The acknowledgement of the SETTINGS was lost at first.
    let mut upload = Upload::new(Duration::from_secs(5)).await;
    upload.rtt = Duration::from_millis(1);
    let connection = upload.rig.connection().expect("an open connection");
    assert!(connection.downstream.server.ping());
    upload.rig.wait(upload.rtt).await;
    let ping = frames(&mut upload.rig).into_iter().find(|frame| frame.kind == PING);
    let answer = Frame::new(PING, ACK, 0, &ping.expect("a PING").payload);
    upload.rig.send(answer).await;
    for _ in 0..100 {
        upload.send().await;
        upload.take().await;
    }
    assert_eq!(upload.window(), WINDOW);
}
