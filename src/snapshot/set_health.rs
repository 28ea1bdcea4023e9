//! Results of the recent dials of an endpoint set in the own network.
//!
//! While all of them fail, one tunnel at a time dials, so that a dead service costs little. The
//! first dial that succeeds ends this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::endpoint::Endpoint;

/// Number of failed dials in a row from which a set can count as failed.
const FAILURES_MIN: u32 = 5;
/// Time without a dial that succeeded from which it counts as failed. A large set with a few good
/// endpoints also has long rows of failures.
const FAILED_AFTER: Duration = Duration::from_secs(1);

/// Health of a set, which its first failed dial creates.
#[derive(Debug)]
pub(super) struct SetHealth {
    epoch: Instant,
    /// Number of failed dials since the last one that succeeded.
    failures: AtomicU32,
    /// Milliseconds after `epoch` of the last dial that succeeded.
    succeeded_ms: AtomicU64,
    is_probed: AtomicBool,
    /// Endpoint of the last dial that succeeded after a failed one.
    last_good: Mutex<Option<Arc<Endpoint>>>,
}

/// Permission to dial endpoints of the own network.
#[derive(Debug)]
pub enum DialAdmission {
    /// Dials succeed.
    Free,
    /// All recent dials failed, and no other tunnel may dial meanwhile.
    Probe(Probe),
    /// All recent dials failed, and another tunnel dials.
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

impl SetHealth {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            epoch: now,
            failures: AtomicU32::new(0),
            succeeded_ms: AtomicU64::new(0),
            is_probed: AtomicBool::new(false),
            last_good: Mutex::new(None),
        }
    }

    fn millis(&self, now: Instant) -> u64 {
        let millis = now.saturating_duration_since(self.epoch).as_millis();
        u64::try_from(millis).unwrap_or(u64::MAX)
    }

    fn has_failed(&self, now: Instant) -> bool {
        let since = Duration::from_millis(self.succeeded_ms.load(Ordering::Relaxed));
        self.failures.load(Ordering::Relaxed) >= FAILURES_MIN
            && now.saturating_duration_since(self.epoch + since) >= FAILED_AFTER
    }

    pub(super) fn note_failure(&self) {
        let more = |failures: u32| failures.checked_add(1);
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.failures.fetch_update(set, fetch, more);
    }

    /// Returns true if all recent dials before failed.
    pub(super) fn note_success(&self, endpoint: &Arc<Endpoint>, now: Instant) -> bool {
        let had_failed = self.has_failed(now);
        let millis = self.millis(now);
        self.succeeded_ms.store(millis, Ordering::Relaxed);
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
            *self.last_good.lock() = Some(Arc::clone(endpoint));
        }
        had_failed
    }

    pub(super) fn admit(self: &Arc<Self>, now: Instant) -> DialAdmission {
        if !self.has_failed(now) {
            return DialAdmission::Free;
        }
        if self.is_probed.swap(true, Ordering::Acquire) {
            DialAdmission::Refused
        } else {
            DialAdmission::Probe(Probe(Arc::clone(self)))
        }
    }

    pub(super) fn last_good(&self) -> Option<Arc<Endpoint>> {
        self.last_good.lock().clone()
    }
}
