//! A short run of each kind of work, with its figures compared with those of the gateway.

use crate::command::{Load, LoadResult, Serve};
use crate::support::{ECHO, Gateway, Net, Settings, endpoint_port, identities, run, until};

/// Gateway with one endpoint behind it.
struct World {
    gateway: Gateway,
    load: Load,
    _endpoint: Serve,
}

impl World {
    async fn start(mode: &str) -> Self {
        let net = Net::new();
        let endpoint = Serve::plain(net.address(11, endpoint_port()), mode).await;
        Self::with(net, endpoint, "TCP").await
    }

    async fn with(net: Net, endpoint: Serve, protocol: &str) -> Self {
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, protocol)]);
        let gateway = Gateway::start(&settings).await;
        Self { load: Load::new(gateway.address), gateway, _endpoint: endpoint }
    }

    async fn run(&self, args: &str) -> LoadResult {
        self.load.run(ECHO, args).await.expect_success()
    }

    /// Waits until the gateway has completed exactly this many tunnels.
    async fn completed(&self, tunnels: u64) {
        let completed = async || self.gateway.tunnels("completed").await;
        let wanted = tunnels as f64;
        until("completed tunnels", completed, |&count| count >= wanted).await;
        assert_eq!(self.gateway.tunnels("completed").await, wanted);
    }

    /// Returns the bytes that the gateway forwarded from clients, and to them.
    async fn bytes(&self) -> (u64, u64) {
        let text = self.gateway.scrape().await;
        let sum = |name: &str| {
            let samples = text.lines().filter(|line| line.starts_with(name));
            let values = samples.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
            values.sum()
        };
        let received = sum("istio_tcp_received_bytes_total{");
        (received, sum("istio_tcp_sent_bytes_total{"))
    }
}

#[test]
fn requests_are_those_that_the_gateway_carried() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("rr --connections 2 --streams 4 --seconds 0.5").await;
        world.completed(8).await;
        let operations = done.number("operations");
        let bytes = operations * 128;
        assert!(operations >= 8, "{done:?}");
        assert_eq!(done.number("opened_tunnels"), 8);
        assert_eq!(done.number("opened_connections"), 2);
        assert_eq!((done.number("sent_bytes"), done.number("received_bytes")), (bytes, bytes));
        assert_eq!(world.bytes().await, (bytes, bytes));
        let latency = &done.report["latency_us"];
        let quantiles = ["p50", "p90", "p99", "p99_9", "max"].map(|name| latency[name].as_f64());
        assert!(quantiles.is_sorted() && quantiles[0] > Some(0.0), "{done:?}");
        let seconds = done.report["seconds"].as_f64().expect("a number");
        assert!((0.5..2.0).contains(&seconds), "{seconds}");
        assert!(done.report["cpu_seconds"].as_f64() > Some(0.0), "{done:?}");
    });
}

#[test]
fn the_key_exchange_is_what_was_offered() {
    run(async {
        let world = World::start("echo").await;
        for (more, agreed) in [
            ("", "X25519MLKEM768"),
            ("--key-exchange x25519mlkem768", "X25519MLKEM768"),
            ("--key-exchange x25519", "X25519"),
        ] {
            let done = world.run(&format!("rr --seconds 0.1 {more}")).await;
            assert_eq!(done.report["key_exchange"], agreed, "{done:?}");
            assert_eq!(done.report["cipher_suite"], "TLS13_AES_256_GCM_SHA384");
        }
    });
}

#[test]
fn requests_larger_than_all_windows_come_back_whole() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("rr --size 12MB --seconds 0.2").await;
        let bytes = done.number("operations") * 12_000_000;
        assert_eq!(done.number("received_bytes"), bytes);
        assert!(bytes > 0);
    });
}

#[test]
fn by_a_rate_exactly_what_is_due_is_done() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("rr --streams 4 --rate 200 --seconds 0.5").await;
        assert_eq!(done.number("operations"), 100);
        let done = world.run("churn --streams 4 --rate 100 --seconds 0.5").await;
        assert_eq!(done.number("operations"), 50);
        world.completed(4 + 50).await;
    });
}

#[test]
fn each_operation_of_churn_is_a_completed_tunnel() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("churn --streams 4 --seconds 0.5").await;
        let operations = done.number("operations");
        assert!(operations >= 4, "{done:?}");
        assert_eq!(done.number("opened_tunnels"), operations);
        assert_eq!(done.number("opened_connections"), 1);
        world.completed(operations).await;
    });
}

#[test]
fn each_operation_of_handshake_is_a_connection() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("handshake --connections 2 --seconds 0.5").await;
        let operations = done.number("operations");
        assert!(operations >= 2, "{done:?}");
        assert_eq!(done.number("opened_connections"), operations);
        world.completed(operations).await;
        let connections = world.gateway.metric("strait_connections_total").await;
        assert_eq!(connections, operations as f64);
    });
}

#[test]
fn what_goes_up_is_counted_when_it_has_arrived() {
    run(async {
        let world = World::start("sink").await;
        let endless = world.run("up --streams 2 --seconds 0.5").await;
        let sized = world.run("up --streams 2 --size 100kB --seconds 0.2").await;
        let operations = sized.number("operations");
        assert_eq!(sized.number("sent_bytes"), operations * 100_000);
        world.completed(2 + operations).await;
        let sent = endless.number("sent_bytes") + sized.number("sent_bytes");
        assert!(endless.number("sent_bytes") > 1_000_000, "{endless:?}");
        assert_eq!(world.bytes().await, (sent, 0));
        assert_eq!(endless.number("operations"), 0);
    });
}

#[test]
fn what_comes_down_is_what_was_asked_for() {
    run(async {
        let world = World::start("source").await;
        let sized = world.run("down --streams 2 --size 100kB --seconds 0.2").await;
        let operations = sized.number("operations");
        let bytes = operations * 100_000;
        world.completed(operations).await;
        assert!(operations >= 2, "{sized:?}");
        assert_eq!(sized.number("received_bytes"), bytes);
        assert_eq!(world.bytes().await, (8 * operations, bytes));
        let endless = world.run("down --streams 2 --seconds 0.5").await;
        assert!(endless.number("received_bytes") > 1_000_000, "{endless:?}");
    });
}

#[test]
fn idle_tunnels_are_held_and_then_ended() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("idle --connections 4 --streams 50 --seconds 0.2").await;
        assert_eq!(done.number("held_tunnels"), 200);
        world.completed(200).await;
    });
}

#[test]
fn stalled_tunnels_hold_their_window_and_no_more() {
    run(async {
        let world = World::start("source").await;
        let done = world.run("stall --streams 10 --seconds 0.5").await;
        assert_eq!(done.number("held_tunnels"), 10);
        assert_eq!(done.number("received_bytes"), 10 * 65_536);
        let args = "stall --streams 2 --window 1MiB --seconds 0.5";
        assert_eq!(world.run(args).await.number("received_bytes"), 2 << 20);
    });
}

#[test]
fn small_requests_beside_a_bulk_and_a_stalled_stream_are_answered() {
    run(async {
        let world = World::start("echo").await;
        let done = world.run("mixed --connections 2 --streams 3 --rate 100 --seconds 0.5").await;
        assert_eq!(done.number("operations"), 50);
        assert_eq!(done.number("opened_tunnels"), 2 * (3 + 2));
        assert!(done.number("received_bytes") > 1_000_000, "{done:?}");
    });
}

#[test]
fn double_hbone_reaches_the_endpoint_through_one_tunnel_a_connection() {
    run(async {
        let net = Net::new();
        let endpoint = Serve::hbone(net.address(11, 15008), "echo").await;
        let world = World::with(net, endpoint, "HBONE").await;
        let args = "rr --double --connections 2 --streams 4 --seconds 0.3";
        let done = world.run(args).await;
        assert_eq!(done.number("opened_outer_tunnels"), 2);
        assert_eq!(done.number("opened_tunnels"), 8);
        world.completed(2).await;
        let args = "churn --double --inner-authority any.name:1 --streams 4 --seconds 0.3";
        let done = world.run(args).await;
        assert_eq!(done.number("opened_tunnels"), done.number("operations"));
        world.completed(3).await;
        let done = world.run("handshake --double --seconds 0.3").await;
        world.completed(3 + done.number("operations")).await;
    });
}

/// Server name with which Istio's clients request [`ECHO`].
const ECHO_SNI: &str = "outbound_.80_._.echo.app.svc.cluster.local";

#[test]
fn bare_connections_carry_each_kind_of_work_behind_a_hello() {
    run(async {
        for (mode, works) in [
            ("echo", &["rr", "handshake", "idle --burst 1MiB"][..]),
            ("sink", &["up"]),
            ("source", &["down --size 1MiB", "stall"]),
        ] {
            let net = Net::new();
            let at = net.address(11, endpoint_port());
            let endpoint = Serve::after_hello(at, mode).await;
            let listener = net.address(1, 15443);
            let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
            settings.listeners =
                format!("  - {{name: sni, bind: \"{listener}\", protocol: tls, routing: istio}}\n");
            settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
            let gateway = Gateway::start(&settings).await;
            let load = Load::bare(listener);
            for work in works {
                let args = format!("{work} --connections 4 --seconds 0.3");
                let done = load.run(ECHO_SNI, &args).await.expect_success();
                assert!(done.number("opened_connections") >= 4, "{done:?}");
                let bytes = done.number("sent_bytes") + done.number("received_bytes");
                assert!(bytes > 0, "{done:?}");
                if *work == "idle --burst 1MiB" {
                    assert_eq!(bytes, 2 << 20, "one of four");
                }
            }
            assert_eq!(gateway.tunnels("upstream_reset").await, 0.0);
            drop(endpoint);
        }
    });
}
