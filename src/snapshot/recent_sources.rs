//! Sources whose tunnels an endpoint has recently served or failed, in constant memory.

use std::hash::{BuildHasher, Hash};
use std::sync::LazyLock;

use foldhash::quality::RandomState;

use super::expiring::Expiring;

/// Hash of the source of a tunnel: a verified peer, or the network prefix of a client without an
/// identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceHash(u32);

impl SourceHash {
    /// Returns the hash of a source, which differs between processes.
    pub fn of(source: &impl Hash) -> Self {
        static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::default);
        let hash = STATE.hash_one(source);
        Self((hash >> 32) as u32)
    }
}

/// The last two sources that have dialled an endpoint, and the last one whose tunnel failed
/// afterwards. Two are enough to tell whether a source was alone.
#[derive(Debug, Default)]
pub(super) struct RecentSources {
    dialled: [Expiring; 2],
    failed: Expiring,
}

impl RecentSources {
    /// Records a source whose dial has succeeded. Of concurrent records one may be lost.
    pub(super) fn record(&self, source: SourceHash, second: u64) {
        let [one, other] = &self.dialled;
        let [first, last] = [one, other].map(|of| of.get(second));
        let is_its = |of: Option<(u32, u64)>| of.is_some_and(|(known, _)| known == source.0);
        let age = |of: Option<(u32, u64)>| of.map_or(u64::MAX, |(_, age)| age);
        let is_first = is_its(first) || !is_its(last) && age(first) >= age(last);
        let place = if is_first { one } else { other };
        place.set(source.0, second);
    }

    /// Records a tunnel of a source that failed after its dial. Returns true if tunnels of another
    /// source failed within a minute too, or if no other source has dialled within a minute.
    pub(super) fn is_to_blame(&self, source: SourceHash, second: u64) -> bool {
        let is_other = |one: &Expiring| one.get(second).is_some_and(|(known, _)| known != source.0);
        let has_failed_other = is_other(&self.failed);
        self.failed.set(source.0, second);
        has_failed_other || !self.dialled.iter().any(is_other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: SourceHash = SourceHash(1);
    const OTHER: SourceHash = SourceHash(2);
    const THIRD: SourceHash = SourceHash(0);

    #[test]
    fn one_source_alone_is_trusted_only_while_no_other_has_dialled() {
        let sources = RecentSources::default();
        sources.record(ONE, 0);
        assert!(sources.is_to_blame(ONE, 0), "the only one that dialled");
        sources.record(OTHER, 1);
        for second in 2..60 {
            sources.record(ONE, second);
            assert!(!sources.is_to_blame(ONE, second));
        }
        sources.record(ONE, 61);
        assert!(sources.is_to_blame(ONE, 61), "a minute after the other");
    }

    #[test]
    fn failures_of_two_sources_within_a_minute_are_trusted() {
        let sources = RecentSources::default();
        for source in [ONE, OTHER, THIRD] {
            sources.record(source, 0);
        }
        assert!(!sources.is_to_blame(ONE, 0));
        assert!(sources.is_to_blame(THIRD, 59));
        sources.record(OTHER, 119);
        assert!(!sources.is_to_blame(ONE, 119), "the last one has expired");
    }

    #[test]
    fn many_tunnels_of_one_source_do_not_hide_the_other() {
        let sources = RecentSources::default();
        sources.record(OTHER, 0);
        for second in 0..50 {
            sources.record(ONE, second);
        }
        assert!(!sources.is_to_blame(ONE, 50));
    }
}
