//! The table of `docs/metrics.md`, from a page of metrics on which each has a sample.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use strait::config::{Link, LinkBudget};
use strait::limits::turns::UsedTime;
use strait::limits::{OwnedPool, Pool, Resource, Source};
use strait::reason::Reason;
use strait::status::{GatewayRow, ReloadSource};
use strait::telemetry::{
    Destination, DestinationService, Metrics, OLD_NAMES, Proximity, Record, RemoteNetwork,
};
use strait::tools::samples;
use strait::wire::ServerAnswer;
use strait::wire::client_hello::OfferedProtocol;
use tokio::time::Instant;

use super::page::{assert_generated, table};
use crate::tree;

/// A label with more values is listed without them.
const VALUES_MAX: usize = 6;
/// The labels of the `istio_tcp_*` counters are the same for all, and many.
const TCP_PREFIX: &str = "istio_tcp_";
const TCP_LABELS: &str = "Istio's, see below";

/// A metric on a page of metrics.
#[derive(Debug, Default)]
struct Described {
    help: String,
    kind: String,
    /// Names of labels in their order, each with the values that were seen.
    labels: Vec<(String, BTreeSet<String>)>,
}

/// Gives each family of samples that has none at the start a sample.
fn sampled(metrics: &Arc<Metrics>) {
    let source = Arc::new(samples::source());
    let destination =
        Destination { address: ([10, 0, 0, 1], 15008).into(), pod: Arc::new("echo".to_owned()) };
    let mut open = Record::new(metrics, &source, "echo:80");
    open.set_service(DestinationService::default(), None);
    let remote = RemoteNetwork { cluster: &"north".into(), network: &"north".into() };
    open.begin_dial(Instant::now());
    open.set_open(destination, &Arc::default(), Some(remote), Proximity::Remote);
    open.add_sent(1);
    for answer in ServerAnswer::ALL {
        open.inner_hello_answered(Duration::ZERO, OfferedProtocol::H2, answer);
    }
    for offered in OfferedProtocol::ALL {
        open.inner_hello_answered(Duration::ZERO, offered, ServerAnswer::Tls13);
    }
    open.finish(Reason::Completed);
    drop(open);
    let mut failed = Record::new(metrics, &source, "echo:80");
    failed.finish(Reason::NoEndpoint);
    drop(failed);
    metrics.remote_gateways.set(|| {
        let rtt = Some(Duration::from_millis(1));
        vec![GatewayRow {
            state: "ready".to_owned(),
            connections: 1,
            tunnels: 1,
            ..GatewayRow::new(([192, 0, 2, 1], 15008).into(), ["west"; 2], rtt, 100)
        }]
    });
    let descriptors = Pool::new(Resource::Descriptors, 100);
    let held = descriptors.account(&Source::cluster(&"west".into())).charge(1);
    let used = UsedTime { cluster: "west".into(), ..UsedTime::default() };
    metrics.worker_time.set(move || vec![used.clone()]);
    metrics.pools.set(move || vec![OwnedPool::new(held.account().pool(), None)]);
    metrics.set_link_budgets(
        Some(&[Link {
            from: "west".to_owned(),
            to: "north".to_owned(),
            exposes: Vec::new(),
            budget: Some(LinkBudget {
                bytes: 1 << 30,
                period: Duration::from_secs(60),
                excess_weight: None,
            }),
        }]),
        "east",
    );
    metrics.listeners.set(|| vec![("hbone".into(), true)]);
    metrics.set_config_hash(1);
    metrics.times().handshake_done(&source, std::time::Instant::now());
    metrics.baggage_mismatch(&source);
    metrics.set_certificate_expiry("identity", &[("leaf", SystemTime::now())]);
    let xds = &metrics.xds;
    xds.create_type("type");
    xds.accepted("type");
    xds.set_resources("type", 1, 0);
    xds.set_cache_time(ReloadSource::Mesh, SystemTime::now());
    xds.terminated("Clean");
}

/// The metrics of a page in Prometheus' text format.
fn described(page: &str) -> BTreeMap<String, Described> {
    let mut found: BTreeMap<String, Described> = BTreeMap::new();
    for line in page.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            found.entry(name.to_owned()).or_default().help = help.trim_end_matches('.').to_owned();
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|l| l.split_once(' '))
        {
            found.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if let Some((name, rest)) = line.split_once('{') {
            let labels = rest.rsplit_once('}').unwrap().0;
            let Some(one) = found.get_mut(name.trim_end_matches("_count")) else {
                continue;
            };
            for pair in labels.split("\",").filter(|pair| !pair.is_empty()) {
                let (label, value) = pair.split_once("=\"").unwrap();
                let value = value.trim_end_matches('"').to_owned();
                match one.labels.iter_mut().find(|(name, _)| name == label) {
                    Some((_, values)) => drop(values.insert(value)),
                    None => one.labels.push((label.to_owned(), [value].into())),
                }
            }
        }
    }
    found
}

/// The labels of a metric; `closed` has the values of those that exist from the start.
fn labels(name: &str, all: &Described, closed: Option<&Described>) -> String {
    if name.starts_with(TCP_PREFIX) {
        return TCP_LABELS.to_owned();
    }
    let label = |(label, _): &(String, BTreeSet<String>)| {
        let mut lists = closed.into_iter().flat_map(|closed| &closed.labels);
        let values = lists.find(|(name, _)| name == label).map(|(_, values)| values);
        match values {
            Some(values) if (2..=VALUES_MAX).contains(&values.len()) => {
                let values: Vec<_> = values.iter().map(|value| format!("`{value}`")).collect();
                format!("`{label}`: {}", values.join(", "))
            }
            _ => format!("`{label}`"),
        }
    };
    all.labels.iter().map(label).collect::<Vec<_>>().join("; ")
}

#[test]
fn the_page_of_metrics_lists_every_metric() {
    let metrics = Arc::new(Metrics::new());
    let closed = described(&metrics.encode_plain());
    sampled(&metrics);
    let all = described(&metrics.encode_plain());
    let row = |(name, one): (&String, &Described)| {
        let labels = labels(name, one, closed.get(name));
        vec![format!("`{name}`"), one.kind.clone(), labels, one.help.clone()]
    };
    let rows: Vec<_> = all.iter().map(row).collect();
    let mut text = table(&["metric", "type", "labels", "meaning"], &rows);
    let tcp = &all["istio_tcp_connections_opened_total"];
    let names: Vec<_> = tcp.labels.iter().map(|(name, _)| format!("`{name}`")).collect();
    text.push_str(&format!(
        "\nThe labels of the `{TCP_PREFIX}*` counters are, in this order:\n\n{}\n",
        names.chunks(3).map(|names| format!("- {}\n", names.join(", "))).collect::<String>()
    ));
    assert_generated("docs/metrics.md", "metrics", &text);
    let renamed = OLD_NAMES.map(|(new, old)| [old, new].map(|name| format!("`{name}`")).to_vec());
    assert_generated("docs/metrics.md", "renamed", &table(&["old name", "new name"], &renamed));

    // A family without a sample is on no page: each name in the source has to be here.
    let names: BTreeSet<_> = all.keys().map(|name| name.trim_end_matches("_total")).collect();
    for source in tree::production() {
        for name in registered(&source.text) {
            let name = name.trim_end_matches("_total");
            assert!(names.contains(name), "{name} has no sample in `sampled`");
        }
    }
}

/// Literals that are names of metrics.
fn registered(text: &str) -> impl Iterator<Item = &str> {
    let literals = text.split('"').skip(1);
    literals.filter(|literal| {
        let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
        let is_ours = literal.starts_with("strait_") || literal.starts_with("istio_");
        is_ours && literal.chars().all(is_name)
    })
}
