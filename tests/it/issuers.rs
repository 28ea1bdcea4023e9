//! Clusters of peers by the issuers of their certificates, with one trust domain for all clusters
//! and with one for each.

use std::path::Path;
use std::sync::Arc;

use http::{Method, Request};
use rustls::ClientConfig;
use strait::tls::{self};
use strait::tools::dev::{Issuer, Leaf};
use strait::tools::hbone::{Client, ConnectError, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{
    ECHO, Endpoint, Gateway, Identities, Net, Settings, broken, echoes, replace, run, until,
};

const PAGE: &str = include_str!("../../docs/security.md");
/// The first lines of the examples on the page.
const ONE_DOMAIN: &str = "# One trust domain for all clusters";
const DOMAIN_EACH: &str = "# A trust domain for each cluster";
/// Section that the harness writes.
const USUAL: &str = "trust:
  domains:
    - {name: east.local, cluster: east}
    - {name: west.local, cluster: west}
";
const OWN: &str = "spiffe://cluster.local/ns/istio-system/sa/eastwest";
const CHECKOUT: &str = "spiffe://cluster.local/ns/shop/sa/checkout";
/// Without `unknown_issuers`.
const LENIENT: &str = "trust:
  domains: [{name: cluster.local}]
  clusters:
    - {name: east, issuers: [east-ca.pem]}
    - {name: west, issuers: [west-ca.pem]}
";

/// Three clusters below one root, of which north is not configured.
struct World {
    identities: Identities,
    net: Net,
}

impl World {
    fn new() -> Self {
        Self { identities: Identities::new(), net: Net::new() }
    }

    /// A gateway with an endpoint, under this section and this audience.
    async fn gateway(&self, trust: &str, to: &str, more: &str) -> (Gateway, Endpoint) {
        let mut settings = Settings::new(self.net, &self.identities).endpoints(&[(11, 1, "TCP")]);
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{to}]}}\n");
        settings.more += more;
        let mut gateway = Gateway::spawn(&settings, |folder| self.prepare(folder, trust));
        let endpoint = Endpoint::echo(self.net.listen(11, 9000).await);
        gateway.ready().await;
        (gateway, endpoint)
    }

    fn prepare(&self, folder: &Path, trust: &str) {
        let write = |name: &str, text: &str| {
            std::fs::write(folder.join(name), text).expect("a file");
        };
        let own = self.identities.east.leaf(OWN).expect("a leaf");
        write("gateway.crt", &own.chain_pem);
        write("gateway.key", &own.key_pem);
        write("east-ca.pem", &self.identities.east.pem());
        write("west-ca.pem", &self.identities.west.pem());
        let text = std::fs::read_to_string(folder.join("strait.yaml")).expect("a configuration");
        assert!(text.contains(USUAL), "{text}");
        write("strait.yaml", &text.replace(USUAL, trust));
    }

    /// TLS of a peer whose certificate `issuer` signs.
    fn client(&self, issuer: &Issuer, id: &str) -> Arc<ClientConfig> {
        self.client_by(&issuer.leaf(id).expect("a leaf"))
    }

    fn client_by(&self, leaf: &Leaf) -> Arc<ClientConfig> {
        let material = self.identities.material(leaf);
        tls::client_config(&material, &[OWN]).expect("a client")
    }

    /// TLS of the same identity by the issuers of east, west and north.
    fn alike(&self) -> [Arc<ClientConfig>; 3] {
        let Identities { east, west, north, .. } = &self.identities;
        [east, west, north].map(|issuer| self.client(issuer, CHECKOUT))
    }
}

/// Returns the example of the page that begins with `first`.
fn example(first: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(first).expect("the example");
    let (_, rest) = rest.split_once('\n').expect("more lines");
    rest.split_once("```").expect("its end").0
}

fn edit(gateway: &Gateway, from: &str, to: &str) {
    let file = gateway.file("strait.yaml");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    assert!(text.contains(from), "{from} in {text}");
    replace(&file, &text.replace(from, to));
}

/// A tunnel, with the client that carries it.
type Open = (Client, Tunnel);

async fn opened(gateway: &Gateway, tls: &Arc<ClientConfig>) -> Result<Open, ConnectError> {
    let client = Client::connect(gateway.address, tls).await?;
    let tunnel = client.tunnel(ECHO).await?;
    Ok((client, tunnel))
}

/// Opens a tunnel and ends it cleanly.
async fn used(gateway: &Gateway, tls: &Arc<ClientConfig>) {
    let (_client, mut tunnel) = opened(gateway, tls).await.expect("a tunnel");
    finished(&mut tunnel).await;
}

async fn finished(tunnel: &mut Tunnel) {
    echoes(tunnel).await;
    tunnel.shutdown().await.expect("our end");
    let mut rest = Vec::new();
    tunnel.read_to_end(&mut rest).await.expect("its end");
}

async fn counts(gateway: &Gateway, name: &str, want: f64) {
    let count = async || gateway.metric(name).await;
    until(name, count, |&count| (count - want).abs() < 0.5).await;
}

async fn completed(gateway: &Gateway, cluster: &str, want: f64) {
    let name = format!("strait_tunnels_total{{reason=\"completed\",source_cluster=\"{cluster}\"}}");
    counts(gateway, &name, want).await;
}

async fn is_503(gateway: &Gateway, tls: &Arc<ClientConfig>) {
    let refused = opened(gateway, tls).await.map(drop);
    let refused = refused.expect_err("no tunnel").to_string();
    assert!(refused.contains("503"), "{refused}");
}

/// Asserts that the peer reads an alert, and that the gateway counts the reason.
async fn is_untrusted(gateway: &Gateway, tls: &Arc<ClientConfig>) {
    is_refused(gateway, tls, "untrusted_issuer").await;
}

async fn is_refused(gateway: &Gateway, tls: &Arc<ClientConfig>, reason: &str) {
    let before = gateway.refused_handshakes(reason).await;
    assert!(opened(gateway, tls).await.is_err(), "an alert");
    let now = async || gateway.refused_handshakes(reason).await;
    until("a refusal", now, |&now| now > before).await;
}

#[test]
fn one_trust_domain_with_an_issuer_per_cluster_tells_the_clusters_apart() {
    run(async {
        let world = World::new();
        let links = "links: [{from: west, to: east}]\n";
        let trust = example(ONE_DOMAIN);
        let (gateway, _endpoint) = world.gateway(trust, "{cluster: west}", links).await;
        let [east, west, north] = world.alike();
        used(&gateway, &west).await;
        is_503(&gateway, &east).await;
        is_untrusted(&gateway, &north).await;
        // A certificate that is not the issuer of the one before it ends the path.
        let mut beside = world.identities.north.leaf(CHECKOUT).expect("a leaf");
        let issuer = beside.chain_pem.rfind("-----BEGIN").expect("an issuer");
        let west_pem = world.identities.west.pem();
        beside.chain_pem.insert_str(issuer, &west_pem);
        is_refused(&gateway, &world.client_by(&beside), "unknown_issuer").await;

        completed(&gateway, "west", 1.0).await;
        let name = "strait_tunnels_total{reason=\"not_for_peer\",source_cluster=\"east\"}";
        counts(&gateway, name, 1.0).await;
        gateway.logged("src.cluster=\"west\"").await;
        let page = gateway.scrape().await;
        let opened = "istio_tcp_connections_opened_total{";
        let mut opened = page.lines().filter(|line| line.starts_with(opened));
        assert!(opened.all(|line| line.contains("source_cluster=\"west\"")), "{page}");

        let _open = Client::connect(gateway.address, &west).await.expect("a connection");
        let status = async || gateway.run_command(&["status"]).await.1;
        let status = until("a holder", status, |text| text.contains("cluster west")).await;
        let rows = status.split_once("Issuers of peers").expect("issuers").1;
        for (cluster, name, counts) in
            [("west", "west", ["2", "0"]), ("east", "east", ["1", "0"]), ("north", "-", ["0", "1"])]
        {
            let subject = format!("intermediate of {cluster}");
            let row = rows.lines().find(|line| line.contains(&subject));
            let row = row.unwrap_or_else(|| panic!("{subject}: {status}"));
            let mut cells = row.split_whitespace().rev();
            let [refused, accepted, of] = [cells.next(), cells.next(), cells.next()];
            assert_eq!([of, accepted, refused], [name, counts[0], counts[1]].map(Some), "{row}");
        }
    });
}

#[test]
fn explain_judges_a_peer_by_the_cluster_of_its_issuer() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(LENIENT, "{cluster: west}", "").await;
        let requested = ["explain", "--from", CHECKOUT, "--to", ECHO];
        for (more, code, want) in [
            (&["--cluster", "west"][..], 0, "of cluster west, by the issuer"),
            (&["--cluster", "east"], 1, "of cluster east, by the issuer"),
            (&[], 1, "of cluster unknown, by an issuer that is not in `trust.clusters`"),
            (&["--cluster", "wets"], 2, "write --cluster with one of east, west"),
        ] {
            let answer = gateway.run_command(&[&requested[..], more].concat()).await;
            assert_eq!(answer.0, code, "{answer:?}");
            assert!((answer.1.clone() + &answer.2).contains(want), "{answer:?}");
        }
        edit(&gateway, LENIENT, &format!("{LENIENT}  unknown_issuers: reject\n"));
        let refused = async || gateway.run_command(&requested).await.1;
        let want = "`trust.unknown_issuers` is `reject`";
        until(want, refused, |text| text.contains(want)).await;
    });
}

#[test]
fn an_issuer_without_a_cluster_is_of_the_cluster_unknown() {
    run(async {
        let world = World::new();
        let to = "{cluster: unknown}";
        let links = "links: [{from: unknown, to: east}]\n";
        let (gateway, _endpoint) = world.gateway(LENIENT, to, links).await;
        let [east, west, north] = world.alike();
        used(&gateway, &north).await;
        is_503(&gateway, &west).await;
        is_503(&gateway, &east).await;
        completed(&gateway, "unknown", 1.0).await;
        let page = gateway.scrape().await;
        let series = "strait_tunnels_total{reason=\"completed\",source_cluster=\"unknown\"}";
        let count = page.lines().filter(|line| line.starts_with(series)).count();
        assert_eq!(count, 1, "one series for unknown peers of all kinds");
        gateway.logged("src.cluster=\"unknown\"").await;
    });
}

#[test]
fn a_changed_issuer_file_moves_open_connections_and_ends_what_loses_its_right() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(LENIENT, "{anyone: true}", "").await;
        let [_, west, north] = world.alike();
        let client = Client::connect(gateway.address, &west).await;
        let client = client.expect("a connection");
        let mut first = client.tunnel(ECHO).await.expect("a tunnel");
        finished(&mut first).await;
        completed(&gateway, "west", 1.0).await;

        // The cluster gets another name, and the connection continues under it.
        edit(&gateway, "name: west,", "name: south,");
        gateway.logged("what=\"config\"").await;
        let mut second = client.tunnel(ECHO).await.expect("a tunnel");
        finished(&mut second).await;
        completed(&gateway, "south", 1.0).await;

        // A file with another issuer changes the cluster of the peers of both.
        edit(&gateway, "{anyone: true}", "{cluster: south}");
        let of_north = async || opened(&gateway, &north).await.is_ok();
        until("the exposure", of_north, |&is_open| !is_open).await;
        let mut lost = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut lost).await;
        replace(&gateway.file("west-ca.pem"), &world.identities.north.pem());
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        used(&gateway, &north).await;
        is_503(&gateway, &west).await;

        // A file without an issuer changes nothing.
        let leaf = world.identities.leaf(CHECKOUT).chain_pem;
        replace(&gateway.file("west-ca.pem"), &leaf);
        gateway.logged("contains a certificate that is not a CA certificate").await;
        used(&gateway, &north).await;
        replace(&gateway.file("west-ca.pem"), &world.identities.east.pem());
        gateway.logged("is in both `east` and `south`").await;
        used(&gateway, &north).await;
    });
}

#[test]
fn a_changed_issuer_file_ends_tunnels_past_a_waypoint_of_another_cluster_now() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(LENIENT, "{anyone: true}", "").await;
        // The service is its own waypoint, so that its workload's identity is trusted.
        let file = gateway.file("mesh.yaml");
        let mesh = std::fs::read_to_string(&file).expect("a mesh");
        let own = "destination: app/echo.app.svc.cluster.local";
        let name = "name: echo,";
        assert!(mesh.contains(name) && mesh.contains("east.local"), "{mesh}");
        let mesh = mesh.replacen(name, &format!("{name} waypoint: {{{own}}},"), 1);
        replace(&file, &mesh.replace("east.local", "cluster.local"));
        let id = "spiffe://cluster.local/ns/app/sa/echo";
        let tls = world.client(&world.identities.east, id);
        let by_waypoint = async || opened(&gateway, &tls).await.map(drop);
        let _ = until("the waypoint", by_waypoint, Result::is_err).await;
        let client = Client::connect(gateway.address, &tls).await;
        let client = client.expect("a connection");
        let past = || {
            let request = Request::builder().method(Method::CONNECT).uri(ECHO);
            let request = request.header("x-istio-source", "waypoint");
            client.request(request.body(()).expect("a request"))
        };
        let mut lost = past().await.expect("a tunnel");
        echoes(&mut lost).await;
        replace(&gateway.file("east-ca.pem"), &world.identities.north.pem());
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        assert!(past().await.is_err(), "a tunnel past the waypoint");
    });
}

#[test]
fn refused_issuers_are_printed_as_lines_that_admit_them() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(LENIENT, "{anyone: true}", "").await;
        let (code, _, none) = gateway.run_command(&["trust", "issuers"]).await;
        assert_eq!(
            (code, &*none),
            (1, "no peer has connected yet; retry after the first connection\n")
        );
        let [_, west, north] = world.alike();
        let (_kept, mut kept) = opened(&gateway, &west).await.expect("a tunnel");
        let (_lost, mut lost) = opened(&gateway, &north).await.expect("a tunnel");
        echoes(&mut lost).await;
        let strict = format!("{LENIENT}  unknown_issuers: reject\n");
        edit(&gateway, LENIENT, &strict);
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        let name = "strait_connections_untrusted_total{reason=\"untrusted_issuer\"}";
        counts(&gateway, name, 1.0).await;
        echoes(&mut kept).await;
        is_untrusted(&gateway, &north).await;
        gateway.logged("is not in trust.clusters").await;

        let (code, lines, _) = gateway.run_command(&["trust", "issuers"]).await;
        assert_eq!(code, 0, "{lines}");
        assert!(lines.contains("- name: \"CLUSTER-1\"") && lines.contains("- name: \"west\""));
        let (_, pasted) = lines.split_once("clusters:\n").expect("entries");
        let pasted = pasted.replace("CLUSTER-1", "north");
        let (domains, _) = strict.split_once("  clusters:\n").expect("entries");
        let trust = format!("{domains}  clusters:\n{pasted}  unknown_issuers: reject\n");
        edit(&gateway, &strict, &trust);
        let admitted = async || opened(&gateway, &north).await.is_ok();
        until("a tunnel", admitted, |&is_open| is_open).await;
        used(&gateway, &north).await;
        completed(&gateway, "north", 1.0).await;
        echoes(&mut kept).await;
    });
}

#[test]
fn with_a_trust_domain_per_cluster_an_issuer_signs_for_its_own_alone() {
    run(async {
        let world = World::new();
        let trust = example(DOMAIN_EACH);
        let (gateway, _endpoint) = world.gateway(trust, "{cluster: west}", "").await;
        let Identities { east, west, .. } = &world.identities;
        let [of_west, of_east] =
            ["west", "east"].map(|cluster| format!("spiffe://{cluster}.local/ns/shop/sa/checkout"));
        used(&gateway, &world.client(west, &of_west)).await;
        is_503(&gateway, &world.client(east, &of_east)).await;
        is_untrusted(&gateway, &world.client(east, &of_west)).await;
        is_untrusted(&gateway, &world.client(&world.identities.north, &of_west)).await;
        gateway.logged("is not in trust.domains[].issuers of west.local").await;
        completed(&gateway, "west", 1.0).await;

        // A changed file causes a new evaluation of open connections.
        let lost = opened(&gateway, &world.client(west, &of_west)).await;
        let (_client, mut lost) = lost.expect("a tunnel");
        echoes(&mut lost).await;
        replace(&gateway.file("west-ca.pem"), &world.identities.north.pem());
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        used(&gateway, &world.client(&world.identities.north, &of_west)).await;
    });
}

#[test]
fn baggage_that_names_another_cluster_is_counted_and_decides_nothing() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(LENIENT, "{cluster: west}", "").await;
        let [east, west, _] = world.alike();
        let connect = |cluster: &str| {
            let request = Request::builder().method(Method::CONNECT).uri(ECHO);
            let baggage = format!("k8s.namespace.name=shop,k8s.cluster.name={cluster}");
            let request = request.header("baggage", baggage);
            request.body(()).expect("a request")
        };
        let client = Client::connect(gateway.address, &west).await;
        let client = client.expect("a connection");
        let mut right = client.request(connect("west")).await.expect("a tunnel");
        finished(&mut right).await;
        let mut wrong = client.request(connect("east")).await.expect("a tunnel");
        finished(&mut wrong).await;
        let other = Client::connect(gateway.address, &east).await;
        let other = other.expect("a connection");
        let refused = other.request(connect("west")).await.map(drop);
        refused.expect_err("a cluster that only baggage names");
        completed(&gateway, "west", 2.0).await;
        for cluster in ["west", "east"] {
            let name =
                format!("strait_baggage_cluster_mismatches_total{{source_cluster=\"{cluster}\"}}");
            counts(&gateway, &name, 1.0).await;
        }
    });
}
