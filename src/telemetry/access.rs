//! Selection of the events that are written to the access log.
//!
//! Lines of tunnels that were open are never limited: they cost the peer an exposed service and a
//! dial, and are the operator's audit trail. A rejection costs the peer nothing, so the lines of
//! each identity are limited, those of each first peer behind a gateway, and those of each source
//! address without an identity.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tracing::Level;

use super::Source;
use crate::config::Access;
use crate::limits::{self, Rate, Rates};

/// Limit of lines per second about the rejections of one identity, of one first peer, or of one
/// address without an identity.
const REFUSALS_A_SECOND: u32 = 10;
/// Limit of lines per second about all first peers of one gateway, which could invent them.
const REFUSALS_A_SECOND_BEHIND_GATEWAY: u32 = 100;
/// Number of identities, first peers, gateways, and addresses, with a limit of their own.
const SOURCES_MAX: usize = 256;
/// Time in which used credit is whole again.
pub(super) const CREDIT_TIME: Duration = Duration::from_secs(1);
/// Sampling divisor of [`Access::Sampled`] for tunnels without an error.
const SAMPLE: u32 = 100;

/// Mode and limits of the access log.
#[derive(Debug)]
pub(crate) struct AccessLog {
    mode: AtomicU8,
    refusals: RefusalCredit,
    suppressed: Counter,
}

/// Credit of each source for reports about its rejections.
#[derive(Debug)]
pub(super) struct RefusalCredit {
    identities: Mutex<Rates>,
    first_peers: Mutex<Rates>,
    /// Credit of all first peers of each gateway.
    gateways: Mutex<Rates>,
    addresses: Mutex<Rates>,
}

pub(super) fn lines_per_second(lines: u32) -> Rate {
    Rate::new(lines, lines)
}

impl RefusalCredit {
    pub(super) fn new() -> Self {
        let rates = |lines| Mutex::new(Rates::new(lines_per_second(lines), SOURCES_MAX));
        Self {
            identities: rates(REFUSALS_A_SECOND),
            first_peers: rates(REFUSALS_A_SECOND),
            gateways: rates(REFUSALS_A_SECOND_BEHIND_GATEWAY),
            addresses: rates(REFUSALS_A_SECOND),
        }
    }

    /// Takes credit for a report about a tunnel. Returns the number of reports left out before it,
    /// or none if it is left out itself.
    pub(super) fn spend(&self, peer: &Source, first_peer: Option<&str>) -> Option<u64> {
        if peer.principal.is_empty() {
            return self.spend_without_identity(peer.address.ip());
        }
        let identity = limits::Source::cluster(&peer.counted_cluster).identity(&peer.principal);
        let now = Instant::now();
        let Some(first_peer) = first_peer else {
            return self.identities.lock().of(&identity, now).spend_on_report(now);
        };
        let first_peer = identity.identity(&first_peer.into());
        let (mut first_peers, mut gateways) = (self.first_peers.lock(), self.gateways.lock());
        let (own, all) = (first_peers.of(&first_peer, now), gateways.of(&identity, now));
        // In this order, so that one first peer cannot use the credit of all.
        let is_admitted = own.spend(1, now) && all.spend(1, now);
        is_admitted.then(|| own.take_refused() + all.take_refused())
    }

    /// Takes credit like [`RefusalCredit::spend`], for a connection without an identity.
    fn spend_without_identity(&self, address: IpAddr) -> Option<u64> {
        let (source, now) = (limits::Source::prefix(address), Instant::now());
        self.addresses.lock().of(&source, now).spend_on_report(now)
    }

    /// Returns the sources with full credit of which reports were left out, and their number.
    fn sweep(&self, now: Instant) -> Vec<(Option<limits::Source>, u64)> {
        let all = [&self.identities, &self.first_peers, &self.gateways, &self.addresses];
        let left = all.into_iter().flat_map(|rates| rates.lock().sweep(now));
        left.filter(|&(_, count)| count > 0).collect()
    }
}

impl AccessLog {
    /// Creates a log in the mode [`Access::All`] that counts suppressed lines in `suppressed`.
    pub(super) fn new(suppressed: Counter) -> Self {
        let mode = AtomicU8::new(Access::All as u8);
        Self { mode, refusals: RefusalCredit::new(), suppressed }
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
    pub(super) fn admit(
        &self,
        (peer, first_peer): (&Source, Option<&str>),
        was_open: bool,
        level: Level,
    ) -> Option<u64> {
        let is_error = level != Level::INFO;
        let is_sampled = || self.is(Access::Sampled) && fastrand::u32(..SAMPLE) == 0;
        if self.is(Access::Off) || !(is_error || self.is_all() || is_sampled()) {
            return None;
        }
        if was_open {
            return Some(0);
        }
        self.count_suppressed(self.refusals.spend(peer, first_peer))
    }

    /// Decides like [`AccessLog::admit`], for a refused handshake or a connection closed before
    /// it.
    pub(super) fn admit_handshake(&self, address: IpAddr) -> Option<u64> {
        if self.is(Access::Off) {
            return None;
        }
        self.count_suppressed(self.refusals.spend_without_identity(address))
    }

    fn count_suppressed(&self, admitted: Option<u64>) -> Option<u64> {
        if admitted.is_none() {
            self.suppressed.inc();
        }
        admitted
    }

    /// Logs the counts of suppressed lines that no later line has reported.
    pub(super) fn sweep(&self, now: Instant) {
        for (source, suppressed) in self.refusals.sweep(now) {
            let source = source.as_ref();
            let name = source.and_then(limits::Source::principal).map(|name| &**name);
            // A first peer is a part of its gateway.
            let gateway = source.and_then(limits::Source::parent);
            let gateway = gateway.and_then(limits::Source::principal).map(|name| &**name);
            let (identity, first_peer) = (gateway.or(name), name.filter(|_| gateway.is_some()));
            let address = source.and_then(limits::Source::address);
            let address = address.map(|address| address.to_string());
            tracing::event!(
                target: "access",
                parent: None,
                Level::WARN,
                "src.addr" = address.as_deref(),
                "src.identity" = identity,
                "src.first_peer" = first_peer,
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
        let all = (0..10_000).filter(|_| log.admit((&peer, None), was_open, level).is_some());
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

    #[test]
    fn first_peers_of_a_gateway_have_limits_of_their_own_and_one_together() {
        let log = AccessLog::new(Counter::default());
        let gateway = source();
        let admit = |first: Option<&str>| log.admit((&gateway, first), false, Level::WARN);
        let noisy = (0..500).filter(|_| admit(Some("noisy")).is_some()).count();
        // The loop can take two or three windows, but not ten.
        assert!((10..100).contains(&noisy), "{noisy}");
        assert_eq!((admit(Some("other")), admit(None)), (Some(0), Some(0)));
        let invented = |index: usize| admit(Some(&format!("invented-{index}"))).is_some();
        let lines = (0..10_000).filter(|&index| invented(index)).count();
        assert!((50..1000).contains(&lines), "{lines}");
    }
}
