//! Tests of the metrics by their encoded text.

use super::super::tests::{source, value};
use super::super::{Destination, DestinationService, OLD_NAMES, Proximity, Record, RemoteNetwork};
use super::*;
use crate::config::LinkBudget;
use crate::wire::UNKNOWN_CLUSTER;

#[test]
fn every_label_of_a_closed_list_shows_as_zero_from_the_start() {
    let text = Metrics::new().encode();
    for reason in Reason::ALL {
        let labels = format!("reason=\"{reason}\",source_cluster=\"unknown\"");
        let line = format!("strait_tunnels_total{{{labels}}} 0\n");
        assert!(text.contains(&line), "{line}");
    }
    for refusal in HandshakeRefusal::ALL {
        let line = format!("strait_handshakes_refused_total{{reason=\"{refusal}\"}} 0\n");
        assert!(text.contains(&line), "{line}");
    }
    for line in [
        "strait_reload_total{what=\"config\",result=\"ok\"} 0\n",
        "strait_reload_total{what=\"certificates\",result=\"error\"} 0\n",
        "strait_certificate_fetches_total{result=\"error\"} 0\n",
        "strait_connections_open 0\n",
        "strait_tunnels_open 0\n",
        "strait_connections_total 0\n",
        "strait_accept_errors_total{kind=\"connection\"} 0\n",
        "strait_accept_errors_total{kind=\"resource\"} 0\n",
        "strait_endpoint_ejections_total 0\n",
        "strait_connections_exhausted_total 0\n",
        "strait_dials_total{result=\"denied\"} 0\n",
        "strait_connections_shed_total{limit=\"files\",source_cluster=\"unknown\"} 0\n",
        "strait_accept_seconds_count 0\n",
        "strait_log_lines_dropped_total 0\n",
        "strait_access_log_suppressed_total 0\n",
        "strait_metric_overflow_total{metric=\"istio_tcp_connections_failed\"} 0\n",
        "istio_build{component=\"strait\",tag=\"0.1.0\"} 1\n",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn each_event_moves_its_own_metric() {
    let metrics = Metrics::new();
    let first = metrics.connection_opened();
    let second = metrics.connection_opened();
    drop(first);
    metrics.accept_errors.inc(AcceptError::Resource.label());
    metrics.handshakes_refused.inc(HandshakeRefusal::UntrustedDomain.label());
    metrics.dial_failed(Reason::DialTimeout);
    metrics.dial_succeeded();
    metrics.times().accepted(Duration::from_millis(3));
    metrics.ejections.inc();
    metrics.connection_shed([192, 0, 2, 1].into(), "share");
    for cluster in ["west", UNKNOWN_CLUSTER, UNKNOWN_CLUSTER] {
        metrics.peer_shed(&cluster.into(), "share");
    }
    metrics.reload(ReloadSource::Mesh, false);
    let text = metrics.encode();
    drop(second);
    for line in [
        "strait_connections_total 2",
        "strait_connections_open 1",
        "strait_accept_errors_total{kind=\"resource\"} 1",
        "strait_handshakes_refused_total{reason=\"untrusted_domain\"} 1",
        "strait_dials_total{result=\"timeout\"} 1",
        "strait_dials_total{result=\"ok\"} 1",
        "strait_accept_seconds_bucket{le=\"0.0025\"} 0",
        "strait_accept_seconds_bucket{le=\"0.005\"} 1",
        "strait_endpoint_ejections_total 1",
        "strait_connections_shed_total{limit=\"share\",source_cluster=\"unknown\"} 3",
        "strait_connections_shed_total{limit=\"share\",source_cluster=\"west\"} 1",
        "strait_reload_total{what=\"mesh\",result=\"error\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
    assert!(metrics.encode().contains("strait_connections_open 0\n"));
}

#[test]
fn the_plain_format_names_counters_by_their_samples() {
    let text = Metrics::new().encode_plain();
    assert!(text.contains("# TYPE strait_tunnels_total counter\nstrait_tunnels_total{"));
    assert!(text.contains("# TYPE strait_tunnels_open gauge\n"));
    assert!(text.contains("# TYPE strait_dial_seconds histogram\n"));
    assert!(!text.contains("# EOF"));
}

#[test]
fn bytes_to_other_networks_count_for_the_budget_of_their_link_and_local_ones_do_not() {
    let metrics = Arc::new(Metrics::new());
    let budget =
        LinkBudget { bytes: 1 << 20, period: Duration::from_secs(60), excess_weight: None };
    let link = Link {
        from: "west".to_owned(),
        to: "north".to_owned(),
        exposes: Vec::new(),
        budget: Some(budget),
    };
    metrics.set_link_budgets(Some(&[link]), "east");
    let (source, network) = (Arc::new(source()), "net-n".into());
    let open = |remote: Option<&str>| {
        let mut record = Record::new(&metrics, &source, "echo:80");
        let service =
            DestinationService { hostname: "echo.app".into(), ..DestinationService::default() };
        record.set_service(service, None);
        let destination =
            Destination { address: ([10, 0, 0, 1], 15008).into(), pod: Arc::new(String::new()) };
        let cluster = remote.map(Arc::from);
        let remote = cluster.as_ref().map(|cluster| RemoteNetwork { cluster, network: &network });
        record.set_open(destination, &Arc::default(), remote, Proximity::Zone);
        record.add_received(7);
        record.add_sent(5);
        record
    };
    let mut tunnels = [open(None), open(Some("north")), open(Some("south"))];
    metrics.sweep(Instant::now());
    tunnels[1].add_sent(100);
    metrics.sweep(Instant::now());
    let text = metrics.encode();
    let north = [
        "source_cluster=\"west\"",
        "destination_cluster=\"north\"",
        "destination_network=\"net-n\"",
        "destination_service=\"echo.app\"",
    ];
    let received = "strait_network_received_bytes_total";
    assert_eq!(value(&text, received, &north), 7);
    assert_eq!(value(&text, "strait_network_sent_bytes_total", &north), 105);
    let of_network = text.lines().filter(|line| line.starts_with(received));
    assert_eq!(of_network.count(), 2, "{text}");
    assert_eq!(value(&text, "strait_link_used_bytes", &north[..2]), 112);
    assert_eq!(value(&text, "strait_link_budget_bytes", &north[..2]), 1 << 20);
}

#[test]
fn renamed_metrics_have_both_names_and_the_same_samples() {
    let metrics = Metrics::new();
    drop(metrics.set_buffer_limit(77));
    metrics.set_certificate_expiry("own", &[("leaf", SystemTime::UNIX_EPOCH)]);
    metrics.remote_gateways.set(|| {
        vec![GatewayRow {
            state: "ready".to_owned(),
            connections: 1,
            tunnels: 1,
            ..GatewayRow::new(([192, 0, 2, 1], 15008).into(), ["west"; 2], None, 50)
        }]
    });
    let text = metrics.encode();
    let samples = |name: &str| {
        let of_name = text.lines().filter_map(|line| line.strip_prefix(name));
        let of_name = of_name.filter(|rest| rest.starts_with([' ', '{']));
        of_name.map(str::to_owned).collect::<Vec<_>>()
    };
    for (new, old) in OLD_NAMES {
        assert_eq!(samples(new).len(), 1, "{new} in {text}");
        assert_eq!(samples(new), samples(old), "{new}");
        assert!(text.contains(&format!("# HELP {old} Old name of {new}.\n")), "{text}");
    }
}

#[test]
fn the_process_has_the_usual_metrics() {
    let text = Metrics::new().encode();
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<f64>().ok()).expect("a number")
    };
    assert!(value("process_cpu_seconds_total") > 0.0);
    assert!(value("process_resident_memory_bytes") > f64::from(1 << 20));
    let open = value("process_open_fds");
    assert!(open >= 3.0 && open <= value("process_max_fds"), "{text}");
    let start =
        SystemTime::UNIX_EPOCH + Duration::from_secs_f64(value("process_start_time_seconds"));
    assert!(start <= SystemTime::now());
    assert!(start.elapsed().expect("a time before now") < Duration::from_secs(24 * 60 * 60));
}
