//! Time of all workers that clusters have used, and their weights.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::limits::Source;

/// Nanoseconds of a worker.
pub(super) type Nanos = i64;

/// Weight of a cluster without one of its own, of a binding, and of all prefixes together.
pub(super) const DEFAULT_WEIGHT: Nanos = 10;

/// Time of the turns of all workers, by cluster.
#[derive(Debug, Default)]
pub struct WorkerTime {
    weights: HashMap<String, u32>,
    clusters: Mutex<BTreeMap<String, Arc<ClusterTime>>>,
}

/// Time of the turns of one cluster, of all bindings, or of all prefixes.
#[derive(Debug, Default)]
pub(super) struct ClusterTime {
    used: AtomicU64,
    waited: AtomicU64,
}

/// Time that the tasks of a cluster have used, and for which they were ready before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsedTime {
    /// Cluster, as in the labels of other metrics.
    pub cluster: String,
    pub used: Duration,
    pub waited: Duration,
}

impl WorkerTime {
    /// Creates the state with the weights of clusters. That of the others is 10.
    pub fn new(weights: HashMap<String, u32>) -> Self {
        Self { weights, ..Self::default() }
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
            }
        });
        rows.collect()
    }

    /// Returns the weight of a source that is no part of another one.
    pub(super) fn weight(&self, source: &Source) -> Nanos {
        let weight = source.cluster_name().and_then(|name| self.weights.get(&**name));
        weight.map_or(DEFAULT_WEIGHT, |&weight| weight.into())
    }

    /// Returns the time of such a source.
    pub(super) fn of(&self, source: &Source) -> Arc<ClusterTime> {
        let label = source.metric_cluster().unwrap_or_default();
        let mut clusters = self.clusters.lock();
        if let Some(time) = clusters.get(label) {
            return Arc::clone(time);
        }
        Arc::clone(clusters.entry(label.to_owned()).or_default())
    }
}

impl ClusterTime {
    pub(super) fn add_used(&self, time: Nanos) {
        self.used.fetch_add(time.unsigned_abs(), Ordering::Relaxed);
    }

    pub(super) fn add_waited(&self, time: Nanos) {
        self.waited.fetch_add(time.unsigned_abs(), Ordering::Relaxed);
    }
}
