//! Counters of a run.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use hdrhistogram::Histogram;

use super::target::add;

/// Limit of distinct kinds of failures. A gateway may answer each operation with another message.
const KINDS_MAX: usize = 20;
const OTHERS: &str = "others";
/// Significant digits of each latency, from a nanosecond to hours.
const DIGITS: u8 = 3;

pub(super) struct Counters {
    pub(super) operations: Cell<u64>,
    /// Number of bytes sent, including those of failed tunnels.
    pub(super) sent: Cell<u64>,
    pub(super) received: Cell<u64>,
    /// Number of tunnels that stayed open to the end.
    pub(super) held: Cell<u64>,
    pub(super) failures: Cell<u64>,
    kinds: RefCell<BTreeMap<String, u64>>,
    /// Latencies, in nanoseconds.
    latency: RefCell<Histogram<u64>>,
}

impl Counters {
    pub(super) fn new() -> anyhow::Result<Self> {
        let latency = Histogram::new(DIGITS).context("cannot make a histogram")?;
        Ok(Self {
            operations: Cell::default(),
            sent: Cell::default(),
            received: Cell::default(),
            held: Cell::default(),
            failures: Cell::default(),
            kinds: RefCell::default(),
            latency: RefCell::new(latency),
        })
    }

    /// Counts a successful operation; `latency` is the time since it was due.
    pub(super) fn count_success(&self, latency: Duration) {
        add(&self.operations, 1);
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        // The histogram resizes itself, so this cannot fail.
        let _ = self.latency.borrow_mut().record(nanos);
    }

    pub(super) fn failed(&self, error: &anyhow::Error) {
        self.count_failures(1, describe(error));
    }

    pub(super) fn count_failures(&self, count: u64, kind: String) {
        if count == 0 {
            return;
        }
        add(&self.failures, count);
        let mut kinds = self.kinds.borrow_mut();
        let known = kinds.contains_key(&kind) || kinds.len() < KINDS_MAX;
        let kind = if known { kind } else { OTHERS.to_owned() };
        *kinds.entry(kind).or_default() += count;
    }

    pub(super) fn kinds(&self) -> BTreeMap<String, u64> {
        self.kinds.borrow().clone()
    }

    /// Returns the latencies, in nanoseconds.
    pub(super) fn latency(&self) -> Histogram<u64> {
        self.latency.borrow().clone()
    }
}

/// Formats an error with its causes. Many errors include their cause, which is not repeated.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::anyhow;

    use crate::tools::hbone::ConnectError;

    use super::*;

    #[test]
    fn an_error_is_reported_once_and_with_its_context() {
        let refused = ConnectError::Io(io::Error::other("refused"));
        let error = anyhow::Error::from(refused).context("inner");
        assert_eq!(describe(&error), "inner: connection failed: refused");
    }

    #[test]
    fn kinds_of_failures_are_bounded_and_all_are_counted() {
        let tally = Counters::new().unwrap();
        for kind in 0..100 {
            tally.failed(&anyhow!("kind {kind}"));
            tally.failed(&anyhow!("kind 0"));
        }
        assert_eq!(tally.failures.get(), 200);
        let kinds = tally.kinds();
        assert_eq!(kinds.len(), KINDS_MAX + 1);
        assert_eq!((kinds["kind 0"], kinds[OTHERS]), (101, 80));
    }
}
