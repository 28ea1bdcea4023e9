//! Histograms of the times of connections and tunnels: where a slow tunnel spends its time.
//!
//! The histograms of a source cluster are one object. A tunnel finds it with its other counters, so
//! that an observation is a search in a constant table and two atomic additions.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::Source;
use super::labels::or_unknown;
use super::sets::describe;
use crate::labels::labelled;

/// Limit of source clusters with a label of their own; further ones share [`OTHER`]. Each has at
/// most 21 histograms with 17 series, and takes 3 KiB.
const CLUSTERS_MAX: usize = 32;
const OTHER: &str = "other";

/// Number of buckets, without the one of longer times.
const BUCKETS: usize = 14;
/// Upper bounds in microseconds: from a pod of the same zone to the budget of dials of 10 s.
const STAGE_BOUNDS: [u64; BUCKETS] = [
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000,
];
/// Upper bounds of the duration of tunnels in microseconds, from 5 ms to a day.
const TUNNEL_BOUNDS: [u64; BUCKETS] = [
    5_000,
    25_000,
    100_000,
    500_000,
    1_000_000,
    5_000_000,
    10_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
    900_000_000,
    3_600_000_000,
    14_400_000_000,
    86_400_000_000,
];

labelled! {
    /// Distance of an endpoint, the label `tier` of times.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Proximity {
        /// Same zone as the gateway.
        Zone = "zone",
        /// Same region, another zone.
        Region = "region",
        /// Same network, another region or an unknown one.
        Network = "network",
        /// Another network.
        Remote = "remote",
    }
}

labelled! {
    #[with(help: &'static str, "Returns the description of the histogram in scrapes.")]
    /// Stage of a tunnel. Its label is the name of its histogram.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Stage {
        Pick = ("strait_pick_seconds",
            "Time from the request of a tunnel to its first dial: policies and pick"),
        Dial = ("strait_dial_seconds", "Duration of the dial of a tunnel that opened"),
        FirstByte = ("strait_first_byte_seconds",
            "Time from the dial to the first byte of the endpoint"),
        InnerHello = ("strait_inner_handshake_seconds",
            "Time from the ClientHello inside a CONNECT to the answer of the endpoint"),
        Tunnel = ("strait_tunnel_seconds",
            "Time from the request of a tunnel that opened to its end"),
    }
}

impl Stage {
    fn bounds(self) -> &'static [u64; BUCKETS] {
        if self == Self::Tunnel { &TUNNEL_BOUNDS } else { &STAGE_BOUNDS }
    }
}

/// Distribution of times. An observation takes no lock, unlike that of `prometheus-client`.
#[derive(Debug)]
pub(super) struct Histogram {
    /// Upper bounds of the buckets, in microseconds.
    bounds: &'static [u64; BUCKETS],
    counts: [AtomicU64; BUCKETS + 1],
    sum_micros: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new(&STAGE_BOUNDS)
    }
}

impl Histogram {
    fn new(bounds: &'static [u64; BUCKETS]) -> Self {
        Self { bounds, counts: Default::default(), sum_micros: AtomicU64::new(0) }
    }

    fn observe(&self, time: Duration) {
        self.observe_micros(micros(time));
    }

    /// Adds a time in microseconds.
    pub(super) fn observe_micros(&self, micros: u64) {
        let bucket = self.bounds.partition_point(|bound| *bound < micros);
        if let Some(count) = self.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let seconds = |micros: &u64| Duration::from_micros(*micros).as_secs_f64();
        let bounds = self.bounds.iter().map(seconds).chain([f64::INFINITY]);
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        let buckets: Vec<_> = bounds.zip(counts).collect();
        let sum = seconds(&self.sum_micros.load(Ordering::Relaxed));
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Histograms of the connections and tunnels of one source cluster.
#[derive(Debug)]
pub(super) struct ClusterTimes {
    handshake: Histogram,
    tunnels: [[Histogram; Stage::ALL.len()]; Proximity::ALL.len()],
}

impl Default for ClusterTimes {
    fn default() -> Self {
        let of_stages = || Stage::ALL.map(|stage| Histogram::new(stage.bounds()));
        Self { handshake: Histogram::default(), tunnels: Proximity::ALL.map(|_| of_stages()) }
    }
}

impl ClusterTimes {
    /// Returns the histogram of a stage of tunnels to endpoints of one distance.
    pub(super) fn of(&self, proximity: Proximity, stage: Stage) -> &Histogram {
        &self.tunnels[proximity as usize][stage as usize]
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Handshake {
    since: Instant,
    pub end: Instant,
}

impl Handshake {
    /// Returns its duration.
    pub fn time(self) -> Duration {
        self.end.saturating_duration_since(self.since)
    }
}

/// Histograms of all connections and tunnels.
#[derive(Clone, Debug, Default)]
pub struct Times(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    accept: Histogram,
    propagation: Histogram,
    clusters: RwLock<HashMap<Arc<str>, Arc<ClusterTimes>>>,
}

impl Times {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let times = Self::default();
        registry.register_collector(Box::new(times.clone()));
        times
    }

    /// Records the time from the accept of a connection to its start on a worker.
    pub fn accepted(&self, time: Duration) {
        self.0.accept.observe(time);
    }

    /// Records the handshake of a peer that was authenticated, from `since` until now.
    pub fn handshake_done(&self, source: &Source, since: Instant) -> Handshake {
        let handshake = Handshake { since, end: Instant::now() };
        self.of_cluster(&source.counted_cluster).handshake.observe(handshake.time());
        handshake
    }

    /// Records the time from the reception of a push to the snapshot with its resources.
    pub fn propagated(&self, time: Duration) {
        self.0.propagation.observe(time);
    }

    /// Returns the histograms of a source cluster, or those of others if too many have some.
    pub(super) fn of_cluster(&self, cluster: &str) -> Arc<ClusterTimes> {
        let cluster = or_unknown(cluster);
        if let Some(times) = self.0.clusters.read().get(cluster) {
            return Arc::clone(times);
        }
        let mut clusters = self.0.clusters.write();
        let has_room = clusters.len() < CLUSTERS_MAX || clusters.contains_key(cluster);
        let name = if has_room { cluster } else { OTHER };
        Arc::clone(clusters.entry(name.into()).or_default())
    }
}

impl Collector for Times {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut alone = |name, help, histogram: &Histogram| {
            histogram.encode(describe(&mut encoder, name, help, MetricType::Histogram)?)
        };
        let help = "Time from the accept of a connection to its start on a worker";
        alone("strait_accept_seconds", help, &self.0.accept)?;
        let help = "Time from the reception of a push to the snapshot with its resources";
        alone("strait_xds_propagation_seconds", help, &self.0.propagation)?;
        // Copied first: new clusters do not wait for the end of the encoding.
        let clusters = self.0.clusters.read();
        let clusters: Vec<_> =
            clusters.iter().map(|(name, times)| (Arc::clone(name), Arc::clone(times))).collect();
        let help = "Duration of the TLS handshake of peers that were authenticated";
        let name = "strait_handshake_seconds";
        let mut described = describe(&mut encoder, name, help, MetricType::Histogram)?;
        for (cluster, times) in &clusters {
            if !times.handshake.is_empty() {
                let labels = [("source_cluster", &**cluster)];
                times.handshake.encode(described.encode_family(&labels)?)?;
            }
        }
        for stage in Stage::ALL {
            let (name, help) = (stage.label(), stage.help());
            let mut described = describe(&mut encoder, name, help, MetricType::Histogram)?;
            for (cluster, times) in &clusters {
                for proximity in Proximity::ALL {
                    let histogram = times.of(proximity, stage);
                    if !histogram.is_empty() {
                        let labels = [("tier", proximity.label()), ("source_cluster", cluster)];
                        histogram.encode(described.encode_family(&labels)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}

pub(super) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn a_time_counts_in_the_first_bucket_that_is_not_below_it() {
        let histogram = Histogram::default();
        for micros in [0, 500, 501, 10_000_000, 10_000_001] {
            histogram.observe(Duration::from_micros(micros));
        }
        let counts = histogram.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        assert_eq!(counts, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(histogram.sum_micros.load(Ordering::Relaxed), 20_001_002);
    }

    #[test]
    fn clusters_beyond_the_limit_share_histograms_and_unknown_ones_are_one() {
        let mut registry = Registry::default();
        let times = Times::register(&mut registry);
        let observe = |cluster: &str| {
            let of_cluster = times.of_cluster(cluster);
            of_cluster.of(Proximity::Zone, Stage::Dial).observe(Duration::ZERO);
        };
        for cluster in ["", "unknown"] {
            observe(cluster);
        }
        for cluster in 0..10 * CLUSTERS_MAX {
            observe(&format!("cluster-{cluster}"));
        }
        observe("cluster-0");
        let mut text = String::new();
        text::encode(&mut text, &registry).expect("a text");
        let count = |cluster: &str| {
            let labels = format!("{{tier=\"zone\",source_cluster=\"{cluster}\"}} ");
            let name = format!("{}_count{labels}", Stage::Dial.label());
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<usize>().ok())
        };
        assert_eq!((count("unknown"), count("cluster-0")), (Some(2), Some(2)));
        assert_eq!(count(OTHER), Some(9 * CLUSTERS_MAX + 1));
        let counts = text.lines().filter(|line| line.contains("_count{tier"));
        assert_eq!(counts.count(), CLUSTERS_MAX + 1);
        assert!(!text.contains("tier=\"remote\""), "nothing was observed");
    }
}
