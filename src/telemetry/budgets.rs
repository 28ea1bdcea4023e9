//! Budgets of bytes between clusters, whose excess raises an alert and may reduce weights.

use std::mem::take;
use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tracing::warn;

use crate::config::{Link, LinkBudget};
use crate::status::{LinkUsage, ReducedLink};

use super::sets::metric;

const BUDGET: &str = "Bytes that a link may carry in a period";
const USED: &str = "Bytes that a link has carried since the start of its period";

type Labels = [(&'static str, String); 2];

#[derive(Debug)]
pub(crate) struct Budgets {
    usages: Mutex<Vec<Usage>>,
    /// Links whose budget is exceeded and that then reduce weights, for the data path.
    reduced: ArcSwap<Vec<ReducedLink>>,
    budget: Family<Labels, Gauge>,
    used: Family<Labels, Gauge>,
}

/// Bytes of one link in its current period.
#[derive(Debug)]
struct Usage {
    from: Arc<str>,
    to: Arc<str>,
    /// Tunnels of clients without identity count, because they use that of this gateway.
    is_own: bool,
    budget: LinkBudget,
    bytes: u64,
    start: Instant,
    is_logged: bool,
}

impl Budgets {
    pub(super) fn register(r: &mut Registry) -> Self {
        Self {
            usages: Mutex::default(),
            reduced: ArcSwap::default(),
            budget: metric(r, "strait_link_budget_bytes", BUDGET),
            used: metric(r, "strait_link_used_bytes", USED),
        }
    }

    /// Replaces the budgets of the gateway of the cluster `own`. A link with the same period keeps
    /// its usage.
    pub(super) fn set(&self, links: &[Link], own: &str, now: Instant) {
        let mut usages = self.usages.lock();
        let earlier = take(&mut *usages);
        self.budget.clear();
        self.used.clear();
        for link in links {
            let Some(budget) = link.budget else {
                continue;
            };
            let mut known = earlier.iter();
            let known = known.find(|one| {
                let is_same = (&*one.from, &*one.to) == (&*link.from, &*link.to);
                is_same && one.budget.period == budget.period
            });
            let usage = Usage {
                from: link.from.as_str().into(),
                to: link.to.as_str().into(),
                is_own: link.from == own,
                budget,
                bytes: known.map_or(0, |known| known.bytes),
                start: known.map_or(now, |known| known.start),
                is_logged: known.is_some_and(|known| known.is_logged && known.budget == budget),
            };
            self.budget.get_or_create(&usage.labels()).set(signed(usage.limit()));
            self.used.get_or_create(&usage.labels()).set(signed(usage.bytes));
            usages.push(usage);
        }
        self.publish(&usages);
    }

    pub(super) fn start_periods(&self, now: Instant) {
        for usage in &mut *self.usages.lock() {
            let period = usage.budget.period;
            while now.saturating_duration_since(usage.start) >= period {
                usage.start += period;
                (usage.bytes, usage.is_logged) = (0, false);
            }
        }
    }

    /// Counts bytes of tunnels of one cluster's peers through gateways of another.
    pub(super) fn add(&self, (from, to): (&str, &str), bytes: u64) {
        let mut usages = self.usages.lock();
        let mut of_link = usages.iter_mut();
        if let Some(usage) = of_link.find(|one| {
            let is_from = *one.from == *from || one.is_own && from.is_empty();
            is_from && *one.to == *to
        }) {
            usage.bytes = usage.bytes.saturating_add(bytes);
        }
    }

    /// Exports the usage, logs each excess once in a period, and updates the reduced links.
    pub(super) fn report(&self) {
        let mut usages = self.usages.lock();
        for usage in &mut *usages {
            let (used, budget) = (usage.bytes, usage.budget.bytes);
            self.used.get_or_create(&usage.labels()).set(signed(used));
            if usage.is_exceeded() && !usage.is_logged {
                usage.is_logged = true;
                let (from, to, period) = (&*usage.from, &*usage.to, usage.budget.period);
                warn!(from, to, used, budget, ?period, "budget of a link exceeded");
            }
        }
        self.publish(&usages);
    }

    /// Returns the links whose excess reduces weights now.
    pub(crate) fn reduced(&self) -> Guard<Arc<Vec<ReducedLink>>> {
        self.reduced.load()
    }

    pub(crate) fn usages(&self) -> Vec<LinkUsage> {
        let usages = self.usages.lock();
        let usage = |one: &Usage| {
            let (used, budget) = (one.bytes, one.limit());
            let weight_percent = one.reduced_percent().unwrap_or(100);
            LinkUsage {
                from: Arc::clone(&one.from),
                to: Arc::clone(&one.to),
                used,
                budget,
                used_bytes: used,
                budget_bytes: budget,
                weight: format!("{weight_percent}%"),
                weight_percent,
            }
        };
        usages.iter().map(usage).collect()
    }

    fn publish(&self, usages: &[Usage]) {
        let reduced = usages.iter().filter_map(|usage| {
            Some(ReducedLink {
                from: Arc::clone(&usage.from),
                is_own: usage.is_own,
                to: Arc::clone(&usage.to),
                weight_percent: usage.reduced_percent()?,
            })
        });
        let reduced: Vec<_> = reduced.collect();
        if **self.reduced.load() != reduced {
            self.reduced.store(Arc::new(reduced));
        }
    }
}

impl Usage {
    fn labels(&self) -> Labels {
        [("source_cluster", self.from.to_string()), ("destination_cluster", self.to.to_string())]
    }

    fn limit(&self) -> u64 {
        u64::try_from(self.budget.bytes).unwrap_or(u64::MAX)
    }

    fn is_exceeded(&self) -> bool {
        self.bytes > self.limit()
    }

    /// Returns the percentage of their weight that gateways have, if an excess reduces it now.
    fn reduced_percent(&self) -> Option<u8> {
        self.budget.excess_weight.filter(|_| self.is_exceeded())
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(60);

    fn link(to: &str, bytes: usize) -> Link {
        let period = PERIOD;
        Link {
            from: "west".to_owned(),
            to: to.to_owned(),
            exposes: Vec::new(),
            budget: (bytes > 0).then_some(LinkBudget { bytes, period, excess_weight: Some(10) }),
        }
    }

    /// Returns the bytes of the link and whether its excess was logged.
    fn usage(budgets: &Budgets) -> (u64, bool) {
        let usages = budgets.usages.lock();
        (usages[0].bytes, usages[0].is_logged)
    }

    #[test]
    fn an_excess_is_logged_once_in_each_period_and_a_reload_keeps_the_usage() {
        let budgets = Budgets::register(&mut Registry::default());
        let start = Instant::now();
        budgets.set(&[link("north", 100), link("south", 0)], "east", start);
        let add = |bytes, at| {
            budgets.start_periods(at);
            budgets.add(("west", "north"), bytes);
            budgets.add(("west", "south"), 1000);
            budgets.add(("north", "west"), 1000);
            budgets.report();
            usage(&budgets)
        };
        assert_eq!(add(100, start), (100, false));
        assert_eq!(add(1, start + PERIOD / 2), (101, true));
        budgets.set(&[link("north", 100)], "east", start + PERIOD / 2);
        assert_eq!(usage(&budgets), (101, true));
        budgets.set(&[link("north", 200)], "east", start + PERIOD / 2);
        assert_eq!(usage(&budgets), (101, false));
        assert_eq!(add(100, start + PERIOD / 2), (201, true));
        // Periods follow each other without a gap, also if none of their bytes were counted.
        assert_eq!(add(5, start + 3 * PERIOD), (5, false));
        assert_eq!(add(5, start + 4 * PERIOD - Duration::from_nanos(1)), (10, false));
        assert_eq!(add(5, start + 4 * PERIOD), (5, false));
        // Clients without identity use that of this gateway.
        budgets.add(("", "north"), 7);
        assert_eq!(usage(&budgets).0, 5);
        budgets.set(&[link("north", 200)], "west", start + 4 * PERIOD);
        budgets.add(("", "north"), 7);
        assert_eq!(usage(&budgets).0, 12);
        budgets.set(&[], "east", start);
        assert!(budgets.usages.lock().is_empty());
    }

    #[test]
    fn an_excess_reduces_the_weight_until_the_period_ends_and_a_reload_applies_at_once() {
        let budgets = Budgets::register(&mut Registry::default());
        let start = Instant::now();
        let sweep = |bytes, at| {
            budgets.start_periods(at);
            budgets.add(("west", "north"), bytes);
            budgets.report();
            let reduced = budgets.reduced();
            let percent = budgets.usages()[0].weight_percent;
            let of_link = reduced.iter().find(|one| one.is_from("west"));
            assert_eq!(of_link.map_or(100, |one| one.weight_percent), percent);
            assert!(!reduced.iter().any(|one| one.is_from("")));
            percent
        };
        budgets.set(&[link("north", 100), link("south", 100)], "east", start);
        assert_eq!(sweep(100, start), 100);
        assert_eq!(sweep(1, start), 10);
        assert_eq!(budgets.reduced().len(), 1);
        let last = start + PERIOD - Duration::from_nanos(1);
        assert_eq!(sweep(0, last), 10);
        assert_eq!(sweep(0, start + PERIOD), 100);
        assert_eq!(sweep(101, start + PERIOD), 10);
        budgets.set(&[link("north", 200)], "west", start + PERIOD);
        assert_eq!(budgets.reduced().len(), 0);
        budgets.set(&[link("north", 50)], "west", start + PERIOD);
        assert!(budgets.reduced()[0].is_from(""), "clients of bindings");
    }
}
