//! Metrics of discovery by a control plane, under Istio's names if it has one
//! (docs/wire-contract.md 6.1).

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::access::lines_per_second;
use super::sets::{metric, metrics};
use crate::limits::Rate;
use crate::status::ReloadSource;

/// Limit of log lines about NACKs per second: a server can cause one with each message.
const NACK_LINES_A_SECOND: u32 = 10;

type Label = [(&'static str, &'static str); 1];

metrics! {
    /// Metrics of the stream to a control plane. Types are identified by their full URL.
    pub struct XdsMetrics in r {
        terminations: Family<Label, Counter> = "istio_xds_connection_terminations",
            "Streams to the control plane that ended or failed to open";
        messages: Family<Label, Counter> = "istio_xds_message",
            "Messages from the control plane, by type";
        message_bytes: Family<Label, Counter> = "istio_xds_message_bytes",
            "Bytes of messages from the control plane, by type";
        connected: Gauge = "strait_xds_connected", "Whether there is a stream to the control plane";
        nacks: Family<Label, Counter> = "strait_xds_nacks",
            "Messages rejected in part or whole, by type";
        resources: Family<Label, Gauge> = "strait_xds_resources", "Resources held, by type";
        rejected: Family<Label, Gauge> = "strait_xds_rejected", "Rejected resources, by type";
        accepted: Family<Label, Gauge> = "strait_xds_accepted_timestamp_seconds",
            "Time of the last message accepted as a whole, by type (Unix time)";
        cached: Family<Label, Gauge> = "strait_xds_cache_timestamp_seconds",
            "When a state on disk was saved, by the source of its content (Unix time)";
        held_removals: Gauge = "strait_xds_held_removals",
            "Removals by the control plane or the API server that wait for the end of a hold";
    } besides {
        nack_lines: Mutex<Rate> = Mutex::new(lines_per_second(NACK_LINES_A_SECOND));
    }
}

impl XdsMetrics {
    /// Creates the counters of a type, so that they are exported as 0.
    pub fn create_type(&self, url: &'static str) {
        let label = label(url);
        drop(self.messages.get_or_create(&label));
        drop(self.message_bytes.get_or_create(&label));
        drop(self.nacks.get_or_create(&label));
    }

    pub fn connected(&self) {
        self.connected.set(1);
    }

    /// Counts a stream that ended or could not be opened, by its reason.
    pub fn terminated(&self, reason: &'static str) {
        self.connected.set(0);
        self.terminations.get_or_create(&[("reason", reason)]).inc();
    }

    pub fn message(&self, url: &'static str, bytes: usize) {
        self.messages.get_or_create(&label(url)).inc();
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.message_bytes.get_or_create(&label(url)).inc_by(bytes);
    }

    /// Records that a message was accepted as a whole.
    pub fn accepted(&self, url: &'static str) {
        self.accepted.get_or_create(&label(url)).set(unix_seconds(SystemTime::now()));
    }

    /// Counts a message that was rejected in part. If it may be logged, returns the number of
    /// such messages since the last that was logged.
    pub fn nacked(&self, url: &'static str) -> Option<u64> {
        self.nacks.get_or_create(&label(url)).inc();
        self.nack_lines.lock().spend_on_report(Instant::now())
    }

    pub fn set_resources(&self, url: &'static str, held: usize, rejected: usize) {
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.resources.get_or_create(&label(url)).set(count(held));
        self.rejected.get_or_create(&label(url)).set(count(rejected));
    }

    pub fn set_cache_time(&self, what: ReloadSource, at: SystemTime) {
        self.cached.get_or_create(&[("what", what.label())]).set(unix_seconds(at));
    }

    /// Records that so many more removals wait.
    pub fn add_held_removals(&self, count: i64) {
        self.held_removals.inc_by(count);
    }
}

fn label(url: &'static str) -> Label {
    [("url", url)]
}

/// Returns a time in seconds after 1970, 0 before.
pub(super) fn unix_seconds(at: SystemTime) -> i64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::telemetry::Metrics;

    use super::*;

    #[test]
    fn each_event_of_the_stream_is_counted_by_its_type() {
        let metrics = Metrics::new();
        let xds = &metrics.xds;
        xds.create_type("a");
        xds.connected();
        xds.message("b", 10);
        xds.message("b", 5);
        xds.accepted("b");
        xds.set_resources("b", 7, 2);
        xds.set_cache_time(ReloadSource::Mesh, UNIX_EPOCH + Duration::from_secs(77));
        let lines = (0..20).filter_map(|_| xds.nacked("b")).count();
        assert_eq!(lines, 10, "in one second");
        let connected = metrics.encode();
        xds.terminated("Complete");
        for line in [
            "istio_xds_message_total{url=\"a\"} 0",
            "istio_xds_message_total{url=\"b\"} 2",
            "istio_xds_message_bytes_total{url=\"b\"} 15",
            "strait_xds_connected 1",
            "strait_xds_nacks_total{url=\"b\"} 20",
            "strait_xds_resources{url=\"b\"} 7",
            "strait_xds_rejected{url=\"b\"} 2",
            "strait_xds_cache_timestamp_seconds{what=\"mesh\"} 77",
        ] {
            assert!(connected.lines().any(|l| l == line), "{line}\n{connected}");
        }
        assert!(connected.contains("strait_xds_accepted_timestamp_seconds{url=\"b\"} 1"));
        let ended = metrics.encode();
        assert!(ended.contains("strait_xds_connected 0\n"));
        let line = "istio_xds_connection_terminations_total{reason=\"Complete\"} 1\n";
        assert!(ended.contains(line), "{ended}");
    }
}
