//! Time of all workers that clusters have used, and their weights.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::limits::{Rate, Source};

pub(super) type Nanos = i64;

/// Weight of a cluster without one of its own, of a binding, and of all prefixes together.
pub(super) const DEFAULT_WEIGHT: Nanos = 10;

/// Longest pause of the tunnels of a connection after bytes beyond the rate of their cluster. What
/// is owed beyond that is forgotten.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Part of a second whose bytes a cluster may move at once.
const BURST: u32 = 10;

/// Time of the turns of all workers, by cluster.
#[derive(Debug, Default)]
pub struct WorkerTime {
    configured: HashMap<String, ClusterSettings>,
    clusters: Mutex<BTreeMap<String, Arc<ClusterTime>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterSettings {
    pub weight: u32,
    /// Limit of the bytes that its connections move in a second.
    pub bytes: Option<u32>,
}

/// Time of the turns of one cluster, of all bindings, or of all prefixes.
#[derive(Debug, Default)]
pub struct ClusterTime {
    /// Position among the clusters in the order of their creation.
    pub(super) index: usize,
    used: AtomicU64,
    waited: AtomicU64,
    paused: AtomicU64,
    bytes: Option<Mutex<Rate>>,
}

/// Time that the tasks of a cluster have used, and for which they were ready before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsedTime {
    /// Cluster, as in the labels of other metrics.
    pub cluster: String,
    pub used: Duration,
    pub waited: Duration,
    /// Time for which its connections paused because of its limit of bytes.
    pub paused: Duration,
}

impl WorkerTime {
    /// Creates the state with the settings of clusters. The weight of the others is 10.
    pub fn new(configured: HashMap<String, ClusterSettings>) -> Self {
        Self { configured, ..Self::default() }
    }

    /// Returns the cluster of a source, if it has a limit of bytes.
    pub fn limited(&self, source: &Source) -> Option<Arc<ClusterTime>> {
        let root = source.root();
        self.byte_limit(root.cluster_name()?)?;
        Some(self.of(root))
    }

    /// Returns the limit of the bytes that a cluster moves in a second.
    pub fn byte_limit(&self, cluster: &str) -> Option<u32> {
        self.configured.get(cluster)?.bytes
    }

    /// Returns what all clusters have used so far.
    pub fn used(&self) -> Vec<UsedTime> {
        let clusters = self.clusters.lock();
        let rows = clusters.iter().map(|(cluster, time)| {
            let read = |of: &AtomicU64| Duration::from_nanos(of.load(Ordering::Relaxed));
            UsedTime {
                cluster: cluster.clone(),
                used: read(&time.used),
                waited: read(&time.waited),
                paused: read(&time.paused),
            }
        });
        rows.collect()
    }

    /// Returns the cluster with an index, as in the labels of other metrics.
    pub(super) fn name(&self, index: usize) -> Option<String> {
        let clusters = self.clusters.lock();
        clusters.iter().find(|(_, time)| time.index == index).map(|(name, _)| name.clone())
    }

    /// Returns the weight of a source that is no part of another one.
    pub(super) fn weight(&self, source: &Source) -> Nanos {
        let settings = source.cluster_name().and_then(|name| self.configured.get(&**name));
        settings.map_or(DEFAULT_WEIGHT, |settings| settings.weight.into())
    }

    pub(super) fn of(&self, source: &Source) -> Arc<ClusterTime> {
        let label = source.metric_cluster().unwrap_or_default();
        let mut clusters = self.clusters.lock();
        if let Some(time) = clusters.get(label) {
            return Arc::clone(time);
        }
        let bytes = source.cluster_name().and_then(|name| self.byte_limit(name));
        let bytes = bytes.map(|bytes| Mutex::new(Rate::new(bytes, bytes / BURST)));
        let index = clusters.len();
        let time = Arc::new(ClusterTime { index, bytes, ..ClusterTime::default() });
        clusters.insert(label.to_owned(), Arc::clone(&time));
        time
    }
}

impl ClusterTime {
    pub(super) fn add_used(&self, time: Nanos) {
        self.used.fetch_add(time.unsigned_abs(), Ordering::Relaxed);
    }

    /// Charges bytes that a connection has moved. Returns the time for which it pauses: until the
    /// cluster has paid for all that it has moved.
    pub fn charge_bytes(&self, bytes: usize, now: Instant) -> Duration {
        let Some(rate) = &self.bytes else { return Duration::ZERO };
        let price = u32::try_from(bytes).unwrap_or(u32::MAX);
        rate.lock().spend_ahead(price, PAUSE_MAX, now)
    }

    /// Adds the time of a pause that begins.
    pub fn add_paused(&self, pause: Duration) {
        let nanos = u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX);
        self.paused.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(super) fn add_waited(&self, time: Nanos) {
        self.waited.fetch_add(time.unsigned_abs(), Ordering::Relaxed);
    }
}
