//! `strait demo`: its output matches the gateway's counters and log.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::support::{get, interrupt, run, run_command, strait, until};

const STEPS: [&str; 6] = ["start", "requests", "kill", "stranger", "unexposed", "look"];

/// Demo that has completed its steps and was left running.
struct Kept {
    process: Child,
    report: Value,
}

impl Kept {
    async fn start() -> Self {
        let mut command = strait();
        let mut process = command.args(["demo", "--json", "--keep"]).spawn().expect("the demo");
        let stdout = process.stdout.take().expect("its output");
        let line = BufReader::new(stdout).lines().next_line().await;
        let line = line.expect("its output").expect("a line");
        let report = serde_json::from_str(&line).expect("one JSON object");
        Self { process, report }
    }

    fn figures(&self, step: &str) -> &Value {
        figures(&self.report, step)
    }

    fn text(&self, step: &str, key: &str) -> &str {
        self.figures(step)[key].as_str().expect("text")
    }

    fn number(&self, step: &str, key: &str) -> u64 {
        self.figures(step)[key].as_u64().expect("a number")
    }

    /// Returns the counts of the demo's client: answered requests per endpoint, over all its steps.
    fn answered_by_endpoint(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for (step, key) in [
            ("requests", "by_endpoint"),
            ("kill", "by_endpoint_before"),
            ("kill", "by_endpoint_after"),
        ] {
            let phase = self.figures(step)[key].as_object().expect("a map");
            for (endpoint, count) in phase {
                *all.entry(endpoint.clone()).or_default() += count.as_u64().expect("a count");
            }
        }
        all
    }

    fn log(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.text("look", "log")).expect("the gateway's log");
        log.lines().map(str::to_owned).collect()
    }

    async fn metrics(&self) -> Metrics {
        let (status, text) = get(self.text("look", "metrics")).await;
        assert_eq!(status, 200, "{text}");
        Metrics(text)
    }
}

fn figures<'a>(report: &'a Value, step: &str) -> &'a Value {
    let steps = report["steps"].as_array().expect("steps");
    let found = steps.iter().find(|shown| shown["name"] == step);
    &found.unwrap_or_else(|| panic!("no step {step} in {report}"))["figures"]
}

/// A scrape.
struct Metrics(String);

impl Metrics {
    /// The sum over all label sets that hold `label`, which may be empty.
    fn sum(&self, name: &str, label: &str) -> u64 {
        let samples = self.0.lines().filter_map(|line| {
            let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
            let is_name = labels.is_empty() || labels.starts_with('{');
            (is_name && labels.contains(label)).then(|| value.parse::<u64>().expect("a count"))
        });
        samples.sum()
    }

    fn tunnels(&self, reason: &str) -> u64 {
        self.sum("strait_tunnels_total", &format!("reason=\"{reason}\""))
    }
}

fn count(log: &[String], parts: &[&str]) -> u64 {
    let holds = |line: &&String| parts.iter().all(|part| line.contains(part));
    log.iter().filter(holds).count() as u64
}

#[test]
fn the_figures_of_the_demo_are_those_of_the_gateway() {
    run(async {
        let mut kept = Kept::start().await;
        assert_eq!(kept.report["ok"], true, "{}", kept.report);
        let answered = kept.number("requests", "answered")
            + kept.number("kill", "answered_before")
            + kept.number("kill", "answered_after");
        assert!(answered > 0 && kept.answered_by_endpoint().values().sum::<u64>() == answered);

        // The log is written in a separate thread, a moment after the count.
        let lines = async || count(&kept.log(), &["connection complete"]);
        until("a line for each tunnel", lines, |&lines| lines >= answered).await;
        let (log, metrics) = (kept.log(), kept.metrics().await);

        assert_eq!(count(&log, &["connection complete"]), answered);
        assert_eq!(metrics.tunnels("completed"), answered);
        let opened = metrics.sum("istio_tcp_connections_opened_total", "");
        let closed = metrics.sum("istio_tcp_connections_closed_total", "");
        assert_eq!((opened, closed), (answered, answered));
        for (endpoint, answered) in kept.answered_by_endpoint() {
            let workload = format!("dst.workload=\"{endpoint}\"");
            let lines = count(&log, &["connection complete", &workload]);
            assert_eq!(lines, answered, "{endpoint}");
        }
        refusals(&kept, &log, &metrics);
        stops(&mut kept).await;
    });
}

/// Asserts that each rejection of the demo is counted once, and no other.
fn refusals(kept: &Kept, log: &[String], metrics: &Metrics) {
    assert_eq!(kept.figures("stranger")["refused"], true);
    let refused = "strait_handshakes_refused_total";
    assert_eq!(metrics.sum(refused, "reason=\"untrusted_domain\""), 1);
    assert_eq!(metrics.sum(refused, ""), 1);
    let line = ["handshake refused", "reason=\"untrusted_domain\""];
    assert_eq!(count(log, &line), 1);

    assert_eq!(kept.number("unexposed", "status"), 503);
    assert_eq!(kept.number("unexposed", "status_of_unknown"), 503);
    for (reason, host) in [
        ("not_exposed", "secret.app.svc.cluster.local"),
        ("unknown_service", "no-such-service.app.svc.cluster.local"),
    ] {
        assert_eq!(metrics.tunnels(reason), 1, "{reason}");
        let reason = format!("reason=\"{reason}\"");
        let authority = format!("dst.hbone_addr=\"{host}:80\"");
        let lines = count(log, &["connection failed", &reason, &authority]);
        assert_eq!(lines, 1, "{reason}");
    }
    let all = metrics.sum("strait_tunnels_total", "");
    assert_eq!(all, metrics.tunnels("completed") + 2);
    assert_eq!(count(log, &["connection failed"]), 2);
    assert_eq!(metrics.sum("istio_tcp_connections_failed_total", ""), 2);
}

/// Asserts that Ctrl-C ends a successful demo, and leaves neither a process nor a folder.
async fn stops(kept: &mut Kept) {
    let folder = kept.text("start", "folder").to_owned();
    assert!(Path::new(&folder).is_dir());
    interrupt(&kept.process);
    let ended = kept.process.wait().await.expect("an exit status");
    assert_eq!(ended.code(), Some(0));
    assert!(!Path::new(&folder).exists(), "{folder} is still there");
    assert_eq!(get(kept.text("look", "metrics")).await.0, 0);
}

#[test]
fn a_demo_that_holds_has_a_log_line_for_each_of_its_tunnels() {
    run(async {
        let shown = run_command(Path::new("."), &["demo", "--json"]).await;
        assert_eq!(shown.code, Some(0), "{shown:?}");
        let report: Value = serde_json::from_str(&shown.stdout).expect("one JSON object");
        let look = figures(&report, "look");
        assert_eq!(look["log_lines"], 600);
        assert_eq!(look["tunnels_completed"], 600.0);
    });
}

#[test]
fn a_demo_that_holds_exits_0_and_shows_every_step() {
    run(async {
        let shown = run_command(Path::new("."), &["demo", "--json"]).await;
        assert_eq!(shown.code, Some(0), "{shown:?}");
        let report: Value = serde_json::from_str(&shown.stdout).expect("one JSON object");
        assert_eq!(report["ok"], true);
        assert!(report["error"].is_null() && report["failed_step"].is_null());
        let steps = report["steps"].as_array().expect("steps");
        let names: Vec<_> = steps.iter().filter_map(|step| step["name"].as_str()).collect();
        assert_eq!(names, STEPS);
    });
}

#[test]
fn a_demo_whose_endpoints_are_both_killed_fails_and_says_at_which_step() {
    run(async {
        let shown = run_command(Path::new("."), &["demo", "--json", "--kill", "2"]).await;
        assert_eq!(shown.code, Some(1), "{shown:?}");
        let report: Value = serde_json::from_str(&shown.stdout).expect("one JSON object");
        assert_eq!(report["ok"], false);
        assert_eq!(report["failed_step"], "kill");
        let figures = figures(&report, "kill");
        assert_eq!(figures["killed"].as_array().expect("a list").len(), 2);
        assert_eq!(figures["answered_after"], 0);
        let error = report["error"].as_str().expect("an error");
        assert!(error.starts_with("step kill failed: "), "{error}");
        assert_eq!(shown.stderr.trim_end(), error);
    });
}

#[test]
fn a_demo_that_is_interrupted_ends_with_all_that_it_started() {
    run(async {
        let mut process = strait().args(["demo", "--keep"]).spawn().expect("the demo");
        let stdout = process.stdout.take().expect("its output");
        let mut lines = BufReader::new(stdout).lines();
        let gateway = loop {
            let line = lines.next_line().await.expect("its output").expect("a line");
            if let Some((_, rest)) = line.split_once("gateway ") {
                break rest.split(':').next().expect("an address").to_owned();
            }
        };
        let ready = format!("http://{gateway}:15021/healthz/ready");
        assert_eq!(get(&ready).await, (200, "ready\n".to_owned()));
        interrupt(&process);
        process.wait().await.expect("an exit status");
        assert_eq!(get(&ready).await.0, 0, "the gateway is still there");
    });
}
