//! Failures are counted by kind, with exit code 1; wrong arguments have exit code 2.

use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, timeout};

use crate::command::{Load, LoadResult, Serve, ended};
use crate::support::process::send_signal;
use crate::support::{
    ECHO, Gateway, Identities, Net, Settings, endpoint_port, identities, run, until,
};

const SECRET: &str = "secret.app.svc.cluster.local:80";

async fn start() -> (Gateway, Serve) {
    start_in(Net::new()).await
}

async fn start_in(net: Net) -> (Gateway, Serve) {
    let endpoint = Serve::plain(net.address(11, endpoint_port()), "echo").await;
    let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    (Gateway::start(&settings).await, endpoint)
}

fn assert_failed(done: &LoadResult, kind: &str) {
    assert_eq!(done.code, Some(1), "{done:?}");
    let kinds = done.report["failures_by_kind"].as_object();
    let received = kinds.is_some_and(|kinds| kinds.keys().any(|key| key.contains(kind)));
    assert!(received, "{kind}: {done:?}");
    assert!(done.stderr.contains(kind), "{kind}: {done:?}");
}

async fn tunnels_open(gateway: &Gateway, tunnels: f64) {
    let open = async || gateway.metric("strait_tunnels_open").await;
    until("open tunnels", open, |&open| open == tunnels).await;
}

#[test]
fn a_refused_authority_is_reported_with_its_status_before_the_time_is_over() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let begun = Instant::now();
        for work in ["rr --streams 4", "churn", "handshake", "idle", "mixed"] {
            let done = load.run(SECRET, &format!("{work} --seconds 30")).await;
            assert_failed(&done, "503 Service Unavailable");
            assert_eq!(done.number("operations"), 0);
        }
        assert!(begun.elapsed() < Duration::from_secs(30));
    });
}

#[test]
fn of_two_authorities_each_has_its_turn() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let args = format!("churn --seconds 0.5 --authority {SECRET}");
        let done = load.run(ECHO, &args).await;
        assert_failed(&done, "503 Service Unavailable");
        let (good, bad) = (done.number("operations"), done.number("failures"));
        assert!(good >= 1 && good.abs_diff(bad) <= 1, "{done:?}");
    });
}

#[test]
fn certificates_of_another_mesh_and_a_port_without_a_listener_are_no_connection() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let foreign = Load::of(gateway.address, &Identities::new());
        let done = foreign.run(ECHO, "rr --seconds 30").await;
        assert_failed(
            &done,
            "connection failed: invalid peer certificate: the chain does not lead to a root",
        );
        let nobody = Load::new(Net::new().address(1, 15008));
        let done = nobody.run(ECHO, "churn --seconds 30").await;
        assert_failed(&done, "connection failed: Connection refused");
    });
}

#[test]
fn a_gateway_that_is_gone_ends_what_was_open() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let idle = load.start(ECHO, "idle --streams 5 --seconds 30");
        let requests = load.start(ECHO, "rr --streams 5 --seconds 30");
        tunnels_open(&gateway, 10.0).await;
        gateway.signal(Signal::KILL);
        let (idle, requests) = tokio::join!(ended(idle), ended(requests));
        // The last one may not know yet that its tunnel was open.
        for done in [idle, requests] {
            assert_eq!(done.code, Some(1), "{done:?}");
            assert!((1..=50).contains(&done.number("failures")), "{done:?}");
            assert_eq!(done.number("held_tunnels"), 0);
            assert!(done.stderr.contains(" failed, most often: "), "{done:?}");
        }
    });
}

#[test]
fn an_endpoint_that_ends_its_tunnels_fails_requests_and_they_go_on_with_the_next() {
    run(async {
        let net = Net::new();
        let (gateway, endpoint) = start_in(net).await;
        let load = Load::new(gateway.address);
        let requests = load.start(ECHO, "rr --streams 2 --seconds 2");
        tunnels_open(&gateway, 2.0).await;
        endpoint.kill().await;
        let _again = Serve::plain(net.address(11, endpoint_port()), "echo").await;
        let done = timeout(Duration::from_secs(10), ended(requests)).await;
        let done = done.expect("in time");
        assert_eq!(done.code, Some(1));
        assert!(done.number("failures") >= 1, "{done:?}");
        assert_eq!(done.number("opened_connections"), 1);
    });
}

#[test]
fn an_interrupt_ends_it_with_the_report_so_far() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let requests = load.start(ECHO, "churn --streams 2 --seconds 30");
        let completed = async || gateway.tunnels("completed").await;
        until("a tunnel", completed, |&count| count > 0.0).await;
        send_signal(&requests, Signal::INT);
        let done = ended(requests).await.expect_success();
        assert_eq!(done.report["interrupted"], true);
        // Operations under way were completed.
        let operations = done.number("operations") as f64;
        until("all tunnels", completed, |&count| count == operations).await;
    });
}

#[test]
fn more_streams_than_the_server_allows_are_refused_with_the_number() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let done = load.run(ECHO, "rr --streams 300 --seconds 30").await;
        assert_failed(&done, "the server allows 256; use fewer --streams");
    });
}

#[test]
fn more_than_can_be_done_by_a_rate_is_a_failure() {
    run(async {
        let (gateway, _endpoint) = start().await;
        let load = Load::new(gateway.address);
        let done = load.run(ECHO, "churn --rate 1000000 --seconds 0.2").await;
        assert_failed(&done, "not started, no free stream");
    });
}

#[test]
fn arguments_without_a_meaning_are_a_usage_error() {
    run(async {
        let load = Load::new(Net::new().address(1, 15008));
        for args in [
            "idle --rate 5",
            "up --rate 5",
            "handshake --streams 2",
            "rr --size 0",
            "rr --seconds 0",
            "rr --inner-authority a:1",
        ] {
            let done = load.run(ECHO, args).await;
            assert_eq!(done.code, Some(2), "{args}: {done:?}");
        }
        let missing = load.run(ECHO, "rr --chain missing.crt").await;
        assert_eq!(missing.code, Some(2), "--chain twice: {missing:?}");
    });
}

#[test]
fn an_alert_of_a_tls_listener_is_reported_by_its_name_and_not_as_bytes() {
    run(async {
        let net = Net::new();
        let listener = net.address(1, 15443);
        let mut settings = Settings::new(net, identities());
        settings.listeners =
            format!("  - {{name: sni, bind: \"{listener}\", protocol: tls, routing: istio}}\n");
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
        let _gateway = Gateway::start(&settings).await;
        let load = Load::bare(listener);
        let works = ["rr", "churn", "idle", "stall", "down", "up", "up --size 1MiB"];
        let alert = "TLS alert unrecognized_name (112)";
        // The second one has no endpoint.
        for name in ["no.such.name", "outbound_.80_._.echo.app.svc.cluster.local"] {
            for work in works {
                let done = load.run(name, &format!("{work} --seconds 5")).await;
                assert_failed(&done, alert);
                let kinds = done.report["failures_by_kind"].as_object();
                assert_eq!(kinds.map(serde_json::Map::len), Some(1), "{work}: {done:?}");
                assert_eq!(done.number("received_bytes"), 0, "{work}: {done:?}");
            }
        }
    });
}
