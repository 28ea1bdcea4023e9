//! Results of the recent dials of a service port in the own network.
//!
//! While all of them fail, one tunnel at a time dials, so that a dead service costs little. The
//! first dial that succeeds ends this. All endpoint sets of the port share the results, also with
//! those of the next snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::endpoint::EndpointState;

/// Number of failed dials in a row from which a set can count as failed.
const FAILURES_MIN: u32 = 5;
/// Time since the first of them from which it counts as failed. A large set with a few good
/// endpoints also has long rows of failures.
const FAILED_AFTER: Duration = Duration::from_secs(1);
/// Time between a failed dial and the next probe if tunnels can go to other networks meanwhile. A
/// probe of endpoints that do not answer delays its tunnel by a whole dial.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);

/// Health of the endpoint sets of a service port.
#[derive(Debug)]
pub(super) struct SetHealth {
    epoch: Instant,
    /// Number of failed dials since the last one that succeeded.
    failures: AtomicU32,
    /// Milliseconds after `epoch` of the first one of these.
    failing_since_ms: AtomicU64,
    is_probed: AtomicBool,
    /// Milliseconds after `epoch` of the last failed dial.
    failed_ms: AtomicU64,
    /// Endpoint of the last dial that succeeded after a failed one.
    last_good: Mutex<Option<Arc<EndpointState>>>,
}

/// Permission to dial endpoints of the own network.
#[derive(Debug)]
pub enum DialAdmission {
    /// Dials succeed.
    Free,
    /// All recent dials failed, and no other tunnel may dial meanwhile.
    Probe(Probe),
    /// All recent dials failed, and another tunnel dials or has just dialled.
    Refused,
}

/// Right to dial while all recent dials of a set failed, returned on drop.
#[derive(Debug)]
pub struct Probe(Arc<SetHealth>);

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.is_probed.store(false, Ordering::Release);
    }
}

impl Default for SetHealth {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            failures: AtomicU32::new(0),
            failing_since_ms: AtomicU64::new(0),
            is_probed: AtomicBool::new(false),
            failed_ms: AtomicU64::new(0),
            last_good: Mutex::new(None),
        }
    }
}

impl SetHealth {
    fn millis(&self, now: Instant) -> u64 {
        let millis = now.saturating_duration_since(self.epoch).as_millis();
        u64::try_from(millis).unwrap_or(u64::MAX)
    }

    fn has_failed(&self, now: Instant) -> bool {
        let since = Duration::from_millis(self.failing_since_ms.load(Ordering::Relaxed));
        self.failures.load(Ordering::Relaxed) >= FAILURES_MIN
            && now.saturating_duration_since(self.epoch + since) >= FAILED_AFTER
    }

    pub(super) fn note_failure(&self, now: Instant) {
        let millis = self.millis(now);
        if self.failures.load(Ordering::Relaxed) == 0 {
            self.failing_since_ms.store(millis, Ordering::Relaxed);
        }
        self.failed_ms.store(millis, Ordering::Relaxed);
        let more = |failures: u32| failures.checked_add(1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.failures.fetch_update(set, fetch, more);
    }

    /// Returns true if all recent dials before failed.
    pub(super) fn note_success(&self, endpoint: &Arc<EndpointState>, now: Instant) -> bool {
        if self.failures.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let had_failed = self.has_failed(now);
        self.failures.store(0, Ordering::Relaxed);
        *self.last_good.lock() = Some(Arc::clone(endpoint));
        had_failed
    }

    /// Returns whether a tunnel may dial, which can go to another network if `has_other`.
    pub(super) fn admit(self: &Arc<Self>, now: Instant, has_other: bool) -> DialAdmission {
        if !self.has_failed(now) {
            return DialAdmission::Free;
        }
        let failed = Duration::from_millis(self.failed_ms.load(Ordering::Relaxed));
        if has_other && now < self.epoch + failed + PROBE_INTERVAL {
            return DialAdmission::Refused;
        }
        if self.is_probed.swap(true, Ordering::Acquire) {
            DialAdmission::Refused
        } else {
            DialAdmission::Probe(Probe(Arc::clone(self)))
        }
    }

    pub(super) fn last_good(&self) -> Option<Arc<EndpointState>> {
        self.last_good.lock().clone()
    }
}
