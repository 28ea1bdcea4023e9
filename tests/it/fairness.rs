//! Isolation of the tunnels of one connection from each other.

use std::time::Duration;

use h2::Reason;
use h2::client::Builder;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, broken, bytes, identities, reset, run,
    until,
};

const MIB: u64 = 1 << 20;
/// Bytes that each of the moving tunnels moves.
const SIZE: u64 = 4 * MIB;
const MOVING: u64 = 92;
const STALLED: u64 = 8;
/// Noise of a busy machine, added to the bound that the test is about.
const NOISE: Duration = Duration::from_millis(500);

async fn gateway(net: Net) -> Gateway {
    Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await
}

/// A client with these HTTP/2 windows.
async fn client(gateway: &Gateway, stream: u32, connection: u32) -> Client {
    let mut settings = Builder::new();
    settings.initial_window_size(stream).initial_connection_window_size(connection);
    let tcp = TcpStream::connect(gateway.address).await.expect("a connection");
    let tls = identities().client(CLIENT, GATEWAY);
    Client::with_settings(tcp, &tls, &settings).await.expect("HTTP/2")
}

/// Serves by the first bytes of a connection: `u` reads [`SIZE`] bytes and answers `k`, `d` sends
/// [`SIZE`] bytes, `i` sends one byte and `s` none, and both never read again.
fn server(stream: TcpStream) -> impl Future<Output = ()> + Send + 'static {
    let mut stream = stream;
    async move {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.expect("a head");
        let id = u64::from_be_bytes(head[1..].try_into().expect("eight bytes"));
        match head[0] {
            b'u' => {
                bytes::expect(&mut stream, id, 0, SIZE).await.expect("all bytes up");
                stream.write_all(b"k").await.expect("an answer");
            }
            b'd' => bytes::send(&mut stream, id, 0, SIZE).await.expect("all bytes down"),
            // An idle tunnel has had its bytes, in both directions.
            b'i' => {
                stream.write_all(b"k").await.expect("a byte");
                std::future::pending().await
            }
            _ => std::future::pending().await,
        }
    }
}

async fn open(client: &Client, kind: u8, id: u64) -> Tunnel {
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    let mut head = vec![kind];
    head.extend(id.to_be_bytes());
    tunnel.write_all(&head).await.expect("a head");
    tunnel
}

/// Returns the time in which [`MOVING`] tunnels concurrently move their bytes.
async fn moving(client: &Client, kind: u8) -> Duration {
    let mut tunnels = Vec::new();
    for id in 0..MOVING {
        tunnels.push((id, client.tunnel(ECHO).await.expect("a tunnel")));
    }
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (id, mut tunnel) in tunnels {
        tasks.spawn(async move {
            let mut head = vec![kind];
            head.extend(id.to_be_bytes());
            tunnel.write_all(&head).await.expect("a head");
            if kind == b'u' {
                bytes::send(&mut tunnel, id, 0, SIZE).await.expect("all bytes up");
                assert_eq!(tunnel.read_u8().await.expect("an answer"), b'k');
            } else {
                bytes::expect(&mut tunnel, id, 0, SIZE).await.expect("all bytes down");
            }
            tunnel.shutdown().await.expect("our end");
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("a tunnel that moved all its bytes");
    }
    start.elapsed()
}

/// Returns the number of bytes of an upload before its endpoint, which never reads, stalls it.
async fn stall(tunnel: &mut Tunnel) -> u64 {
    let mut sent = 0;
    let chunk = vec![0; 64 * 1024];
    loop {
        let write = tokio::time::timeout(Duration::from_millis(200), tunnel.write(&chunk));
        match write.await {
            Ok(count) => sent += count.expect("an open tunnel") as u64,
            Err(_) => return sent,
        }
    }
}

/// Asserts that a transfer takes at most twice its time alone. Noise of the machine slows some
/// attempts; a defect slows all of them.
async fn assert_not_slowed(
    what: &str,
    alone: Duration,
    mut attempt: impl AsyncFnMut() -> Duration,
) {
    let mut times = Vec::new();
    for _ in 0..3 {
        times.push(attempt().await);
        if times.last() <= Some(&(alone * 2 + NOISE)) {
            return;
        }
    }
    panic!("{what}: alone {alone:?}, then {times:?}");
}

#[test]
fn eight_tunnels_that_nobody_reads_do_not_slow_ninety_two_others() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, server);
        // Windows of a client that may leave eight of its own tunnels unread: 8 × 1 MiB of 16.
        let client = client(&gateway, 1 << 20, 16 << 20).await;
        moving(&client, b'u').await;
        let unloaded = (moving(&client, b'u').await, moving(&client, b'd').await);
        let start = Instant::now();
        let mut stalled = Vec::new();
        for id in 0..STALLED / 2 {
            let mut up = open(&client, b's', id).await;
            assert!(stall(&mut up).await > 100_000, "an upload that stalls was begun");
            stalled.push((id, up, open(&client, b'd', MOVING + id).await));
        }
        assert_not_slowed("up", unloaded.0, async || moving(&client, b'u').await).await;
        assert_not_slowed("down", unloaded.1, async || moving(&client, b'd').await).await;
        // deadline: the stalled tunnels are left alone for ten seconds in all.
        tokio::time::sleep_until(start + Duration::from_secs(10)).await;
        for (id, _, mut down) in stalled {
            let read = bytes::expect(&mut down, MOVING + id, 0, SIZE).await;
            read.expect("a stalled download goes on where it was left");
        }
    });
}

#[test]
fn a_burst_of_tunnels_that_stall_after_the_window_has_grown_leaves_room_for_one_more() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, server);
        let client = client(&gateway, 1 << 20, 16 << 20).await;
        let upload = async |id| {
            let mut tunnel = open(&client, b'u', id).await;
            bytes::send(&mut tunnel, id, 0, SIZE).await.expect("all bytes up");
            assert_eq!(tunnel.read_u8().await.expect("an answer"), b'k');
        };
        // A single tunnel that keeps up makes the window of all streams grow.
        for id in 0..8 {
            upload(id).await;
        }
        let mut opening = JoinSet::new();
        let client_of = std::sync::Arc::new(client);
        for _ in 0..99 {
            let client = std::sync::Arc::clone(&client_of);
            opening.spawn(async move {
                let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
                tunnel.write_all(&[b's'; 9]).await.expect("a head");
                tunnel
            });
        }
        let mut filling = JoinSet::new();
        for mut tunnel in opening.join_all().await {
            filling.spawn(async move {
                stall(&mut tunnel).await;
                tunnel
            });
        }
        let stalled = filling.join_all().await;
        let live = async {
            let mut tunnel = open(&client_of, b'u', 100).await;
            bytes::send(&mut tunnel, 100, 0, SIZE).await.expect("all bytes up");
            assert_eq!(tunnel.read_u8().await.expect("an answer"), b'k');
        };
        let live = tokio::time::timeout(Duration::from_secs(10), live).await;
        live.expect("a live tunnel beside 99 that stall");
        drop(stalled);
    });
}

#[test]
fn idle_tunnels_hold_no_window_of_a_client_that_has_little() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, server);
        let client = client(&gateway, 65_535, 65_535).await;
        let download = async || {
            let mut busy = open(&client, b'd', 0).await;
            let start = Instant::now();
            bytes::expect(&mut busy, 0, 0, SIZE).await.expect("all bytes down");
            start.elapsed()
        };
        let alone = download().await;
        let mut idle = Vec::new();
        for id in 0..200 {
            let mut tunnel = open(&client, b'i', id).await;
            assert_eq!(tunnel.read_u8().await.expect("a byte"), b'k');
            idle.push(tunnel);
        }
        assert_not_slowed("beside idle tunnels", alone, download).await;
        drop(idle);
    });
}

#[test]
fn three_thousand_tunnels_that_break_mid_upload_do_not_end_their_connection() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, |mut stream| async move {
            let mut some = [0; 1024];
            let _ = stream.read(&mut some).await;
            reset(stream);
        });
        let client = gateway.client(identities()).await;
        for _ in 0..30 {
            let mut tasks = JoinSet::new();
            for _ in 0..100 {
                let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel on this connection");
                tasks.spawn(async move {
                    let chunk = vec![0; 64 * 1024];
                    while tunnel.write_all(&chunk).await.is_ok() {}
                    broken(&mut tunnel).await
                });
            }
            while let Some(code) = tasks.join_next().await {
                assert_eq!(code.expect("an end"), Some(Reason::CONNECT_ERROR));
            }
        }
        assert!(!client.is_closed());
        let ended = async || gateway.tunnels("upstream_reset").await;
        until("ended tunnels", ended, |&ended| ended == 3000.0).await;
        assert_eq!(gateway.metric("strait_connections_total").await, 1.0);
    });
}

#[test]
fn a_cluster_over_its_limit_of_bytes_is_delayed_and_loses_none() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.more = "limits: {clusters: [{name: west, bytes: 4MiB}]}\n".to_owned();
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let clients = [gateway.client(identities()).await, gateway.client(identities()).await];
        let start = Instant::now();
        let moved = clients.each_ref().map(async |client| {
            let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            let (mut read, mut write) = tokio::io::split(tunnel);
            let send = bytes::send(&mut write, 1, 0, SIZE);
            let expect = bytes::expect(&mut read, 1, 0, SIZE);
            tokio::try_join!(send, expect).expect("every byte");
        });
        let [one, other] = moved;
        tokio::join!(one, other);
        // 16 MiB less what may pass at once and the last pauses.
        assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
        let paused = gateway.metric("strait_paused_seconds_total{cluster=\"west\"}").await;
        assert!(paused > 1.0, "{paused}");
        let args = ["explain", "--from", CLIENT, "--to", ECHO];
        let (_, text, _) = gateway.run_command(&args).await;
        let note = "`limits.clusters` limits all tunnels of cluster west to 4.0 MiB per second";
        assert!(text.contains(note), "{text}");
    });
}

#[test]
fn the_time_of_workers_is_counted_by_cluster() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, server);
        let client = gateway.client(identities()).await;
        // Its answer shows that the turn of the handshake is over, and counted.
        let _idle = open(&client, b'i', 0).await;
        let seconds = async |cluster: &str| {
            gateway.metric(&format!("strait_worker_seconds_total{{cluster=\"{cluster}\"}}")).await
        };
        let (handshake, before) = (seconds("prefixes").await, seconds("west").await);
        assert!(handshake > 0.0, "the handshake is that of an address");
        moving(&client, b'd').await;
        assert!(seconds("west").await > before);
        assert_eq!(seconds("prefixes").await, handshake);
        let page = gateway.scrape().await;
        assert!(page.contains("strait_worker_wait_seconds_total{cluster=\"west\"} "), "{page}");
    });
}
