//! Results of the recent dials of a service port in the own network.
//!
//! While all of them fail, one tunnel at a time dials, so that a dead service costs little. The
//! first dial that succeeds ends this. All endpoint sets of the port share the results, also with
//! those of the next snapshots.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
#[derive(Debug, Default)]
pub(super) struct SetHealth {
    /// Number of failed dials since the last one that succeeded. It changes under the lock.
    failures: AtomicU32,
    is_probed: AtomicBool,
    dials: Mutex<LastDials>,
}

#[derive(Debug, Default)]
struct LastDials {
    /// Times of the first and the last failed dial since the last one that succeeded.
    failed: Option<[Instant; 2]>,
    /// Endpoint of the last dial that succeeded after a failed one.
    good: Option<Arc<EndpointState>>,
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

impl SetHealth {
    /// Returns the time of the last failed dial, if all recent ones failed.
    fn failed(&self, now: Instant) -> Option<Instant> {
        if self.failures.load(Ordering::Relaxed) < FAILURES_MIN {
            return None;
        }
        let [first, last] = self.dials.lock().failed?;
        (now.saturating_duration_since(first) >= FAILED_AFTER).then_some(last)
    }

    pub(super) fn note_failure(&self, now: Instant) {
        let mut dials = self.dials.lock();
        let [first, _] = dials.failed.unwrap_or([now; 2]);
        dials.failed = Some([first, now]);
        let failures = self.failures.load(Ordering::Relaxed).saturating_add(1);
        self.failures.store(failures, Ordering::Relaxed);
    }

    /// Returns true if all recent dials before failed.
    pub(super) fn note_success(&self, endpoint: &Arc<EndpointState>, now: Instant) -> bool {
        if self.failures.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let had_failed = self.failed(now).is_some();
        let mut dials = self.dials.lock();
        *dials = LastDials { failed: None, good: Some(Arc::clone(endpoint)) };
        self.failures.store(0, Ordering::Relaxed);
        had_failed
    }

    /// Returns whether a tunnel may dial, which can go to another network if `has_other`.
    pub(super) fn admit(self: &Arc<Self>, now: Instant, has_other: bool) -> DialAdmission {
        let Some(failed) = self.failed(now) else {
            return DialAdmission::Free;
        };
        if has_other && now < failed + PROBE_INTERVAL {
            return DialAdmission::Refused;
        }
        if self.is_probed.swap(true, Ordering::Acquire) {
            DialAdmission::Refused
        } else {
            DialAdmission::Probe(Probe(Arc::clone(self)))
        }
    }

    pub(super) fn last_good(&self) -> Option<Arc<EndpointState>> {
        self.dials.lock().good.clone()
    }
}
