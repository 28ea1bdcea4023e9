//! Faults in which the kernel's TCP takes part, in a network namespace.

use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::{LabPath, all_whole, plans, start};
use crate::support::lab::{ENDPOINT_HOST, Lab, Link, Way};
use crate::support::oracle::Plan;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, echoes, endpoint_port, identities, run, until,
};

/// Duration of a partition that loses nothing.
const PARTITION: Duration = Duration::from_secs(5);
/// Duration of a partition of one direction, before the first SYN is sent again.
const ONE_WAY: Duration = Duration::from_millis(800);
/// Time of a handshake, and some of a loaded machine.
const HANDSHAKE_MAX: Duration = Duration::from_secs(8);
/// Length of packets that no tunnel's headers exceed, and the certificates of a gateway do.
const NARROW: u16 = 1280;

#[test]
fn a_partition_of_5_seconds_loses_no_byte() {
    let Some(lab) = Lab::new("WAN partition of 5 s") else {
        return;
    };
    run(async {
        let LabPath { client, oracle, .. } = &LabPath::start(&lab).await;
        let rest = Duration::from_millis(100);
        // Three seconds without the partition.
        let plan = |id| Plan { rest, ..Plan::both(id, 30 * 16 * 1024) };
        let tunnels = start(client, &[1, 2, 3, 4].map(plan)).await;
        for link in [Link::Clients, Link::Endpoints] {
            lab.cut(link);
        }
        // deadline: the duration of the partition is what is tested.
        sleep(PARTITION).await;
        for link in [Link::Clients, Link::Endpoints] {
            lab.heal(link);
        }
        let healed = Instant::now();
        let mut tunnel = client.tunnel(ECHO).await.expect("a new tunnel");
        assert!(healed.elapsed() < PARTITION, "{:?}", healed.elapsed());
        drop_cleanly(5, &mut tunnel).await;
        all_whole(oracle, tunnels).await;
    });
}

#[test]
fn a_partition_of_one_direction_loses_no_byte() {
    let Some(lab) = Lab::new("partition of one direction") else {
        return;
    };
    run(async {
        let LabPath { client, oracle, .. } = &LabPath::start(&lab).await;
        let rest = Duration::from_millis(100);
        // Eight seconds without the partitions.
        let plan = |id| Plan { rest, ..Plan::both(id, 80 * 16 * 1024) };
        let tunnels = start(client, &[1, 2, 3, 4].map(plan)).await;
        let mut ids = 5..;
        for link in [Link::Clients, Link::Endpoints] {
            for way in [Way::ToGateway, Way::FromGateway] {
                let id = ids.next().expect("a number");
                lab.cut_one_way(link, way);
                let mut during = std::pin::pin!(client.tunnel(ECHO));
                // deadline: a tunnel needs both directions of both links. The next SYN, a second
                // after the first one, arrives.
                let opened = timeout(ONE_WAY, &mut during).await;
                assert!(opened.is_err(), "{link:?} {way:?} is cut");
                lab.heal_one_way(link, way);
                drop_cleanly(id, &mut during.await.expect("a tunnel")).await;
            }
        }
        all_whole(oracle, tunnels).await;
    });
}

#[test]
fn a_link_that_loses_reorders_repeats_and_corrupts_packets_changes_no_byte() {
    let Some(lab) = Lab::new("impaired link") else {
        return;
    };
    run(async {
        let LabPath { client, oracle, .. } = &LabPath::start(&lab).await;
        let links = [lab.impair(Link::Clients, 1).await, lab.impair(Link::Endpoints, 2).await];
        let tunnels = start(client, &plans(1..9, 64 * 1024)).await;
        all_whole(oracle, tunnels).await;
        for link in links {
            let counts = link.end().await;
            assert!(counts.values().all(|&count| count > 0), "{counts:?}");
        }
    });
}

/// Sends the head of a tunnel without bytes, and ends it.
async fn drop_cleanly(id: u64, tunnel: &mut Tunnel) {
    tunnel.write_all(&Plan::both(id, 0).head()).await.expect("an open tunnel");
    tunnel.shutdown().await.expect("our end");
}

#[test]
fn a_black_hole_for_long_packets_ends_a_handshake_by_its_deadline_and_no_other_connection() {
    let Some(lab) = Lab::new("MTU black hole") else {
        return;
    };
    run(async {
        let gateway = lab.gateway().await;
        let _endpoint = Endpoint::echo(lab.net.listen(ENDPOINT_HOST, endpoint_port()).await);
        let open = gateway.client(identities()).await;
        lab.narrow(Link::Clients, Way::FromGateway, NARROW);
        // The certificates of the gateway do not arrive.
        let tls = identities().client(CLIENT, GATEWAY);
        let handshake = timeout(HANDSHAKE_MAX, Client::connect(gateway.address, &tls)).await;
        handshake.expect("an end in time").expect_err("no handshake");
        gateway.logged("not acknowledged; long packets to it may be lost (path MTU)").await;
        echoes(&mut open.tunnel(ECHO).await.expect("a tunnel of short packets")).await;
        lab.widen(Link::Clients, Way::FromGateway);
        gateway.client(identities()).await;

        // The first of two packets does not arrive.
        lab.narrow(Link::Clients, Way::ToGateway, NARROW);
        let mut hello = TcpStream::connect(gateway.address).await.expect("a connection");
        hello.write_all(&[22; 2000]).await.expect("room");
        gateway.logged("long packets from it may be lost (path MTU)").await;
        echoes(&mut open.tunnel(ECHO).await.expect("a tunnel of short packets")).await;
        assert_eq!(gateway.refused_handshakes("timeout").await, 2.0);
    });
}

#[test]
fn short_packets_of_the_kernel_avoid_a_black_hole() {
    let Some(lab) = Lab::new("MTU black hole with tcp_mtu_probing") else {
        return;
    };
    run(async {
        let gateway = lab.gateway().await;
        lab.narrow(Link::Clients, Way::FromGateway, NARROW);
        lab.sysctl("tcp_mtu_probing", "2");
        gateway.client(identities()).await;
    });
}

#[test]
fn without_a_free_port_tunnels_are_refused_and_the_others_go_on() {
    let Some(lab) = Lab::new("ephemeral ports used up") else {
        return;
    };
    run(async {
        let gateway = lab.gateway().await;
        let _endpoint = Endpoint::echo(lab.net.listen(ENDPOINT_HOST, endpoint_port()).await);
        lab.sysctl("ip_local_port_range", "40000 40009");
        let client = gateway.client(identities()).await;
        let mut tunnels = Vec::new();
        while let Ok(mut tunnel) = client.tunnel(ECHO).await {
            echoes(&mut tunnel).await;
            tunnels.push(tunnel);
            assert!(tunnels.len() <= 10, "a tunnel for each port");
        }
        assert!(tunnels.len() >= 5, "{} tunnels", tunnels.len());
        let refused = async || gateway.tunnels("overloaded").await;
        until("a refusal with its reason", refused, |&count| count >= 1.0).await;
        assert_eq!(gateway.readiness().await.0, 200);
        for tunnel in &mut tunnels {
            echoes(tunnel).await;
        }
        drop(tunnels.pop());
        let again = async || client.tunnel(ECHO).await.is_ok();
        until("a tunnel on the port that became free", again, |&is_open| is_open).await;
    });
}
