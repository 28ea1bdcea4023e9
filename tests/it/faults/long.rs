//! Rows that wait for the deadlines of keepalive, PING and a stopped process.

use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::stops::{endpoint_stopped_for, pause, stopped_for, throttled};
use super::{LabPath, all_broken, start};
use crate::passthrough::client_hello;
use crate::support::lab::{ENDPOINT_HOST, Lab, Link, NEAR_HOST, Way};
use crate::support::oracle::{self, End, Oracle, Plan};
use crate::support::{
    ECHO, Endpoint, Gateway, broken, endpoint_port, identities, print_uncaptured, run, until,
};

/// Time in which a peer that has vanished is noticed: 30 s, and some of a loaded machine.
const VANISHED_MAX: Duration = Duration::from_secs(33);
/// Port of a TLS listener.
const TLS_PORT: u16 = 15012;
/// Rounds of each direction in which goodput is measured, connections of a round on each path, and
/// bytes of each.
const GOODPUT_ROUNDS: usize = 5;
const GOODPUT_AT_ONCE: usize = 4;
const GOODPUT_BYTES: u64 = 4 << 20;
/// Duration of a partition that breaks connections.
const PARTITION: Duration = Duration::from_secs(60);

#[test]
fn a_partition_of_a_minute_breaks_both_sides_and_new_tunnels_follow_at_once() {
    let Some(lab) = Lab::new("WAN partition, half-open peer") else {
        return;
    };
    run(async {
        let gateway = lab.gateway().await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(lab.net.listen(ENDPOINT_HOST, endpoint_port()).await);
        let descriptors = gateway.descriptors();
        let client = gateway.client(identities()).await;
        let rest = Duration::from_millis(100);
        let ids = [1, 2, 3, 4];
        // An hour; their heads arrive before the cut.
        let plans = ids.map(|id| Plan { rest, ..Plan::both(id, 36_000 * 16 * 1024) });
        let tunnels = start(&client, &plans).await;
        // deadline: bytes of all tunnels are on their way.
        sleep(Duration::from_secs(1)).await;
        lab.cut(Link::Clients);
        let cut = Instant::now();
        for id in ids {
            let side = oracle.side(id).await;
            assert!(matches!(side.end, End::Broken(_)), "{side:?}");
        }
        assert!(cut.elapsed() < VANISHED_MAX, "{:?}", cut.elapsed());
        let freed = async || gateway.descriptors();
        until(&format!("{descriptors} descriptors"), freed, |&now| now <= descriptors + 1).await;
        pause(PARTITION.saturating_sub(cut.elapsed())).await;
        lab.heal(Link::Clients);
        let healed = Instant::now();
        let again = timeout(VANISHED_MAX, gateway.client(identities())).await.expect("in time");
        again.tunnel(ECHO).await.expect("a tunnel");
        assert!(healed.elapsed() < Duration::from_secs(2), "{:?}", healed.elapsed());
        all_broken(tunnels).await;
        let lost = async || gateway.tunnels("downstream_lost").await;
        until("the reason of the broken tunnels", lost, |&lost| lost == 4.0).await;
    });
}

#[test]
fn a_partition_towards_the_gateway_breaks_both_sides_within_half_a_minute() {
    breaks_both_sides(Way::ToGateway);
}

#[test]
fn a_partition_from_the_gateway_breaks_both_sides_within_half_a_minute() {
    breaks_both_sides(Way::FromGateway);
}

fn breaks_both_sides(way: Way) {
    let Some(lab) = Lab::new("lasting partition of one direction") else {
        return;
    };
    run(async {
        let LabPath { gateway, client, oracle, .. } = &LabPath::start(&lab).await;
        let rest = Duration::from_millis(100);
        let ids = [1, 2];
        // An hour; their heads arrive before the cut.
        let plans = ids.map(|id| Plan { rest, ..Plan::both(id, 36_000 * 16 * 1024) });
        let tunnels = start(client, &plans).await;
        // deadline: bytes of all tunnels are on their way.
        sleep(Duration::from_secs(1)).await;
        lab.cut_one_way(Link::Clients, way);
        let cut = Instant::now();
        for id in ids {
            let side = oracle.side(id).await;
            assert!(matches!(side.end, End::Broken(_)), "{side:?}");
        }
        assert!(cut.elapsed() < VANISHED_MAX, "{:?}", cut.elapsed());
        lab.heal_one_way(Link::Clients, way);
        let again = timeout(VANISHED_MAX, gateway.client(identities())).await.expect("in time");
        again.tunnel(ECHO).await.expect("a tunnel");
        all_broken(tunnels).await;
    });
}

/// Opens tunnels until one leads to the endpoint of this name.
async fn to(client: &Client, name: u8) -> Tunnel {
    for _ in 0..64 {
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        if tunnel.read_u8().await.expect("a name") == name {
            return tunnel;
        }
    }
    panic!("no tunnel leads to {name}");
}

#[test]
fn tunnels_to_a_node_that_vanishes_break_within_half_a_minute_and_new_ones_avoid_it() {
    let Some(lab) = Lab::new("endpoint node vanishes") else {
        return;
    };
    run(async {
        let hosts = [(ENDPOINT_HOST, 1, "TCP"), (NEAR_HOST, 1, "TCP")];
        let gateway = Gateway::start(&lab.settings(&hosts)).await;
        let mut endpoints = Vec::new();
        for host in [ENDPOINT_HOST, NEAR_HOST] {
            let listener = lab.net.listen(host, endpoint_port()).await;
            endpoints.push(Endpoint::named(listener, host));
        }
        let client = gateway.client(identities()).await;
        let mut idle = to(&client, ENDPOINT_HOST).await;
        let mut busy = to(&client, ENDPOINT_HOST).await;
        lab.cut(Link::Endpoints);
        let cut = Instant::now();
        busy.write_all(b"in flight").await.expect("an open tunnel");
        let new = async {
            for index in 0..20 {
                let mut tunnel = client.tunnel(ECHO).await.expect("a new tunnel");
                assert_eq!(tunnel.read_u8().await.expect("a name"), NEAR_HOST, "{index}");
            }
            assert!(cut.elapsed() < Duration::from_secs(10), "{:?}", cut.elapsed());
        };
        let ends = async {
            let (one, other) = tokio::join!(broken(&mut idle), broken(&mut busy));
            assert_eq!([one, other], [Some(h2::Reason::CONNECT_ERROR); 2]);
            cut.elapsed()
        };
        let ((), ended) = tokio::join!(new, ends);
        assert!(ended < VANISHED_MAX, "{ended:?}");
    });
}

#[test]
fn an_endpoint_of_a_tls_listener_that_vanishes_breaks_its_tunnel_within_half_a_minute() {
    breaks_a_tls_tunnel(Link::Endpoints, "upstream_reset");
}

#[test]
fn a_client_of_a_tls_listener_that_vanishes_breaks_its_tunnel_within_half_a_minute() {
    breaks_a_tls_tunnel(Link::Clients, "downstream_lost");
}

/// Cuts a link of an open tunnel of a TLS listener, under bytes in both directions.
fn breaks_a_tls_tunnel(link: Link, reason: &str) {
    let Some(lab) = Lab::new("side of a TLS listener vanishes") else {
        return;
    };
    run(async {
        let mut settings = lab.settings(&[(ENDPOINT_HOST, 1, "TCP")]);
        let address = lab.net.address(1, TLS_PORT);
        settings.listeners = format!(
            "  - {{name: tls, bind: \"{address}\", protocol: tls, routes: [{{sni: [\"*\"], to: \
             \"{ECHO}\"}}]}}\n"
        );
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
        let gateway = Gateway::start(&settings).await;
        let listener = lab.net.listen(ENDPOINT_HOST, endpoint_port()).await;
        let hello = client_hello("echo.example", &[]);
        let mut client = TcpStream::connect(address).await.expect("a connection");
        client.write_all(&hello).await.expect("a hello");
        let (mut endpoint, _) = listener.accept().await.expect("a tunnel");
        let mut replayed = vec![0; hello.len()];
        endpoint.read_exact(&mut replayed).await.expect("a hello");
        endpoint.write_all(b"answer").await.expect("an open tunnel");
        client.read_exact(&mut [0; 6]).await.expect("an answer");
        lab.cut(link);
        let cut = Instant::now();
        for stream in [&mut client, &mut endpoint] {
            stream.write_all(b"in flight").await.expect("an open tunnel");
        }
        let left = if matches!(link, Link::Clients) { &mut endpoint } else { &mut client };
        let end = timeout(VANISHED_MAX, left.read_to_end(&mut Vec::new())).await;
        end.expect("an end in time").expect_err("a reset");
        let after = cut.elapsed();
        // The metrics are behind the link of the clients.
        lab.heal(link);
        assert_eq!(gateway.tunnels(reason).await, 1.0, "after {after:?}");
        if reason == "upstream_reset" {
            // The cause of a warning is logged.
            gateway.logged("and not acknowledged").await;
        }
    });
}

#[test]
fn a_gateway_that_is_stopped_for_a_minute_loses_no_byte() {
    run(stopped_for(Duration::from_secs(60)));
}

/// The endpoint's kernel answers all that time, with a closed window.
#[test]
fn an_endpoint_that_is_stopped_for_a_minute_loses_no_byte() {
    run(endpoint_stopped_for(Duration::from_secs(60)));
}

#[test]
fn a_gateway_with_a_tenth_of_a_core_times_no_peer_out() {
    // 40 s: two deadlines of PING.
    throttled(|id| Plan { rest: Duration::from_millis(250), ..Plan::both(id, 160 * 16 * 1024) });
}

/// Measures the time until both sides of a stream have received all bytes of a plan: those that are
/// sent wait in the kernel. Returns it with the index of the path.
async fn time_of(
    (path, stream): (usize, impl AsyncRead + AsyncWrite + Unpin),
    plan: Plan,
    oracle: Oracle,
) -> (usize, Duration) {
    let begun = Instant::now();
    let side = oracle::drive(stream, plan).await;
    oracle.whole(plan, side).await;
    (path, begun.elapsed())
}

/// Returns KiB per second of the median transfer.
fn goodput(mut times: Vec<Duration>) -> f64 {
    times.sort();
    GOODPUT_BYTES as f64 / 1024.0 / times[times.len() / 2].as_secs_f64()
}

#[test]
fn the_goodput_of_an_impaired_link_is_reported_beside_that_of_a_plain_relay() {
    let Some(lab) = Lab::new("impaired link, beside a plain relay") else {
        return;
    };
    run(async {
        let LabPath { gateway, oracle, .. } = &LabPath::start(&lab).await;
        let relay = lab.relay(lab.net.address(ENDPOINT_HOST, endpoint_port())).await;
        let _links = [lab.impair(Link::Clients, 1).await, lab.impair(Link::Endpoints, 2).await];
        let mut ids = 0..;
        for (way, up, down) in [("up", GOODPUT_BYTES, 0), ("down", 0, GOODPUT_BYTES)] {
            let mut plan = || Plan { up, down, ..Plan::both(ids.next().expect("a number"), 0) };
            let mut times = [Vec::new(), Vec::new()];
            for _ in 0..GOODPUT_ROUNDS {
                let mut open = Vec::new();
                for _ in 0..GOODPUT_AT_ONCE {
                    // A new TCP connection on each path, and all are open before the first byte.
                    let client = gateway.client(identities()).await;
                    let tunnel = loop {
                        // Lost packets of a dial may cost more than its deadline.
                        if let Ok(tunnel) = client.tunnel(ECHO).await {
                            break tunnel;
                        }
                    };
                    let stream = TcpStream::connect(relay.address).await.expect("a connection");
                    open.push((client, tunnel, stream));
                }
                let (mut clients, mut transfers) = (Vec::new(), JoinSet::new());
                for (client, tunnel, stream) in open {
                    clients.push(client);
                    transfers.spawn(time_of((0, tunnel), plan(), oracle.clone()));
                    transfers.spawn(time_of((1, stream), plan(), oracle.clone()));
                }
                for (path, time) in transfers.join_all().await {
                    times[path].push(time);
                }
            }
            let [through, beside] = times.map(goodput);
            print_uncaptured(&format!(
                "goodput of an impaired link, {way}: {through:.0} KiB/s through the gateway and \
                 {beside:.0} KiB/s through a plain relay, in the median: {:.2}",
                through / beside,
            ));
        }
    });
}
