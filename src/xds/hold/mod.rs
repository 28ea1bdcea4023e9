//! Hold of mass removals, so that a control plane that has lost its view does not empty the
//! gateway.
//!
//! An istiod that sees no namespace, or a control plane that starts with nothing, removes the whole
//! mesh in its first responses. Such removals wait for `discovery.hold`: the resources stay in
//! force, although the client no longer holds them, and a resource that is sent again leaves the
//! hold. A removal of policies that arrives before the first services and clusters of a stream
//! waits for these, because no policy may go before what it covers.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::client::Removals;
use super::store::{ADDRESS, AUTHORIZATION, CLUSTER};

/// Time after the first response of a type on a stream in which removals may be held.
const WINDOW: Duration = Duration::from_secs(60);
/// Minimum number of removals that are held.
const REMOVALS_MIN: usize = 10;

/// Removed resource: type URL and name.
pub(super) type Removed = (&'static str, Arc<str>);

/// Removals that wait, and the rule by which they do.
#[derive(Debug, Default)]
pub(super) struct Hold {
    /// Time for which a mass removal waits; none if all removals apply at once.
    time: Duration,
    /// By type, of this stream.
    windows: BTreeMap<&'static str, Window>,
    /// True if a mass removal was recognized on this stream.
    is_mass: bool,
    /// Start of the hold of a mass removal, of this stream or an earlier one.
    since: Option<Instant>,
    removed: BTreeSet<Removed>,
    /// Limit of waiting removals: the number of resources when they began to wait.
    most: usize,
    /// True after a change since the last [`Self::take_change`].
    is_changed: bool,
}

/// Time since the first response of a type on the stream.
#[derive(Debug)]
struct Window {
    end: Instant,
    /// Largest number of resources of each counted kind since.
    most: [usize; 2],
}

impl Hold {
    pub(super) fn new(time: Duration) -> Self {
        Self { time, ..Self::default() }
    }

    /// Begins a stream.
    pub(super) fn connected(&mut self) {
        self.windows.clear();
        self.is_mass = false;
    }

    /// Evaluates the removals of a response. `counted` has the number of resources that are
    /// compared, before the response, and how many of those are removed. Of addresses, services
    /// and workloads are compared apart.
    pub(super) fn announce(
        &mut self,
        type_url: &'static str,
        removals: &Removals<'_>,
        counted: [(usize, usize); 2],
    ) {
        if self.time.is_zero() {
            return;
        }
        let now = Instant::now();
        if removals.is_first {
            self.windows.insert(type_url, Window { end: now + WINDOW, most: [0; 2] });
        }
        let Some(window) = self.windows.get_mut(type_url).filter(|window| now < window.end) else {
            return;
        };
        for (most, (total, gone)) in window.most.iter_mut().zip(counted) {
            *most = total.max(*most);
            let missing = *most - total.saturating_sub(gone);
            self.is_mass |= missing >= REMOVALS_MIN && missing > *most / 2;
        }
        let waits = self.is_mass || (type_url == AUTHORIZATION && !self.is_complete());
        if removals.gone.is_empty() || !waits {
            return;
        }
        self.is_changed = true;
        if self.is_mass {
            self.since.get_or_insert(now);
        }
        if self.removed.is_empty() {
            self.most = removals.held_of_all;
        }
        let room = self.most.saturating_sub(self.removed.len());
        self.removed.extend(removals.gone.iter().take(room).map(|name| (type_url, name.clone())));
    }

    /// Returns true if the removal of a resource waits.
    pub(super) fn contains(&self, type_url: &'static str, name: &str) -> bool {
        !self.removed.is_empty() && self.removed.contains(&(type_url, Arc::from(name)))
    }

    /// Ends the wait of one removal: the resource was sent again, or is removed now. Returns true
    /// if it waited.
    pub(super) fn forget(&mut self, type_url: &'static str, name: &str) -> bool {
        let waited = !self.removed.is_empty() && self.removed.remove(&(type_url, Arc::from(name)));
        self.is_changed |= waited;
        if waited && self.removed.is_empty() {
            self.since = None;
        }
        waited
    }

    /// Returns true if services and clusters had a response on this stream.
    fn is_complete(&self) -> bool {
        [ADDRESS, CLUSTER].iter().all(|type_url| self.windows.contains_key(type_url))
    }

    /// Returns the time at which the removals apply; none if none wait, or if no response of this
    /// stream has arrived. A mass removal waits for the end of the minute after a reconnect too, in
    /// which the control plane sends what it has again.
    pub(super) fn due(&self) -> Option<Instant> {
        let end = self.windows.values().map(|window| window.end).max()?;
        let due = match self.since {
            Some(since) => end.max(since + self.time),
            None if self.is_complete() => end - WINDOW,
            None => end,
        };
        (!self.removed.is_empty()).then_some(due)
    }

    /// Returns the start of the hold of a mass removal, and the end of its time.
    pub(super) fn mass_times(&self) -> Option<[Instant; 2]> {
        let since = self.since.filter(|_| !self.removed.is_empty())?;
        Some([since, since + self.time])
    }

    /// Returns true if the waiting removals have changed since the last call.
    pub(super) fn take_change(&mut self) -> bool {
        mem::take(&mut self.is_changed)
    }

    /// Returns the waiting removals.
    pub(super) fn removed(&self) -> &BTreeSet<Removed> {
        &self.removed
    }

    /// Ends the hold and returns its removals. Removals on this stream after a mass removal apply
    /// at once.
    pub(super) fn release(&mut self) -> BTreeSet<Removed> {
        if self.since.take().is_some() {
            self.connected();
        }
        self.is_changed |= !self.removed.is_empty();
        mem::take(&mut self.removed)
    }
}
