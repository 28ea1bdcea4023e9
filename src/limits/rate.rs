//! Credit over time.

use std::time::{Duration, Instant};

use super::{Source, SourceMap};

/// Minimum time between two passes over all sources.
const SWEEP_PERIOD: Duration = Duration::from_secs(1);

/// Rates by source. Sources beyond the limit of the table share one.
#[derive(Debug)]
pub struct Rates {
    initial: Rate,
    sources_max: usize,
    by_source: SourceMap<Rate>,
    others: Rate,
    swept: Option<Instant>,
}

impl Rates {
    /// Creates the rates, each of which is a copy of `initial`, for a number of sources.
    pub fn new(initial: Rate, sources_max: usize) -> Self {
        let others = initial.clone();
        Self { initial, sources_max, by_source: SourceMap::default(), others, swept: None }
    }

    pub fn of(&mut self, source: &Source, now: Instant) -> &mut Rate {
        if !self.by_source.contains_key(source) && self.by_source.len() >= self.sources_max {
            let is_due = |at| now.saturating_duration_since(at) >= SWEEP_PERIOD;
            if self.swept.is_none_or(is_due) {
                let refused: u64 = self.sweep(now).iter().map(|(_, refused)| refused).sum();
                self.others.refused = self.others.refused.saturating_add(refused);
            }
            if self.by_source.len() >= self.sources_max {
                return &mut self.others;
            }
        }
        self.by_source.entry(source.clone()).or_insert_with(|| self.initial.clone())
    }

    /// Forgets the sources with full credit. Returns those with requests that were refused and not
    /// reported, and their number; none stands for all sources that share a rate.
    pub fn sweep(&mut self, now: Instant) -> Vec<(Option<Source>, u64)> {
        self.swept = Some(now);
        let mut left = Vec::new();
        self.by_source.retain(|source, rate| {
            let is_full = rate.is_full(now);
            if is_full && rate.refused > 0 {
                left.push((Some(source.clone()), rate.refused));
            }
            !is_full
        });
        if self.others.is_full(now) && self.others.refused > 0 {
            left.push((None, self.others.take_refused()));
        }
        left
    }
}

/// Credit of one source that grows with time up to a maximum.
#[derive(Clone, Debug)]
pub struct Rate {
    per_second: u32,
    max: u32,
    /// Credit in billionths of a unit. Negative after [`Self::spend_ahead`].
    credit: i64,
    at: Option<Instant>,
    /// Number of requests that were refused and not reported.
    refused: u64,
}

/// Billionths of a unit: a nanosecond of a rate of one per second.
const FRACTION: i64 = 1_000_000_000;

impl Rate {
    /// Creates full credit of `max`, which grows by `per_second`.
    pub fn new(per_second: u32, max: u32) -> Self {
        Self { per_second, max, credit: i64::from(max) * FRACTION, at: None, refused: 0 }
    }

    /// Takes `price` of the credit at `now`. Takes nothing and returns false if it does not
    /// suffice.
    pub fn spend(&mut self, price: u32, now: Instant) -> bool {
        self.grow(now);
        let price = i64::from(price) * FRACTION;
        let suffices = price <= self.credit;
        if suffices {
            self.credit -= price;
        } else {
            self.refused = self.refused.saturating_add(1);
        }
        suffices
    }

    /// Takes `price` of the credit at `now`, whether it suffices or not. Returns the time until the
    /// debt is paid, of which more than `wait_max` is forgotten.
    pub fn spend_ahead(&mut self, price: u32, wait_max: Duration, now: Instant) -> Duration {
        self.grow(now);
        let lowest = self.earned(wait_max).saturating_neg();
        let price = i64::from(price) * FRACTION;
        self.credit = self.credit.saturating_sub(price).max(lowest);
        let debt = self.credit.min(0).unsigned_abs();
        Duration::from_nanos(debt.div_ceil(self.per_second.max(1).into()))
    }

    /// Takes credit for one event that reports the refused ones before it. Returns their number.
    pub fn spend_on_report(&mut self, now: Instant) -> Option<u64> {
        self.spend(1, now).then(|| self.take_refused())
    }

    /// Returns the number of refused requests since the last report, which this is.
    pub fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Returns whether the credit is full at `now`, so that nothing is known of its source.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.grow(now);
        self.credit == self.max_credit()
    }

    fn max_credit(&self) -> i64 {
        i64::from(self.max) * FRACTION
    }

    /// Returns the credit that grows in this time.
    fn earned(&self, time: Duration) -> i64 {
        i64::try_from(time.as_nanos()).unwrap_or(i64::MAX).saturating_mul(self.per_second.into())
    }

    fn grow(&mut self, now: Instant) {
        let since = self.at.replace(now).unwrap_or(now);
        let passed = now.saturating_duration_since(since);
        self.credit = self.credit.saturating_add(self.earned(passed)).min(self.max_credit());
    }
}
