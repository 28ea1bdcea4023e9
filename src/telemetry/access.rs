//! Selection of the events that are written to the access log.
//!
//! Lines of tunnels that were open are never limited: they cost the peer an exposed service and a
//! dial, and are the operator's audit trail. A rejection costs the peer nothing, so the lines of
//! each identity are limited, and those of each source address without an identity.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tracing::Level;

use super::Source;
use crate::config::Access;
use crate::limits::{self, Rate, Rates};

/// Limit of lines per second about the rejections of one identity, or of one address without one.
const REFUSALS_A_SECOND: u32 = 10;
/// Number of identities, and of addresses, with a limit of their own.
const SOURCES_MAX: usize = 256;
/// Time in which used credit is whole again.
pub(super) const CREDIT_TIME: Duration = Duration::from_secs(1);
/// Sampling divisor of [`Access::Sampled`] for tunnels without an error.
const SAMPLE: u32 = 100;

/// Mode and limits of the access log.
#[derive(Debug)]
pub(crate) struct AccessLog {
    mode: AtomicU8,
    identities: Mutex<Rates>,
    addresses: Mutex<Rates>,
    suppressed: Counter,
}

pub(super) fn lines_per_second(lines: u32) -> Rate {
    Rate::new(lines, lines)
}

impl AccessLog {
    /// Creates a log in the mode [`Access::All`] that counts suppressed lines in `suppressed`.
    pub(super) fn new(suppressed: Counter) -> Self {
        let rate = lines_per_second(REFUSALS_A_SECOND);
        Self {
            mode: AtomicU8::new(Access::All as u8),
            identities: Mutex::new(Rates::new(rate.clone(), SOURCES_MAX)),
            addresses: Mutex::new(Rates::new(rate, SOURCES_MAX)),
            suppressed,
        }
    }

    pub(crate) fn set(&self, mode: Access) {
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
            return self.admit_without_identity(peer.address.ip());
        }
        let identity = limits::Source::cluster(&peer.counted_cluster).identity(&peer.principal);
        let now = Instant::now();
        let admitted = self.identities.lock().of(&identity, now).spend_on_report(now);
        self.count_suppressed(admitted)
    }

    /// Decides like [`AccessLog::admit`], for a refused handshake or a connection closed before
    /// it.
    pub(super) fn admit_handshake(&self, address: IpAddr) -> Option<u64> {
        if self.is(Access::Off) { None } else { self.admit_without_identity(address) }
    }

    fn admit_without_identity(&self, address: IpAddr) -> Option<u64> {
        let (source, now) = (limits::Source::prefix(address), Instant::now());
        let admitted = self.addresses.lock().of(&source, now).spend_on_report(now);
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
        left.extend(self.addresses.lock().sweep(now));
        for (source, suppressed) in left.into_iter().filter(|&(_, count)| count > 0) {
            let identity = source.as_ref().and_then(limits::Source::principal).map(|name| &**name);
            let address = source.as_ref().and_then(limits::Source::address);
            let address = address.map(|address| address.to_string());
            tracing::event!(
                target: "access",
                parent: None,
                Level::WARN,
                "src.addr" = address.as_deref(),
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
        let [flood, other] = [[192_u8, 0, 2, 1], [192_u8, 0, 2, 2]].map(IpAddr::from);
        let lines = (0..500).filter(|_| log.admit_handshake(flood).is_some()).count();
        assert_eq!(log.admit_handshake(other), Some(0), "another address has its own limit");
        assert_eq!(suppressed.get(), 500 - lines as u64);
        log.set(Access::Off);
        assert_eq!(log.admit_handshake(flood), None);
        assert_eq!(suppressed.get(), 500 - lines as u64, "off suppresses nothing");
    }
}
