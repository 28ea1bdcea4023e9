//! Credit over time.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::prefix;

/// Limit of prefixes with a rate of their own.
const PREFIXES_MAX: usize = 4096;
/// Minimum time between two passes over all prefixes.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Rates by prefix. Prefixes beyond the limit of the table share one.
#[derive(Debug)]
pub struct Rates {
    initial: Rate,
    by_prefix: HashMap<IpAddr, Rate>,
    others: Rate,
    swept: Option<Instant>,
}

impl Rates {
    /// Creates the rates, each of which is a copy of `initial`.
    pub fn new(initial: Rate) -> Self {
        Self { by_prefix: HashMap::new(), others: initial.clone(), initial, swept: None }
    }

    /// Takes `price` of the credit of an address, as [`Rate::spend`].
    pub fn spend(&mut self, address: IpAddr, price: u32, now: Instant) -> bool {
        let prefix = prefix(address);
        if let Some(rate) = self.by_prefix.get_mut(&prefix) {
            return rate.spend(price, now);
        }
        let is_due = |at| now.saturating_duration_since(at) >= SWEEP_PERIOD;
        if self.by_prefix.len() >= PREFIXES_MAX && self.swept.is_none_or(is_due) {
            self.swept = Some(now);
            self.by_prefix.retain(|_, rate| !rate.is_full(now));
        }
        if self.by_prefix.len() >= PREFIXES_MAX {
            return self.others.spend(price, now);
        }
        let rate = self.by_prefix.entry(prefix);
        rate.or_insert_with(|| self.initial.clone()).spend(price, now)
    }
}

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
        Self { per_second, max, credit: u64::from(max) * FRACTION, at: None }
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
