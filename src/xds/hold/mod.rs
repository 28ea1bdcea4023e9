//! Hold of mass removals, so that a control plane or an API server that has lost its view does not
//! empty the gateway.
//!
//! An istiod that sees no namespace, or a control plane that starts with nothing, removes the whole
//! mesh in its first responses. Such removals wait for `discovery.hold`: the resources stay in
//! force, although the client no longer holds them, and a resource that is sent again leaves the
//! hold. No policy may go before what it covers. So the removal of a policy that was there before
//! the stream waits for the end of the first minute, and one during a hold for the end of that. A
//! list of live objects is the first response of its kind.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep_until};

use super::client::Removals;
use super::store::{ADDRESS, AUTHORIZATION, CLUSTER};

/// Time after the first response of a type on a stream in which removals may be held.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// Minimum number of removals that are held.
const REMOVALS_MIN: usize = 10;

/// Removed resource: type URL and name, or kind and name of an object.
pub(super) type Removed = (&'static str, Arc<str>);

/// Types whose removals wait for other removals.
#[derive(Debug)]
pub(super) struct WaitRule {
    /// Types that wait for the first response of other types.
    pub(super) of: &'static [&'static str],
    /// Types that they wait for.
    pub(super) on: &'static [&'static str],
    /// Returns whether a resource is a policy that may cover one of these resources, whose removal
    /// waits; given none of them, whether it is one that may cover any.
    pub(super) covers: fn(&'static str, &str, &BTreeSet<Removed>) -> bool,
}

impl Default for WaitRule {
    /// Returns the rule for the resources of a control plane.
    fn default() -> Self {
        Self {
            of: &[AUTHORIZATION],
            on: &[ADDRESS, CLUSTER],
            covers: |type_url, _, _| type_url == AUTHORIZATION,
        }
    }
}

/// State before the first response of a type, or before a list of a kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Before {
    /// No resource.
    Nothing,
    /// Resources, and a time in which no change of them was received.
    #[default]
    Gap,
    /// Resources, with each change of them. Such a list makes no other removal wait.
    Watch,
}

/// Removals that wait, and the rule by which they do.
#[derive(Debug, Default)]
pub(super) struct Hold {
    /// Time for which a mass removal waits; none if all removals apply at once.
    time: Duration,
    rule: WaitRule,
    /// By type, of this stream.
    windows: BTreeMap<&'static str, Window>,
    /// End of the first window of this stream.
    first_end: Option<Instant>,
    /// True if a mass removal was recognized on this stream.
    is_mass: bool,
    /// True if its time has begun.
    has_begun: bool,
    /// Time since which removals wait, if they began to on this stream.
    waits_since: Option<Instant>,
    /// Start of the hold of a mass removal, of this stream or an earlier one.
    since: Option<Instant>,
    removed: BTreeSet<Removed>,
    /// Limit of waiting removals: the number of resources when they began to wait.
    most: usize,
    /// True after a change since the last [`Self::take_change`].
    pub(super) is_changed: bool,
    /// Number of waiting removals at that time.
    reported: usize,
}

/// Time since the first response of a type on the stream.
#[derive(Debug)]
struct Window {
    end: Instant,
    before: Before,
    /// False once another type has begun again: its removals wait until this one has as well.
    is_recent: bool,
    /// Largest number of resources of each counted kind since.
    most: [usize; 2],
}

impl Hold {
    pub(super) fn new(time: Duration) -> Self {
        Self::with(time, WaitRule::default())
    }

    pub(super) fn with(time: Duration, rule: WaitRule) -> Self {
        Self { time, rule, ..Self::default() }
    }

    pub(super) fn connected(&mut self) {
        self.windows.clear();
        (self.first_end, self.is_mass, self.has_begun) = (None, false, false);
        // Policies that wait have the first minute of this stream before them too.
        self.waits_since = None;
    }

    /// Begins the window of a type at the time of its first response, or again after a reconnect
    /// of that type alone.
    pub(super) fn begin(&mut self, type_url: &'static str, at: Instant, before: Before) {
        if self.time.is_zero() {
            return;
        }
        self.first_end.get_or_insert(at + WINDOW);
        let window = Window { end: at + WINDOW, before, is_recent: true, most: [0; 2] };
        let old = self.windows.insert(type_url, window);
        if before != Before::Watch && old.is_some_and(|old| old.is_recent) {
            let others = self.windows.iter_mut().filter(|(of, _)| **of != type_url);
            others.for_each(|(_, other)| other.is_recent = false);
        }
    }

    /// Returns true if nothing waits, and no removal would at this time.
    pub(super) fn is_idle(&self, at: Instant) -> bool {
        self.removed.is_empty() && self.is_over(at)
    }

    /// Returns true if all windows have ended.
    pub(super) fn is_over(&self, at: Instant) -> bool {
        self.windows.values().all(|window| window.end <= at)
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
        let now = Instant::now();
        if removals.is_first {
            let has_none = removals.held == 0 && self.removed.is_empty();
            let before = if has_none { Before::Nothing } else { Before::Gap };
            self.begin(type_url, now, before);
        }
        // A policy waits with what it may cover.
        let (mut waits, mut is_policy_awaited) = (false, !self.removed.is_empty());
        if let Some(window) = self.windows.get_mut(type_url).filter(|window| now < window.end) {
            for (most, (total, gone)) in window.most.iter_mut().zip(counted) {
                *most = total.max(*most);
                let missing = *most - total.saturating_sub(gone);
                self.is_mass |= missing >= REMOVALS_MIN && missing > *most / 2;
            }
            let before = window.before;
            let has_to_wait = self.rule.of.contains(&type_url) && !self.is_complete();
            waits = self.is_mass || (has_to_wait && before != Before::Watch);
            is_policy_awaited |= before == Before::Gap;
        }
        let has_cover = |name: &str| (self.rule.covers)(type_url, name, &self.removed);
        let gone = removals.gone.iter();
        let gone = gone.filter(|name| waits || (is_policy_awaited && has_cover(name)));
        let gone: Vec<_> = gone.map(|name| (type_url, Arc::clone(name))).collect();
        if gone.is_empty() {
            return;
        }
        self.is_changed = true;
        // Another mass removal, after most of an earlier one has returned, has a time of its own.
        let new = gone.iter().filter(|one| !self.removed.contains(*one)).count();
        let begins = self.is_mass && !self.has_begun && new >= REMOVALS_MIN;
        self.has_begun |= begins;
        let is_first = self.removed.is_empty();
        if is_first {
            (self.waits_since, self.most) = (Some(now), 0);
        }
        if begins || is_first {
            self.most = self.most.max(removals.held_of_all);
        }
        if self.is_mass {
            self.since = self.since.filter(|_| !begins).or(Some(now));
        }
        let room = self.most.saturating_sub(self.removed.len());
        self.removed.extend(gone.into_iter().take(room));
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

    /// Returns true if the types that others wait for had a response.
    fn is_complete(&self) -> bool {
        let window = |type_url: &&str| self.windows.get(*type_url);
        self.rule.on.iter().all(|of| window(of).is_some_and(|window| window.is_recent))
    }

    /// Returns true if policies wait for the removal of what they may cover.
    fn has_policies(&self) -> bool {
        let mut removed = self.removed.iter();
        removed.any(|(type_url, name)| (self.rule.covers)(type_url, name, &BTreeSet::new()))
    }

    /// Returns the time at which the removals apply; none if none wait, or if no response of this
    /// stream has arrived. A mass removal waits for the end of the minute after a reconnect too, in
    /// which the control plane sends what it has again, and for one minute more at most.
    pub(super) fn due(&self) -> Option<Instant> {
        let end = self.windows.values().map(|window| window.end).max()?;
        let due = match self.since {
            Some(since) => {
                let end = self.first_end.map_or(end, |first| end.min(first + WINDOW));
                end.max(since + self.time)
            }
            None if self.is_complete() && !self.has_policies() => end - WINDOW,
            None => self.waits_since.map_or(end, |first| end.min(first + WINDOW)),
        };
        (!self.removed.is_empty()).then_some(due)
    }

    /// Returns the wait for the time at which the removals apply. It is endless if none wait.
    pub(super) fn end(&self) -> impl Future<Output = ()> + use<> {
        let due = self.due();
        async move {
            match due {
                Some(due) => sleep_until(due).await,
                None => pending().await,
            }
        }
    }

    /// Returns the start of the hold of a mass removal, and the end of its time.
    pub(super) fn mass_times(&self) -> Option<[SystemTime; 2]> {
        let since = self.since.filter(|_| !self.removed.is_empty())?;
        let (now, today) = (Instant::now(), SystemTime::now());
        let times = [since, since + self.time];
        Some(times.map(|at| {
            today - now.saturating_duration_since(at) + at.saturating_duration_since(now)
        }))
    }

    /// Returns by how many the number of waiting removals has grown since the last call, if they
    /// have changed.
    pub(super) fn take_change(&mut self) -> Option<i64> {
        let count = |removals: usize| i64::try_from(removals).unwrap_or(i64::MAX);
        let before = mem::replace(&mut self.reported, self.removed.len());
        let is_changed = mem::take(&mut self.is_changed);
        is_changed.then(|| count(self.reported) - count(before))
    }

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
