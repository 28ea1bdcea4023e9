//! Connections to one gateway by source, and its health, which is common to all.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use crate::limits::{self, Held, LimitReached, Source, SourceMap};
use crate::reason::Reason;
use crate::snapshot::{EndpointState, Snapshot};
use crate::tls::OutboundTls;

use super::connection::{Connection, STREAMS_MAX, Slot};
use super::{Failure, Target};

/// Limit of tunnels through one gateway. One source may hold half.
pub(super) const PLACES_MAX: usize = 16 * 1024;
/// Limit of attempts to connect of one source, with those that wait.
const SOURCE_ATTEMPTS_MAX: usize = 8;
/// Limit of tunnels that wait for a new connection: a burst may take all places.
const WAITERS_MAX: usize = PLACES_MAX;
/// Limit of those of one source.
const SOURCE_WAITERS_MAX: usize = WAITERS_MAX / 2;
/// Number of connections without an answer to a CONNECT after which attempts pause for
/// [`REPLACE_PAUSE`]: the gateway accepts connections and no tunnels.
const UNANSWERED_MAX: usize = 3;
/// Pause after the first failure to replace a connection that still serves. It doubles with each
/// further failure.
const REPLACE_PAUSE: Duration = Duration::from_secs(1);
const REPLACE_PAUSE_MAX: Duration = Duration::from_secs(60);
/// Number of intervals after which the state that a probe has shown is unknown. Probes may be
/// switched off, or be skipped for lack of descriptors.
const PROBE_INTERVALS: u32 = 3;

#[derive(Debug, Default)]
pub(super) struct Connections {
    pub(super) by_source: SourceMap<SourceConnections>,
    /// Number of attempts to connect that run or wait.
    pub(super) attempts: usize,
    pub(super) waiters: usize,
    /// Time at which the last connection was opened.
    pub(super) opened_at: Option<Instant>,
    pub(super) replacement: Replacement,
    /// Time and failure of the last attempt that failed.
    pub(super) failure: Option<(Instant, Failure)>,
    pub(super) health: EndpointState,
    /// Start of the last attempt that failed, or time of a later ejection. Only connections that
    /// were opened afterwards prove that the gateway has recovered.
    pub(super) failed_at: Option<Instant>,
    /// Time of the last failure that the gateway alone can have caused.
    pub(super) proved_at: Option<Instant>,
    /// Last CONNECT that ended by an error or was not answered, since the last answer to any.
    pub(super) lost: Option<Loss>,
    /// True if no CONNECT was answered since the last ejection.
    pub(super) is_mute: bool,
    /// True if a CONNECT met a late PING since the last answer to any.
    pub(super) was_silent: bool,
    pub(super) ejections: u64,
    /// Time of the next probe, or end of a later ejection; `None` before the first one.
    pub(super) probe_at: Option<Instant>,
    pub(super) probe_interval: Duration,
    /// Time until which the last probe, or a connection since, shows that it is healthy; `None`
    /// after a failure.
    pub(super) healthy_until: Option<Instant>,
    pub(super) last_error: String,
}

/// CONNECT without an answer.
#[derive(Debug)]
pub(super) struct Loss {
    /// Verified source.
    pub(super) source: Source,
    pub(super) authority: String,
    pub(super) at: Instant,
}

#[derive(Debug, Default)]
pub(super) struct SourceConnections {
    pub(super) open: Vec<Arc<Connection>>,
    /// Number of attempts to connect that run or wait.
    pub(super) attempts: usize,
    /// Result of the last attempt, for the tunnels that wait. A failure is left out while others
    /// are running.
    pub(super) result: watch::Sender<Option<Failure>>,
    pub(super) waiters: usize,
    /// Time at which the last connection was opened.
    pub(super) opened_at: Option<Instant>,
    /// Number of connections that were opened since the last answer to a CONNECT.
    pub(super) unanswered: usize,
}

/// Back-off of attempts to replace a connection that still serves.
#[derive(Debug, Default)]
pub(super) struct Replacement {
    /// Time of the next attempt; `None` if the last one succeeded.
    pub(super) next_attempt: Option<Instant>,
    pub(super) pause: Duration,
}

impl Replacement {
    pub(super) fn is_due(&self) -> bool {
        self.next_attempt.is_none_or(|at| Instant::now() >= at)
    }

    fn back_off(&mut self) {
        self.pause = (2 * self.pause).clamp(REPLACE_PAUSE, REPLACE_PAUSE_MAX);
        self.next_attempt = Some(Instant::now() + self.pause);
    }
}

impl Connections {
    pub(super) fn of(&mut self, source: &Source) -> &mut SourceConnections {
        self.by_source.entry(source.clone()).or_default()
    }

    /// Forgets a source that has no state to keep.
    pub(super) fn prune(&mut self, source: &Source) {
        let own = self.by_source.get(source);
        if own.is_some_and(|own| own.open.is_empty() && own.attempts + own.waiters == 0) {
            self.by_source.remove(source);
        }
    }

    pub(super) fn open(&self) -> impl Iterator<Item = &Arc<Connection>> {
        self.by_source.values().flat_map(|own| &own.open)
    }

    /// Adds a new connection. It replaces those of its source that are aged, or take no tunnels.
    pub(super) fn add(&mut self, source: &Source, new: Arc<Connection>) {
        self.opened_at = Some(Instant::now());
        let (own, tls) = (self.of(source), Arc::clone(&new.state.tls));
        own.open.retain(|one| !one.state.is_aged(Some(&tls)) && one.has_places());
        own.open.push(new);
        own.opened_at = Some(Instant::now());
        own.unanswered += 1;
        own.result.send_replace(None);
    }

    /// Takes one of a pool for a new connection of a source. If the source may take no more, the
    /// connection of its cluster that was idle for longest makes room. If the pool is short and the
    /// source would have a share of the reserve, idle connections of all make room.
    pub(super) fn charge(
        &mut self,
        pool: &Arc<limits::Pool>,
        source: &Source,
    ) -> Result<Held, LimitReached> {
        let account = pool.account(source);
        let charge = account.take(1);
        if charge.is_ok() {
            return charge;
        }
        let idle = self.idle();
        let most = idle.len().min(pool.reserve() + 1);
        let enough = (1..=most).find(|more| account.check_on(1, pool.terms_after(*more)).is_ok());
        let of = source.root();
        let (is_of_all, count) = enough.map_or((false, 1), |count| (true, count));
        let idle = idle.into_iter().filter(|(one, _)| is_of_all || one.root() == of);
        for (source, connection) in idle.take(count) {
            if connection.state.retire_if_idle(Duration::ZERO)
                && let Some(own) = self.by_source.get_mut(&source)
            {
                own.open.retain(|one| !Arc::ptr_eq(one, &connection));
            }
        }
        account.take(1)
    }

    /// Returns the connections without a tunnel, of sources that do not wait for one. Those that
    /// were idle for longest are first.
    fn idle(&self) -> Vec<(Source, Arc<Connection>)> {
        let sources = self.by_source.iter().filter(|(_, own)| own.waiters == 0);
        let mut idle: Vec<_> = sources
            .flat_map(|(source, own)| own.open.iter().map(move |one| (source, one)))
            .filter_map(|(source, one)| Some((one.state.idle_time()?, source, one)))
            .collect();
        idle.sort_unstable_by_key(|(time, ..)| Reverse(*time));
        idle.into_iter().map(|(_, source, one)| (source.clone(), Arc::clone(one))).collect()
    }

    /// Notes the answer to a CONNECT of a source on a connection that was opened at this time.
    /// Failures before are forgotten.
    pub(super) fn answered(&mut self, source: &Source, opened: Instant) {
        if let Some(own) = self.by_source.get_mut(source) {
            own.unanswered = 0;
        }
        self.forget_failures(opened);
    }

    /// Notes a probe that succeeded at this time. It refutes failures to connect, but only with
    /// the answer to a CONNECT that others were lost since the last answer.
    pub(super) fn probed(&mut self, opened: Instant, is_answered: bool) {
        self.opened_at = Some(opened);
        self.healthy_until = Some(self.confirmed(opened));
        if is_answered || self.lost.is_none() && !self.was_silent {
            self.forget_failures(opened);
        }
    }

    /// Returns the time until which a state that was confirmed at this time is known.
    pub(super) fn confirmed(&self, at: Instant) -> Instant {
        at + PROBE_INTERVALS * self.probe_interval
    }

    /// Forgets failures before the time at which a connection was opened.
    fn forget_failures(&mut self, opened: Instant) {
        (self.lost, self.is_mute, self.was_silent) = (None, false, false);
        if self.failed_at.is_some_and(|at| at <= opened) {
            self.failed_at = None;
            self.health = EndpointState::default();
            self.replacement = Replacement::default();
        }
    }

    /// Notes an attempt that failed.
    pub(super) fn note_failure(&mut self, source: &Source, failure: Failure, started: Instant) {
        self.note_cause(&failure, started);
        let failure = self.judge(failure, started);
        let own = self.of(source);
        if own.attempts == 0 {
            own.result.send_replace(Some(failure));
        }
    }

    pub(super) fn note_cause(&mut self, failure: &Failure, started: Instant) {
        self.last_error.clone_from(&failure.detail);
        // This process may have no descriptor left.
        if failure.is_of_gateway() {
            self.healthy_until = None;
            self.replacement.back_off();
            self.failed_at = self.failed_at.max(Some(started));
            self.failure = Some((Instant::now(), failure.clone()));
        }
    }

    /// Returns the failure of an attempt or a wait with its reason. If a connection was opened
    /// meanwhile, the gateway is not unreachable.
    pub(super) fn judge(&self, failure: Failure, since: Instant) -> Failure {
        if self.opened_at.is_some_and(|at| at >= since) {
            return Failure::new(Reason::RemoteBusy, failure.detail);
        }
        failure
    }

    /// Returns the number of attempts that should run for one more waiter of a source.
    ///
    /// # Errors
    /// The tunnel cannot wait.
    pub(super) fn useful_attempts(&mut self, source: &Source) -> Result<usize, String> {
        let is_full = self.waiters >= WAITERS_MAX;
        let own = self.of(source);
        if is_full || own.waiters >= SOURCE_WAITERS_MAX {
            let waiters = if is_full { WAITERS_MAX } else { own.waiters };
            return Err(format!("{waiters} tunnels wait for a connection"));
        }
        let is_recent = |at: Instant| at.elapsed() < REPLACE_PAUSE;
        let is_useless = own.unanswered >= UNANSWERED_MAX
            && own.opened_at.is_some_and(is_recent)
            && own.open.iter().all(|one| one.state.streams() == 0);
        if is_useless && own.attempts == 0 {
            return Err("its connections take no tunnels".to_owned());
        }
        let useful = (own.waiters + 1).div_ceil(STREAMS_MAX);
        Ok(if is_useless { 0 } else { useful.min(SOURCE_ATTEMPTS_MAX) })
    }
}

impl SourceConnections {
    /// Forgets retired connections, and retires those whose certificate has expired or no longer
    /// proves the gateway.
    pub(super) fn retire_unverified(&mut self, target: &Target, snapshot: &Snapshot) {
        self.open.retain(|one| {
            let peer = &one.state.peer;
            let checked = || peer.server().check_gateway(&target.gateway, snapshot);
            if peer.not_after() <= SystemTime::now() || checked().is_err() {
                one.state.retire();
            }
            !one.state.is_retired()
        });
    }

    /// Takes a place, on an aged connection only if no other has one.
    pub(super) fn take(&self, tls: Option<&Arc<OutboundTls>>) -> Option<Slot> {
        let (aged, fresh): (Vec<_>, Vec<_>) =
            self.open.iter().partition(|one| one.state.is_aged(tls));
        fresh.into_iter().chain(aged).find_map(Connection::try_take)
    }
}
