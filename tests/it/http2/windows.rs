//! Sections 5.2, 6.5.3 and 6.9.2: windows while bytes are in flight.

use std::time::Duration;

use crate::support::raw::{self, Frame};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, run};

use super::{Connection, FLOW_CONTROL_ERROR, Ignored, Peer, Stream, start};

const INITIAL_WINDOW_SIZE: u8 = 4;
/// Limit of a window (section 6.9.1).
const WINDOW_MAX: u32 = (1 << 31) - 1;

fn initial_window(bytes: u32) -> Vec<u8> {
    let [a, b, c, d] = bytes.to_be_bytes();
    let payload = [0, INITIAL_WINDOW_SIZE, a, b, c, d];
    raw::frame(raw::SETTINGS, 0, 0, &payload)
}

fn window_update(stream: u32, bytes: u32) -> Vec<u8> {
    raw::frame(raw::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

impl Peer {
    /// Connects with this initial window, and opens stream 1.
    async fn with_window(gateway: &Gateway, bytes: u32) -> Self {
        let mut peer = Self::connect(gateway, &initial_window(bytes)[9..]).await;
        peer.open(1).await;
        peer
    }

    /// Sends bytes that the endpoint returns.
    async fn request(&mut self, stream: u32, bytes: usize) {
        let sent = raw::frame(raw::DATA, 0, stream, &vec![b'x'; bytes]);
        self.raw.write(&sent).await;
    }

    /// Receives exactly this many bytes of a stream.
    async fn receive(&mut self, stream: u32, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            let is_data = |frame: &Frame| frame.kind == raw::DATA && frame.stream == stream;
            let frame = self.until(is_data).await;
            let rest = left.checked_sub(frame.payload.len());
            left = rest.unwrap_or_else(|| panic!("{} bytes above the window", frame.payload.len()));
        }
    }

    /// Asserts that no bytes are sent although the endpoint has some.
    async fn receive_none(&mut self) {
        // deadline: that nothing is sent can only be waited for.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(self.outcome(&[Ignored]).await, Ignored);
    }
}

#[test]
fn a_stream_sends_up_to_its_window_and_no_further() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, 1000).await;
        peer.request(1, 5000).await;
        peer.receive(1, 1000).await;
        for bytes in [1, 10, 989] {
            peer.raw.write(&window_update(1, bytes)).await;
            peer.receive(1, bytes as usize).await;
        }
        peer.raw.write(&window_update(1, WINDOW_MAX)).await;
        peer.receive(1, 3000).await;
    });
}

/// Section 6.9.2: a window that becomes negative by SETTINGS is counted up from there.
#[test]
fn a_window_below_zero_is_paid_off_before_more_is_sent() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, 3000).await;
        peer.request(1, 8000).await;
        peer.receive(1, 3000).await;
        // 3,000 were sent under the old window, which leaves 1,000 - 3,000.
        peer.raw.write(&initial_window(1000)).await;
        peer.raw.write(&window_update(1, 1999)).await;
        peer.receive_none().await;
        peer.raw.write(&window_update(1, 2)).await;
        peer.receive(1, 1).await;
        peer.raw.write(&initial_window(3000)).await;
        peer.receive(1, 2000).await;
        // Twice in one frame: the last value counts.
        let both = [&initial_window(0)[9..], &initial_window(5000)[9..]].concat();
        peer.raw.write(&raw::frame(raw::SETTINGS, 0, 0, &both)).await;
        peer.receive(1, 2000).await;
    });
}

#[test]
fn a_stream_without_a_window_sends_nothing() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, 0).await;
        peer.request(1, 1).await;
        peer.receive_none().await;
        peer.raw.write(&initial_window(1)).await;
        peer.receive(1, 1).await;
    });
}

#[test]
fn the_window_of_the_connection_limits_all_streams() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, WINDOW_MAX).await;
        // The connection's window is not changed by SETTINGS, and is 65,535 (section 6.9.2).
        peer.request(1, 60_000).await;
        peer.receive(1, 60_000).await;
        peer.open(3).await;
        peer.request(3, 10_000).await;
        peer.receive(3, 5_535).await;
        peer.raw.write(&initial_window(1 << 30)).await;
        peer.raw.write(&window_update(3, 1 << 20)).await;
        peer.receive_none().await;
        peer.raw.write(&window_update(0, 65)).await;
        peer.receive(3, 65).await;
        peer.raw.write(&window_update(0, 1 << 20)).await;
        peer.receive(3, 4_400).await;
    });
}

#[test]
fn a_window_of_the_largest_size_carries_bytes() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, WINDOW_MAX).await;
        peer.raw.write(&window_update(0, WINDOW_MAX - 65_535)).await;
        for _ in 0..4 {
            peer.request(1, 50_000).await;
            peer.receive(1, 50_000).await;
        }
        // 200,000 bytes were used: the windows may grow by them, and not by one more.
        peer.raw.write(&window_update(1, 200_000)).await;
        peer.raw.write(&window_update(0, 200_000)).await;
        peer.request(1, 1).await;
        peer.receive(1, 1).await;
        peer.raw.write(&window_update(1, 2)).await;
        assert_eq!(peer.outcome(&[]).await, Stream(FLOW_CONTROL_ERROR), "2,147,483,648");
    });
}

/// Section 4.2: no frame exceeds the size that the peer allows, and a change applies at once.
#[test]
fn frames_stay_within_the_peers_maximum() {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut peer = Peer::with_window(&gateway, 1 << 30).await;
        peer.raw.write(&window_update(0, 1 << 30)).await;
        for _ in 0..4 {
            peer.request(1, 60_000).await;
        }
        let mut left = 240_000;
        while left > 0 {
            let frame = peer.until(|frame| frame.kind == raw::DATA).await;
            assert!(frame.payload.len() <= 16_384, "{}", frame.payload.len());
            left -= frame.payload.len();
        }
    });
}

/// Section 6.9: bytes above the gateway's window are an error. Padding counts (section 6.1).
#[test]
fn bytes_above_our_window_are_an_error() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        // An endpoint that never reads, with a small buffer in the kernel.
        let listener = net.listen(11, 9000).await;
        let socket = socket2::SockRef::from(&listener);
        socket.set_recv_buffer_size(64 * 1024).expect("a buffer");
        let _endpoint = Endpoint::new(listener, |stream| async move {
            std::future::pending::<()>().await;
            drop(stream);
        });
        let gateway = Gateway::start(&settings).await;
        let mut peer = Peer::connect(&gateway, &[]).await;
        peer.open(1).await;
        let data = raw::frame(raw::DATA, 0, 1, &[b'x'; 16_384]);
        // The gateway's socket takes 4 MiB, and the largest window 4 MiB.
        for _ in 0..1024 {
            peer.raw.try_write(&data).await;
        }
        let outcome = peer.outcome(&[]).await;
        let allowed = [Stream(FLOW_CONTROL_ERROR), Connection(FLOW_CONTROL_ERROR)];
        assert!(allowed.contains(&outcome), "{outcome:?}");
    });
}
