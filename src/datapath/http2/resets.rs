//! Streams that were reset lately.

use std::collections::{HashSet, VecDeque};

/// Limit of streams that are remembered after a reset by this side. Frames that the peer sent
/// before it received the reset are ignored (RFC 9113 section 5.1).
const RESETS_MAX: usize = 1024;

/// Identifiers of the streams that this side has reset last. All operations take constant time.
#[derive(Debug, Default)]
pub struct Resets {
    ids: HashSet<u32>,
    /// Oldest first.
    order: VecDeque<u32>,
}

impl Resets {
    /// Returns true if the stream is one of them.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Adds a stream in place of the oldest.
    pub fn insert(&mut self, id: u32) {
        if !self.ids.insert(id) {
            return;
        }
        if self.order.len() == RESETS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        self.order.push_back(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_more_than_1024_is_forgotten_and_none_is_kept_twice() {
        let mut resets = Resets::default();
        for id in (1..=2048).chain([2048]) {
            resets.insert(id);
        }
        assert!(!resets.contains(1024) && resets.contains(1025) && resets.contains(2048));
        assert_eq!((resets.ids.len(), resets.order.len()), (1024, 1024));
    }
}
