//! The same CDS and EDS for the gateway and a real Envoy: both distribute their connections alike.
//!
//! Each scenario is a cluster with separate endpoints, a port of one service of the gateway, and a
//! listener of Envoy. The bounds are five standard deviations of independent draws.

use std::collections::VecDeque;
use std::net::SocketAddr;

use envoy_types::pb::envoy::config::cluster::v3 as cds;
use envoy_types::pb::envoy::config::core::v3 as core;
use strait::grpc::core::HealthStatus;
use strait::grpc::endpoint::cluster_load_assignment::{Policy, policy::DropOverload};
use strait::grpc::endpoint::{ClusterLoadAssignment, LbEndpoint};
use strait::grpc::number::FractionalPercent;
use strait::tools::hbone::Client;
use strait::xds::envoy::ENDPOINT;
use strait::xds::store::CLUSTER;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::process::{self, Envoy};
use crate::support::eds::{assignment, weighted, zone};
use crate::support::istiod::{Istiod, programmed};
use crate::support::{CLIENT, Gateway};
use crate::support::{Endpoint, Net, Settings, identities, run};

const HOST: &str = "echo.app.svc.cluster.local";
/// Number of connections of each scenario through each of the two.
const CONNECTIONS: u32 = 2_000;
/// Number of them that are open at once. The gateway considers open connections: with this number
/// it distributes by the weights, and with a single one it would prefer another endpoint.
const OPEN: usize = 16;

/// Zone, its weight, its priority, and the weight, state and share of each of its endpoints.
type Zone = (&'static str, Option<u32>, u32, &'static [(u32, HealthStatus, f64)]);

struct Scenario {
    name: &'static str,
    by_locality: bool,
    zones: &'static [Zone],
    drop_percent: u32,
}

const UP: HealthStatus = HealthStatus::Healthy;
const DOWN: HealthStatus = HealthStatus::Unhealthy;
const WORSE: HealthStatus = HealthStatus::Degraded;

const SCENARIOS: [Scenario; 6] = [
    Scenario {
        name: "weights of endpoints",
        by_locality: false,
        zones: &[("a", None, 0, &[(1, UP, 0.1), (2, UP, 0.2), (3, UP, 0.3), (4, UP, 0.4)])],
        drop_percent: 0,
    },
    Scenario {
        name: "weights of localities and endpoints",
        by_locality: true,
        zones: &[
            ("a", Some(1), 0, &[(1, UP, 0.125), (1, UP, 0.125)]),
            ("b", Some(3), 0, &[(1, UP, 0.1875), (3, UP, 0.5625)]),
        ],
        drop_percent: 0,
    },
    Scenario {
        name: "a locality of which half is ready",
        by_locality: true,
        zones: &[
            (
                "a",
                Some(1),
                0,
                &[(1, UP, 7.0 / 34.0), (1, UP, 7.0 / 34.0), (1, DOWN, 0.0), (1, DOWN, 0.0)],
            ),
            ("b", Some(1), 0, &[(1, UP, 20.0 / 34.0)]),
        ],
        drop_percent: 0,
    },
    Scenario {
        name: "a priority of which half is ready",
        by_locality: false,
        zones: &[
            (
                "a",
                None,
                0,
                &[
                    (1, UP, 0.175),
                    (1, UP, 0.175),
                    (1, UP, 0.175),
                    (1, UP, 0.175),
                    (1, DOWN, 0.0),
                    (1, DOWN, 0.0),
                    (1, DOWN, 0.0),
                    (1, DOWN, 0.0),
                ],
            ),
            ("b", None, 1, &[(1, UP, 0.15), (1, UP, 0.15)]),
        ],
        drop_percent: 0,
    },
    Scenario {
        name: "a priority of which half is degraded",
        by_locality: false,
        zones: &[(
            "a",
            None,
            0,
            &[(1, UP, 0.35), (1, UP, 0.35), (1, WORSE, 0.15), (1, WORSE, 0.15)],
        )],
        drop_percent: 0,
    },
    Scenario {
        name: "a drop overload",
        by_locality: false,
        zones: &[("a", None, 0, &[(1, UP, 0.375), (1, UP, 0.375)])],
        drop_percent: 25,
    },
];

/// Running scenario with its endpoints.
struct Running {
    scenario: &'static Scenario,
    /// Port of the service, and of Envoy's listener.
    port: u16,
    cluster: String,
    endpoints: Vec<Endpoint>,
    wanted: Vec<f64>,
}

impl Running {
    async fn start(index: usize, net: Net) -> (Self, ClusterLoadAssignment) {
        let scenario = &SCENARIOS[index];
        let index = u16::try_from(index).expect("few scenarios");
        let (port, target) = (8000 + index, 9000 + index);
        let cluster = format!("outbound|{port}||{HOST}");
        let (mut endpoints, mut wanted, mut zones) = (Vec::new(), Vec::new(), Vec::new());
        for (name, weight, priority, list) in scenario.zones {
            let mut of_zone = Vec::new();
            for (weight, state, share) in *list {
                let host = 40 + u8::try_from(endpoints.len()).expect("few endpoints");
                endpoints.push(Endpoint::echo(net.listen(host, target).await));
                wanted.push(*share);
                of_zone.push(LbEndpoint {
                    health_status: (*state).into(),
                    ..weighted(net.address(host, target), *weight)
                });
            }
            zones.push(zone(name, *weight, *priority, of_zone));
        }
        let mut assignment = assignment(&cluster, zones);
        if scenario.drop_percent > 0 {
            let drop_percentage = FractionalPercent {
                numerator: scenario.drop_percent,
                ..FractionalPercent::default()
            };
            assignment.policy = Some(Policy {
                drop_overloads: vec![DropOverload {
                    category: "overload".to_owned(),
                    drop_percentage: Some(drop_percentage),
                }],
                ..Policy::default()
            });
        }
        let running = Self { scenario, port, cluster, endpoints, wanted };
        (running, assignment)
    }

    /// Returns the cluster in Envoy's own messages.
    fn message(&self) -> cds::Cluster {
        use cds::cluster::common_lb_config::{LocalityConfigSpecifier, LocalityWeightedLbConfig};
        let ads = core::config_source::ConfigSourceSpecifier::Ads(Default::default());
        let weighted = LocalityWeightedLbConfig {};
        let weighted = LocalityConfigSpecifier::LocalityWeightedLbConfig(weighted);
        cds::Cluster {
            name: self.cluster.clone(),
            cluster_discovery_type: Some(cds::cluster::ClusterDiscoveryType::Type(
                cds::cluster::DiscoveryType::Eds.into(),
            )),
            eds_cluster_config: Some(cds::cluster::EdsClusterConfig {
                eds_config: Some(core::ConfigSource {
                    resource_api_version: core::ApiVersion::V3.into(),
                    config_source_specifier: Some(ads),
                    ..core::ConfigSource::default()
                }),
                ..cds::cluster::EdsClusterConfig::default()
            }),
            common_lb_config: Some(cds::cluster::CommonLbConfig {
                locality_config_specifier: self.scenario.by_locality.then_some(weighted),
                ..cds::cluster::CommonLbConfig::default()
            }),
            ..cds::Cluster::default()
        }
    }

    /// Returns the share of each endpoint, and of rejections, of connections that `connect` opens
    /// one by one. Each is closed after some others were opened.
    async fn shares<T>(&self, mut connect: impl AsyncFnMut() -> Option<T>) -> Vec<f64> {
        let before: Vec<_> = self.endpoints.iter().map(Endpoint::accepted).collect();
        let mut refused = 0;
        let mut open = VecDeque::new();
        for _ in 0..CONNECTIONS {
            match connect().await {
                Some(connection) => open.push_back(connection),
                None => refused += 1,
            }
            if open.len() > OPEN {
                open.pop_front();
            }
        }
        let counts = self.endpoints.iter().zip(before);
        let counts = counts.map(|(one, before)| one.accepted() - before);
        let counts: Vec<_> = counts.map(|count| u32::try_from(count).expect("few")).collect();
        assert_eq!(counts.iter().sum::<u32>() + refused, CONNECTIONS, "{counts:?}");
        let all = counts.into_iter().chain([refused]);
        all.map(|count| f64::from(count) / f64::from(CONNECTIONS)).collect()
    }
}

/// Sends a byte and waits for its echo.
async fn asks<S: AsyncReadExt + AsyncWriteExt + Unpin>(mut stream: S) -> Option<S> {
    stream.write_all(b"x").await.ok()?;
    (stream.read_u8().await.ok()? == b'x').then_some(stream)
}

async fn by_envoy(at: SocketAddr) -> Option<TcpStream> {
    asks(TcpStream::connect(at).await.expect("Envoy's listener")).await
}

/// Connects by HTTP CONNECT: Envoy's router drops overloads, its TCP proxy does not.
async fn by_connect(at: SocketAddr) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(at).await.expect("Envoy's listener");
    let request = format!("CONNECT {HOST}:80 HTTP/1.1\r\nhost: {HOST}:80\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("a request");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.expect("an answer"));
    }
    let status = answer.get(..12).expect("a status");
    if status == b"HTTP/1.1 503" {
        return None;
    }
    assert_eq!(status, b"HTTP/1.1 200");
    asks(stream).await
}

async fn by_gateway(client: &Client, authority: &str) -> Option<strait::tools::hbone::Tunnel> {
    asks(client.tunnel(authority).await.ok()?).await
}

/// Compares the shares of two samples with each other and with the expected share.
fn compare(what: &str, wanted: f64, gateway: f64, envoy: f64) {
    let deviation = (wanted * (1.0 - wanted) / f64::from(CONNECTIONS)).sqrt();
    for (who, got) in [("the gateway", gateway), ("Envoy", envoy)] {
        let bound = 5.0 * deviation + 1e-9;
        assert!(
            (got - wanted).abs() <= bound,
            "{what}: {got:.4} by {who}, not {wanted:.4} within {bound:.4}"
        );
    }
    let bound = 5.0 * 2_f64.sqrt() * deviation + 1e-9;
    assert!(
        (gateway - envoy).abs() <= bound,
        "{what}: {gateway:.4} by the gateway and {envoy:.4} by Envoy, not within {bound:.4}"
    );
}

/// Returns a listener of Envoy at host 21 for a cluster.
fn listener(net: Net, running: &Running) -> String {
    let Running { port, cluster, .. } = running;
    let ip = net.ip(21);
    let (name, rest) = match running.scenario.drop_percent {
        0 => ("tcp_proxy.v3.TcpProxy", format!("cluster: \"{cluster}\"")),
        _ => ("http_connection_manager.v3.HttpConnectionManager", by_http(cluster)),
    };
    let address = format!("{{socket_address: {{address: \"{ip}\", port_value: {port}}}}}");
    format!(
        "{{name: \"{port}\", address: {address}, filter_chains: [{{filters: [{{name: filter, \
         typed_config: {{\"@type\": type.googleapis.com/envoy.extensions.filters.network.{name}, \
         stat_prefix: \"{port}\", {rest}}}}}]}}]}}"
    )
}

/// Returns the settings of a listener for CONNECT, without its name.
fn by_http(cluster: &str) -> String {
    let router = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router";
    let connect = "upgrade_configs: [{upgrade_type: CONNECT, connect_config: {}}]";
    format!(
        "upgrade_configs: [{{upgrade_type: CONNECT}}], \
         http_filters: [{{name: router, typed_config: {{\"@type\": {router}}}}}], \
         route_config: {{validate_clusters: false, virtual_hosts: [{{name: all, domains: [\"*\"], \
         routes: [{{match: {{connect_matcher: {{}}}}, \
         route: {{cluster: \"{cluster}\", {connect}}}}}]}}]}}"
    )
}

async fn gateway(net: Net) -> Gateway {
    let mut settings = Settings::new(net, identities());
    settings.exposure = format!("    - {{service: \"{HOST}\", to: [{{cluster: west}}]}}\n");
    let mut gateway = programmed(&settings, "envoy", "tls: off", |_| {});
    gateway.ready().await;
    gateway
}

#[test]
fn the_gateway_and_envoy_share_alike_what_the_same_eds_tells_them() {
    run(async {
        let Some(program) = process::program("the same EDS for both") else {
            return;
        };
        let net = Net::new();
        let control = Istiod::envoy_dialect();
        let mut all = Vec::new();
        for index in 0..SCENARIOS.len() {
            let (running, assignment) = Running::start(index, net).await;
            control.put(CLUSTER, &running.cluster, &running.message());
            control.put(ENDPOINT, &running.cluster, &assignment);
            all.push(running);
        }
        let _serving = control.serve_plaintext(net.address(2, 15012)).await;
        let listeners: Vec<_> = all.iter().map(|running| listener(net, running)).collect();
        let names = [("CONTROL", net.ip(2).to_string()), ("LISTENERS", listeners.join(", "))];
        let leaf = identities().leaf(CLIENT);
        let yaml = (include_str!("same_eds.yaml"), &names[..]);
        let (_envoy, gateway) =
            tokio::join!(Envoy::start(&program, net, 21, &leaf, yaml), gateway(net),);
        let version = process::version(&program).await;
        for running in &all {
            let name = running.scenario.name;
            let client = gateway.client(identities()).await;
            let authority = format!("{HOST}:{}", running.port);
            let own = running.shares(async || by_gateway(&client, &authority).await).await;
            let at = net.address(21, running.port);
            let other = match running.scenario.drop_percent {
                0 => running.shares(async || by_envoy(at).await).await,
                _ => running.shares(async || by_connect(at).await).await,
            };
            let dropped = f64::from(running.scenario.drop_percent) / 100.0;
            let wanted = running.wanted.iter().copied().chain([dropped]);
            let shown = |shares: &[f64]| {
                let shares = shares.iter().map(|share| format!("{share:.3}"));
                shares.collect::<Vec<_>>().join(" ")
            };
            process::print_uncaptured(&format!(
                "envoy {version}: {name}: {} by the gateway, {} by Envoy",
                shown(&own),
                shown(&other)
            ));
            for (at, wanted) in wanted.enumerate() {
                compare(&format!("{name}, endpoint {at}"), wanted, own[at], other[at]);
            }
        }
        assert_eq!(control.rejections(), [""; 0]);
    });
}
