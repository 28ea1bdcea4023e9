//! Peers that flood. Each receives ENHANCE_YOUR_CALM after a bounded number of frames, and a victim
//! on its own connection is not affected.

use std::collections::BTreeSet;
use std::time::Duration;

use strait::tools::conformance::Names;
use strait::tools::conformance::floods::{FLOODS, Flood, opened_and_reset, stream};
use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::support::raw::{self, Ending, RawPeer};
use crate::support::{CLIENT, ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};

/// Repeated part of a flood, by the number of the round.
type Round = fn(u32) -> Vec<u8>;

fn names() -> Names {
    Names { echo: ECHO.into(), unknown: "nothing.here:80".into() }
}

/// Limit of the bytes that a peer sends before its flood is ended: those that the gateway reads,
/// and those in the buffers of both sockets, by the defaults of Linux (`tcp_wmem` 4 MiB, `tcp_rmem`
/// 6 MiB). On a busy machine the peer fills them before the gateway reads.
const SENT_MAX: usize = (4 + 4 + 6) << 20;

/// Number of rounds after which a flood that was not ended fails the test.
const ROUNDS_MAX: u32 = 1_000_000;

/// Floods until the connection ends. Returns the bytes sent, and the GOAWAY's code if one came.
async fn flood(gateway: &Gateway, flood: Flood) -> (usize, Option<u8>) {
    let names = names();
    let mut peer = RawPeer::with_window(gateway, flood.window).await;
    peer.write(&raw::headers(1, &names.connect())).await;
    peer.ending(1).await;
    let (mut reader, mut writer) = peer.split();
    let reading = tokio::spawn(async move {
        let mut code = None;
        while let Some(frame) = reader.next().await {
            if frame.kind == raw::GOAWAY {
                code = frame.payload.get(7).copied().or(code);
            }
        }
        code
    });
    let mut sent = 0;
    let mut opening = (flood.opening)(&names);
    for index in 0..ROUNDS_MAX {
        let bytes = [std::mem::take(&mut opening), (flood.round)(&names, index)].concat();
        sent += bytes.len();
        if writer.write_all(&bytes).await.is_err() || writer.flush().await.is_err() {
            return (sent, reading.await.expect("a reader"));
        }
        assert!(index + 1 < ROUNDS_MAX, "still open after {sent} bytes");
    }
    unreachable!("the last round has failed")
}

/// Sends small requests on an open tunnel until signalled, and one more after that.
async fn victim(client: Client, stop: tokio::sync::watch::Receiver<bool>) {
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    let mut last = false;
    while !last {
        last = *stop.borrow();
        tunnel.write_all(b"small request").await.expect("a request");
        let mut answer = [0; 13];
        tunnel.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(&answer, b"small request");
    }
}

#[test]
fn each_flood_is_ended_and_a_victim_loses_no_request() {
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        for one in FLOODS {
            let name = one.name;
            let (stop, stopped) = tokio::sync::watch::channel(false);
            let victim = tokio::spawn(victim(gateway.client(identities()).await, stopped));
            let flooding = timeout(Duration::from_secs(20), flood(&gateway, one));
            let (sent, code) = flooding.await.unwrap_or_else(|_| panic!("{name}: not ended"));
            stop.send_replace(true);
            victim.await.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(sent < SENT_MAX, "{name}: {sent} bytes before it was ended");
            // h2 itself detects the flood of CONTINUATION, and reports a protocol error.
            let calm = [Some(11), name.starts_with("CONTINUATION").then_some(1)];
            assert!(code.is_some() && calm.contains(&code), "{name}: GOAWAY {code:?}");
        }
        let open = async || gateway.metric("strait_connections_open").await;
        until("connections", open, |&open| open == 0.0).await;
    });
}

const QUIET: &[u8] = b"spiffe://west.local/ns/shop/sa/quiet;cluster=west";
const FLOODING: &[u8] = b"spiffe://west.local/ns/shop/sa/flooding;cluster=west";

/// Returns a CONNECT of a first peer, as a gateway sends it.
fn of_first_peer(authority: &'static [u8], source: &'static [u8]) -> Fields {
    [(":method", b"CONNECT"), (":authority", authority), ("x-strait-source", source)]
}

type Fields = [(&'static str, &'static [u8]); 3];

/// Floods of a first peer with their number of rounds. Stream 3 is its tunnel.
const FIRST_PEER_FLOODS: [(&str, u32, Round); 3] = [
    ("one-byte DATA", 20_000, |_| raw::frame(raw::DATA, 0, 3, &[7])),
    ("abandoned CONNECTs", 8_000, |round| {
        opened_and_reset(1 + round, &of_first_peer(b"echo.global:80", FLOODING))
    }),
    ("refused CONNECTs", 16_000, |round| {
        let fields = of_first_peer(b"nothing.here:80", FLOODING);
        raw::headers(stream(1 + round), &fields)
    }),
];

/// Sends a flood of one first peer, and then bytes on the tunnel of another. Returns the streams
/// that were reset with ENHANCE_YOUR_CALM until the second is answered.
async fn flood_beside(gateway: &Gateway, rounds: u32, round: Round) -> BTreeSet<u32> {
    let mut peer = RawPeer::connect(gateway).await;
    for (stream, source) in [(1, QUIET), (3, FLOODING)] {
        let fields = of_first_peer(b"echo.global:80", source);
        peer.headers(stream, &fields).await;
        assert_eq!(peer.ending(stream).await, Ending::Answered);
    }
    let (mut reader, mut writer) = peer.split();
    let reading = tokio::spawn(async move {
        let mut reset = BTreeSet::new();
        loop {
            let frame = reader.next().await.expect("an open connection");
            assert_ne!(frame.kind, raw::GOAWAY, "{frame:?}");
            match (frame.kind, frame.stream, frame.payload.last()) {
                (raw::RST_STREAM, stream, Some(11)) => drop(reset.insert(stream)),
                (raw::DATA, 1, _) => return reset,
                _ => {}
            }
        }
    });
    for index in 0..rounds {
        let bytes = round(index);
        writer.write_all(&bytes).await.expect("an open connection");
    }
    let last = raw::frame(raw::DATA, 0, 1, b"still open");
    writer.write_all(&last).await.expect("an open connection");
    writer.flush().await.expect("an open connection");
    reading.await.expect("a reader")
}

#[test]
fn a_flood_of_one_first_peer_ends_its_tunnels_and_none_of_another() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let trust = format!("trust:\n  gateways: [\"{CLIENT}\"]\n");
            std::fs::write(file, text.replace("trust:\n", &trust)).expect("a configuration");
        });
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        for (name, rounds, round) in FIRST_PEER_FLOODS {
            let flooding = flood_beside(&gateway, rounds, round);
            let reset = timeout(Duration::from_secs(60), flooding).await;
            let reset = reset.unwrap_or_else(|_| panic!("{name}: no answer"));
            assert!(!reset.is_empty() && !reset.contains(&1), "{name}");
        }
        assert!(gateway.tunnels("credit_exhausted").await > 0.0);
    });
}

#[test]
fn requests_whose_reset_is_in_the_same_record_dial_no_endpoint() {
    // Less work than that of one turn, whose end may fall between a request and its reset.
    const ROUNDS: u32 = 50;
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut peer = RawPeer::connect(&gateway).await;
        let flight: Vec<u8> =
            (0..ROUNDS).flat_map(|round| opened_and_reset(round, &names().connect())).collect();
        peer.write(&flight).await;
        peer.tunnel(stream(ROUNDS), ECHO).await;
        let reset = async || gateway.tunnels("downstream_cancelled").await;
        until("resets", reset, |&reset| reset == f64::from(ROUNDS)).await;
        assert_eq!(endpoint.accepted(), 1);
    });
}
