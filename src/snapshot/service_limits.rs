//! Limits of the tunnels that an exposure entry admits, and the number of these tunnels.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Limits of tunnels. `None` means no limit besides those of the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Number of concurrent tunnels.
    pub tunnels: Option<u32>,
    /// Time to find an endpoint and to connect to it.
    pub connect_timeout: Option<Duration>,
    /// Time without a byte in either direction.
    pub idle_timeout: Option<Duration>,
    /// Time for which a tunnel is open.
    pub max_duration: Option<Duration>,
}

impl ServiceLimits {
    /// Returns whether there is any limit.
    pub fn is_some(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the stricter limits of two.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        fn least<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
            one.into_iter().chain(other).min()
        }
        Self {
            tunnels: least(self.tunnels, other.tunnels),
            connect_timeout: least(self.connect_timeout, other.connect_timeout),
            idle_timeout: least(self.idle_timeout, other.idle_timeout),
            max_duration: least(self.max_duration, other.max_duration),
        }
    }
}

impl fmt::Display for ServiceLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tunnels = self.tunnels.map(|max| format!("tunnels {max}"));
        let times = [
            ("connect_timeout", self.connect_timeout),
            ("idle_timeout", self.idle_timeout),
            ("max_duration", self.max_duration),
        ];
        let times = times.into_iter().filter_map(|(name, time)| {
            let time = humantime::format_duration(time?);
            Some(format!("{name} {time}"))
        });
        let limits: Vec<_> = tunnels.into_iter().chain(times).collect();
        f.write_str(&limits.join(", "))
    }
}

/// Number of concurrent tunnels that an exposure entry admits. All counts are equal, because they
/// are no rules.
#[derive(Debug, Default)]
pub struct TunnelCount(AtomicU32);

impl PartialEq for TunnelCount {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl TunnelCount {
    /// Returns the number of tunnels.
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the share of `max` that is free, in percent.
    pub fn free_percent(&self, max: u32) -> u32 {
        let free = u64::from(max.saturating_sub(self.get())) * 100;
        u32::try_from(free / u64::from(max.max(1))).unwrap_or(100)
    }

    /// Counts a tunnel, unless there are `max` already.
    pub fn take(self: &Arc<Self>, max: u32) -> Option<TunnelPlace> {
        let add = |count: u32| (count < max).then(|| count + 1);
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        taken.is_ok().then(|| TunnelPlace(Arc::clone(self)))
    }

    /// Counts a tunnel that is open already.
    pub fn add(self: &Arc<Self>) -> TunnelPlace {
        self.0.fetch_add(1, Ordering::Relaxed);
        TunnelPlace(Arc::clone(self))
    }
}

/// Place of a tunnel in a count. Its drop gives the place back.
#[derive(Debug)]
pub struct TunnelPlace(Arc<TunnelCount>);

impl TunnelPlace {
    /// Returns whether this is a place in `count`.
    pub fn is_in(&self, count: &Arc<TunnelCount>) -> bool {
        Arc::ptr_eq(&self.0, count)
    }
}

impl Drop for TunnelPlace {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_admits_up_to_its_limit_and_again_after_a_drop() {
        let count = Arc::<TunnelCount>::default();
        let first = count.take(2).expect("a place");
        let _open = count.add();
        assert!(count.take(2).is_none());
        assert_eq!(count.get(), 2);
        let free = [0, 1, 2, 3, 8, u32::MAX].map(|max| count.free_percent(max));
        assert_eq!(free, [0, 0, 0, 33, 75, 99]);
        drop(first);
        assert!(count.take(2).is_some());
        assert_eq!(count.get(), 1, "the place was dropped at once");
    }

    #[test]
    fn the_stricter_limit_of_each_kind_applies() {
        let seconds = |count| Some(Duration::from_secs(count));
        let one = ServiceLimits {
            tunnels: Some(3),
            idle_timeout: seconds(60),
            ..ServiceLimits::default()
        };
        let other = ServiceLimits {
            tunnels: Some(5),
            idle_timeout: seconds(30),
            max_duration: seconds(3600),
            ..ServiceLimits::default()
        };
        let both = one.stricter(other);
        assert_eq!(both, other.stricter(one));
        assert_eq!(
            both.to_string(),
            "tunnels 3, idle_timeout 30s, max_duration 1h"
        );
        assert!(!ServiceLimits::default().is_some());
    }
}
