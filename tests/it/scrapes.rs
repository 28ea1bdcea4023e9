//! Scrapes of a gateway with many label sets, by many clients and by silent ones, and their
//! content.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::passthrough::client_hello;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};

const SCRAPE: &[u8] = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n";
/// Number of label sets of one counter, up to its bound.
const LABEL_SETS: usize = 4096;

/// Starts a gateway that has rejected a CONNECT to each of `count` services that are not exposed.
/// Each has a label set of `istio_tcp_connections_failed_total`.
async fn with_label_sets(count: usize) -> Gateway {
    let mut settings = Settings::new(Net::new(), identities());
    let mut services = String::new();
    for i in 0..count {
        let _ = writeln!(
            services,
            "  - {{name: s{i}, namespace: app, hostname: s{i}.app.svc.cluster.local, vips: [], \
             ports: {{80: 9000}}}}"
        );
    }
    settings.mesh = settings.mesh.replace("policies:", &format!("{services}policies:"));
    let mut gateway = Gateway::spawn(&settings, |_| {});
    gateway.ready_within(Duration::from_secs(60)).await;
    let client = Arc::new(gateway.client(identities()).await);
    let mut clients = JoinSet::new();
    for first in 0..20 {
        let client = Arc::clone(&client);
        clients.spawn(async move {
            for i in (first..count).step_by(20) {
                let authority = format!("s{i}.app.svc.cluster.local:80");
                let refused = client.tunnel(&authority).await;
                refused.expect_err("a service that is not exposed");
            }
        });
    }
    clients.join_all().await;
    let ended = async || gateway.tunnels("not_exposed").await;
    until("rejections", ended, |&ended| ended == count as f64).await;
    gateway
}

async fn request_metrics(gateway: &Gateway) -> TcpStream {
    let mut address = gateway.address;
    address.set_port(15020);
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(SCRAPE).await.expect("a request");
    stream
}

#[test]
fn clients_that_never_read_their_scrapes_hold_little_memory_and_keep_nobody_out() {
    run(async {
        let gateway = with_label_sets(2000).await;
        // The first scrape makes the page that the others share.
        let (status, page) = gateway.http(15020, "GET", "/metrics").await;
        assert!(status == 200 && page.len() > 1_500_000, "{}", page.len());
        let before = gateway.private_dirty();
        let mut mute = Vec::new();
        for _ in 0..60 {
            let mut stream = request_metrics(&gateway).await;
            let mut first = [0; 12];
            stream.read_exact(&mut first).await.expect("an answer");
            assert_eq!(&first, b"HTTP/1.1 200");
            mute.push(stream);
        }
        let more = gateway.private_dirty().saturating_sub(before);
        // Without sharing, 60 × 2 MB; shared, a few pages and the memory to encode them.
        assert!(more < 30 << 20, "{more} bytes more");
        let (status, page) = gateway.http(15020, "GET", "/metrics").await;
        assert_eq!(status, 200);
        assert!(page.contains("strait_tunnels_total{"), "a whole page");
        assert_eq!(gateway.readiness().await.0, 200);
        drop(mute);
    });
}

#[test]
fn readiness_answers_at_once_while_forty_clients_scrape() {
    run(async {
        let gateway = with_label_sets(2000).await;
        let mut scrapers = JoinSet::new();
        for _ in 0..40 {
            let mut stream = request_metrics(&gateway).await;
            scrapers.spawn(async move {
                let mut page = Vec::new();
                let read = stream.read_to_end(&mut page).await;
                read.expect("a whole page");
                page.len()
            });
        }
        let mut times = Vec::new();
        for _ in 0..50 {
            let start = Instant::now();
            assert_eq!(gateway.readiness().await.0, 200);
            times.push(start.elapsed());
        }
        times.sort_unstable();
        // A page takes 0.1 s to encode in a debug build, so 40 of them would take 4 s.
        let (median, slowest) = (times[25], times[49]);
        assert!(median < Duration::from_millis(10), "{times:?}");
        // A loaded machine may delay a single probe.
        assert!(slowest < Duration::from_secs(1), "{times:?}");
        let pages = scrapers.join_all().await;
        assert!(pages.iter().all(|&bytes| bytes > 1_500_000), "{pages:?}");
    });
}

#[test]
fn more_services_than_label_sets_are_counted_together_and_reported() {
    run(async {
        let gateway = with_label_sets(LABEL_SETS + 50).await;
        let metrics = gateway.scrape().await;
        let failed = "istio_tcp_connections_failed_total{";
        let sets: Vec<_> = metrics.lines().filter(|line| line.starts_with(failed)).collect();
        assert_eq!(sets.len(), LABEL_SETS + 1);
        let others = sets.iter().find(|set| set.contains("source_principal=\"unknown\""));
        assert!(others.is_some_and(|set| set.ends_with(" 50")), "{others:?}");
        let of = |name| format!("strait_metric_overflow_total{{metric=\"{name}\"}}");
        let overflow = gateway.metric(&of("istio_tcp_connections_failed")).await;
        assert_eq!(overflow, 50.0);
        assert_eq!(gateway.metric(&of("istio_tcp_sent_bytes")).await, 0.0);
        let line = "limit of label sets reached";
        gateway.logged(line).await;
        assert_eq!(gateway.log().matches(line).count(), 1);
    });
}

#[test]
fn tunnels_are_counted_by_the_cluster_of_their_peer() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.listeners = format!(
            "  - {{name: istio, bind: \"{}\", protocol: tls, routing: istio}}\n",
            net.address(1, 15443)
        );
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.shutdown().await.expect("our end");
        tunnel.read_to_end(&mut Vec::new()).await.expect("its end");
        let east = "spiffe://east.local/ns/shop/sa/checkout";
        let client = gateway.client_as(identities(), east).await;
        client.tunnel(ECHO).await.expect_err("a service for west");
        // A peer of a TLS listener has no client certificate.
        let client = TcpStream::connect(net.address(1, 15443)).await;
        let mut client = client.expect("a connection");
        let name = "outbound_.80_._.nothing.app.svc.cluster.local";
        client.write_all(&client_hello(name, &["istio"])).await.expect("a hello");
        client.read_to_end(&mut Vec::new()).await.expect("an end");
        for (reason, cluster) in
            [("completed", "west"), ("not_for_peer", "east"), ("unknown_service", "unknown")]
        {
            let labels = format!("reason=\"{reason}\",source_cluster=\"{cluster}\"");
            let name = format!("strait_tunnels_total{{{labels}}}");
            let counted = async || gateway.metric(&name).await;
            until(&name, counted, |&count| count == 1.0).await;
        }
        // With the first tunnel of a cluster each of its reasons shows.
        let zero = "strait_tunnels_total{reason=\"panic\",source_cluster=\"east\"} 0\n";
        assert!(gateway.scrape().await.contains(zero));
    });
}
