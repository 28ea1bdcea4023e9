//! Load of a worker, by which it gets new connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One connection or tunnel in the load of a worker. The load is the number of clones, and has the
/// part of it that is leaving.
#[derive(Clone, Debug, Default)]
pub struct LoadGuard(Arc<AtomicUsize>);

/// Load of a worker: the number of its connections and tunnels. It holds one guard of its own.
#[derive(Clone, Debug, Default)]
pub struct WorkerLoad(Arc<LoadGuard>);

impl WorkerLoad {
    pub fn count(&self) -> usize {
        Arc::strong_count(&self.0.0) - 1
    }

    /// Returns the load without the part that is leaving. The guards of that part may be gone
    /// before it has left, so this may be too little.
    pub fn staying(&self) -> usize {
        self.count().saturating_sub(self.0.0.load(Ordering::Relaxed))
    }

    /// Notes that a part of the load, whose guards are still held, is leaving.
    pub fn begin_leaving(&self, load: usize) {
        self.0.0.fetch_add(load, Ordering::Relaxed);
    }

    /// Notes that such a part has left.
    pub fn end_leaving(&self, load: usize) {
        self.0.0.fetch_sub(load, Ordering::Relaxed);
    }

    /// Returns the guard of one more connection or tunnel.
    pub fn guard(&self) -> LoadGuard {
        LoadGuard::clone(&self.0)
    }

    pub fn is_of(&self, guard: &LoadGuard) -> bool {
        Arc::ptr_eq(&self.0.0, &guard.0)
    }
}
