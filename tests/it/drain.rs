//! Shutdown under load.

use std::sync::Arc;
use std::time::Duration;

use h2::Reason;
use rustix::process::Signal;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use crate::support::raw::{self, Ending, GOAWAY, RawPeer};
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, broken, bytes, identities, run, until,
};

const SIZE: u64 = 256 * 1024;
const LAG: Duration = Duration::from_secs(2);
const DEADLINE: Duration = Duration::from_secs(6);
/// Number of tunnels that end before the signal, during the drain, or at its deadline.
const THIRD: u64 = 30;

async fn gateway(net: Net) -> Gateway {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.more = "drain: {lag: 2s, deadline: 6s}\n".to_owned();
    Gateway::start(&settings).await
}

/// Sends and gets back a part of the tunnel's stream.
async fn echo(tunnel: &mut Tunnel, id: u64, from: u64, to: u64) -> std::io::Result<()> {
    let (mut read, mut write) = tokio::io::split(tunnel);
    let send = bytes::send(&mut write, id, from, to);
    let expect = bytes::expect(&mut read, id, from, to);
    tokio::try_join!(send, expect).map(|_| ())
}

async fn finish(mut tunnel: Tunnel, id: u64, from: u64) {
    echo(&mut tunnel, id, from, SIZE).await.expect("the rest of the bytes");
    tunnel.shutdown().await.expect("our end");
    bytes::expect_end(&mut tunnel).await;
}

/// Continues until the tunnel breaks. Returns the code of the reset.
async fn go_on(mut tunnel: Tunnel, id: u64, from: u64) -> Option<Reason> {
    let mut at = from;
    while echo(&mut tunnel, id, at, at + 1024).await.is_ok() {
        at += 1024;
    }
    broken(&mut tunnel).await
}

async fn half_done(clients: &[Client], count: u64) -> Vec<(u64, Tunnel)> {
    let mut tunnels = Vec::new();
    for (id, client) in (0..count).zip(clients.iter().cycle()) {
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echo(&mut tunnel, id, 0, SIZE / 2).await.expect("the first half");
        tunnels.push((id, tunnel));
    }
    tunnels
}

#[test]
fn sigterm_loses_no_byte_of_what_ends_in_time_and_resets_the_rest() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(gateway.client(identities()).await);
        }
        let mut tunnels = half_done(&clients, 3 * THIRD).await;
        let third = tunnels.len() / 3;
        let (late, in_time) = (tunnels.split_off(2 * third), tunnels.split_off(third));

        // A third ends before the signal.
        for (id, tunnel) in tunnels {
            finish(tunnel, id, SIZE / 2).await;
        }
        let signalled = Instant::now();
        gateway.signal(Signal::TERM);
        // A third continues through the drain and never ends by itself.
        let mut late_tasks = JoinSet::new();
        for (id, tunnel) in late {
            late_tasks.spawn(go_on(tunnel, id, SIZE / 2));
        }
        until(
            "readiness",
            async || gateway.readiness().await,
            |(status, text)| *status == 500 && text.contains("draining"),
        )
        .await;
        // Until load balancers notice, everything continues.
        let client = gateway.client(identities()).await;
        finish(client.tunnel(ECHO).await.expect("a tunnel during the lag"), 1000, 0).await;
        // After it, no new client is admitted; a third ends now, before the deadline.
        let connect = async || TcpStream::connect(gateway.address).await.is_err();
        until("refused connections", connect, |&refused| refused).await;
        assert!(signalled.elapsed() >= LAG, "the lag was cut short");
        // At once, so that a busy machine needs the time of a few round trips for all of them.
        let mut in_time_tasks = JoinSet::new();
        for (id, tunnel) in in_time {
            in_time_tasks.spawn(finish(tunnel, id, SIZE / 2));
        }
        in_time_tasks.join_all().await;
        let mut reset = 0;
        while let Some(code) = late_tasks.join_next().await {
            // A busy client may read the reset too late: the process ends, and the kernel answers
            // the client's unread bytes by RST.
            let code = code.expect("an end");
            assert!(code.is_none_or(|code| code == Reason::INTERNAL_ERROR), "{code:?}");
            reset += 1;
        }
        assert_eq!(reset, THIRD);
        assert!(signalled.elapsed() >= LAG + DEADLINE, "the deadline came early");
        assert!(gateway.exited().await.success());
        let log = gateway.log();
        let count = |reason: &str| log.matches(&format!("reason=\"{reason}\"")).count() as u64;
        assert_eq!(count("completed"), 2 * THIRD + 1);
        assert_eq!(count("drain_deadline"), THIRD);
    });
}

#[test]
fn a_connection_that_reaches_its_age_is_retired_and_its_tunnels_stay() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.more = "limits: {connection_age: 1s}\n".to_owned();
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut peer = RawPeer::connect(&gateway).await;
        peer.tunnel(1, ECHO).await;
        let start = Instant::now();
        while peer.next().await.expect("an open connection").kind != GOAWAY {}
        assert!(start.elapsed() >= Duration::from_millis(800), "{:?}", start.elapsed());
        goes_on(&mut peer).await;
        let retired = "strait_connections_retired_total{reason=\"age\"}";
        assert_eq!(gateway.metric(retired).await, 1.0);
        let mut next = RawPeer::connect(&gateway).await;
        next.tunnel(1, ECHO).await;
    });
}

/// Checks that the tunnel of stream 1 is open.
async fn goes_on(peer: &mut RawPeer) {
    peer.write(&raw::frame(raw::DATA, 0, 1, b"still there")).await;
    let mut echoed = Vec::new();
    while echoed != b"still there" {
        let frame = peer.next().await.expect("an open connection");
        if (frame.kind, frame.stream) == (raw::DATA, 1) {
            echoed.extend_from_slice(&frame.payload);
        }
        assert_ne!(frame.kind, raw::RST_STREAM, "{frame:?}");
    }
}

/// Connects again after each GOAWAY until this time. Returns how often.
async fn moves(gateway: &Gateway, mut peer: RawPeer, until: Instant) -> u32 {
    let mut count = 0;
    while let Ok(frame) = timeout_at(until, peer.next()).await {
        if frame.expect("an open connection").kind == GOAWAY {
            let mut next = RawPeer::connect(gateway).await;
            next.tunnel(1, ECHO).await;
            goes_on(&mut peer).await;
            (peer, count) = (next, count + 1);
        }
    }
    count
}

#[test]
fn connections_leave_a_worker_whose_load_is_above_the_mean_until_it_is_not() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.more = "workers: 2\nlimits: {worker_load: 120%}\n".to_owned();
        let gateway = Arc::new(Gateway::start(&settings).await);
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut peers = Vec::new();
        for _ in 0..8 {
            let mut peer = RawPeer::connect(&gateway).await;
            peer.tunnel(1, ECHO).await;
            peers.push(peer);
        }
        // deadline: connections are examined every 10 s, and retire a second apart.
        let deadline = Instant::now() + Duration::from_secs(16);
        let (mut moves_of_peers, mut is_of_first) = (JoinSet::new(), false);
        for peer in peers {
            is_of_first = !is_of_first;
            if is_of_first {
                let gateway = Arc::clone(&gateway);
                moves_of_peers.spawn(async move { moves(&gateway, peer, deadline).await });
            } else {
                // Those of the other worker leave.
                peer.close_with_fin().await;
            }
        }
        let moved: u32 = moves_of_peers.join_all().await.into_iter().sum();
        // Two of four, or one if the tunnel of the first took longer to end.
        assert!((1..=2).contains(&moved), "{moved}");
        let retired = "strait_connections_retired_total{reason=\"worker_load\"}";
        assert_eq!(gateway.metric(retired).await, f64::from(moved));
    });
}

#[test]
fn a_peer_that_ignores_goaway_opens_no_tunnel_after_a_second() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        // It acknowledges no PING, so that h2 continues to accept its streams.
        let mut peer = RawPeer::connect(&gateway).await;
        peer.tunnel(1, ECHO).await;
        gateway.signal(Signal::TERM);
        while peer.next().await.expect("an open connection").kind != GOAWAY {}
        let start = Instant::now();
        // A CONNECT that was under way when GOAWAY arrived is served.
        peer.tunnel(3, ECHO).await;
        let refused = Ending::Reset(7);
        for stream in (5..).step_by(2) {
            // deadline: the grace after a GOAWAY is a time.
            tokio::time::sleep(Duration::from_millis(200)).await;
            let fields: [(&str, &[u8]); 2] =
                [(":method", b"CONNECT"), (":authority", ECHO.as_bytes())];
            peer.headers(stream, &fields).await;
            if peer.ending(stream).await == refused {
                break;
            }
            assert!(start.elapsed() < DEADLINE / 2, "{:?}", start.elapsed());
        }
        assert!(start.elapsed() >= Duration::from_millis(900));
    });
}

#[test]
fn a_gateway_without_tunnels_stops_as_soon_as_the_lag_is_over() {
    run(async {
        let mut gateway = gateway(Net::new()).await;
        let client = gateway.client(identities()).await;
        let start = Instant::now();
        gateway.signal(Signal::TERM);
        // The client may still be closing when the gateway has exited.
        let _ = client.wait_closed().await;
        assert!(gateway.exited().await.success());
        assert!(start.elapsed() < LAG + DEADLINE, "an idle client held up the drain");
    });
}

#[test]
fn a_second_sigterm_is_now() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(b"x").await.expect("a byte");
        gateway.signal(Signal::TERM);
        until("the lag", async || gateway.readiness().await.0, |&status| status == 500).await;
        let start = Instant::now();
        gateway.signal(Signal::TERM);
        assert!(gateway.exited().await.success());
        assert!(start.elapsed() < DEADLINE, "the second signal changed nothing");
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
    });
}

#[test]
fn quitquitquit_is_as_good_as_sigterm() {
    run(async {
        let mut gateway = gateway(Net::new()).await;
        assert_eq!(gateway.http(15000, "GET", "/quitquitquit").await.0, 405);
        assert_eq!(gateway.http(15000, "POST", "/quitquitquit").await.0, 200);
        assert!(gateway.exited().await.success());
    });
}

#[test]
fn explain_says_that_a_draining_gateway_refuses_connections() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(b"x").await.expect("a byte");
        let explained =
            async || gateway.run_command(&["explain", "--from", CLIENT, "--to", ECHO]).await;
        let (code, text, _) = explained().await;
        assert_eq!(code, 0, "{text}");
        gateway.signal(Signal::TERM);
        let (code, text, _) = until("the drain", explained, |(code, ..)| *code != 0).await;
        assert_eq!(code, 1, "{text}");
        assert!(text.contains("the connection is refused (draining)"), "{text}");
        assert!(!text.contains("opened"), "{text}");
        assert!(TcpStream::connect(gateway.address).await.is_err());
    });
}
