//! Gateways behind a binding: shares of several, failures, and replaced addresses.

use std::net::SocketAddr;
use std::time::Duration;

use strait::tools::dev::Issuer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bindings::{WORKLOAD, Workload, bound, connect, east, echoes, is_rejected};
use crate::support::dns::{Answer, DnsServer};
use crate::support::loss::{Loss, first_success, lose};
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, determine_clusters_by_issuers, endpoint_port,
    identities, run, try_echo, until,
};
use crate::transit::{WEST_GATEWAY, start_west, start_west_with, west};
use crate::transit_shares::{TUNNELS, assert_counts};

#[test]
fn two_donors_share_the_connections_and_one_that_is_gone_is_replaced() {
    run(async {
        let (one, other, gone) = (Net::new(), Net::new(), Net::new());
        let mut workloads = Vec::new();
        let mut donors = Vec::new();
        for net in [one, other] {
            workloads.push(Workload::start(net, WORKLOAD, false).await);
            donors.push(start_west(&west(net, &[(11, 1, "HBONE")])).await);
        }
        let here = Net::new();
        let acceptor = Gateway::start(&east(here, &[one, other, gone], "")).await;
        for _ in 0..40 {
            echoes(&mut connect(bound(here)).await).await;
        }
        let counts = [workloads[0].accepted(), workloads[1].accepted()];
        assert_eq!(counts.iter().sum::<usize>(), 40);
        // A share below a fifth has a probability below 1 in 10,000.
        assert!(counts.iter().all(|count| *count >= 8), "{counts:?}");
        let completed = async || acceptor.tunnels_by_reason().await;
        let all =
            |ends: &std::collections::BTreeMap<String, f64>| ends.values().sum::<f64>() == 40.0;
        until("their ends", completed, all).await;
    });
}

#[test]
fn all_addresses_of_a_bindings_gateway_are_replaced_within_5_s() {
    for loss in Loss::ALL {
        run(all_addresses_are_replaced(loss));
    }
}

async fn all_addresses_are_replaced(loss: Loss) {
    let (here, old, new) = (Net::new(), Net::new(), Net::new());
    let _workloads =
        [Workload::start(old, WORKLOAD, false).await, Workload::start(new, WORKLOAD, false).await];
    let first = start_west(&west(old, &[(11, 1, "HBONE")])).await;
    let _second = start_west(&west(new, &[(11, 1, "HBONE")])).await;
    let says = |net: Net| Answer::Addresses(vec![net.ip(1)], 300);
    let dns = DnsServer::start(here.address(3, 5300), says(old)).await;
    let mut settings = east(here, &[old], "");
    let address = format!("\"{}:15008\"", old.ip(1));
    settings.more = settings.more.replace(&address, "\"west.example:15008\"");
    settings.more += &format!("dns: {{servers: [\"{}\"]}}\n", here.address(3, 5300));
    let _acceptor = Gateway::start(&settings).await;
    recovers(bound(here)).await;
    // The old one is lost before the name leads to the new one, whose TTL is 300 s.
    dns.set_answer(says(new));
    let _lost = lose(first, loss).await;
    let time = recovers(bound(here)).await;
    assert!(time < Duration::from_secs(5), "{loss:?}: {time:?}");
}

/// Connects to a binding until it answers. Returns the time that this took.
async fn recovers(address: SocketAddr) -> Duration {
    first_success(|| async move {
        // A rejected client is reset, maybe before its connection is seen as open.
        let client = TcpStream::connect(address).await;
        match client {
            Ok(mut client) => try_echo(&mut client).await.is_ok(),
            Err(_) => false,
        }
    })
    .await
}

/// Donors of clusters west and north, whose certificates differ by their issuers alone. North has
/// three quarters of the instances.
struct Donors {
    nets: [Net; 2],
    gateways: [Gateway; 2],
    endpoints: [Endpoint; 2],
}

impl Donors {
    async fn start(issuers: [&Issuer; 2]) -> Self {
        let nets = [Net::new(), Net::new()];
        let donor = async |at: usize, capacity| {
            let leaf = issuers[at].leaf(WEST_GATEWAY).expect("a leaf");
            start_west_with(&west(nets[at], &[(11, capacity, "TCP")]), &leaf).await
        };
        let endpoint = async |net: Net| Endpoint::echo(net.listen(11, endpoint_port()).await);
        Self {
            gateways: [donor(0, 1).await, donor(1, 3).await],
            endpoints: [endpoint(nets[0]).await, endpoint(nets[1]).await],
            nets,
        }
    }

    /// Starts a gateway with a binding to these clusters, and returns it with its address.
    async fn acceptor(&self, clusters: &str) -> (Gateway, SocketAddr) {
        let net = Net::new();
        let mut settings = Settings::new(net, identities());
        settings.mesh = settings.mesh.replace("workloads: []", "workloads:");
        settings.more += "networks:\n";
        let clusters_of_donors = [("west", 1), ("north", 3)];
        for (donor, (cluster, capacity)) in self.nets.iter().zip(clusters_of_donors) {
            settings.mesh += &format!(
                "  - {{uid: {cluster}, namespace: app, clusterId: {cluster}, network: {cluster},
     workloadIps: [\"10.9.0.1\"], protocol: TCP, capacity: {capacity},
     services: {{app/echo.app.svc.cluster.local: {{80: 9000}}}}}}\n"
            );
            settings.more += &format!(
                "  - {{name: {cluster}, cluster: {cluster}, identities: [\"{WEST_GATEWAY}\"],
     gateways: [\"{}\"]}}\n",
                donor.address(1, 15008)
            );
        }
        let address = bound(net);
        settings.more += &format!(
            "bindings: [{{cluster: {clusters}, service: \"{ECHO}\", listen: \"{address}\", inner: \
             tcp}}]\n"
        );
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let known = identities();
            let issuers = [("east", &known.east), ("west", &known.west), ("north", &known.north)];
            determine_clusters_by_issuers(folder, &issuers);
        });
        gateway.ready().await;
        (gateway, address)
    }

    fn accepted(&self) -> [usize; 2] {
        self.endpoints.each_ref().map(Endpoint::accepted)
    }
}

/// Opens connections one after another. Each has ended before the next: the pick prefers a gateway
/// with fewer open tunnels, so that tunnels that end late would make the shares more even.
async fn open(address: SocketAddr, count: usize) {
    for _ in 0..count {
        let mut client = connect(address).await;
        echoes(&mut client).await;
        client.shutdown().await.expect("an open connection");
        assert_eq!(client.read(&mut [0]).await.expect("a clean end"), 0);
    }
}

#[test]
fn donors_of_two_clusters_share_by_weight_and_one_takes_over_from_the_other() {
    run(async {
        let known = identities();
        let donors = Donors::start([&known.west, &known.north]).await;
        let (_acceptor, address) = donors.acceptor("[west, north]").await;
        open(address, TUNNELS).await;
        let before = donors.accepted();
        assert_counts(&before[..1], 0.25);
        assert_counts(&before[1..], 0.75);
        let [_west, north] = donors.gateways;
        let _lost = lose(north, Loss::Refused).await;
        open(address, 20).await;
        let after = donors.endpoints.each_ref().map(Endpoint::accepted);
        assert_eq!(after, [before[0] + 20, before[1]]);
    });
}

#[test]
fn a_donor_with_a_certificate_of_the_other_cluster_is_not_used() {
    run(async {
        let west = &identities().west;
        let donors = Donors::start([west, west]).await;
        let (acceptor, address) = donors.acceptor("[west, north]").await;
        open(address, 20).await;
        assert_eq!(donors.accepted(), [20, 0]);
        let failed = "strait_dials_total{result=\"failed\"}";
        assert!(acceptor.metric(failed).await >= 1.0, "north was tried");
        let (acceptor, address) = donors.acceptor("north").await;
        is_rejected(address).await;
        let untrusted = async || acceptor.tunnels("gateway_untrusted").await;
        until("untrusted", untrusted, |&count| count == 1.0).await;
        acceptor.logged("belongs to cluster west, not to north").await;
        assert_eq!(donors.accepted(), [20, 0]);
    });
}
