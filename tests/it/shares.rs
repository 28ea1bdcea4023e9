//! Shares of descriptors: a source with many connections leaves descriptors for sources with few.
//!
//! `STRAIT_GATEWAY=/path/to/strait cargo test --test it -- --nocapture beside_2000` runs the
//! scenario of a neighbour against another build and prints its figures.

use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::passthrough::client_hello;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, print_uncaptured,
    raise_descriptor_limit, run, until,
};

const SIBLING: &str = "spiffe://west.local/ns/shop/sa/quiet";
const OTHER_CLUSTER: &str = "spiffe://east.local/ns/app/sa/quiet";
const TLS: u16 = 15012;
/// Tunnels of a connection: under the gateway's 256, so that none waits for another.
const TUNNELS: usize = 250;
const OVER_SHARE: &str = "over_share";
const SHED: &str = "strait_connections_shed_total{limit=\"share\",source_cluster=\"unknown\"}";
const SHED_WEST: &str = "strait_connections_shed_total{limit=\"share\",source_cluster=\"west\"}";

/// A gateway with a listener of each kind and `pool` descriptors for both.
async fn start(net: Net, pool: u32) -> Gateway {
    raise_descriptor_limit();
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.descriptors = pool + 128;
    settings.exposure += "    - {service: \"secret.app.svc.cluster.local:80\", to: [{cluster: \
                          east}]}\n";
    settings.listeners = format!(
        "  - {{name: routes, bind: \"{}\", protocol: tls, routes: [{{sni: [\"*\"], to: \
         \"{ECHO}\"}}]}}\n",
        net.address(1, TLS)
    );
    Gateway::start(&settings).await
}

/// Opens connections and tunnels as one identity until it is rejected.
async fn fill(gateway: &Gateway, id: &str) -> Vec<(Client, Vec<Tunnel>)> {
    let mut held = Vec::new();
    loop {
        let client = gateway.client_as(identities(), id).await;
        let mut tunnels = Vec::new();
        while tunnels.len() < TUNNELS {
            match client.tunnel(ECHO).await {
                Ok(tunnel) => tunnels.push(tunnel),
                Err(_) => {
                    held.push((client, tunnels));
                    return held;
                }
            }
        }
        held.push((client, tunnels));
    }
}

async fn answers(tunnel: &mut Tunnel) {
    tunnel.write_all(b"?").await.expect("an open tunnel");
    assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
}

/// Sends a ClientHello from a host of the test's own net. Returns the connection, if the endpoint
/// echoes it.
async fn by_tls(net: Net, from: u8) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(net.address(from, 0)).expect("a free address");
    let mut stream = socket.connect(net.address(1, TLS)).await.ok()?;
    let hello = client_hello("any.example", &[]);
    stream.write_all(&hello).await.ok()?;
    let mut echo = vec![0; hello.len()];
    // A listener at its limit accepts nothing.
    let read = timeout(Duration::from_secs(5), stream.read_exact(&mut echo));
    read.await.ok()?.ok()?;
    (echo == hello).then_some(stream)
}

/// Opens such connections until one is rejected.
async fn fill_by_tls(net: Net, from: u8) -> Vec<TcpStream> {
    let mut held = Vec::new();
    while let Some(stream) = by_tls(net, from).await {
        held.push(stream);
    }
    held
}

#[test]
fn a_quiet_source_connects_while_another_holds_half_of_the_pool() {
    run(async {
        let net = Net::new();
        let gateway = start(net, 800).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let held = fill(&gateway, CLIENT).await;
        let tunnels: usize = held.iter().map(|(_, tunnels)| tunnels.len()).sum();
        // Half of the pool, minus the reserve for the other listener.
        assert!((340..=400).contains(&tunnels), "{tunnels} tunnels");
        assert_eq!(gateway.tunnels(OVER_SHARE).await, 1.0);
        let tls = identities().client(CLIENT, GATEWAY);
        let _refused = Client::connect(gateway.address, &tls).await;
        let shed = async || gateway.metric(SHED_WEST).await;
        until("a connection of its cluster is refused", shed, |&shed| shed == 1.0).await;
        assert_eq!(gateway.metric(SHED).await, 0.0);

        let sibling = gateway.client_as(identities(), SIBLING).await;
        for _ in 0..20 {
            let mut tunnel = sibling.tunnel(ECHO).await.expect("a tunnel of a sibling");
            answers(&mut tunnel).await;
        }
        let other = gateway.client_as(identities(), OTHER_CLUSTER).await;
        let secret = other.tunnel("secret.app.svc.cluster.local:80").await;
        answers(&mut secret.expect("a tunnel of another cluster")).await;
        assert!(by_tls(net, 20).await.is_some(), "an anonymous client");

        let (code, status, _) = gateway.run_command(&["status"]).await;
        let holder = format!("  identity {CLIENT}");
        assert!(code == 0 && status.contains(&holder), "{status}");
        gateway.logged("has used its share of the descriptors").await;
        drop(held);
        let again = async || {
            let client = gateway.client(identities()).await;
            client.tunnel(ECHO).await.is_ok()
        };
        until("its share is free again", again, |&served| served).await;
    });
}

#[test]
fn connections_of_one_address_keep_nobody_out_of_a_tls_listener() {
    run(async {
        let net = Net::new();
        let gateway = start(net, 1000).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut flood = Vec::new();
        let mut refused = 0_u32;
        for _ in 0..1200 {
            match by_tls(net, 20).await {
                Some(stream) => flood.push(stream),
                None => refused += 1,
            }
        }
        // Each needs two descriptors, of half of the pool.
        assert!((200..=250).contains(&flood.len()), "{}", flood.len());
        // By RST before the ClientHello, or by an alert if a connection would fit but not its
        // tunnel.
        let rejected = gateway.metric(SHED).await + gateway.tunnels(OVER_SHARE).await;
        assert!(rejected >= f64::from(refused), "{rejected} of {refused}");
        for from in 30..40 {
            assert!(by_tls(net, from).await.is_some(), "another address");
        }
        let client = gateway.client(identities()).await;
        answers(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
        gateway.logged("has used its share of the descriptors").await;
    });
}

#[test]
fn the_clients_of_one_listener_leave_the_part_of_another() {
    run(async {
        let net = Net::new();
        let gateway = start(net, 400).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut flood = Vec::new();
        for from in 20..120 {
            flood.push(fill_by_tls(net, from).await);
            if flood.last().is_some_and(Vec::is_empty) {
                break;
            }
        }
        assert!(flood.last().is_some_and(Vec::is_empty), "the pool is full");
        for _ in 0..3 {
            let connect = timeout(Duration::from_secs(5), gateway.client(identities()));
            let client = connect.await.expect("a handshake in time");
            answers(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
        }
    });
}

#[test]
fn a_tls_tunnel_whose_endpoint_stays_silent_is_reset_after_5_seconds() {
    run(async {
        let net = Net::new();
        let gateway = start(net, 400).await;
        // It answers the first connection with one byte, and no other.
        let answers = std::sync::atomic::AtomicBool::new(true);
        let answers = std::sync::Arc::new(answers);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let answers = answers.swap(false, std::sync::atomic::Ordering::SeqCst);
            async move {
                if answers {
                    stream.write_all(b"!").await.expect("a byte");
                }
                let mut all = Vec::new();
                let _ = stream.read_to_end(&mut all).await;
            }
        });
        let connect = async || {
            let stream = TcpStream::connect(net.address(1, TLS)).await;
            let mut stream = stream.expect("a connection");
            let hello = client_hello("any.example", &[]);
            stream.write_all(&hello).await.expect("a hello");
            stream
        };
        let mut answered = connect().await;
        assert_eq!(answered.read_u8().await.expect("a byte"), b'!');
        let start = Instant::now();
        let mut silent = connect().await;
        let end = silent.read_u8().await.expect_err("no byte");
        assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
        let after = start.elapsed().as_secs_f64();
        assert!((4.9..15.0).contains(&after), "{after} s");
        let count = async || gateway.tunnels("endpoint_silent").await;
        until("a reset", count, |&count| count == 1.0).await;
        gateway.logged("no byte within 5 s of the ClientHello").await;
        let more = timeout(Duration::from_millis(500), answered.read_u8()).await;
        assert!(more.is_err(), "later silence is the endpoint's own affair");
    });
}

/// Results of new connections of a quiet neighbour: the duration of each served one in ascending
/// order, and the number of those not served.
struct NeighbourResults {
    served: Vec<Duration>,
    failed: usize,
}

impl NeighbourResults {
    fn percentile(&self, percent: usize) -> Duration {
        let at = (self.served.len() * percent / 100).min(self.served.len().saturating_sub(1));
        self.served.get(at).copied().unwrap_or_default()
    }
}

/// Connects repeatedly for `time`, each time with a handshake, a tunnel and an answer.
async fn neighbour(gateway: &Gateway, time: Duration) -> NeighbourResults {
    let tls = identities().client(SIBLING, GATEWAY);
    let (start, mut served, mut failed) = (Instant::now(), Vec::new(), 0);
    while start.elapsed() < time {
        let begun = Instant::now();
        let once = async {
            let client = Client::connect(gateway.address, &tls).await.ok()?;
            let mut tunnel = client.tunnel(ECHO).await.ok()?;
            tunnel.write_all(b"?").await.ok()?;
            tunnel.read_u8().await.ok()
        };
        match timeout(Duration::from_secs(1), once).await {
            Ok(Some(_)) => served.push(begun.elapsed()),
            Ok(None) | Err(_) => failed += 1,
        }
    }
    served.sort_unstable();
    NeighbourResults { served, failed }
}

#[test]
fn a_neighbour_is_served_beside_2000_tunnels_of_one_peer() {
    const TIME: Duration = Duration::from_secs(3);
    run(async {
        let net = Net::new();
        let gateway = start(net, 1920).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let alone = neighbour(&gateway, TIME).await;
        let mut flood = JoinSet::new();
        for _ in 0..8 {
            let client = gateway.client(identities()).await;
            flood.spawn(async move {
                let mut tunnels = Vec::new();
                for _ in 0..TUNNELS {
                    tunnels.extend(client.tunnel(ECHO).await.ok());
                }
                (client, tunnels)
            });
        }
        let held = flood.join_all().await;
        let open: usize = held.iter().map(|(_, tunnels)| tunnels.len()).sum();
        let beside = neighbour(&gateway, TIME).await;
        for (name, noticed) in [("alone", &alone), ("beside", &beside)] {
            print_uncaptured(&format!(
                "neighbour {name}: {} served in {TIME:?}, {} failed, p50 {:?}, p99 {:?}; {open} of \
                 2000 tunnels are open",
                noticed.served.len(),
                noticed.failed,
                noticed.percentile(50),
                noticed.percentile(99),
            ));
        }
        assert_eq!((alone.failed, beside.failed), (0, 0), "{open} tunnels");
        assert!((800..=960).contains(&open), "{open} tunnels");
    });
}
