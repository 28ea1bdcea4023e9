//! Networks that slice, delay, slow and cut. Every byte is compared, and no break looks clean.

use std::net::SocketAddr;
use std::time::Duration;

use h2::Reason;
use strait::tools::hbone::Client;
use tokio::io::AsyncWriteExt;

use super::{all_whole, plans, start};
use crate::support::link::{Cut, Faults, FaultyRelay};
use crate::support::oracle::{self, End, Oracle, Plan, SideResult, is_consistent};
use crate::support::{CLIENT, ECHO, GATEWAY, Gateway, Net, Settings, bytes, identities, run};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

async fn gateway(net: Net) -> Gateway {
    Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await
}

/// Connects a client through a link.
async fn client(address: SocketAddr) -> Client {
    let tls = identities().client(CLIENT, GATEWAY);
    Client::connect(address, &tls).await.expect("a connection")
}

#[test]
fn slices_and_delays_on_both_sides_change_no_byte() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(12, 9000).await);
        let toxic = |slice, delay| Faults {
            slice: Some(slice),
            delay: Duration::from_millis(delay),
            ..Faults::default()
        };
        let rounds = [(toxic(1, 5), 8 * KIB), (toxic(7, 20), 64 * KIB)];
        let far = net.address(12, 9000);
        let _behind = FaultyRelay::new(net.listen(11, 9000).await, far, move |number| {
            [rounds[number / 8].0; 2]
        });
        let mut count = 0;
        for (toxic, bytes) in rounds {
            let before =
                FaultyRelay::new(net.listen(2, 0).await, gateway.address, move |_| [toxic; 2]);
            let client = client(before.address).await;
            let plans = plans(count..count + 8, bytes);
            all_whole(&oracle, start(&client, &plans).await).await;
            count += 8;
            drop(client);
            gateway.wait_until_open(0, 0).await;
            let completed = ("completed".to_owned(), count as f64);
            assert_eq!(gateway.tunnels_by_reason().await, [completed].into());
        }
    });
}

#[test]
fn a_client_that_is_cut_off_never_looks_clean_and_hurts_nobody_else() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(11, 9000).await);
        let neighbour = gateway.client(identities()).await;
        let mut lost = 0;
        for how in [Cut::Reset, Cut::End] {
            // After the handshake and four CONNECTs, and long before any tunnel's last byte.
            for after in [20_000, 200_000, 3_333_333] {
                for way in [0, 1] {
                    let mut toxics = [Faults::default(); 2];
                    toxics[way] = Faults::cut(after, how);
                    let to = gateway.address;
                    let link = FaultyRelay::new(net.listen(2, 0).await, to, move |_| toxics);
                    let client = client(link.address).await;
                    let ids = 1000 + lost..1004 + lost;
                    let cut = start(&client, &plans(ids.clone(), 64 * MIB)).await;
                    let whole = start(&neighbour, &plans(lost..lost + 2, MIB)).await;
                    let what = format!("{how:?} after {after}, way {way}");
                    for (_, side) in cut.join_all().await {
                        assert!(matches!(side.end, End::Broken(_)), "{what}: {side:?}");
                    }
                    for id in ids {
                        let side = oracle.side(id).await;
                        assert!(matches!(side.end, End::Broken(_)), "{what}: {side:?}");
                    }
                    all_whole(&oracle, whole).await;
                    lost += 4;
                    gateway.wait_until_open(1, 0).await;
                }
            }
        }
        let ends = [("completed", lost / 2), ("downstream_lost", lost)];
        let ends = ends.map(|(reason, count)| (reason.to_owned(), count as f64));
        assert_eq!(gateway.tunnels_by_reason().await, ends.into());
    });
}

#[test]
fn an_endpoint_that_is_cut_off_is_connect_error_and_its_neighbours_go_on() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(12, 9000).await);
        let client = gateway.client(identities()).await;
        let rounds = [1, 20_000, 1_111_111].map(|after| [(after, 0), (after, 1)]);
        let rounds = rounds.as_flattened().to_vec();
        let (toxics, far) = (rounds.clone(), net.address(12, 9000));
        let _link = FaultyRelay::new(net.listen(11, 9000).await, far, move |number| {
            let mut toxic = [Faults::default(); 2];
            // Every other connection is without faults.
            if number.is_multiple_of(2) {
                let (after, way) = toxics[number / 8];
                toxic[way] = Faults::cut(after, Cut::Reset);
            }
            toxic
        });
        let mut count = 0;
        for (after, way) in rounds {
            let tunnels = start(&client, &plans(count..count + 8, 4 * MIB)).await;
            for (plan, side) in tunnels.join_all().await {
                if plan.id.is_multiple_of(2) {
                    let code = Some(Reason::CONNECT_ERROR);
                    let what = format!("after {after}, way {way}");
                    assert_eq!(side.end, End::Broken(code), "{what}");
                    // A head that was cut has no name.
                    if way == 1 || after >= 20_000 {
                        let endpoint = oracle.side(plan.id).await;
                        assert!(is_consistent(side, endpoint), "{what}: {side:?}, {endpoint:?}");
                    }
                } else {
                    oracle.whole(plan, side).await;
                }
            }
            count += 8;
            gateway.wait_until_open(1, 0).await;
        }
        let ends = ["completed", "upstream_reset"].map(|reason| (reason.to_owned(), 24.0));
        assert_eq!(gateway.tunnels_by_reason().await, ends.into());
    });
}

#[test]
fn one_directions_end_is_that_directions_alone() {
    run(async {
        const CUT: u64 = 100_000;
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(12, 9000).await);
        let far = net.address(12, 9000);
        let _link = FaultyRelay::new(net.listen(11, 9000).await, far, |number| {
            let mut toxics = [Faults::default(); 2];
            toxics[number] = Faults::cut(CUT, Cut::End);
            toxics
        });
        let client = gateway.client(identities()).await;
        let upload_ends = Plan::both(1, MIB);
        let side = oracle::tunnel(&client, upload_ends).await;
        assert_eq!(side, SideResult::complete(MIB), "the way back goes on");
        let endpoint = oracle.side(1).await;
        let received = CUT - upload_ends.head().len() as u64;
        assert_eq!((endpoint.received, endpoint.end), (received, End::Short));

        let plan = Plan::both(2, MIB);
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(&plan.head()).await.expect("a head");
        let cut = bytes::expect(&mut tunnel, plan.down_stream(), 0, CUT).await;
        cut.expect("what was not cut");
        bytes::expect_end(&mut tunnel).await;
        let sent = bytes::send(&mut tunnel, plan.id, 0, MIB).await;
        sent.expect("the way there goes on");
        tunnel.shutdown().await.expect("our end");
        assert_eq!(oracle.side(2).await, SideResult::complete(MIB));
        gateway.wait_until_open(1, 0).await;
    });
}

#[test]
fn seven_tunnels_finish_before_the_one_whose_endpoint_is_slow() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(12, 9000).await);
        let slow = Faults { limit: Some(256 * 1024), ..Faults::default() };
        let far = net.address(12, 9000);
        let _link = FaultyRelay::new(net.listen(11, 9000).await, far, move |number| {
            [if number == 0 { slow } else { Faults::default() }; 2]
        });
        let client = gateway.client(identities()).await;
        let mut tunnels = start(&client, &plans(0..8, MIB)).await;
        let mut order = Vec::new();
        while let Some(ended) = tunnels.join_next().await {
            let (plan, side) = ended.expect("a side");
            oracle.whole(plan, side).await;
            order.push(plan.id);
        }
        assert_eq!(order.last(), Some(&0), "{order:?}");
        gateway.wait_until_open(1, 0).await;
    });
}

#[test]
fn an_endpoint_that_takes_less_than_the_kernel_holds_gets_every_byte() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(12, 9000).await);
        let slow = Faults { limit: Some(4 << 20), ..Faults::default() };
        let near = net.listen(11, 9000).await;
        let buffer = socket2::SockRef::from(&near).set_recv_buffer_size(16 * 1024);
        buffer.expect("a small buffer");
        let _link = FaultyRelay::new(near, net.address(12, 9000), move |_| [slow; 2]);
        let client = gateway.client(identities()).await;
        // Linux gives a socket at most 4 MiB to send from (tcp(7), `tcp_wmem`): the gateway has to
        // wait, and its writes are taken in parts.
        all_whole(&oracle, start(&client, &plans(0..3, 8 * MIB)).await).await;
        gateway.wait_until_open(1, 0).await;
    });
}
