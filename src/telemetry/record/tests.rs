//! Tests of a record's metrics and log lines.

use opentelemetry_sdk::trace::SpanData;
use serde_json::{Value, json};

use super::super::logging;
use super::super::tests::{Captured, source, value};
use super::*;
use crate::config::{Log, LogFormat};
use crate::telemetry::spans::tests::{Collector, sampling};

const LABELS: &str = "reporter=\"gateway\",source_workload=\"unknown\",\
    source_canonical_service=\"unknown\",source_canonical_revision=\"unknown\",\
    source_workload_namespace=\"shop\",\
    source_principal=\"spiffe://west.local/ns/shop/sa/checkout\",source_app=\"unknown\",\
    source_version=\"unknown\",source_cluster=\"west\",\
    destination_service=\"echo.app.mesh.internal\",destination_service_namespace=\"app\",\
    destination_service_name=\"echo\",destination_workload=\"echo-v1\",\
    destination_canonical_service=\"echo\",destination_canonical_revision=\"v1\",\
    destination_workload_namespace=\"app\",\
    destination_principal=\"spiffe://east.local/ns/app/sa/echo\",destination_app=\"echo\",\
    destination_version=\"v1\",destination_cluster=\"east\",request_protocol=\"tcp\",\
    response_flags=\"-\",connection_security_policy=\"mutual_tls\",\
    source_region=\"unknown\",source_zone=\"unknown\",destination_region=\"us-east-2\",\
    destination_zone=\"unknown\"";

fn service() -> DestinationService {
    DestinationService {
        hostname: "echo.app.mesh.internal".into(),
        name: "echo".into(),
        namespace: "app".into(),
    }
}

fn connect(record: &mut Record) {
    let destination = Destination {
        address: ([10, 0, 0, 1], 15008).into(),
        pod: Arc::new("echo-v1-abcde".to_owned()),
    };
    let workload = WorkloadLabels {
        workload: "echo-v1".into(),
        namespace: "app".into(),
        principal: "spiffe://east.local/ns/app/sa/echo".into(),
        cluster: "east".into(),
        canonical_name: "echo".into(),
        canonical_revision: "v1".into(),
        region: "us-east-2".into(),
        zone: String::new(),
    };
    record.set_open(destination, &Arc::new(workload), None, Proximity::Region);
}

fn record(metrics: &Arc<Metrics>, authority: &str) -> Record {
    Record::new(metrics, &Arc::new(source()), authority)
}

/// Runs `work` with a JSON log and returns its events without their timestamps.
fn logged(level: &str, work: impl FnOnce()) -> Vec<Value> {
    let lines = Captured::default();
    let log = Log { level: level.into(), format: LogFormat::Json, ..Log::default() };
    let (subscriber, _handle) = logging::build(&log, lines.clone(), false, None).expect("a log");
    tracing::subscriber::with_default(subscriber, work);
    let event = |line: &str| {
        let mut event: Value = serde_json::from_str(line).expect("a JSON line");
        event.as_object_mut().and_then(|event| event.remove("timestamp")).expect("a time");
        event
    };
    lines.text().lines().map(event).collect()
}

#[test]
fn a_tunnel_counts_its_bytes_while_open_and_its_end_once() {
    let metrics = Arc::new(Metrics::new());
    let mut record = record(&metrics, "echo.app.mesh.internal:80");
    record.set_service(service(), None);
    connect(&mut record);
    record.add_received(5);
    record.add_sent(6);
    record.add_sent(7);
    let open = metrics.encode();
    for (name, count) in [
        ("istio_tcp_connections_opened_total", 1),
        ("istio_tcp_received_bytes_total", 5),
        ("istio_tcp_sent_bytes_total", 13),
    ] {
        let line = format!("{name}{{{LABELS}}} {count}\n");
        assert!(open.contains(&line), "{line} in\n{open}");
    }
    assert!(open.contains("strait_tunnels_open 1\n"));
    assert!(!open.contains("istio_tcp_connections_closed_total{"));
    record.finish(Reason::Completed);
    record.finish(Reason::DrainDeadline);
    drop(record);
    let closed = metrics.encode();
    assert!(closed.contains(&format!("istio_tcp_connections_closed_total{{{LABELS}}} 1\n")));
    assert!(
        closed.contains("strait_tunnels_total{reason=\"completed\",source_cluster=\"west\"} 1\n")
    );
    assert!(
        closed.contains(
            "strait_tunnels_total{reason=\"drain_deadline\",source_cluster=\"west\"} 0\n"
        )
    );
    assert!(closed.contains("strait_tunnels_open 0\n"));
}

#[test]
fn a_refusal_counts_as_failed_with_its_response_flags() {
    let metrics = Arc::new(Metrics::new());
    let mut record = record(&metrics, "echo.app.mesh.internal:80");
    record.set_service(service(), None);
    record.finish(Reason::NotForPeer);
    drop(record);
    let text = metrics.encode();
    let labels = ["response_flags=\"DENY\"", "destination_workload=\"unknown\""];
    assert_eq!(value(&text, "istio_tcp_connections_failed_total", &labels), 1);
    assert!(!text.contains("istio_tcp_connections_opened_total{"));
}

#[test]
fn a_record_that_nobody_finished_tells_a_panic_from_a_lost_peer() {
    let metrics = Arc::new(Metrics::new());
    drop(record(&metrics, "a:1"));
    let moved = record(&metrics, "a:1");
    let panicked = std::thread::spawn(move || {
        let _record = moved;
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    let text = metrics.encode();
    assert!(
        text.contains(
            "strait_tunnels_total{reason=\"downstream_lost\",source_cluster=\"west\"} 1\n"
        )
    );
    assert!(text.contains("strait_tunnels_total{reason=\"panic\",source_cluster=\"west\"} 1\n"));
}

#[test]
fn an_open_tunnel_logs_its_opening_and_its_completion() {
    let metrics = Arc::new(Metrics::new());
    let mut events = logged("debug", || {
        let mut record = record(&metrics, "echo.app.mesh.internal:80");
        record.set_service(service(), None);
        connect(&mut record);
        record.add_received(5);
        record.add_sent(6);
        record.finish(Reason::Completed);
    });
    let duration = events[1].as_object_mut().and_then(|event| event.remove("duration"));
    let duration = duration.as_ref().and_then(Value::as_str).expect("a duration");
    assert!(duration.strip_suffix("ms").is_some_and(|ms| ms.parse::<u64>().is_ok()));
    let opened = json!({
        "level": "DEBUG",
        "target": "access",
        "message": "connection opened",
        "src.addr": "192.0.2.7:40001",
        "src.namespace": "shop",
        "src.identity": "spiffe://west.local/ns/shop/sa/checkout",
        "src.cluster": "west",
        "dst.addr": "10.0.0.1:15008",
        "dst.hbone_addr": "echo.app.mesh.internal:80",
        "dst.service": "echo.app.mesh.internal",
        "dst.workload": "echo-v1-abcde",
        "dst.namespace": "app",
        "dst.identity": "spiffe://east.local/ns/app/sa/echo",
        "dst.cluster": "east",
        "listener": "cross-network",
        "direction": "inbound",
    });
    let mut complete = opened.clone();
    complete["level"] = "INFO".into();
    complete["message"] = "connection complete".into();
    complete["bytes_sent"] = 6.into();
    complete["bytes_recv"] = 5.into();
    complete["reason"] = "completed".into();
    assert_eq!(events, [opened, complete]);
}

#[test]
fn a_refusal_logs_what_is_known_and_why() {
    let metrics = Arc::new(Metrics::new());
    let events = logged("info", || {
        let mut first = record(&metrics, "evil\n:80");
        first.finish(Reason::BadAuthority);
        drop(first);
        let mut second = record(&metrics, &"é".repeat(1000));
        second.set_service(service(), None);
        second.finish(Reason::DialRefused);
        second.set_detail("10.0.0.1:80 and 1 other refused".into());
    });
    assert_eq!(events[0]["message"], "connection failed");
    assert_eq!(events[0]["level"], "WARN");
    assert_eq!(events[0]["dst.hbone_addr"], "evil\n:80");
    assert_eq!(events[0].get("error"), None);
    assert_eq!(events[0].get("dst.service"), None);
    assert_eq!(events[0].get("dst.addr"), None);
    assert_eq!(events[1]["dst.hbone_addr"].as_str().map(str::len), Some(MAX_TEXT));
    assert_eq!(events[1]["reason"], "dial_refused");
    assert_eq!(events[1]["error"], "10.0.0.1:80 and 1 other refused");
    assert_eq!(events[1]["dst.namespace"], "app");
}

#[test]
fn an_endpoint_that_was_tried_in_vain_does_not_explain_a_later_end() {
    let metrics = Arc::new(Metrics::new());
    let events = logged("info", || {
        let mut record = record(&metrics, "echo.app.mesh.internal:80");
        record.set_detail("another endpoint refused".into());
        connect(&mut record);
        record.finish(Reason::UpstreamReset);
    });
    assert_eq!(events[0]["message"], "connection complete");
    assert_eq!(events[0].get("error"), None);
}

#[test]
fn a_flood_of_refused_handshakes_is_counted_whole_and_logged_in_part() {
    let metrics = Metrics::new();
    let events = logged("info", || {
        for _ in 0..500 {
            let address = ([192, 0, 2, 9], 1).into();
            report_refused_handshake(&metrics, address, HandshakeRefusal::Expired, "old");
        }
    });
    // The loop can take two or three windows, but not ten.
    assert!((10..100).contains(&events.len()), "{}", events.len());
    assert_eq!(events[0]["message"], "handshake refused");
    assert_eq!(events[0]["reason"], "expired");
    assert_eq!(events[0]["error"], "old");
    let text = metrics.encode();
    assert!(text.contains("strait_handshakes_refused_total{reason=\"expired\"} 500\n"));
}

#[tokio::test(start_paused = true)]
async fn the_stages_of_a_tunnel_are_timed_one_after_the_other() {
    let wait = |millis| tokio::time::advance(Duration::from_millis(millis));
    let metrics = Arc::new(Metrics::new());
    let mut tunnel = record(&metrics, "echo:80");
    wait(3).await;
    tunnel.begin_dial(Instant::now());
    wait(70).await;
    // The first endpoint has failed.
    tunnel.begin_dial(Instant::now());
    wait(20).await;
    tunnel.end_dial(Instant::now(), Duration::from_millis(20));
    connect(&mut tunnel);
    tunnel.add_received(5);
    tunnel.add_sent(0);
    wait(400).await;
    let (offered, answer) = (OfferedProtocol::H2, ServerAnswer::Tls13);
    tunnel.inner_hello_answered(Duration::from_millis(300), offered, answer);
    tunnel.add_sent(5);
    wait(2000).await;
    tunnel.add_sent(5);
    tunnel.finish(Reason::Completed);
    drop(tunnel);
    // A tunnel that never opened has no times.
    record(&metrics, "echo:80").finish(Reason::NoEndpoint);
    let text = metrics.encode();
    for (stage, sum) in [
        ("pick", "0.003"),
        ("dial", "0.02"),
        ("first_byte", "0.4"),
        ("inner_handshake", "0.3"),
        ("tunnel", "2.493"),
    ] {
        let labels = "{tier=\"region\",source_cluster=\"west\"}";
        let name = format!("strait_{stage}_seconds");
        let has = |line: &str| text.lines().any(|other| other == line);
        assert!(has(&format!("{name}_sum{labels} {sum}")), "{stage}: {text}");
        assert!(has(&format!("{name}_count{labels} 1")), "{stage}: {text}");
        let all = labels.replacen('{', "{le=\"+Inf\",", 1);
        assert!(has(&format!("{name}_bucket{all} 1")), "{stage}: {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_sampled_tunnel_is_a_span_and_its_line_has_the_trace() {
    let (metrics, collector) = (Arc::new(Metrics::new()), Collector::default());
    metrics.trace(sampling(0.0), collector.clone(), 4);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let mut next = Vec::new();
    let events = logged("info", || {
        for flag in ["01", "00"] {
            let mut record = record(&metrics, "[2001:db8::1]:80");
            record
                .begin_trace(Some(format!("00-{trace}-b7ad6b7169203331-{flag}").as_bytes()), None);
            record.set_service(service(), None);
            record.begin_dial(Instant::now());
            record.set_detail("10.0.0.1:80 refused".into());
            next.push(record.traceparent());
            record.finish(Reason::DialRefused);
        }
        let mut record = record(&metrics, "echo.app.mesh.internal:80");
        record.begin_trace(None, None);
        record.finish(Reason::DialRefused);
    });
    let ids: Vec<_> = events.iter().map(|event| event["trace_id"].as_str()).collect();
    assert_eq!(ids, [Some(trace), Some(trace), None]);
    let tracer = metrics.tracer().expect("a tracer");
    tracer.shut_down(Duration::from_secs(60)).expect("an export");
    let spans = collector.spans.lock();
    let [span] = &spans[..] else {
        panic!("one sampled tunnel: {spans:?}");
    };
    let (context, parent) = (&span.span_context, span.parent_span_id.to_string());
    assert_eq!((&*context.trace_id().to_string(), &*parent), (trace, "b7ad6b7169203331"));
    assert_eq!(next, [Some(format!("00-{trace}-{}-01", context.span_id())), None]);
    let names: Vec<_> = span.events.iter().map(|event| &*event.name).collect();
    assert_eq!((&*span.name, &names[..]), ("tunnel echo.app.mesh.internal", &["policy"][..]));
    assert_eq!(span.status, opentelemetry::trace::Status::error("10.0.0.1:80 refused"));
    let value = |key: &str| {
        let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == key)?;
        Some(found.value.to_string())
    };
    for (key, text) in [
        ("error.type", "dial_refused"),
        ("server.address", "2001:db8::1"),
        ("server.port", "80"),
        ("strait.src.cluster", "west"),
    ] {
        assert_eq!(value(key).as_deref(), Some(text), "{key}");
    }
    assert_eq!(value("strait.dst.addr"), None);
}

#[test]
fn tunnels_of_a_peer_that_never_opened_take_no_room_from_the_spans_of_others() {
    let (metrics, collector) = (Arc::new(Metrics::new()), Collector::default());
    metrics.trace(sampling(0.0), collector.clone(), 512);
    let other = Source { principal: "spiffe://west.local/ns/shop/sa/other".into(), ..source() };
    let begin = |source: &Source| {
        let mut record = Record::new(&metrics, &Arc::new(source.clone()), "echo:80");
        let trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        record.begin_trace(Some(trace), None);
        record
    };
    // No export ends meanwhile.
    let taken = collector.spans.lock();
    (0..5000).for_each(|_| begin(&source()).finish(Reason::DialRefused));
    (0..5).for_each(|_| begin(&other).finish(Reason::DialRefused));
    let mut open = begin(&source());
    connect(&mut open);
    drop((open, taken));
    let tracer = metrics.tracer().expect("a tracer");
    tracer.shut_down(Duration::from_secs(60)).expect("an export");
    let spans = collector.spans.lock();
    let has = |span: &&SpanData, text: &str| {
        span.attributes.iter().any(|attribute| attribute.value.as_str() == text)
    };
    let of_other = spans.iter().filter(|span| has(span, &other.principal)).count();
    let of_open = spans.iter().filter(|span| has(span, "echo-v1-abcde")).count();
    // The loop can take some seconds.
    assert!((of_other, of_open) == (5, 1) && spans.len() < 500, "{}", spans.len());
}
