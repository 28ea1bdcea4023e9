//! Work that a worker does at this moment, which its watchdog reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::WorkerTime;
use crate::labels::labelled;

labelled! {
    /// Work of a task. Its label is also the `work` field of the log.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Work {
        /// No turn of a source: accepts, timers, last bytes of tunnels, or the runtime itself.
        Other = "other",
        /// PROXY header, TLS handshake and identity, or the ClientHello of a TLS listener.
        Handshake = "handshake",
        /// Policies, pick and dial of one tunnel.
        Connect = "connect",
        /// Frames of a peer's connection and the bytes of its tunnels, or those of one tunnel.
        Copy = "copy",
        /// Connection to a gateway of another network.
        Gateway = "gateway",
    }
}

/// Work of a worker, which it stores at both ends of a turn without an order, lock or allocation.
#[derive(Debug)]
pub struct CurrentWork {
    /// Index of the cluster, times the number of works, plus the work.
    encoded: AtomicUsize,
    time: Arc<WorkerTime>,
}

impl CurrentWork {
    pub(super) fn new(time: &Arc<WorkerTime>) -> Arc<Self> {
        Arc::new(Self { encoded: AtomicUsize::new(0), time: Arc::clone(time) })
    }

    pub(super) fn set(&self, work: Work, cluster: usize) {
        self.encoded.store(cluster * Work::ALL.len() + work as usize, Ordering::Relaxed);
    }

    /// Returns the work, and the cluster that pays for it, as in the labels of other metrics.
    pub fn read(&self) -> (Work, Option<String>) {
        let encoded = self.encoded.load(Ordering::Relaxed);
        let (work, cluster) = (encoded % Work::ALL.len(), encoded / Work::ALL.len());
        let work = Work::ALL[work];
        (work, (work != Work::Other).then(|| self.time.name(cluster)).flatten())
    }
}
