//! Dashboard of `deploy/prometheus`: a real Prometheus reads a gateway, and answers each query.

use std::collections::BTreeSet;
use std::process::Stdio;

use serde_json::Value;
use tokio::process::Command;

use crate::peers;
use crate::support::process::http;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, echoes, identities, run, until};

/// Prometheus, which is in the package of `make promtool`.
const PROMETHEUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.promtool/usr/bin/prometheus");
const DASHBOARD: &str = include_str!("../../deploy/prometheus/dashboard.json");

/// Returns the labels that a legend shows, as in `{{network}} {{gateway}}`.
fn labels_of(legend: &str) -> BTreeSet<&str> {
    legend.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0)).collect()
}

/// Returns the names of metrics in a query.
fn metrics_of(query: &str) -> BTreeSet<&str> {
    let words = query.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
    words.filter(|word| word.starts_with("strait_") || word.starts_with("istio_")).collect()
}

#[test]
fn each_query_of_the_dashboard_is_answered_with_the_labels_of_its_legend() {
    run(async {
        let test = "each_query_of_the_dashboard_is_answered_with_the_labels_of_its_legend";
        if !peers::exists(PROMETHEUS, test, "type `make promtool`") {
            return;
        }
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("prometheus.yml");
        let config = format!(
            "scrape_configs:\n- job_name: strait\n  scrape_interval: 1s\n  \
             metrics_path: /stats/prometheus\n  \
             static_configs: [{{targets: [\"{}\"]}}]\n",
            net.address(1, 15020)
        );
        std::fs::write(&file, config).expect("a file");
        let address = net.address(9, 9090);
        let _prometheus = Command::new(PROMETHEUS)
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("prometheus");
        let ask = async |query: &str| -> Value {
            let query = serde_urlencoded::to_string([("query", query)]).expect("a query");
            let (_, text) = http(address, "GET", &format!("/api/v1/query?{query}")).await;
            serde_json::from_str(&text).unwrap_or_default()
        };
        let answered =
            |answer: &Value| answer["data"]["result"].as_array().is_some_and(|it| !it.is_empty());
        // Two scrapes with ended tunnels are a rate.
        let rated = async || {
            echoes(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
            ask("rate(strait_tunnels_total{reason=\"completed\"}[10s])").await
        };
        until("a rate", rated, answered).await;
        let scrape = gateway.scrape().await;
        let dashboard: Value = serde_json::from_str(DASHBOARD).expect("a dashboard");
        let panels = dashboard["panels"].as_array().expect("panels");
        let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
        let mut count = 0;
        for target in targets {
            let [query, legend] =
                ["expr", "legendFormat"].map(|key| target[key].as_str().expect("a text"));
            let query = query
                .replace("$__rate_interval", "10s")
                .replace("$job", "strait")
                .replace("$instance", ".*");
            let answer = ask(&query).await;
            assert_eq!(answer["status"], "success", "{query}: {answer}");
            // Series of refusals, drains and other networks begin with the first one.
            if !metrics_of(&query).iter().all(|name| scrape.contains(&format!("\n{name}"))) {
                continue;
            }
            assert!(answered(&answer), "{query}: {answer}");
            let shown = answer["data"]["result"][0]["metric"].as_object().expect("labels");
            for label in labels_of(legend) {
                assert!(shown.contains_key(label), "{query} has no {label} for {legend}: {answer}");
            }
            count += 1;
        }
        assert!(count >= 20, "only {count} queries have series");
    });
}
