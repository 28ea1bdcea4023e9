//! Limits of one tunnel, by the exposure entries that admit it, or by its binding.

use tokio::time::{Duration, Instant};

use crate::limits::{Held, Source};
use crate::reason::Reason;
use crate::snapshot::{Exposure, ServiceLimits};

/// Strictest limits of the entries that admit a tunnel, with its places in their counts; or those
/// of its binding.
#[derive(Debug, Default)]
pub struct TunnelLimits {
    limits: ServiceLimits,
    places: Vec<Held>,
    /// Number of bytes at the last check.
    bytes: u64,
    /// Time of the first check that found this number.
    unchanged_since: Option<Instant>,
}

/// Fraction of `idle_timeout` between two checks. A check only finds that bytes have passed since
/// the last one, so a tunnel ends at most this much later.
const IDLE_CHECKS: u32 = 4;

impl TunnelLimits {
    /// Takes places of a new tunnel of `source` in the counts of `entries`. Returns none without
    /// entries.
    ///
    /// # Errors
    /// [`Reason::TunnelLimit`] if an entry admits no further tunnel of the source.
    pub fn take(entries: &[&Exposure], source: &Source) -> Result<Option<Box<Self>>, Reason> {
        let limited = entries.iter().filter_map(|entry| Some((entry, entry.limits.tunnels?)));
        let places: Option<_> = limited.map(|(entry, max)| entry.open.take(max, source)).collect();
        let limits = Self {
            limits: strictest(entries),
            places: places.ok_or(Reason::TunnelLimit)?,
            ..Self::default()
        };
        Ok((!entries.is_empty()).then(|| Box::new(limits)))
    }

    /// Returns the limits of a tunnel that ends after this time without a byte.
    pub fn of_idle(timeout: Duration) -> Box<Self> {
        let limits = ServiceLimits { idle_timeout: Some(timeout), ..ServiceLimits::default() };
        Box::new(Self { limits, ..Self::default() })
    }

    /// Replaces the limits of an open tunnel by those of `entries`, whose counts may exceed their
    /// limits by it.
    pub fn update(limits: &mut Option<Box<Self>>, entries: &[&Exposure], source: &Source) {
        if entries.is_empty() {
            *limits = None;
            return;
        }
        let current = limits.get_or_insert_default();
        current.limits = strictest(entries);
        let mut earlier = std::mem::take(&mut current.places);
        for entry in entries.iter().filter(|one| one.limits.tunnels.is_some()) {
            let kept = earlier.iter().position(|place| entry.open.holds(place));
            current.places.push(match kept {
                Some(at) => earlier.swap_remove(at),
                None => entry.open.add(source),
            });
        }
    }

    /// Returns the time to find an endpoint and to connect to it, if it is limited.
    pub fn connect_timeout(&self) -> Option<Duration> {
        self.limits.connect_timeout
    }

    /// Checks a tunnel that is open since `opened` and has passed `bytes`. Returns the time of the
    /// next check, if there is a limit of time.
    pub fn check(&mut self, opened: Instant, bytes: u64) -> Result<Option<Instant>, Reason> {
        let now = Instant::now();
        let end = self.limits.max_duration.map(|max| opened + max);
        if end.is_some_and(|end| end <= now) {
            return Err(Reason::MaxDuration);
        }
        let mut idle_check = None;
        if let Some(timeout) = self.limits.idle_timeout {
            let has_moved = std::mem::replace(&mut self.bytes, bytes) != bytes;
            let since = match self.unchanged_since {
                Some(since) if !has_moved => since,
                _ => *self.unchanged_since.insert(now),
            };
            if since + timeout <= now {
                return Err(Reason::IdleTimeout);
            }
            idle_check = Some((since + timeout).min(now + timeout / IDLE_CHECKS));
        }
        Ok(end.into_iter().chain(idle_check).min())
    }
}

fn strictest(entries: &[&Exposure]) -> ServiceLimits {
    entries.iter().map(|entry| entry.limits).fold(ServiceLimits::default(), ServiceLimits::stricter)
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep_until;

    use super::*;
    use crate::config::ExposedService;
    use crate::snapshot::tests::entry;

    fn source() -> Source {
        Source::prefix([192, 0, 2, 1].into())
    }

    fn limited(limits: ServiceLimits) -> Exposure {
        let entry = ExposedService { limits, ..entry("echo.app", Vec::new()) };
        Exposure { index: 0, entry: entry.into(), open: Default::default() }
    }

    fn tunnels(max: u32) -> Exposure {
        limited(ServiceLimits { tunnels: Some(max), ..ServiceLimits::default() })
    }

    #[test]
    fn a_tunnel_that_one_entry_refuses_is_counted_by_none() {
        let (many, one) = (tunnels(2), tunnels(1));
        let first = TunnelLimits::take(&[&many, &one], &source()).expect("a place");
        assert!(first.is_some());
        let second = TunnelLimits::take(&[&many, &one], &source());
        assert_eq!(second.err(), Some(Reason::TunnelLimit));
        assert_eq!((many.open.get(), one.open.get()), (1, 1));
        drop(first);
        assert_eq!((many.open.get(), one.open.get()), (0, 0));
        assert!(TunnelLimits::take(&[], &source()).expect("no limit").is_none());
    }

    #[test]
    fn an_open_tunnel_is_counted_by_the_entries_of_the_new_configuration() {
        let (old, new) = (tunnels(1), tunnels(1));
        let mut limits = TunnelLimits::take(&[&old], &source()).expect("a place");
        TunnelLimits::update(&mut limits, &[&old, &new], &source());
        assert_eq!((old.open.get(), new.open.get()), (1, 1));
        TunnelLimits::update(&mut limits, &[&new], &source());
        assert_eq!((old.open.get(), new.open.get()), (0, 1));
        let mut other = None;
        TunnelLimits::update(&mut other, &[&new], &source());
        assert_eq!(new.open.get(), 2, "a lower limit ends no open tunnel");
        TunnelLimits::update(&mut limits, &[], &source());
        assert!(limits.is_none());
        assert_eq!(new.open.get(), 1);
    }

    /// Returns the end of a tunnel that sends its last byte after `last` seconds.
    async fn end(limits: ServiceLimits, last: u64) -> (Reason, Duration) {
        let opened = Instant::now();
        let mut of = TunnelLimits::take(&[&limited(limits)], &source()).expect("a place");
        let of = of.as_mut().expect("limits");
        loop {
            let bytes = opened.elapsed().as_secs().min(last);
            match of.check(opened, bytes) {
                Ok(next) => sleep_until(next.expect("a next check")).await,
                Err(reason) => return (reason, opened.elapsed()),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_tunnel_ends_within_a_quarter_and_a_long_one_at_its_limit() {
        let seconds = Duration::from_secs;
        let idle = ServiceLimits { idle_timeout: Some(seconds(20)), ..ServiceLimits::default() };
        for last in [0, 7, 100] {
            let (reason, after) = end(idle, last).await;
            assert_eq!(reason, Reason::IdleTimeout);
            let bounds = seconds(last + 20)..=seconds(last + 26);
            assert!(bounds.contains(&after), "{last}: {after:?}");
        }
        let both = ServiceLimits { max_duration: Some(seconds(90)), ..idle };
        let (reason, after) = end(both, 100).await;
        assert_eq!(reason, Reason::MaxDuration);
        assert!((seconds(90)..seconds(91)).contains(&after), "{after:?}");
    }
}
