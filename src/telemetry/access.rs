//! Selection of the events that are written to the access log.
//!
//! Lines of tunnels that were open are never limited: they cost the peer an exposed service and a
//! dial, and are the operator's audit trail. A rejection costs the peer nothing, so the lines of
//! each identity are limited, and those of all peers without an identity together.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tracing::Level;

use super::Source;
use crate::config::Access;
use crate::limits::{self, Rate, Rates};

/// Limit of lines per second about the rejections of one identity, or of all peers without one.
const REFUSALS_A_SECOND: u32 = 10;
/// Number of identities with a limit of their own.
const IDENTITIES_MAX: usize = 256;
/// Time in which used credit is whole again.
pub(super) const CREDIT_TIME: Duration = Duration::from_secs(1);
/// Sampling divisor of [`Access::Sampled`] for tunnels without an error.
const SAMPLE: u32 = 100;

/// Mode and limits of the access log.
#[derive(Debug)]
pub(super) struct AccessLog {
    mode: AtomicU8,
    identities: Mutex<Rates>,
    without_identity: Mutex<Rate>,
    suppressed: Counter,
}

/// Returns the rate of the lines about one subject.
pub(super) fn lines_per_second(lines: u32) -> Rate {
    Rate::new(lines, lines)
}

impl AccessLog {
    /// Creates a log in the mode [`Access::All`] that counts suppressed lines in `suppressed`.
    pub(super) fn new(suppressed: Counter) -> Self {
        let rate = lines_per_second(REFUSALS_A_SECOND);
        Self {
            mode: AtomicU8::new(Access::All as u8),
            identities: Mutex::new(Rates::new(rate.clone(), IDENTITIES_MAX)),
            without_identity: Mutex::new(rate),
            suppressed,
        }
    }

    pub(super) fn set(&self, mode: Access) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// Returns true if every tunnel is logged, including its opening.
    pub(super) fn is_all(&self) -> bool {
        self.is(Access::All)
    }

    fn is(&self, mode: Access) -> bool {
        self.mode.load(Ordering::Relaxed) == mode as u8
    }

    /// Decides whether a tunnel that has ended is logged. Returns the number of lines suppressed
    /// before it, or none if it is not logged.
    ///
    /// The sample is random, so that no peer can evade it.
    pub(super) fn admit(&self, peer: &Source, was_open: bool, level: Level) -> Option<u64> {
        let is_error = level != Level::INFO;
        let is_sampled = || self.is(Access::Sampled) && fastrand::u32(..SAMPLE) == 0;
        if self.is(Access::Off) || !(is_error || self.is_all() || is_sampled()) {
            return None;
        }
        if was_open {
            return Some(0);
        }
        if peer.principal.is_empty() {
            return self.admit_without_identity();
        }
        let identity = limits::Source::cluster(&peer.counted_cluster).identity(&peer.principal);
        let now = Instant::now();
        let admitted = self.identities.lock().of(&identity, now).spend_on_report(now);
        self.count_suppressed(admitted)
    }

    /// Decides like [`AccessLog::admit`], for a refused handshake or a connection closed before
    /// it.
    pub(super) fn admit_handshake(&self) -> Option<u64> {
        if self.is(Access::Off) { None } else { self.admit_without_identity() }
    }

    fn admit_without_identity(&self) -> Option<u64> {
        let admitted = self.without_identity.lock().spend_on_report(Instant::now());
        self.count_suppressed(admitted)
    }

    fn count_suppressed(&self, admitted: Option<u64>) -> Option<u64> {
        if admitted.is_none() {
            self.suppressed.inc();
        }
        admitted
    }

    /// Logs the counts of suppressed lines that no later line has reported.
    pub(super) fn sweep(&self, now: Instant) {
        let mut left = self.identities.lock().sweep(now);
        let mut others = self.without_identity.lock();
        if others.is_full(now) {
            left.push((None, others.take_refused()));
        }
        drop(others);
        for (source, suppressed) in left.into_iter().filter(|&(_, count)| count > 0) {
            let identity = source.as_ref().and_then(limits::Source::principal).map(|name| &**name);
            tracing::event!(
                target: "access",
                parent: None,
                Level::WARN,
                "src.identity" = identity,
                direction = "inbound",
                suppressed,
                "lines suppressed"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::source;
    use super::*;

    /// Returns the number of lines for 10,000 tunnels of one identity.
    fn lines(mode: Access, was_open: bool, level: Level) -> usize {
        let log = AccessLog::new(Counter::default());
        log.set(mode);
        let peer = source();
        let all = (0..10_000).filter(|_| log.admit(&peer, was_open, level).is_some());
        all.count()
    }

    #[test]
    fn each_mode_chooses_by_how_a_tunnel_ended() {
        for (mode, good, broken) in [
            (Access::All, 10_000..=10_000, 10_000),
            // Ten standard deviations of a binomial count: 10 × √(10,000 × 0.01 × 0.99).
            (Access::Sampled, 1..=200, 10_000),
            (Access::Errors, 0..=0, 10_000),
            (Access::Off, 0..=0, 0),
        ] {
            let sampled = lines(mode, true, Level::INFO);
            assert!(good.contains(&sampled), "{mode:?}: {sampled}");
            assert_eq!(lines(mode, true, Level::WARN), broken, "{mode:?}");
            let refused = lines(mode, false, Level::WARN);
            // The loop can take two or three windows, but not ten.
            let limited = if broken == 0 { 0..1 } else { 10..100 };
            assert!(limited.contains(&refused), "{mode:?}: {refused}");
        }
    }

    #[test]
    fn what_is_suppressed_is_counted() {
        let suppressed = Counter::default();
        let log = AccessLog::new(suppressed.clone());
        let lines = (0..500).filter(|_| log.admit_handshake().is_some()).count();
        assert_eq!(suppressed.get(), 500 - lines as u64);
        log.set(Access::Off);
        assert_eq!(log.admit_handshake(), None);
        assert_eq!(suppressed.get(), 500 - lines as u64, "off suppresses nothing");
    }
}
