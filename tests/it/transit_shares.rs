//! Shares of networks, and gateways that are replaced, over real gateways of two networks. The
//! numbers in the test names refer to the acceptance list of the features that Strait was planned
//! with.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::support::dns::{Answer, DnsServer};
use crate::support::loss::{Loss, first_success, lose};
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, echoes, identities, replace, run, until,
};
use crate::transit::{WEST_GATEWAY, start_west, west};

/// Limit of the time from new addresses to tunnels that reach them.
const RECOVERY: Duration = Duration::from_secs(5);
/// Tunnels over which shares are measured.
pub const TUNNELS: usize = 400;

/// Returns the settings of a gateway of network east with these pods of its own. `remote` has the
/// zone of each instance in network west, which is behind `gateways`.
fn spread(net: Net, own: &[u8], remote: &[&str], gateways: &[String]) -> Settings<'static> {
    let own: Vec<_> = own.iter().map(|host| (*host, 1, "TCP")).collect();
    let mut settings = Settings::new(net, identities()).endpoints(&own);
    settings.mesh = settings.mesh.replace("workloads: []", "workloads:");
    for (at, zone) in remote.iter().enumerate() {
        let _ = writeln!(
            settings.mesh,
            "  - {{uid: \"west/{at}\", namespace: app, clusterId: west, network: west,
     workloadIps: [\"10.9.0.{at}\"], protocol: HBONE, locality: {{region: west, zone: {zone}}},
     services: {{app/echo.app.svc.cluster.local: {{80: 9000}}}}}}"
        );
    }
    let transit = "to: [{cluster: west}]\n      transit: always";
    settings.exposure = settings.exposure.replace("to: [{cluster: west}]", transit);
    let _ = write!(
        settings.more,
        "traffic: [{{service: echo.app.svc.cluster.local, distribution: any}}]
networks: [{{name: west, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: [{}]}}]
",
        gateways.join(", ")
    );
    settings
}

/// Returns the address of a network's gateway, as `networks[].gateways` has it.
fn address(net: Net) -> String {
    format!("\"{}\"", net.address(1, 15008))
}

async fn pods(net: Net, hosts: &[u8]) -> Vec<Endpoint> {
    let mut pods = Vec::new();
    for host in hosts {
        pods.push(Endpoint::echo(net.listen(*host, 9000).await));
    }
    pods
}

fn plain(hosts: &[u8]) -> Vec<(u8, u32, &'static str)> {
    hosts.iter().map(|host| (*host, 1, "TCP")).collect()
}

/// A pod in each of two networks, with the gateway of the other one.
struct TwoPods {
    settings: Settings<'static>,
    own: Endpoint,
    remote: Endpoint,
    _west: Gateway,
}

impl TwoPods {
    async fn start() -> Self {
        let (here, there) = (Net::new(), Net::new());
        Self {
            settings: spread(here, &[11], &["a"], &[address(there)]),
            own: Endpoint::echo(here.listen(11, 9000).await),
            remote: Endpoint::echo(there.listen(21, 9000).await),
            _west: start_west(&west(there, &plain(&[21]))).await,
        }
    }

    fn counts(&self) -> [usize; 2] {
        [self.own.accepted(), self.remote.accepted()]
    }
}

/// Opens tunnels one after another.
async fn open(client: &Client, to: &str, count: usize) {
    for _ in 0..count {
        let mut tunnel = client.tunnel(to).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        tunnel.shutdown().await.expect("an open tunnel");
        let end = tunnel.read(&mut [0]).await.expect("a clean end");
        assert_eq!(end, 0);
    }
}

/// Asserts that each pod has its share of the tunnels, within five standard deviations.
#[track_caller]
fn assert_share(pods: &[Endpoint], share: f64) {
    let counts: Vec<_> = pods.iter().map(Endpoint::accepted).collect();
    assert_counts(&counts, share);
}

/// As [`assert_share`], of counts.
#[track_caller]
pub fn assert_counts(counts: &[usize], share: f64) {
    let all = TUNNELS as f64;
    let bound = 5.0 * (all * share * (1.0 - share)).sqrt();
    for (at, count) in counts.iter().enumerate() {
        let count = *count as f64;
        assert!((count - all * share).abs() <= bound, "pod {at} has {count} of {all}, not {share}");
    }
}

#[test]
fn two_and_two_pods_of_one_network_get_a_quarter_each_directly() {
    run(async {
        let net = Net::new();
        let pods = pods(net, &[11, 12, 13, 14]).await;
        let mut settings = spread(net, &[11, 12, 13, 14], &[], &[]);
        // Two of them are of another cluster of the same network.
        settings.mesh = settings.mesh.replacen("clusterId: east", "clusterId: west", 2);
        let networks = settings.more.find("networks:").expect("networks");
        settings.more.truncate(networks);
        let gateway = Gateway::start(&settings).await;
        open(&gateway.client(identities()).await, ECHO, TUNNELS).await;
        assert_share(&pods, 0.25);
    });
}

#[test]
fn the_pods_of_three_remote_zones_all_count() {
    run(async {
        let (here, there) = (Net::new(), Net::new());
        let own = pods(here, &[11, 12]).await;
        let hosts = [21, 22, 23, 24, 25, 26];
        let remote = pods(there, &hosts).await;
        let _west = start_west(&west(there, &plain(&hosts))).await;
        let zones = ["a", "b", "b", "c", "c", "c"];
        let settings = spread(here, &[11, 12], &zones, &[address(there)]);
        let gateway = Gateway::start(&settings).await;
        open(&gateway.client(identities()).await, ECHO, TUNNELS).await;
        assert_share(&own, 0.125);
        assert_share(&remote, 0.125);
    });
}

#[test]
fn two_gateways_of_one_network_share_1_to_1() {
    run(async {
        let (here, first, second) = (Net::new(), Net::new(), Net::new());
        let mut behind = pods(first, &[11]).await;
        behind.extend(pods(second, &[11]).await);
        let _first = start_west(&west(first, &plain(&[11]))).await;
        let _second = start_west(&west(second, &plain(&[11]))).await;
        let gateways = [address(first), address(second)];
        let gateway = Gateway::start(&spread(here, &[], &["a", "a", "b"], &gateways)).await;
        open(&gateway.client(identities()).await, ECHO, TUNNELS).await;
        assert_share(&behind, 0.5);
    });
}

#[test]
fn a_split_of_clusters_in_two_networks_shares_10_to_90() {
    run(async {
        let mut pods = TwoPods::start().await;
        let settings = &mut pods.settings;
        let _ = write!(
            settings.exposure,
            "      subsets:
        - {{name: here, labels: {{topology.istio.io/cluster: east}}}}
        - {{name: there, labels: {{topology.istio.io/cluster: west}}}}
        - {{name: both, split: [{{subset: here, weight: 10}}, {{subset: there, weight: 90}}]}}
"
        );
        // Tunnels would stay here without the split.
        settings.more = settings.more.replace("distribution: any", "distribution: network");
        let _ = writeln!(
            settings.more,
            "names: {{aliases: [{{name: \"both.global:80\", to: \
             \"echo.app.svc.cluster.local:80\", subset: both}}]}}"
        );
        let gateway = Gateway::start(settings).await;
        let client = gateway.client(identities()).await;
        open(&client, "both.global:80", TUNNELS).await;
        let [own, remote] = pods.counts();
        assert_counts(&[own], 0.1);
        assert_counts(&[remote], 0.9);
    });
}

#[test]
fn an_exceeded_budget_leaves_a_quarter_of_the_weight() {
    run(async {
        let mut pods = TwoPods::start().await;
        let settings = &mut pods.settings;
        let _ = writeln!(
            settings.more,
            "links:
  - {{from: west, to: east}}
  - {{from: west, to: west, budget: {{bytes: 1MiB, excess_weight: 25%}}}}"
        );
        let gateway = Gateway::start(settings).await;
        let client = gateway.client(identities()).await;
        while pods.remote.accepted() == 0 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            carries(&mut tunnel, 1 << 20).await;
        }
        let reduced = async || gateway.run_command(&["status", "peers"]).await.1;
        until("the weight is reduced", reduced, |page| page.contains("25%")).await;
        let before = pods.counts();
        open(&client, ECHO, TUNNELS).await;
        let counts = pods.counts();
        assert_counts(&[counts[0] - before[0]], 0.8);
        assert_counts(&[counts[1] - before[1]], 0.2);
    });
}

/// Sends bytes through a tunnel to an endpoint that echoes them.
async fn carries(tunnel: &mut Tunnel, bytes: usize) {
    let (mut read, mut write) = tokio::io::split(tunnel);
    let sent = vec![7; bytes];
    let mut received = vec![0; bytes];
    let (written, read) = tokio::join!(write.write_all(&sent), read.read_exact(&mut received));
    written.expect("an open tunnel");
    read.expect("an echo");
    assert!(received == sent);
}

#[test]
fn all_addresses_of_a_networks_gateways_are_replaced_within_5_s() {
    for loss in Loss::ALL {
        run(all_addresses_are_replaced(loss));
    }
}

async fn all_addresses_are_replaced(loss: Loss) {
    let here = Net::new();
    let nets = [Net::new(), Net::new(), Net::new(), Net::new()];
    let mut behind = Vec::new();
    let mut gateways = Vec::new();
    for net in nets {
        behind.extend(pods(net, &[11]).await);
        gateways.push(start_west(&west(net, &plain(&[11]))).await);
    }
    let says = |nets: &[Net]| Answer::Addresses(nets.iter().map(|net| net.ip(1)).collect(), 300);
    let dns = DnsServer::start(here.address(2, 5300), says(&nets[..2])).await;
    let name = "\"gateways.west.example:15008\"".to_owned();
    let mut settings = spread(here, &[], &["a"], &[name]);
    let _ = writeln!(settings.more, "dns: {{servers: [\"{}\"]}}", here.address(2, 5300));
    let gateway = Gateway::start(&settings).await;
    let client = Arc::new(gateway.client(identities()).await);
    recovers(&client).await;
    let before: usize = behind[..2].iter().map(Endpoint::accepted).sum();
    assert!(before >= 1, "the old gateways serve");
    // The old ones are lost before the name leads to the new ones, whose TTL is 300 s.
    dns.set_answer(says(&nets[2..]));
    let mut lost = Vec::new();
    for gateway in gateways.drain(..2) {
        lost.push(lose(gateway, loss).await);
    }
    let time = recovers(&client).await;
    assert!(time < RECOVERY, "{loss:?}: {time:?}");
    for pod in &behind[2..] {
        let start = Instant::now();
        while pod.accepted() == 0 {
            assert!(start.elapsed() < RECOVERY, "both new gateways are used");
            recovers(&client).await;
        }
    }
}

/// Opens tunnels until one carries bytes. Returns the time that this took.
async fn recovers(client: &Arc<Client>) -> Duration {
    first_success(|| {
        let client = Arc::clone(client);
        async move {
            let Ok(mut tunnel) = client.tunnel(ECHO).await else {
                return false;
            };
            echoes(&mut tunnel).await;
            true
        }
    })
    .await
}

/// Shares of the pods in the own zone, in another zone and in another region, and of the pod in the
/// other network. None at all is a rejection.
type Shares = Option<[f64; 4]>;

/// Distribution, and its shares by the readiness of the own network: all pods, those outside the
/// own zone, none. The first row has a ready instance in the other network, the second none.
type Preference = (&'static str, [[Shares; 3]; 2]);

const HALVES: Shares = Some([0.5, 0.5, 0.0, 0.0]);
const THIRDS: Shares = Some([1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
const OWN_ZONE: Shares = Some([1.0, 0.0, 0.0, 0.0]);
const OTHER_ZONE: Shares = Some([0.0, 1.0, 0.0, 0.0]);
/// One of two ready pods takes 50 / 70.
const SPILLED: Shares = Some([0.0, 0.71, 0.29, 0.0]);
const BEYOND_ZONE: Shares = Some([0.0, 0.5, 0.5, 0.0]);
const REMOTE: Shares = Some([0.0, 0.0, 0.0, 1.0]);

const PREFERENCES: [Preference; 5] = [
    ("close", [[OWN_ZONE, OTHER_ZONE, REMOTE], [OWN_ZONE, OTHER_ZONE, None]]),
    ("region", [[HALVES, SPILLED, REMOTE], [HALVES, SPILLED, None]]),
    (
        "network",
        [
            // Two of three ready pods take 66 / 70.
            [THIRDS, Some([0.0, 0.47, 0.47, 0.06]), REMOTE],
            [THIRDS, BEYOND_ZONE, None],
        ],
    ),
    // Active-passive.
    ("network, spill_below: 0%", [[THIRDS, BEYOND_ZONE, REMOTE], [THIRDS, BEYOND_ZONE, None]]),
    (
        "any",
        [
            [Some([0.25; 4]), Some([0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0]), REMOTE],
            [THIRDS, BEYOND_ZONE, None],
        ],
    ),
];

/// Tunnels of each case of the matrix.
const CASE_TUNNELS: usize = 60;

/// Returns the mesh with the readiness of the pods in the own network and of the other one's.
fn with_readiness(mesh: &str, ready: [bool; 4]) -> String {
    let mut text = mesh.to_owned();
    for (at, is_ready) in ready.into_iter().enumerate() {
        let status = if is_ready { "Healthy" } else { "Unhealthy" };
        text = text.replace(&format!("STATUS-{at}"), status);
    }
    text
}

/// Asserts where tunnels arrive at these pods.
async fn assert_arrivals(gateway: &Gateway, pods: &[Endpoint; 4], shares: Shares, case: &str) {
    let client = gateway.client(identities()).await;
    let Some(shares) = shares else {
        let before = gateway.tunnels("no_endpoint").await;
        client.tunnel(ECHO).await.expect_err(case);
        assert_eq!(gateway.tunnels("no_endpoint").await, before + 1.0, "{case}");
        return;
    };
    let before = pods.each_ref().map(Endpoint::accepted);
    open(&client, ECHO, CASE_TUNNELS).await;
    let all = CASE_TUNNELS as f64;
    for ((pod, before), share) in pods.iter().zip(before).zip(shares) {
        let count = (pod.accepted() - before) as f64;
        let bound = 5.0 * (all * share * (1.0 - share)).sqrt();
        assert!(
            (count - all * share).abs() <= bound,
            "{case}: {count} of {all} instead of {share}"
        );
    }
}

#[test]
fn each_preference_with_ready_and_unready_pods_in_two_networks() {
    run(async {
        let (here, there) = (Net::new(), Net::new());
        let hosts = [11, 12, 13];
        let own = pods(here, &hosts).await;
        let remote = pods(there, &[21]).await;
        let pods: [_; 4] =
            own.into_iter().chain(remote).collect::<Vec<_>>().try_into().ok().expect("four");
        let _west = start_west(&west(there, &plain(&[21]))).await;
        let mut settings = spread(here, &hosts, &["a"], &[address(there)]);
        let places = ["east, zone: a", "east, zone: b", "south, zone: a"];
        for (at, place) in places.into_iter().enumerate() {
            let workload = format!("workloadIps: [\"{}\"]", here.ip(hosts[at]));
            let placed = format!("locality: {{region: {place}}}, status: STATUS-{at}, {workload}");
            settings.mesh = settings.mesh.replace(&workload, &placed);
        }
        let remote = "workloadIps: [\"10.9.0.0\"]";
        settings.mesh = settings.mesh.replace(remote, &format!("status: STATUS-3, {remote}"));
        let mesh = settings.mesh.clone();
        for (distribution, rows) in PREFERENCES {
            settings.mesh = with_readiness(&mesh, [true; 4]);
            let mut gateway = Gateway::spawn(&settings, |folder| {
                let file = folder.join("strait.yaml");
                let text = std::fs::read_to_string(&file).expect("a configuration");
                let text =
                    text.replace("distribution: any", &format!("distribution: {distribution}"));
                let place = "network: east, locality: {region: east, zone: a}}\nidentity:";
                let text = text.replace("network: east}\nidentity:", place);
                std::fs::write(file, text).expect("a configuration");
            });
            gateway.ready().await;
            let mut reloads = 0.0;
            for (is_remote, row) in [true, false].into_iter().zip(rows) {
                let locals = [[true; 3], [false, true, true], [false; 3]];
                for (local, shares) in locals.into_iter().zip(row) {
                    let ready = [local[0], local[1], local[2], is_remote];
                    let case = format!("{distribution} with {ready:?}");
                    if ready != [true; 4] {
                        reloads += 1.0;
                        replace(&gateway.file("mesh.yaml"), &with_readiness(&mesh, ready));
                        let name = "strait_reload_total{what=\"mesh\",result=\"ok\"}";
                        let done = async || gateway.metric(name).await;
                        until(&case, done, |&count| count >= reloads).await;
                    }
                    assert_arrivals(&gateway, &pods, shares, &case).await;
                }
            }
            // The next gateway listens at the same addresses.
            gateway.kill().await;
        }
    });
}
