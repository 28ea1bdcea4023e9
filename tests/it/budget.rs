//! Limit of memory that tunnels hold for slow readers.

use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::support::raw::{self, Ending, RawPeer};
use crate::support::{
    ECHO, ENDLESS, Endpoint, Gateway, Net, Settings, bytes, identities, run, until,
};

const CONNECT: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", b"echo.global:80")];
const KIB: u64 = 1024;
/// Streams of a peer that asks for more.
pub const STREAMS: u32 = 200;

/// Widest window of HTTP/2.
pub const WIDEST: u32 = 0x7fff_ffff;

/// Number of peers that do not read. Each makes the gateway hold one buffer of 128 KiB, of which
/// their identity has a share of 2 MiB.
const STALLED_PEERS: usize = 40;

/// Requests bytes on [`STREAMS`] streams.
pub async fn ask_for_more(peer: &mut RawPeer) {
    ask_for_bytes(peer, STREAMS).await;
}

async fn ask_for_bytes(peer: &mut RawPeer, streams: u32) {
    // The connection's window already has 65,535.
    let more = (WIDEST - 0xffff).to_be_bytes();
    let mut hello = raw::frame(raw::WINDOW_UPDATE, 0, 0, &more);
    for stream in (0..streams).map(|index| 1 + 2 * index) {
        hello.extend(raw::headers(stream, &CONNECT));
        hello.extend(raw::frame(raw::DATA, 0, stream, &[ENDLESS]));
    }
    peer.write(&hello).await;
}

#[test]
fn past_its_share_stalled_tunnels_of_a_source_go_and_a_neighbour_notices_nothing() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.more += "limits: {buffers: 4MiB}\n";
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo_or_endless(net.listen(11, 9000).await);
        let max = gateway.metric("strait_buffered_max_bytes").await;
        assert_eq!(max, 4.0 * 1024.0 * 1024.0);
        let neighbour = gateway.client(identities()).await;
        let mut tunnel = neighbour.tunnel(ECHO).await.expect("a tunnel");

        let mut peers = Vec::new();
        for _ in 0..STALLED_PEERS {
            peers.push(RawPeer::with_window(&gateway, WIDEST).await);
        }
        for peer in &mut peers {
            ask_for_bytes(peer, 1).await;
        }
        let held = async || gateway.metric("strait_buffered_bytes").await;
        let reset = async || gateway.tunnels("buffers_full").await;
        until("the fattest are reset", reset, |&count| count > 10.0).await;
        until("seven eighths", held, |&held| held <= max).await;
        gateway.logged("buffer budget exceeded").await;
        bytes::send(&mut tunnel, 1, 0, 64 * KIB).await.expect("all bytes up");
        bytes::expect(&mut tunnel, 1, 0, 64 * KIB).await.expect("all bytes down");
        let again = async || neighbour.tunnel(ECHO).await.is_ok();
        until("new tunnels", again, |&served| served).await;
        let open = gateway.metric("strait_tunnels_open").await;
        assert!(open > 2.0, "those that are not needed stay: {open} are open");

        drop(peers);
        until("nothing is held", held, |&held| held == 0.0).await;
    });
}

/// Returns a listener with a full queue, so that a dial gets no answer, and the connections that
/// fill it.
async fn unanswering(net: Net) -> (TcpListener, Vec<TcpStream>) {
    let address = net.address(11, 9000);
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(address).expect("a free address");
    let listener = socket.listen(1).expect("a listener");
    let mut queue = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        queue.push(stream.expect("a place in the queue"));
    }
    (listener, queue)
}

#[test]
fn what_comes_before_the_answer_is_delivered_up_to_64_kib_and_reset_beyond() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let (listener, queue) = unanswering(net).await;
        let mut peer = RawPeer::connect(&gateway).await;
        // After it has acknowledged our SETTINGS, its window is larger than the limit of early
        // bytes.
        let unknown: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", b"unknown:80")];
        peer.headers(1, &unknown).await;
        assert_eq!(peer.ending(1).await, Ending::Answered);
        let early = bytes::range(1, 0, 64 * KIB);
        for stream in [3, 5] {
            peer.headers(stream, &CONNECT).await;
            for part in early.chunks(16 * 1024) {
                peer.write(&raw::frame(raw::DATA, 0, stream, part)).await;
            }
        }
        peer.write(&raw::frame(raw::DATA, 0, 5, &[0])).await;
        const ENHANCE_YOUR_CALM: u8 = 11;
        assert_eq!(peer.ending(5).await, Ending::Reset(ENHANCE_YOUR_CALM));
        assert_eq!(gateway.tunnels("early_data").await, 1.0);

        for _ in &queue {
            drop(listener.accept().await.expect("what fills the queue"));
        }
        // The system retries the dial after a second.
        let (mut dialled, _) = listener.accept().await.expect("the gateway's dial");
        assert_eq!(peer.ending(3).await, Ending::Answered);
        bytes::expect(&mut dialled, 1, 0, 64 * KIB).await.expect("all that came early");
    });
}
