//! Slow peers. Each has a deadline or a limit, does not affect a neighbour, and its resources are
//! released after it has left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::support::oracle::{self, Oracle, Plan};
use crate::support::raw::{self, RawPeer};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};

const SECOND: Duration = Duration::from_secs(1);
const MIB: u64 = 1 << 20;
/// First bytes of tunnels outside of the oracle, whose ids are all below 2^56.
const ENDLESS: u8 = b'e';
const SLOW: u8 = b's';

/// Gateway with an endpoint, and a neighbour on its own connection.
struct Scene {
    gateway: Gateway,
    oracle: Oracle,
    neighbour: Client,
    /// Bytes that the endpoint has sent endlessly, and that it has read slowly.
    sent: Arc<AtomicU64>,
    read: Arc<AtomicU64>,
    _endpoint: Endpoint,
}

impl Scene {
    async fn new() -> Self {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let oracle = Oracle::new();
        let [sent, read]: [Arc<AtomicU64>; 2] = Default::default();
        let all = (oracle.clone(), Arc::clone(&sent), Arc::clone(&read));
        let endpoint = Endpoint::new(net.listen(11, 9000).await, move |stream| {
            let (oracle, sent, read) = all.clone();
            async move { serve(stream, oracle, &sent, &read).await }
        });
        Self {
            neighbour: gateway.client(identities()).await,
            gateway,
            oracle,
            sent,
            read,
            _endpoint: endpoint,
        }
    }

    /// Asserts that the neighbour moves 4 MiB each way, in a tunnel with this name.
    async fn check_neighbour(&self, id: u64) {
        let plan = Plan::both(id, 4 * MIB);
        let side = oracle::tunnel(&self.neighbour, plan).await;
        self.oracle.whole(plan, side).await;
    }

    /// Asserts that the slow peer has ended for this reason with all its resources, and then the
    /// neighbour too.
    async fn check_released(self, reason: &str, tunnels: f64) {
        self.gateway.wait_until_open(1, 0).await;
        assert_eq!(self.gateway.tunnels_by_reason().await[reason], tunnels);
        drop(self.neighbour);
        self.gateway.wait_until_open(0, 0).await;
    }
}

/// Serves by the first byte of a connection; waits until it arrives.
async fn serve(mut stream: TcpStream, oracle: Oracle, sent: &AtomicU64, read: &AtomicU64) {
    let mut first = [0];
    match stream.peek(&mut first).await {
        Ok(1) if first == [ENDLESS] => endless(&mut stream, sent).await,
        Ok(1) if first == [SLOW] => {
            while stream.read_u8().await.is_ok() {
                read.fetch_add(1, Ordering::SeqCst);
                // deadline: slowness is what is tested.
                sleep(SECOND).await;
            }
        }
        Ok(1) => oracle.answer(stream).await,
        // The client left without sending a byte.
        Ok(_) | Err(_) => {}
    }
}

/// Writes and counts until the stream breaks.
async fn endless(stream: &mut (impl AsyncWrite + Unpin), count: &AtomicU64) {
    let chunk = vec![7; 64 * 1024];
    while let Ok(written) = stream.write(&chunk).await {
        count.fetch_add(written as u64, Ordering::SeqCst);
    }
}

/// Waits until a writer that has written at least `least` bytes has made no progress for a while.
async fn stalled(count: &AtomicU64, least: u64) {
    let mut last = (0, Instant::now());
    let look = async || {
        let now = count.load(Ordering::SeqCst);
        if now != last.0 {
            last = (now, Instant::now());
        }
        (now, last.1.elapsed())
    };
    let stuck = |&(now, quiet): &(u64, Duration)| now >= least && quiet > SECOND / 4;
    until("a writer that is stuck", look, stuck).await;
}

#[test]
fn a_client_hello_or_a_preface_at_a_byte_a_second_has_five_seconds_all_the_same() {
    run(async {
        let scene = Scene::new().await;
        let start = Instant::now();
        let hello = async {
            let mut peer = TcpStream::connect(scene.gateway.address).await.expect("a connection");
            // A record of 512 bytes with a ClientHello of 508.
            let mut bytes = [&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3][..], &[7; 500]].concat();
            trickle(&mut peer, bytes.drain(..)).await;
            start.elapsed()
        };
        let preface = async {
            let mut peer = raw::session(&scene.gateway).await;
            let start = Instant::now();
            trickle(&mut peer, raw::PREFACE.iter().copied()).await;
            start.elapsed()
        };
        let (hello, preface, ()) = tokio::join!(hello, preface, scene.check_neighbour(1));
        for lasted in [hello, preface] {
            // A byte may still be accepted in the second after the end, and the machine is busy.
            assert!(lasted > 4 * SECOND && lasted < 9 * SECOND, "{lasted:?}");
        }
        let refused = async || scene.gateway.refused_handshakes("timeout").await;
        until("two refusals", refused, |&refused| refused == 2.0).await;
        scene.check_released("completed", 1.0).await;
    });
}

/// Writes a byte per second until the other side has gone.
async fn trickle(
    stream: &mut (impl tokio::io::AsyncRead + AsyncWrite + Unpin),
    bytes: impl Iterator<Item = u8>,
) {
    for byte in bytes {
        if stream.write_u8(byte).await.is_err() || stream.flush().await.is_err() {
            return;
        }
        let mut answer = [0; 4096];
        // deadline: slowness is what is tested.
        let mut second = std::pin::pin!(sleep(SECOND));
        loop {
            tokio::select! {
                read = stream.read(&mut answer) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                },
                () = &mut second => break,
            }
        }
    }
    panic!("a peer that was never refused");
}

#[test]
fn a_client_that_never_reads_its_socket_holds_up_nobody() {
    run(async {
        let scene = Scene::new().await;
        // HTTP/2 would allow two gigabytes, so it is TCP's window that closes.
        const MOST: u32 = (1 << 31) - 1;
        let mut peer = RawPeer::with_window(&scene.gateway, MOST).await;
        let more = (MOST - 65_535).to_be_bytes();
        peer.write(&raw::frame(raw::WINDOW_UPDATE, 0, 0, &more)).await;
        peer.tunnel(1, ECHO).await;
        peer.write(&raw::frame(raw::DATA, 0, 1, &[ENDLESS])).await;
        stalled(&scene.sent, 1).await;
        scene.check_neighbour(1).await;
        drop(peer);
        scene.check_released("downstream_lost", 1.0).await;
    });
}

#[test]
fn a_client_that_never_writes_holds_up_nobody() {
    run(async {
        let scene = Scene::new().await;
        let client = scene.gateway.client(identities()).await;
        let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        scene.check_neighbour(1).await;
        scene.gateway.wait_until_open(2, 1).await;
        drop((tunnel, client));
        scene.gateway.wait_until_open(1, 0).await;
        let ends = scene.gateway.tunnels_by_reason().await;
        // The order of its reset and its connection's end depends on the client.
        assert_eq!(ends.values().sum::<f64>(), 2.0, "{ends:?}");
        scene.check_released("completed", 1.0).await;
    });
}

#[test]
fn a_client_that_reads_a_byte_a_second_holds_up_nobody() {
    run(async {
        let scene = Scene::new().await;
        let client = scene.gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(&[ENDLESS]).await.expect("a byte");
        let reads = async {
            for _ in 0..3 {
                assert_eq!(tunnel.read_u8().await.expect("a byte"), 7);
                // deadline: slowness is what is tested.
                sleep(SECOND).await;
            }
        };
        let beside = async {
            stalled(&scene.sent, 1).await;
            scene.check_neighbour(1).await;
        };
        tokio::join!(reads, beside);
        drop(client);
        scene.check_released("downstream_lost", 1.0).await;
    });
}

#[test]
fn an_endpoint_that_reads_a_byte_a_second_holds_up_nobody() {
    run(async {
        let scene = Scene::new().await;
        let client = scene.gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(&[SLOW]).await.expect("a byte");
        let written = AtomicU64::new(0);
        let beside = async {
            stalled(&written, 1).await;
            scene.check_neighbour(1).await;
            let read = async || scene.read.load(Ordering::SeqCst);
            until("three bytes", read, |&read| read >= 3).await;
        };
        tokio::select! {
            () = endless(&mut tunnel, &written) => panic!("the upload broke"),
            () = beside => {}
        }
        drop(client);
        scene.check_released("downstream_lost", 1.0).await;
    });
}

#[test]
#[expect(clippy::print_stdout, reason = "a figure is for people to see")]
fn a_hundred_readers_that_never_read_hold_less_than_300_kib_each() {
    run(async {
        const READERS: u64 = 100;
        const WINDOW: u32 = 64 * 1024;
        const HELD_MAX: u64 = 300 * 1024;
        let scene = Scene::new().await;
        let mut readers = Vec::new();
        for _ in 0..READERS {
            let mut peer = RawPeer::with_window(&scene.gateway, WINDOW).await;
            peer.tunnel(1, ECHO).await;
            readers.push(peer);
        }
        let idle = scene.gateway.private_dirty();
        assert!(idle > 0, "Linux tells the memory of a process");
        for peer in &mut readers {
            peer.write(&raw::frame(raw::DATA, 0, 1, &[ENDLESS])).await;
        }
        // Each stream has used its window, and the endpoint's socket is full behind it.
        stalled(&scene.sent, READERS * 65_535).await;
        let mut most = scene.gateway.private_dirty();
        // The cost of the neighbour counts too.
        for id in 1..4 {
            scene.check_neighbour(id).await;
            most = most.max(scene.gateway.private_dirty());
        }
        let held = most.saturating_sub(idle) / READERS;
        println!("{} KiB for each reader that never reads", held / 1024);
        assert!(held < HELD_MAX, "{held} bytes for each reader");
        drop(readers);
        scene.check_released("downstream_lost", READERS as f64).await;
    });
}
