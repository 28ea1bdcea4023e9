//! Choice of the tunnels that are evicted: of the largest holder, those that hold the most.

use std::collections::HashMap;
use std::iter::successors;
use std::sync::atomic::Ordering;

use crate::limits::{Account, Source};

use super::{BufferAccount, BufferBudget, ProgressMark, Wait};

/// Account that may be evicted.
struct Candidate<'a> {
    account: &'a BufferAccount,
    is_stalled: bool,
    held: usize,
}

/// Candidates of one source, the first one last.
struct Candidates<'a> {
    source: Account,
    list: Vec<Candidate<'a>>,
}

struct Round<'a> {
    by_source: HashMap<Source, Candidates<'a>>,
    /// Bytes that each source will hold after the round.
    held: HashMap<Source, usize>,
    evicted: usize,
}

/// Evicts tunnels of the sources over their share until they are below it, and of the largest
/// sources until an eighth of the limit is free if it is exceeded. Evicts tunnels that have stalled
/// since `marks`, and then others in the last rounds, of all sources while the budget is exhausted,
/// or of a source far over its share. Returns their number.
pub(super) fn run(budget: &BufferBudget, marks: &[ProgressMark], wait: Wait) -> usize {
    let mut round = Round::new(budget, marks, wait);
    let freed = round.evict_over_share();
    let (held, limit) = (budget.held(), budget.limit());
    if held > limit {
        let excess = held.saturating_sub(limit / 8 * 7);
        round.evict_largest(excess.saturating_sub(freed));
    }
    round.evicted
}

impl<'a> Round<'a> {
    fn new(budget: &BufferBudget, marks: &'a [ProgressMark], wait: Wait) -> Self {
        let mut by_source: HashMap<Source, Candidates<'_>> = HashMap::new();
        let is_urgent = wait.is_last || budget.is_exhausted();
        for mark in marks {
            let (account, is_stalled) = (&*mark.account, mark.is_stalled());
            let held = account.held();
            let source = account.source.lock().clone();
            let has_stalled = is_stalled && !wait.was_cut_short;
            // One that was evicted before this wait gives nothing back.
            let is_stuck = !wait.was_cut_short && account.evicted.load(Ordering::Relaxed);
            if held == 0
                || is_stuck
                || !(has_stalled || is_urgent || budget.is_far_over_share(&source))
            {
                continue;
            }
            let of_source = by_source.entry(source.source().clone());
            let list =
                &mut of_source.or_insert_with(|| Candidates { source, list: Vec::new() }).list;
            list.push(Candidate { account, is_stalled, held });
        }
        for candidates in by_source.values_mut() {
            let list = &mut candidates.list;
            list.sort_unstable_by_key(|one| (one.is_stalled, one.held));
        }
        Self { by_source, held: budget.pool.holders().into_iter().collect(), evicted: 0 }
    }

    /// Evicts tunnels of the sources over their share, the largest of them first. Returns the
    /// number of bytes.
    fn evict_over_share(&mut self) -> usize {
        let excess = |one: &Candidates<'_>| one.source.excess();
        let all = self.by_source.iter();
        let over = all.map(|(source, one)| (source.clone(), excess(one)));
        let mut over: HashMap<_, _> = over.filter(|(_, excess)| *excess > 0).collect();
        let mut freed: HashMap<Source, usize> = HashMap::new();
        let mut all = 0;
        while let Some(largest) = self.largest(over.keys()) {
            let excess = over.get(&largest).copied().unwrap_or(0);
            let of_root = freed.entry(largest.root().clone()).or_default();
            // What another source of the cluster has given back lowers the excess by as much, and
            // what is free for everyone by half.
            let lowered = *of_root + (all - *of_root) / 2;
            let bytes = if excess > lowered { self.evict_one(&largest) } else { 0 };
            if bytes == 0 {
                over.remove(&largest);
            }
            *of_root += bytes;
            all += bytes;
        }
        all
    }

    /// Evicts tunnels of the largest sources, until `excess` bytes are free.
    fn evict_largest(&mut self, mut excess: usize) {
        while excess > 0
            && let Some(largest) = self.largest(self.by_source.keys())
        {
            match self.evict_one(&largest) {
                0 => drop(self.by_source.remove(&largest)),
                bytes => excess = excess.saturating_sub(bytes),
            }
        }
    }

    /// Returns the largest of the sources, level by level.
    fn largest<'b>(&self, sources: impl Iterator<Item = &'b Source>) -> Option<Source> {
        let held = |source: &Source| self.held.get(source).copied().unwrap_or(0);
        let by_level = |source: &&Source| {
            let mut levels: Vec<_> =
                successors(Some(*source), |one| one.parent()).map(held).collect();
            levels.reverse();
            levels
        };
        sources.max_by_key(by_level).cloned()
    }

    /// Evicts the next tunnel of a source. Returns the number of its bytes, 0 without one.
    fn evict_one(&mut self, source: &Source) -> usize {
        let candidates = self.by_source.get_mut(source);
        let Some(one) = candidates.and_then(|of| of.list.pop()) else {
            return 0;
        };
        one.account.evict();
        self.evicted += 1;
        for level in successors(Some(source), |one| one.parent()) {
            if let Some(held) = self.held.get_mut(level) {
                *held = held.saturating_sub(one.held);
            }
        }
        one.held
    }
}
