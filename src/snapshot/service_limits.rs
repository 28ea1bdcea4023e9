//! Limits of the tunnels that an exposure entry admits, and the number of these tunnels.

use std::fmt;
use std::sync::Arc;

pub use crate::config::ServiceLimits;
use crate::limits::{Account, Held, Pool, Resource, Source};

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

/// Concurrent tunnels that an exposure entry admits, by source. All counts are equal, because they
/// are no rules.
#[derive(Debug)]
pub struct TunnelCount(Arc<Pool>);

impl Default for TunnelCount {
    fn default() -> Self {
        Self(Pool::new(Resource::ServiceTunnels, usize::MAX))
    }
}

impl PartialEq for TunnelCount {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl TunnelCount {
    pub fn pool(&self) -> &Arc<Pool> {
        &self.0
    }

    pub fn get(&self) -> u32 {
        u32::try_from(self.0.used()).unwrap_or(u32::MAX)
    }

    pub fn free_percent(&self, max: u32) -> u32 {
        let free = u64::from(max.saturating_sub(self.get())) * 100;
        u32::try_from(free / u64::from(max.max(1))).unwrap_or(100)
    }

    /// Counts a tunnel, unless there are `max` already, or the source has its share of them.
    pub fn take(&self, max: u32, source: &Source) -> Option<Held> {
        self.account(max, source).take(1).ok()
    }

    /// Returns whether [`Self::take`] would count another tunnel.
    pub fn has_room(&self, max: u32, source: &Source) -> bool {
        self.account(max, source).check(1).is_ok()
    }

    fn account(&self, max: u32, source: &Source) -> Account {
        self.0.set_max(usize::try_from(max).unwrap_or(usize::MAX));
        self.0.account(source)
    }

    /// Counts a tunnel that is open already.
    pub fn add(&self, source: &Source) -> Held {
        self.0.account(source).charge(1)
    }

    /// Returns whether a tunnel is counted here.
    pub fn holds(&self, place: &Held) -> bool {
        Arc::ptr_eq(place.account().pool(), &self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn source(name: &str) -> Source {
        Source::cluster(&"west".into()).identity(&name.into())
    }

    #[test]
    fn a_count_admits_up_to_its_limit_and_again_after_a_drop() {
        let count = TunnelCount::default();
        let first = count.take(2, &source("a")).expect("a place");
        let _open = count.add(&source("b"));
        assert!(count.take(2, &source("c")).is_none() && !count.has_room(2, &source("c")));
        assert_eq!(count.get(), 2);
        let free = [0, 1, 2, 3, 8, u32::MAX].map(|max| count.free_percent(max));
        assert_eq!(free, [0, 0, 0, 33, 75, 99]);
        drop(first);
        assert!(count.take(2, &source("c")).is_some());
        assert_eq!(count.get(), 1, "the place was dropped at once");
    }

    #[test]
    fn one_identity_leaves_half_of_a_services_tunnels_to_others() {
        let count = TunnelCount::default();
        let take = |name: &str| count.take(100, &source(name));
        let greedy: Vec<_> = (0..100).map_while(|_| take("greedy")).collect();
        assert_eq!(greedy.len(), 50);
        let others: Vec<_> = (0..10).map(|at| take(&format!("i{at}"))).collect();
        assert!(others.iter().all(Option::is_some));
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
        assert_eq!(both.to_string(), "tunnels 3, idle_timeout 30s, max_duration 1h");
        assert!(!ServiceLimits::default().is_some());
    }
}
