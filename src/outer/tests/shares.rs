//! Shares of the gateways of a network by their round trip times.

use super::*;
use crate::snapshot::FACTOR_ONE;
use crate::snapshot::mesh::{Mesh, Template, Workload};

impl World {
    /// Publishes the records of gateways of network west, each with its service account.
    fn publish(&self, gateways: &[(&Scripted, &str)]) {
        let record = |(gateway, account): &(&Scripted, &str)| {
            let address = gateway.address;
            Workload {
                uid: format!("NetworkGateway/west/{}/{}", address.ip(), address.port()).into(),
                addresses: [address.ip()].into(),
                healthy: true,
                capacity: 1,
                template: Arc::new(Template {
                    namespace: "edge".into(),
                    service_account: (*account).into(),
                    trust_domain: "west.local".into(),
                    cluster: "west".into(),
                    network: "west".into(),
                    ..Template::default()
                }),
                ..Workload::default()
            }
        };
        let mesh = Mesh::new([], gateways.iter().map(record));
        self.publisher.update(Change { mesh: Some((mesh, "east".into())), ..Change::default() });
    }
}

#[tokio::test]
async fn a_slow_gateway_has_a_smaller_share_of_its_network() {
    let world = World::new();
    let gateways =
        [world.west(Script::new(Answer::Echo)).await, world.west(Script::new(Answer::Echo)).await];
    let shares = async || {
        let mut shares = Vec::new();
        for gateway in &gateways {
            let snapshot = world.publisher.reader().load();
            let mut known = snapshot.remote_gateways();
            let known = known.find(|(address, _)| *address == gateway.address);
            let (address, gateway) = known.expect("a record");
            let target = Target { address, gateway };
            let request = Request::new("echo.app:80".to_owned(), &Via::default());
            let (source, deadline) = (source("a"), Instant::now() + SOON);
            let opened = world.pool.open((&target, &source), &request, deadline);
            shares.push(opened.await.expect("a tunnel").weight_factor);
        }
        shares
    };
    world.publish(&[(&gateways[0], ""), (&gateways[1], "")]);
    assert_eq!(shares().await, [FACTOR_ONE; 2]);
    let slow = gateways[1].address;
    let compare = || {
        for _ in 0..3 {
            world.pool.simulate_times(|target| {
                let is_slow = target.address == slow;
                Duration::from_millis(if is_slow { 100 } else { 10 })
            });
        }
    };
    compare();
    assert_eq!(shares().await, [409, 102]);
    let rows = world.pool.status().into_iter();
    let mut shown: Vec<_> = rows.map(|row| (row.address == slow, row.share_percent)).collect();
    shown.sort_unstable();
    assert_eq!(shown, [(false, 159), (true, 39)]);
    // The earlier form of the gateway has a connection, but no part of the network.
    world.publish(&[(&gateways[0], ""), (&gateways[1], "gateway")]);
    assert_eq!(shares().await, [409, FACTOR_ONE]);
    compare();
    assert_eq!(shares().await, [409, 102]);
    assert_eq!(world.pool.status().len(), 3);
}

#[tokio::test]
async fn a_new_connection_keeps_the_least_round_trip_time_of_its_gateway() {
    let (world, gateway) = World::with(Answer::Echo).await;
    let mut tunnels = vec![world.open(&gateway).await.expect("a tunnel")];
    let row = || world.pool.status().remove(0);
    let least = Duration::from_micros(1);
    assert!(row().rtt_microseconds > Some(least.as_micros()), "the first PING counts");
    let target = target(&gateway);
    let known = world.pool.gateway(&target);
    known.rtt.lock().record(least, Instant::now());
    world.renew();
    let replaced = async {
        while row().tunnels == tunnels.len() {
            let mut stream = world.open(&gateway).await.expect("a tunnel");
            echoes(&mut stream, b"hello").await;
            tunnels.push(stream);
        }
    };
    timeout(SOON, replaced).await.expect("a second connection");
    assert_eq!(row().rtt_microseconds, Some(least.as_micros()));
}
