//! Spans of tunnels, exported to an OTLP collector.

use http::{Method, Request};
use opentelemetry_proto::tonic::trace::v1::Span;
use rcgen::SanType;
use rustix::process::Signal;
use strait::tools::dev::Authority;
use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::collector::{Collector, hex, texts};
use crate::support::istiod;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};
use crate::transit;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Host and port of the collector.
const COLLECTOR: (u8, u16) = (20, 4317);

/// Has the gateway export to the collector of a net, under the name `service`.
fn export<'a>(
    settings: Settings<'a>,
    to: Net,
    service: &str,
    variables: &[(&str, &str)],
) -> Settings<'a> {
    let collector = format!("http://{}", to.address(COLLECTOR.0, COLLECTOR.1));
    let own = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ("OTEL_SERVICE_NAME", service),
    ];
    let variables = own.iter().chain(variables).map(|(name, value)| format!("{name}={value}"));
    // `env` is in coreutils.
    let inside = ["env".to_owned()].into_iter().chain(variables).collect();
    Settings { inside, ..settings }
}

fn echo(net: Net) -> Settings<'static> {
    Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])
}

async fn serve(collector: &Collector, net: Net) {
    collector.serve(net.listen(COLLECTOR.0, COLLECTOR.1).await);
}

/// A tunnel whose request has a `traceparent`, to its end.
async fn tunnel(client: &Client, flag: &str) {
    let request = Request::builder().method(Method::CONNECT).uri(ECHO);
    let traceparent = format!("00-{TRACE}-{PARENT}-{flag}");
    let request = request.header("traceparent", traceparent).body(()).expect("a request");
    let mut tunnel = client.request(request).await.expect("a tunnel");
    tunnel.write_all(b"hello").await.expect("an open tunnel");
    tunnel.shutdown().await.expect("our end");
    let mut answer = String::new();
    tunnel.read_to_string(&mut answer).await.expect("an answer");
    assert_eq!(answer, "hello");
}

async fn spans(collector: &Collector, service: &str, count: usize) -> Vec<Span> {
    let received = async || collector.spans(service);
    until("spans", received, |spans| spans.len() >= count).await
}

fn events(span: &Span) -> Vec<&str> {
    span.events.iter().map(|event| &*event.name).collect()
}

#[test]
fn a_collector_receives_the_span_of_a_tunnel_below_that_of_its_peer() {
    run(async {
        let (net, collector) = (Net::new(), Collector::default());
        serve(&collector, net).await;
        let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "x-team=mesh");
        let gateway = Gateway::start(&export(echo(net), net, "east", &[headers])).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        tunnel(&client, "00").await;
        let received = spans(&collector, "east", 1).await;
        let [span] = &received[..] else {
            panic!("one tunnel: {received:?}");
        };
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.into(), PARENT.into()));
        assert_eq!((span.kind, span.span_id.len()), (2, 8));
        assert_eq!(span.name, "tunnel echo.app.svc.cluster.local");
        assert_eq!(span.status.as_ref().map_or(0, |status| status.code), 0);
        assert_eq!(events(span), ["handshake", "policy", "dial", "first_byte"]);
        let handshake = texts(&span.events[0].attributes);
        let seconds: f64 = handshake["strait.handshake.duration"].parse().expect("a number");
        assert!(seconds > 0.0);
        // The handshake is older than the request.
        let times = span.events[1..].iter().map(|event| event.time_unix_nano);
        let mut times: Vec<_> = [span.start_time_unix_nano].into_iter().chain(times).collect();
        times.push(span.end_time_unix_nano);
        assert!(times.is_sorted() && span.events[0].time_unix_nano <= times[0], "{times:?}");
        let attributes = texts(&span.attributes);
        for (key, value) in [
            ("server.address", "echo.app.svc.cluster.local"),
            ("server.port", "80"),
            ("strait.src.cluster", "west"),
            ("strait.dst.addr", &*net.address(11, 9000).to_string()),
            ("strait.bytes_sent", "5"),
            ("strait.bytes_recv", "5"),
            ("strait.reason", "completed"),
        ] {
            assert_eq!(attributes.get(key).map(String::as_str), Some(value), "{key}");
        }
        assert!(attributes.contains_key("client.address"));
        assert_eq!(attributes.get("client.address"), attributes.get("network.peer.address"));
        assert_eq!(attributes.get("error.type"), None);
        assert_eq!(collector.header("x-team").as_deref(), Some("mesh"));
        gateway.logged(&format!("trace_id=\"{TRACE}\"")).await;

        // A rejection is a span of its own trace, with the reason as its error.
        client.tunnel("nothing.app.svc.cluster.local:80").await.expect_err("a rejection");
        let received = spans(&collector, "east", 2).await;
        let span = received.last().expect("a span");
        assert!(span.parent_span_id.is_empty() && hex(&span.trace_id) != TRACE);
        assert_eq!(events(span), [""; 0]);
        assert_eq!(texts(&span.attributes)["error.type"], "unknown_service");
        assert_eq!(span.status.as_ref().map(|status| status.code), Some(2));
    });
}

#[test]
fn a_collector_is_reached_by_tls_with_the_roots_of_the_environment_and_no_others() {
    run(async {
        let (net, collector) = (Net::new(), Collector::default());
        let socket = net.listen(COLLECTOR.0, COLLECTOR.1).await;
        let name = SanType::IpAddress(net.ip(COLLECTOR.0));
        collector.serve_tls(socket, istiod::tls(identities(), name)).await;
        let folder = tempfile::tempdir().expect("a folder");
        let endpoint = format!("https://{}", net.address(COLLECTOR.0, COLLECTOR.1));
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let other = Authority::new().expect("a root").root_pem();
        for (service, roots) in [("east", &identities().root), ("other", &other)] {
            let file = folder.path().join(service);
            std::fs::write(&file, roots).expect("a file");
            let variables = [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint),
                ("OTEL_EXPORTER_OTLP_CERTIFICATE", file.to_str().expect("a path")),
            ];
            let gateway = Gateway::start(&export(echo(net), net, service, &variables)).await;
            let client = gateway.client(identities()).await;
            tunnel(&client, "00").await;
            if service == "east" {
                spans(&collector, service, 1).await;
            } else {
                gateway.logged("the collector does not take spans").await;
                assert!(collector.spans(service).is_empty());
            }
            // The next one has its addresses.
            gateway.kill().await;
        }
    });
}

#[test]
fn a_flag_samples_where_the_own_ratio_does_not_and_a_stop_exports_the_last_spans() {
    run(async {
        let (net, collector) = (Net::new(), Collector::default());
        serve(&collector, net).await;
        // Only the end of the process comes before the next batch.
        let variables = [
            ("OTEL_TRACES_SAMPLER", "parentbased_always_off"),
            ("OTEL_BSP_SCHEDULE_DELAY", "86400000"),
        ];
        let mut gateway = Gateway::start(&export(echo(net), net, "east", &variables)).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        for flag in ["00", "01", "00"] {
            tunnel(&client, flag).await;
        }
        gateway.wait_until_open(1, 0).await;
        drop(client);
        gateway.signal(Signal::TERM);
        let status = gateway.exited().await;
        assert!(status.success(), "{status}");
        let received = collector.spans("east");
        let traces: Vec<_> = received.iter().map(|span| hex(&span.trace_id)).collect();
        assert_eq!(traces, [TRACE]);
    });
}

#[test]
fn the_span_of_the_next_gateway_is_below_that_of_this_one() {
    run(async {
        let (here, there, collector) = (Net::new(), Net::new(), Collector::default());
        serve(&collector, here).await;
        let east = transit::east(here, &[there], transit::WEST_GATEWAY);
        let west = transit::west(there, &[(11, 1, "TCP")]);
        // West samples what east has sampled, and nothing else.
        let flagged = [("OTEL_TRACES_SAMPLER", "parentbased_always_off")];
        let (east, west) = (export(east, here, "east", &[]), export(west, here, "west", &flagged));
        let _endpoint = Endpoint::echo(there.listen(11, 9000).await);
        let _west = transit::start_west(&west).await;
        let east = Gateway::start(&east).await;
        let client = east.client(identities()).await;
        tunnel(&client, "00").await;
        let (outer, inner) =
            (spans(&collector, "east", 1).await, spans(&collector, "west", 1).await);
        assert_eq!(
            (hex(&outer[0].trace_id), hex(&inner[0].trace_id)),
            (TRACE.into(), TRACE.into())
        );
        assert_eq!(hex(&outer[0].parent_span_id), PARENT);
        assert_eq!(hex(&inner[0].parent_span_id), hex(&outer[0].span_id));
    });
}

#[test]
fn a_collector_that_is_gone_or_silent_delays_no_tunnel_and_no_end() {
    run(async {
        let queue = [
            ("OTEL_BSP_MAX_QUEUE_SIZE", "2"),
            // Longer than the test.
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "86400000"),
        ];
        for (is_silent, variables) in [(false, &[][..]), (true, &queue)] {
            let net = Net::new();
            let _silent = if is_silent { Some(net.listen(20, COLLECTOR.1).await) } else { None };
            let mut gateway = Gateway::start(&export(echo(net), net, "east", variables)).await;
            let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
            let client = gateway.client(identities()).await;
            for _ in 0..5 {
                tunnel(&client, "01").await;
            }
            let dropped = async || gateway.metric("strait_spans_dropped_total").await;
            until("lost spans", dropped, |&dropped| dropped >= 3.0).await;
            if !is_silent {
                gateway.logged("the collector does not take spans").await;
            }
            drop(client);
            gateway.signal(Signal::TERM);
            let status = gateway.exited().await;
            assert!(status.success(), "{status}");
        }
    });
}

#[test]
fn a_wrong_variable_is_an_error_at_the_start_that_names_it() {
    run(async {
        let net = Net::new();
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://:4317:4317"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
        ] {
            let mut gateway =
                Gateway::spawn(&export(echo(net), net, "east", &[(name, value)]), |_| {});
            assert_eq!(gateway.exited().await.code(), Some(1), "{name}");
            let log = gateway.log();
            assert!(log.contains(name) && log.contains(value), "{log}");
        }
    });
}
