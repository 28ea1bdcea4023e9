//! Credit over time.

use std::time::{Duration, Instant};

/// Credit of one source that grows with time up to a maximum.
#[derive(Clone, Debug)]
pub struct Rate {
    per_second: u32,
    max: u32,
    /// Credit in billionths of a unit.
    credit: u64,
    at: Option<Instant>,
}

/// Billionths of a unit: a nanosecond of a rate of one per second.
const FRACTION: u64 = 1_000_000_000;

impl Rate {
    /// Creates full credit of `max`, which grows by `per_second`.
    pub fn new(per_second: u32, max: u32) -> Self {
        Self {
            per_second,
            max,
            credit: u64::from(max) * FRACTION,
            at: None,
        }
    }

    /// Takes `price` of the credit at `now`. Takes nothing and returns false if it does not
    /// suffice.
    pub fn spend(&mut self, price: u32, now: Instant) -> bool {
        self.grow(now);
        let price = u64::from(price) * FRACTION;
        let rest = self.credit.checked_sub(price);
        self.credit = rest.unwrap_or(self.credit);
        rest.is_some()
    }

    /// Returns whether the credit is full at `now`, so that nothing is known of its source.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.grow(now);
        self.credit == self.max_credit()
    }

    fn max_credit(&self) -> u64 {
        u64::from(self.max) * FRACTION
    }

    fn grow(&mut self, now: Instant) {
        let since = self.at.replace(now).unwrap_or(now);
        let passed = now.saturating_duration_since(since);
        let nanos = u64::try_from(passed.min(Duration::from_secs(3600)).as_nanos());
        let grown = nanos.unwrap_or(0).saturating_mul(self.per_second.into());
        self.credit = self.credit.saturating_add(grown).min(self.max_credit());
    }
}
