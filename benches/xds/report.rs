//! Table of results, and missed limits.

use std::fmt::Write as _;
use std::time::Duration;

use crate::common::table::{head, line};
use crate::gateway::StartCost;
use crate::load::Pair;
use crate::mesh::Mesh;

/// Limits for the largest mesh; memory without a cache.
const SERVING_MAX: Duration = Duration::from_millis(600);
const CHANGE_P99_MAX: Duration = Duration::from_millis(1);
/// Time from the start of the process, with a cache and no control plane.
const RESTART_MAX: Duration = Duration::from_millis(500);
const BYTES_MAX: f64 = 1000.0;
const RATIO_MAX: f64 = 1.3;

const COLUMNS: [&str; 11] = [
    "mesh",
    "workloads",
    "services",
    "first message → serving",
    "one change p50",
    "one change p99",
    "bytes per workload",
    "with a cache",
    "restart from the cache",
    "p99 at rest → with 1,000 changes/s",
    "ratio",
];

/// Results for one mesh.
pub struct Row {
    pub mesh: Mesh,
    pub taken: StartCost,
    pub cached: StartCost,
    pub restart: Duration,
    /// Median and 99th percentile.
    pub change: (Duration, Duration),
    /// Pair with the median ratio.
    pub pair: Pair,
}

impl Row {
    fn per_workload(&self, bytes: u64) -> f64 {
        bytes as f64 / self.mesh.workloads as f64
    }

    fn cells(&self) -> Vec<String> {
        let ms = |time: Duration| format!("{:.3} ms", time.as_secs_f64() * 1e3);
        vec![
            self.mesh.shape.name().to_owned(),
            self.mesh.workloads.to_string(),
            self.mesh.services().to_string(),
            format!("{} ms", self.taken.serving.as_millis()),
            ms(self.change.0),
            ms(self.change.1),
            format!("{:.0}", self.per_workload(self.taken.bytes)),
            format!("{:.0}", self.per_workload(self.cached.bytes)),
            format!("{} ms", self.restart.as_millis()),
            format!("{} → {}", ms(self.pair.rest), ms(self.pair.changes)),
            format!("{:.2}", self.pair.ratio()),
        ]
    }

    /// Returns the limits that the row misses.
    pub fn missed(&self) -> Vec<String> {
        let bytes = self.per_workload(self.taken.bytes);
        let bars = [
            (self.taken.serving >= SERVING_MAX, "serving takes 600 ms or more"),
            (self.change.1 >= CHANGE_P99_MAX, "one change takes 1 ms or more (p99)"),
            (self.restart >= RESTART_MAX, "a restart from the cache takes 500 ms or more"),
            (bytes > BYTES_MAX, "a workload takes more than 1,000 bytes"),
            (self.pair.ratio() > RATIO_MAX, "changes make the p99 more than 1.3 times as long"),
        ];
        let missed = bars.into_iter().filter(|(is_missed, _)| *is_missed);
        missed
            .map(|(_, what)| {
                format!("{}, {} workloads: {what}", self.mesh.shape.name(), self.mesh.workloads)
            })
            .collect()
    }
}

/// Returns the section of docs/performance.md: the table, and where it is from.
pub fn section(commit: &str, rows: &[Row]) -> String {
    let table = rows.iter().fold(head(&COLUMNS), |text, row| text + &line(&row.cells()));
    format!("{table}\nAt {commit}; [how, and the bars](../benches/results/xds-{commit}.md).")
}

/// Returns the whole report.
pub fn report(command: &str, commit: &str, rows: &[Row], missed: &[String]) -> String {
    let mut text = format!(
        "# A mesh from a control plane, at {commit}

Made by `{command}`, on a machine of two cores that others may share. `short` has uids of 60 bytes
and names of 30. `istiod` is sent as istiod does it: names of 120 bytes, labels, SANs, split-horizon
records of three remote clusters among the workloads, and clusters for a tenth of the services, all
of which are sent again every 250 changes. `rolling` is one service of which each change replaces a
pod. A control plane of the tests' tells a real gateway its mesh over gRPC and TLS, on the same
machine: serving is readiness, from the moment in which the first message was handed to the
control plane's gRPC. Memory is private dirty pages beyond those of a gateway without a mesh,
after ten seconds of changes. A restart from the cache is from the start of the process to
readiness, with the control plane gone. One change is timed from the control plane's gRPC to the
snapshot, through the same code of the stream but in the bench's own process, because none other
can say when a snapshot is there.
Latencies are of requests of 128 bytes on eight tunnels; the pair with the median ratio is shown.

The bars, for the largest meshes: 600 ms, 1 ms (p99), 1,000 bytes without a cache, a restart in
500 ms, a ratio of 1.3.

{}",
        head(&COLUMNS)
    );
    for row in rows {
        text += &line(&row.cells());
    }
    text += "\n";
    for missed in missed {
        let _ = writeln!(text, "- Missed: {missed}.");
    }
    text
}
