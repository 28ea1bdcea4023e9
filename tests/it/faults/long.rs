//! Rows that wait for the deadlines of keepalive, PING and a stopped process.

use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};

use super::stops::{endpoint_stopped_for, pause, stopped_for, throttled};
use super::{LabPath, all_broken, start};
use crate::support::lab::{ENDPOINT_HOST, Lab, Link, NEAR_HOST, Way};
use crate::support::oracle::{End, Oracle, Plan};
use crate::support::{ECHO, Endpoint, Gateway, broken, endpoint_port, identities, run, until};

/// Time in which a peer that has vanished is noticed: 30 s, and some of a loaded machine.
const VANISHED_MAX: Duration = Duration::from_secs(33);
/// Retransmissions of `net.ipv4.tcp_retries2` with which bytes in flight have about 26 s.
const RETRIES: &str = "6";
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
        lab.sysctl("tcp_retries2", RETRIES);
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
