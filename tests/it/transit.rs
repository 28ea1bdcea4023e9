//! Tunnels that leave the network: two and three gateways as processes, each in a network of its
//! own.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use rustix::process::Signal;
use strait::tools::dev::Leaf;
use strait::tools::hbone::{Client, ConnectError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, broken, echoes, endpoint_port,
    identities, replace, reset, run, until,
};

pub const WEST_GATEWAY: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
/// Limit of a wait for something that happens at once.
const SOON: Duration = Duration::from_secs(10);

/// Settings of a gateway of network east whose service is behind these gateways of network west.
pub fn east<'a>(net: Net, gateways: &[Net], identity: &str) -> Settings<'a> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(99, 1, "TCP")]);
    // The only instance is in the other network.
    settings.mesh =
        settings.mesh.replace("clusterId: east, network: east", "clusterId: west, network: west");
    let transit = "to: [{cluster: west}]\n      transit: always";
    settings.exposure = settings.exposure.replace("to: [{cluster: west}]", transit);
    let addresses: Vec<_> = gateways.iter().map(|net| format!("\"{}:15008\"", net.ip(1))).collect();
    settings.more += &format!(
        "networks: [{{name: west, cluster: west, identities: [\"{identity}\"], gateways: [{}]}}]\n",
        addresses.join(", ")
    );
    settings
}

/// Settings of a gateway of network west, which exposes its endpoints to both clusters: to the
/// gateway of east, and to the peers behind it.
pub fn west<'a>(net: Net, endpoints: &[(u8, u32, &str)]) -> Settings<'a> {
    let mut settings = Settings::new(net, identities()).endpoints(endpoints);
    settings.mesh = in_west(&settings.mesh);
    let both = "cluster: east}, {cluster: west";
    settings.exposure = settings.exposure.replace("cluster: west", both);
    settings
}

pub fn in_west(mesh: &str) -> String {
    mesh.replace("clusterId: east, network: east", "clusterId: west, network: west")
        .replace("vips: [east/", "vips: [west/")
}

/// Makes the files in a folder those of a gateway of network west with this certificate.
fn become_west(folder: &Path, leaf: &Leaf) {
    let file = |name: &str| folder.join(name);
    let config = std::fs::read_to_string(file("strait.yaml")).expect("a configuration");
    let config = config.replace(
        "gateway: {cluster: east, network: east}",
        "gateway: {cluster: west, network: west}",
    );
    let config = config.replace("trust:\n", &format!("trust:\n  gateways: [\"{GATEWAY}\"]\n"));
    std::fs::write(file("strait.yaml"), config).expect("a configuration");
    std::fs::write(file("gateway.crt"), &leaf.chain_pem).expect("a certificate");
    std::fs::write(file("gateway.key"), &leaf.key_pem).expect("a key");
}

pub async fn start_west(settings: &Settings<'_>) -> Gateway {
    start_west_with(settings, &identities().leaf(WEST_GATEWAY)).await
}

/// As [`start_west`], with this certificate.
pub async fn start_west_with(settings: &Settings<'_>, leaf: &Leaf) -> Gateway {
    let mut gateway = Gateway::spawn(settings, |folder| become_west(folder, leaf));
    gateway.ready().await;
    gateway
}

/// Starts a gateway of each network, and an endpoint of the service behind the second.
async fn pair(endpoint: Endpoint, net: Net) -> (Gateway, Gateway, Endpoint) {
    let second = start_west(&west(net, &[(11, 1, "TCP")])).await;
    let first = Gateway::start(&east(Net::new(), &[net], WEST_GATEWAY)).await;
    (first, second, endpoint)
}

#[test]
fn a_reload_starts_probes_of_gateways_that_no_tunnel_has_used() {
    run(async {
        let (net, dead) = (Net::new(), Net::new());
        let second = start_west(&west(net, &[(11, 1, "TCP")])).await;
        let first = Gateway::start(&east(Net::new(), &[net, dead], WEST_GATEWAY)).await;
        let page = async || first.run_command(&["status", "peers"]).await.1;
        let states = |page: &str| {
            [net, dead].map(|net| {
                let address = format!("{}:15008", net.ip(1));
                let row = page.lines().find(|line| line.trim_start().starts_with(&address));
                let state = row.and_then(|row| row.split_whitespace().nth(2));
                state.map(ToOwned::to_owned).unwrap_or_default()
            })
        };
        assert_eq!(states(&page().await), ["idle", "idle"]);
        let config = std::fs::read_to_string(first.file("strait.yaml")).expect("a file");
        let probed = config.replace("dial: {", "dial: {probe_interval: 1s, ");
        assert_ne!(probed, config);
        replace(&first.file("strait.yaml"), &probed);
        let both = |page: &String| {
            let [good, bad] = states(page);
            good == "healthy" && ["ejected", "failed"].contains(&&*bad)
        };
        until("a state of both", page, both).await;
        let shown = page().await;
        assert!(shown.contains("refused"), "{shown}");
        for result in ["healthy", "failed"] {
            let series = format!("strait_gateway_probes_total{{result=\"{result}\"}}");
            assert!(first.metric(&series).await >= 1.0, "{result}");
        }
        assert_eq!(first.metric("strait_reload_failing{what=\"config\"}").await, 0.0);
        assert_eq!(second.tunnels("completed").await, 0.0);
    });
}

#[test]
fn a_tunnel_to_another_network_carries_bytes_and_each_end_of_both_sides() {
    run(async {
        let net = Net::new();
        let listener = net.listen(11, endpoint_port()).await;
        let endpoint = Endpoint::echo_or_endless(listener);
        let (first, second, endpoint) = pair(endpoint, net).await;
        let client = first.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        for (gateway, tunnels) in
            [(&first, format!("{WEST_GATEWAY} 0 1")), (&second, format!("{GATEWAY} 1 0"))]
        {
            let (_, page, _) = gateway.run_command(&["status", "peers"]).await;
            let words: Vec<_> = page.split_whitespace().collect();
            assert!(words.join(" ").contains(&tunnels), "{tunnels}: {page}");
        }
        // More than all windows and buffers on the way.
        let sent: Vec<u8> = (0..8_000_000_u32).map(|index| index.to_le_bytes()[1]).collect();
        let (mut read, mut write) = tokio::io::split(tunnel);
        let upload = async {
            write.write_all(&sent).await.expect("an open tunnel");
            write.shutdown().await.expect("an open tunnel");
        };
        let mut received = Vec::new();
        let (_, end) = tokio::join!(upload, read.read_to_end(&mut received));
        end.expect("a clean end");
        assert!(received == sent, "{} of {}", received.len(), sent.len());
        until("it is completed", async || first.tunnels("completed").await, |&n| n == 1.0).await;
        until("it is completed", async || second.tunnels("completed").await, |&n| n == 1.0).await;
        assert_eq!(endpoint.accepted(), 1);
        let connections = async || second.metric("strait_connections_open").await;
        until("one pooled connection", connections, |&open| open == 1.0).await;
        let (_, page, _) = first.run_command(&["status"]).await;
        assert!(page.contains("Gateways of other networks"), "{page}");
        assert!(page.contains(WEST_GATEWAY), "{page}");
        for direction in ["received", "sent"] {
            let series = format!(
                "strait_network_{direction}_bytes_total{{source_cluster=\"west\",\
                 destination_cluster=\"west\",destination_network=\"west\",\
                 destination_service=\"echo.app.svc.cluster.local\"}}"
            );
            let counted = async || first.metric(&series).await;
            until(direction, counted, |&now| now >= sent.len() as f64).await;
        }
        let times = "strait_tunnel_seconds_count{tier=\"remote\",source_cluster=\"west\"}";
        assert_eq!(first.metric(times).await, 1.0);
        let text = second.scrape().await;
        assert!(!text.contains("strait_network_sent_bytes_total{"), "{text}");
        let (code, page, _) = first.run_command(&["status", "peers"]).await;
        assert_eq!(code, 0);
        assert!(page.contains(WEST_GATEWAY), "{page}");
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(page.contains("east west linked 1 1 0 "), "{page}");
        let load = format!("{}:15008 {ECHO} 1 0.9", second.address.ip());
        assert!(page.contains(&load), "{page}");
        let requested = ["explain", "--from", CLIENT, "--to", ECHO];
        let (_, page, _) = first.run_command(&requested).await;
        assert!(page.contains("1 x 0.9"), "{page}");
    });
}

#[test]
fn a_reset_of_either_side_reaches_the_other_through_both_gateways() {
    run(async {
        let net = Net::new();
        let listener = net.listen(11, endpoint_port()).await;
        let endpoint = Endpoint::new(listener, |mut stream| async move {
            // The first byte decides: reset, or wait for the end.
            if matches!(stream.read_u8().await, Ok(b'r')) {
                reset(stream);
            } else {
                let _ = stream.read_u8().await;
            }
        });
        let (first, second, _endpoint) = pair(endpoint, net).await;
        let client = first.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(b"r").await.expect("an open tunnel");
        let code = timeout(SOON, broken(&mut tunnel)).await.expect("a reset");
        assert_eq!(code, Some(h2::Reason::CONNECT_ERROR));
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(b"w").await.expect("an open tunnel");
        tunnel.reset(h2::Reason::INTERNAL_ERROR);
        let resets = async || second.tunnels("downstream_reset").await;
        until("the reset arrives", resets, |&count| count == 1.0).await;
        first.wait_until_open(1, 0).await;
    });
}

#[test]
fn a_gateway_with_another_identity_gets_no_tunnel() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let second = start_west(&west(net, &[(11, 1, "TCP")])).await;
        let expected = "spiffe://west.local/ns/other/sa/gateway";
        let first = Gateway::start(&east(Net::new(), &[net], expected)).await;
        let client = first.client(identities()).await;
        let refused = client.tunnel(ECHO).await;
        assert!(matches!(refused, Err(ConnectError::Status(status)) if status == 503));
        assert_eq!(first.tunnels("gateway_untrusted").await, 1.0);
        assert_eq!(second.tunnels_by_reason().await.len(), 0);
        first.logged("is not an identity of this gateway").await;
    });
}

#[test]
fn a_gateway_that_is_gone_is_replaced_by_the_other_one() {
    run(async {
        let (net, gone) = (Net::new(), Net::new());
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let _second = start_west(&west(net, &[(11, 1, "TCP")])).await;
        let first = Gateway::start(&east(Net::new(), &[gone, net], WEST_GATEWAY)).await;
        let client = first.client(identities()).await;
        for _ in 0..20 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
        }
        let failed = first.metric("strait_dials_total{result=\"failed\"}").await;
        assert!(failed <= 2.0, "{failed} dials of a gateway that is ejected");
    });
}

#[test]
fn a_drain_of_the_next_gateway_keeps_open_tunnels_until_its_deadline() {
    run(async {
        let net = Net::new();
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let (first, second, _endpoint) = pair(endpoint, net).await;
        let client = first.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        second.signal(Signal::TERM);
        second.logged("stopping").await;
        echoes(&mut tunnel).await;
        let code = timeout(SOON, broken(&mut tunnel)).await.expect("a reset");
        assert_eq!(code, Some(h2::Reason::CONNECT_ERROR));
    });
}

/// Asks for a tunnel, and returns the status and a header of the answer.
async fn answer(
    gateway: &Gateway,
    id: &str,
    (authority, via): (&str, &str),
    header: &str,
) -> (u16, Option<String>) {
    let server = WEST_GATEWAY;
    let tls = TlsConnector::from(identities().client(id, server));
    let stream = TcpStream::connect(gateway.address).await.expect("a connection");
    let name = rustls::pki_types::ServerName::try_from("0.0.0.0").expect("a name");
    let stream = tls.connect(name, stream).await.expect("TLS");
    let (mut send, connection) = h2::client::handshake(stream).await.expect("HTTP/2");
    let driver = tokio::spawn(connection);
    let request = Request::connect(authority).header("x-strait-via", via);
    let request = request.body(()).expect("a request");
    let (answer, _stream): (_, h2::SendStream<Bytes>) =
        send.send_request(request, true).expect("a stream");
    let answer = answer.await.expect("an answer");
    driver.abort();
    let value = answer.headers().get(header);
    let value = value.map(|value| value.to_str().expect("text").to_owned());
    (answer.status().as_u16(), value)
}

/// Asks for an unknown service, and returns the status and the outcome.
async fn outcome(gateway: &Gateway, id: &str, via: &str) -> (u16, Option<String>) {
    let requested = ("nothing.here:80", via);
    answer(gateway, id, requested, "x-strait-outcome").await
}

#[test]
fn only_gateways_learn_why_a_tunnel_is_rejected() {
    run(async {
        let second = start_west(&west(Net::new(), &[])).await;
        let hash = "0123456789abcdef";
        let unknown = Some("unknown_service".to_owned());
        assert_eq!(outcome(&second, GATEWAY, hash).await, (503, unknown));
        let east = "spiffe://east.local/ns/shop/sa/checkout";
        assert_eq!(outcome(&second, east, hash).await, (503, None));
        let looped = Some("gateway_loop".to_owned());
        let long = [hash; 4].join(",");
        assert_eq!(outcome(&second, GATEWAY, &long).await, (503, looped));
        assert_eq!(second.tunnels("gateway_loop").await, 1.0);
    });
}

#[test]
fn only_gateways_learn_the_load_of_a_service() {
    run(async {
        let net = Net::new();
        let mut pods = Vec::new();
        for host in [11, 12] {
            pods.push(Endpoint::echo(net.listen(host, 9000).await));
        }
        let mut settings = west(net, &[(11, 1, "TCP"), (12, 3, "TCP")]);
        let limit = "to: [{cluster: east}, {cluster: west}]\n      limits: {tunnels: 4}";
        let exposed = "to: [{cluster: east}, {cluster: west}]";
        settings.exposure = settings.exposure.replace(exposed, limit);
        let second = start_west(&settings).await;
        let load = async |id: &str| {
            let requested = (ECHO, "0123456789abcdef");
            answer(&second, id, requested, "x-strait-load").await
        };
        let quarter = Some("ready=4, free=0.75".to_owned());
        assert_eq!(load(GATEWAY).await, (200, quarter));
        let east = "spiffe://east.local/ns/shop/sa/checkout";
        assert_eq!(load(east).await, (200, None));
    });
}

#[test]
fn two_gateways_that_send_a_service_to_each_other_reject_it_after_three_tunnels() {
    run(async {
        let (here, there) = (Net::new(), Net::new());
        let first = Gateway::start(&east(here, &[there], WEST_GATEWAY)).await;
        let second = start_west(&sends_back(there, here)).await;
        let client = Client::connect(first.address, &identities().client(CLIENT, GATEWAY)).await;
        let client = client.expect("a connection");
        let refused = timeout(SOON, client.tunnel(ECHO)).await.expect("an answer");
        assert!(matches!(refused, Err(ConnectError::Status(status)) if status == 503));
        let ends = (first.tunnels_by_reason().await, second.tunnels_by_reason().await);
        let total = ends.0.values().chain(ends.1.values()).sum::<f64>();
        assert!(total <= 3.0, "{ends:?}");
        assert!(ends.0.contains_key("gateway_loop"), "{ends:?}");
        let connections = connections(&[&first, &second]).await;
        assert!(connections <= 3.0, "{connections} connections");
    });
}

#[test]
fn a_gateway_that_sends_tunnels_back_is_replaced_by_the_first_gateway() {
    run(async {
        let (here, lost, good) = (Net::new(), Net::new(), Net::new());
        let endpoint = Endpoint::echo(good.listen(11, endpoint_port()).await);
        let settings = east(here, &[lost, good], WEST_GATEWAY);
        // Only gateways of `trust.gateways` learn that they are in a loop.
        let mut first = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let trust = format!("trust:\n  gateways: [\"{WEST_GATEWAY}\"]\n");
            std::fs::write(file, text.replace("trust:\n", &trust)).expect("a configuration");
        });
        first.ready().await;
        let back = start_west(&sends_back(lost, here)).await;
        let _serves = start_west(&west(good, &[(11, 1, "TCP")])).await;
        let client = first.client(identities()).await;
        let mut opened = 0;
        while back.tunnels("gateway_loop").await == 0.0 {
            assert!(opened < 40, "the other gateway takes all tunnels");
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            opened += 1;
        }
        // It is ejected for this service.
        for _ in 0..10 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
        }
        assert_eq!(back.tunnels("gateway_loop").await, 1.0);
        assert_eq!(endpoint.accepted(), opened + 10);
    });
}

/// Settings of a gateway of network west that sends the service back to a gateway of east.
fn sends_back<'a>(net: Net, to: Net) -> Settings<'a> {
    let mut settings = west(net, &[(99, 1, "TCP")]);
    settings.mesh =
        settings.mesh.replace("clusterId: west, network: west", "clusterId: east, network: east");
    let both = "to: [{cluster: east}, {cluster: west}]";
    let transit = format!("{both}\n      transit: always");
    settings.exposure = settings.exposure.replace(both, &transit);
    settings.more += &format!(
        "networks: [{{name: east, cluster: east, identities: [\"{GATEWAY}\"], gateways: \
         [\"{}:15008\"]}}]\n",
        to.ip(1)
    );
    settings
}

/// Returns the number of connections of these gateways and of their client.
async fn connections(gateways: &[&Gateway]) -> f64 {
    let mut total = 0.0;
    for gateway in gateways {
        total += gateway.metric("strait_connections_total").await;
    }
    total
}

/// Gateway of a path through three networks.
struct Node {
    network: &'static str,
    cluster: &'static str,
    identity: &'static str,
}

const NODES: [Node; 3] = [
    Node { network: "east", cluster: "east", identity: GATEWAY },
    Node { network: "west", cluster: "west", identity: WEST_GATEWAY },
    Node {
        network: "north",
        cluster: "east",
        identity: "spiffe://east.local/ns/istio-system/sa/north",
    },
];

impl Node {
    /// Starts the gateway. The only instance of its service is in network `at`, behind the gateway
    /// of the node `next` if there is one.
    async fn start(&self, net: Net, at: &Self, next: Option<Net>) -> Gateway {
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let Self { network, cluster, identity } = at;
        let instance = format!("clusterId: {cluster}, network: {network}");
        settings.mesh = settings.mesh.replace("clusterId: east, network: east", &instance);
        let to = "to: [{cluster: west}, {cluster: east}]\n      transit: always";
        settings.exposure = settings.exposure.replace("to: [{cluster: west}]", to);
        if let Some(next) = next {
            let address = next.address(1, 15008);
            settings.more += &format!(
                "networks: [{{name: {network}, cluster: {cluster}, identities: [\"{identity}\"], \
                 gateways: [\"{address}\"]}}]\n"
            );
        }
        let leaf = identities().leaf(self.identity);
        let mut gateway = Gateway::spawn(&settings, |folder| self.configure(folder, &leaf));
        gateway.ready().await;
        gateway
    }

    fn configure(&self, folder: &Path, leaf: &Leaf) {
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let own = format!("gateway: {{cluster: {}, network: {}}}", self.cluster, self.network);
        let gateways = NODES.map(|node| format!("\"{}\"", node.identity)).join(", ");
        let text = text
            .replace("gateway: {cluster: east, network: east}", &own)
            .replace("trust:\n", &format!("trust:\n  gateways: [{gateways}]\n"));
        std::fs::write(file, text).expect("a configuration");
        std::fs::write(folder.join("gateway.crt"), &leaf.chain_pem).expect("a certificate");
        std::fs::write(folder.join("gateway.key"), &leaf.key_pem).expect("a key");
    }
}

#[test]
fn a_tunnel_passes_three_gateways_and_each_evaluates_its_first_peer() {
    run(async {
        let nets = [Net::new(), Net::new(), Net::new()];
        let [east, west, north] = &NODES;
        let endpoint = Endpoint::echo(nets[2].listen(11, endpoint_port()).await);
        let third = north.start(nets[2], north, None).await;
        let second = west.start(nets[1], north, Some(nets[2])).await;
        let first = east.start(nets[0], west, Some(nets[1])).await;
        let client = first.client(identities()).await;
        for _ in 0..5 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            tunnel.shutdown().await.expect("an open tunnel");
            assert_eq!(tunnel.read(&mut [0]).await.expect("a clean end"), 0);
        }
        assert_eq!(endpoint.accepted(), 5);
        for gateway in [&first, &second, &third] {
            let completed = async || gateway.tunnels("completed").await;
            until("five tunnels", completed, |&count| count == 5.0).await;
        }
        for gateway in [&second, &third] {
            gateway.logged(&format!("src.first_peer=\"{CLIENT}\"")).await;
        }
        assert!(!first.log().contains("src.first_peer"));
        assert_eq!(connections(&[&first, &second, &third]).await, 3.0);
    });
}

#[test]
fn a_ring_of_three_gateways_rejects_a_tunnel_after_three_connections_between_them() {
    run(async {
        let nets = [Net::new(), Net::new(), Net::new()];
        let [east, west, north] = &NODES;
        let first = east.start(nets[0], west, Some(nets[1])).await;
        let second = west.start(nets[1], north, Some(nets[2])).await;
        let third = north.start(nets[2], east, Some(nets[0])).await;
        let client = first.client(identities()).await;
        let refused = timeout(SOON, client.tunnel(ECHO)).await.expect("an answer");
        assert!(matches!(refused, Err(ConnectError::Status(status)) if status == 503));
        for (gateway, tunnels) in [(&first, 2.0), (&second, 1.0), (&third, 1.0)] {
            let ends = gateway.tunnels_by_reason().await;
            assert_eq!(ends, [("gateway_loop".to_owned(), tunnels)].into(), "{ends:?}");
        }
        // One of them is the client's.
        let connections = connections(&[&first, &second, &third]).await;
        assert_eq!(connections, 4.0, "connections");
    });
}

#[test]
fn a_peer_gains_no_service_of_the_next_network_through_a_trusted_gateway() {
    run(async {
        let net = Net::new();
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let mut settings = west(net, &[(11, 1, "TCP")]);
        let both = "[{cluster: east}, {cluster: west}]";
        settings.exposure = settings.exposure.replace(both, "[{cluster: east}]");
        let second = start_west(&settings).await;
        let first = Gateway::start(&east(Net::new(), &[net], WEST_GATEWAY)).await;
        let client = first.client(identities()).await;
        let refused = client.tunnel(ECHO).await;
        assert!(matches!(refused, Err(ConnectError::Status(status)) if status == 503));
        assert_eq!(first.tunnels("remote_rejected").await, 1.0);
        assert_eq!(second.tunnels("not_for_peer").await, 1.0);
        second.logged(&format!("src.first_peer=\"{CLIENT}\"")).await;
        assert_eq!(endpoint.accepted(), 0);
        // The gateway itself is permitted.
        let tls = identities().client(GATEWAY, WEST_GATEWAY);
        let own = Client::connect(second.address, &tls).await;
        let own = own.expect("a connection");
        let mut tunnel = own.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        let args = ["explain", "--from", GATEWAY, "--to", ECHO, "--source", CLIENT];
        let (_, page, _) = second.run_command(&args).await;
        assert!(page.contains(&format!("for the first peer {CLIENT}")), "{page}");
    });
}

#[test]
fn an_open_tunnel_ends_when_its_gateway_has_to_be_another_one() {
    run(async {
        let net = Net::new();
        let endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let (first, _second, _endpoint) = pair(endpoint, net).await;
        let client = first.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        let file = first.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let other = "spiffe://west.local/ns/other/sa/gateway";
        assert!(text.contains(WEST_GATEWAY), "{text}");
        replace(&file, &text.replace(WEST_GATEWAY, other));
        let code = timeout(SOON, broken(&mut tunnel)).await;
        let code = code.unwrap_or_else(|_| panic!("no reset:\n{}", first.log()));
        assert_eq!(code, Some(h2::Reason::INTERNAL_ERROR));
        let revoked = async || first.tunnels("revoked").await;
        until("it is revoked", revoked, |&count| count == 1.0).await;
        first.logged("is not an identity of this gateway").await;
    });
}
