//! Queries of Prometheus over the series of a running gateway, by promtool: the alerts of
//! `deploy/prometheus`, and sums as in the dashboards of Istio and Kiali.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use crate::peers;
use crate::reload::reloads;
use crate::support::{
    ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, echoes, identities, replace, run, until,
};

/// promtool, as `make promtool` unpacks it.
const PROMTOOL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.promtool/usr/bin/promtool");
const RULES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/alerts.yaml");
const FIRING: &str = "group by (alertname) (ALERTS{alertstate=\"firing\"})";
/// Series of a revocation list.
const CRL: &str = "strait_certificate_expiry_timestamp_seconds{identity=\"a\",kind=\"crl\"}";

/// Values by series, one a minute. Values that are times count from the first minute.
type History = BTreeMap<String, Vec<f64>>;

/// Adds the metrics of a gateway as the next `minutes`. Those that are new have no earlier values.
async fn record(history: &mut History, gateway: &Gateway, minutes: usize) {
    let now = UNIX_EPOCH.elapsed().expect("after 1970").as_secs_f64();
    let minute = history.values().map(Vec::len).max().unwrap_or(0);
    for line in gateway.scrape().await.lines() {
        let Some((series, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let mut value: f64 = value.parse().expect("a number");
        if series.contains("_expiry_timestamp_seconds{") {
            value += 60.0 * minute as f64 - now;
        }
        let series = series.replacen('{', "{job=\"strait\",instance=\"a\",", 1);
        let series = if series.contains('{') {
            series
        } else {
            format!("{series}{{job=\"strait\",instance=\"a\"}}")
        };
        let values = history.entry(series).or_default();
        values.resize(minute, f64::NAN);
        values.extend(vec![value; minutes]);
    }
}

/// Minute, query, and its samples: values by labels.
type Expected<'a> = (usize, &'a str, &'a [(&'a str, f64)]);

/// Runs promtool over the series: the value of each expression at its minute, by labels.
async fn promtool(history: &History, expected: &[Expected<'_>]) {
    let folder = tempfile::tempdir().expect("a folder");
    let series = history.iter().map(|(series, values)| {
        let shown = |value: &f64| if value.is_nan() { "_".to_owned() } else { value.to_string() };
        let values: Vec<_> = values.iter().map(shown).collect();
        json!({"series": series, "values": values.join(" ")})
    });
    let queries = expected.iter().map(|(minute, query, samples)| {
        let samples =
            samples.iter().map(|(labels, value)| json!({"labels": labels, "value": value}));
        json!({
            "expr": query,
            "eval_time": format!("{minute}m"),
            "exp_samples": samples.collect::<Vec<_>>(),
        })
    });
    let test = json!({
        "rule_files": [RULES],
        "evaluation_interval": "1m",
        "tests": [{
            "interval": "1m",
            "input_series": series.collect::<Vec<Value>>(),
            "promql_expr_test": queries.collect::<Vec<Value>>(),
        }],
    });
    let file: PathBuf = folder.path().join("test.yaml");
    std::fs::write(&file, test.to_string()).expect("a file");
    let command =
        Command::new(PROMTOOL).args(["test", "rules"]).arg(&file).kill_on_drop(true).output();
    let output = command.await.expect("its output");
    let text = String::from_utf8_lossy(&output.stderr);
    let ends = history.iter().filter(|(series, values)| {
        series.starts_with("strait_tunnels_total") && values.iter().any(|&value| value > 0.0)
    });
    assert!(output.status.success(), "{text}{:#?}", ends.collect::<Vec<_>>());
}

#[test]
fn alerts_fire_while_their_cause_lasts_and_never_without_it() {
    run(async {
        let test = "alerts_fire_while_their_cause_lasts_and_never_without_it";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        let mut history = History::new();
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        for _ in 0..10 {
            echoes(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
            record(&mut history, &gateway, 2).await;
        }
        // Minute 20: a mesh file with a mistake, and an endpoint that is gone.
        replace(&gateway.file("mesh.yaml"), "services: [{nmespace: app}]\n");
        reloads(&gateway, "mesh", "error", 1.0).await;
        drop(endpoint);
        for _ in 0..10 {
            assert!(client.tunnel(ECHO).await.is_err());
            record(&mut history, &gateway, 1).await;
        }
        // Minute 30: both are repaired.
        replace(&gateway.file("mesh.yaml"), &settings.mesh);
        reloads(&gateway, "mesh", "ok", 1.0).await;
        record(&mut history, &gateway, 30).await;
        let reload = ("{alertname=\"StraitReloadFailed\"}", 1.0);
        let tunnels = ("{alertname=\"StraitTunnelsFail\"}", 1.0);
        promtool(
            &history,
            &[
                (19, FIRING, &[]),
                (23, FIRING, &[reload]),
                (29, FIRING, &[reload, tunnels]),
                (36, FIRING, &[]),
                (59, FIRING, &[]),
            ],
        )
        .await;
    });
}

#[test]
fn the_alert_about_a_control_plane_fires_only_where_one_is_configured() {
    run(async {
        let test = "the_alert_about_a_control_plane_fires_only_where_one_is_configured";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let net = Net::new();
        let nowhere = net.address(77, 15012);
        let gateway = Gateway::spawn(&Settings::new(net, identities()), |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a file");
            let istio = format!("{{kind: istio, address: \"{nowhere}\", roots: root.crt}}");
            let text = text.replace("{kind: file, path: mesh.yaml}", &istio);
            std::fs::write(file, text).expect("a file");
        });
        let mut history = History::new();
        let failures = async || {
            let (_, text) = gateway.http(15000, "GET", "/stats/prometheus").await;
            let ends = "istio_xds_connection_terminations_total{";
            let lines = text.lines().filter(|line| line.starts_with(ends));
            lines.filter(|line| !line.ends_with(" 0")).count()
        };
        until("a failed stream", failures, |&count| count > 0).await;
        record(&mut history, &gateway, 10).await;
        let alert = ("{alertname=\"StraitNoControlPlane\"}", 1.0);
        promtool(&history, &[(1, FIRING, &[]), (5, FIRING, &[alert])]).await;
    });
}

#[test]
fn failures_for_several_reasons_are_summed_and_those_of_peers_do_not_count() {
    run(async {
        let test = "failures_for_several_reasons_are_summed_and_those_of_peers_do_not_count";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let alert = ("{alertname=\"StraitTunnelsFail\"}", 1.0);
        for (failures, firing) in [
            // Of 1,000 tunnels a minute.
            (&[("dial_timeout", 30), ("remote_unavailable", 15), ("panic", 10)][..], true),
            (
                &[
                    ("dial_timeout", 30),
                    ("not_for_peer", 200),
                    ("idle_timeout", 200),
                    ("tunnel_limit", 200),
                    ("remote_rejected", 200),
                ],
                false,
            ),
        ] {
            let failed: u32 = failures.iter().map(|(_, count)| count).sum();
            let all = failures.iter().copied().chain([("completed", 1000 - failed)]);
            let series = all.map(|(reason, count)| {
                let series = format!(
                    "strait_tunnels_total{{job=\"strait\",instance=\"a\",reason=\"{reason}\"}}"
                );
                (series, (0..=20).map(|minute| f64::from(minute * count)).collect())
            });
            let expected = if firing { &[alert][..] } else { &[] };
            promtool(&series.collect(), &[(3, FIRING, &[]), (20, FIRING, expected)]).await;
        }
    });
}

#[test]
fn a_certificate_in_its_last_quarter_raises_an_alert_until_it_is_renewed() {
    run(async {
        let test = "a_certificate_in_its_last_quarter_raises_an_alert_until_it_is_renewed";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let settings = Settings::new(Net::new(), identities());
        let late = identities().east.leaf_with(|params| {
            let (uri, now) = (GATEWAY.try_into().expect("a URI"), time::OffsetDateTime::now_utc());
            params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
            params.not_before = now - time::Duration::days(300);
            params.not_after = now + time::Duration::days(65);
        });
        let late = late.expect("a leaf");
        let mut gateway = Gateway::spawn(&settings, |folder| {
            std::fs::write(folder.join("gateway.key"), &late.key_pem).expect("a key");
            std::fs::write(folder.join("gateway.crt"), &late.chain_pem).expect("a chain");
        });
        gateway.ready().await;
        let mut history = History::new();
        record(&mut history, &gateway, 10).await;
        let leaf = identities().leaf(GATEWAY);
        replace(&gateway.file("gateway.key"), &leaf.key_pem);
        replace(&gateway.file("gateway.crt"), &leaf.chain_pem);
        let problem = async || gateway.metric("strait_certificate_renewal_problem").await;
        until("the renewal", problem, |&problem| problem < 0.5).await;
        reloads(&gateway, "certificates", "ok", 1.0).await;
        record(&mut history, &gateway, 10).await;
        let alert = ("{alertname=\"StraitCertificateExpires\"}", 1.0);
        promtool(&history, &[(5, FIRING, &[alert]), (15, FIRING, &[])]).await;
    });
}

#[test]
fn a_revocation_list_that_is_replaced_in_time_raises_no_alert_and_another_one_does() {
    run(async {
        let test =
            "a_revocation_list_that_is_replaced_in_time_raises_no_alert_and_another_one_does";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let alert = ("{alertname=\"StraitCrlExpires\"}", 1.0);
        for lifetime in [60, 24 * 60] {
            // Renewed four times at half of its lifetime in minutes, and then no more.
            let expiry =
                |minute: usize| (minute / (lifetime / 2)).min(3) * (lifetime / 2) + lifetime;
            let last = expiry(usize::MAX);
            let values = (0..=last).map(|minute| 60.0 * expiry(minute) as f64);
            let history = History::from([(CRL.to_owned(), values.collect())]);
            let healthy = (0..last - lifetime / 2).step_by(lifetime / 6);
            let healthy = healthy.map(|minute| (minute, FIRING, &[][..]));
            let late = [(last - lifetime / 5, FIRING, &[alert][..])];
            promtool(&history, &healthy.chain(late).collect::<Vec<_>>()).await;
        }
    });
}

#[test]
fn every_sum_of_bytes_over_ztunnels_and_gateway_counts_them_once() {
    run(async {
        let test = "every_sum_of_bytes_over_ztunnels_and_gateway_counts_them_once";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        tunnel.write_all(&[1; 1000]).await.expect("bytes");
        tunnel.shutdown().await.expect("an end");
        let mut back = Vec::new();
        tunnel.read_to_end(&mut back).await.expect("the bytes");
        drop(tunnel);
        until("the end", async || gateway.tunnels("completed").await, |&ended| ended >= 1.0).await;
        let mut history = History::new();
        record(&mut history, &gateway, 2).await;
        history.retain(|series, _| series.starts_with("istio_tcp_") && series.contains("_bytes_"));
        assert_eq!(history.len(), 2, "{history:?}");
        // The ztunnels of both sides report the same bytes with the same names.
        for (series, values) in history.clone() {
            for reporter in ["source", "destination"] {
                let own =
                    series.replace("reporter=\"gateway\"", &format!("reporter=\"{reporter}\""));
                let own = own.replace("job=\"strait\"", "job=\"ztunnel\",app=\"ztunnel\"");
                history.insert(own, values.clone());
            }
        }
        assert_eq!(history.len(), 6, "{history:?}");
        // Matchers of Istio's dashboards (86c9f01) and of Kiali (d733a09), one for each query.
        let mut queries = Vec::new();
        for metric in ["istio_tcp_sent_bytes_total", "istio_tcp_received_bytes_total"] {
            for matcher in [
                "reporter=\"source\"",
                "reporter=\"destination\"",
                "reporter=~\"source|waypoint\"",
                "reporter=~\"waypoint|source\"",
                "reporter=~\"waypoint|destination\"",
                "reporter=~\"source\"",
                "reporter=~\"destination\"",
                "app=\"ztunnel\",reporter=\"source\"",
            ] {
                queries.push(format!("sum({metric}{{{matcher}}})"));
            }
        }
        let once = [("{}", 1000.0)];
        let expected: Vec<_> = queries.iter().map(|query| (1, &**query, &once[..])).collect();
        promtool(&history, &expected).await;
    });
}

#[test]
fn holds_ejections_refused_peers_panics_and_stalls_raise_an_alert_for_a_while() {
    run(async {
        let test = "holds_ejections_refused_peers_panics_and_stalls_raise_an_alert_for_a_while";
        if !peers::exists(PROMTOOL, test, "type `make promtool`") {
            return;
        }
        type Values = fn(usize) -> f64;
        let held: Values = |minute| if (10..20).contains(&minute) { 14.0 } else { 0.0 };
        let once: Values = |minute| if minute < 10 { 0.0 } else { 1.0 };
        // An attempt ends the ejection in each fourth minute.
        let ejected: Values =
            |minute| f64::from(u8::from((10..20).contains(&minute) && minute % 4 > 0));
        let refused: Values = |minute| 60.0 * (minute.clamp(10, 22) - 10) as f64;
        let reason = ",reason=\"untrusted_domain\"";
        let gateway = ",network=\"west\",gateway=\"192.0.2.7:15008\"";
        for (alert, metric, labels, values, first) in [
            ("StraitRemovalsHeld", "strait_xds_held_removals", "", held, 10),
            ("StraitGatewayEjected", "strait_remote_gateway_ejected", gateway, ejected, 19),
            ("StraitPeersRefused", "strait_handshakes_refused_total", reason, refused, 21),
            ("StraitPanics", "strait_panics_total", "", once, 10),
            ("StraitWorkerStalls", "strait_worker_stalls_total", "", once, 10),
        ] {
            let series = format!("{metric}{{job=\"strait\",instance=\"a\"{labels}}}");
            let history = History::from([(series, (0..=40).map(values).collect())]);
            let alert = (&*format!("{{alertname=\"{alert}\"}}"), 1.0);
            let quiet: Expected<'_> = (first - 1, FIRING, &[]);
            promtool(&history, &[quiet, (first, FIRING, &[alert]), (40, FIRING, &[])]).await;
        }
    });
}
