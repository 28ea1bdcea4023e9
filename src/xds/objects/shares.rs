//! Shares of the namespaces in a limit of entries of objects.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Places for entries, with max-min fairness between namespaces. The shares depend on the numbers
/// and the names of the namespaces alone, so that a restart leads to the same ones.
#[derive(Debug)]
pub(super) struct Shares {
    free: usize,
    /// Number of places by namespace.
    taken: BTreeMap<Arc<str>, usize>,
}

impl Shares {
    pub(super) const fn new(limit: usize) -> Self {
        let taken = BTreeMap::new();
        Self { free: limit, taken }
    }

    /// Takes a place for an entry. If none is free, returns the namespace with the most entries,
    /// the last one by name among equals. Its newest entry, which may be this one, loses its place.
    pub(super) fn take(&mut self, namespace: Arc<str>) -> Option<Arc<str>> {
        *self.taken.entry(namespace).or_default() += 1;
        if self.free > 0 {
            self.free -= 1;
            return None;
        }
        // The last one of several with the most.
        let most = self.taken.iter().max_by_key(|(_, count)| **count);
        let (most, count) = most.map(|(name, count)| (Arc::clone(name), *count))?;
        if count == 1 {
            self.taken.remove(&most);
        } else {
            self.taken.insert(Arc::clone(&most), count - 1);
        }
        Some(most)
    }

    /// Uses up a place of a namespace. Returns false if it has none.
    pub(super) fn use_up(&mut self, namespace: &str) -> bool {
        let places = self.taken.get_mut(namespace).filter(|places| **places > 0);
        places.map(|places| *places -= 1).is_some()
    }
}

/// Separates the entries that have a place from the others. A namespace keeps its first entries.
pub(super) fn limit<T>(
    entries: Vec<T>,
    limit: usize,
    namespace: impl Fn(&T) -> Arc<str>,
) -> (Vec<T>, Vec<T>) {
    let mut shares = Shares::new(limit);
    for entry in &entries {
        shares.take(namespace(entry));
    }
    let has_place = |entry: &T| shares.use_up(&namespace(entry));
    entries.into_iter().partition(has_place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_takes_places_only_from_one_with_more() {
        // Each letter is the namespace of an entry.
        for (entries, want) in [
            ("aaaa", "aaaa"),
            ("aaaaaaaa", "aaaa"),
            ("aaaaaaaab", "aaab"),
            ("baaaaaaaa", "baaa"),
            ("bbbbbbbbaaaaaaaa", "bbaa"),
            ("aaaaaaaabbbbbbbb", "aabb"),
            ("bbbbcccca", "bbca"),
            ("ccccbbbba", "cbba"),
            ("fedcba", "dcba"),
            ("abcdef", "abcd"),
        ] {
            let (mut shares, mut kept) = (Shares::new(4), String::new());
            for namespace in entries.split("").filter(|name| !name.is_empty()) {
                kept.push_str(namespace);
                if let Some(most) = shares.take(namespace.into()) {
                    kept.remove(kept.rfind(&*most).expect("an entry"));
                }
            }
            assert_eq!(kept, want, "{entries}");
        }
    }
}
