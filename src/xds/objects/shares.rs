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

    /// Divides places between namespaces that want so many. What does not divide goes to those with
    /// the most, and among equals to the first ones by name.
    pub(super) fn divide(limit: usize, wanted: impl Iterator<Item = (Arc<str>, usize)>) -> Self {
        let mut taken = BTreeMap::<_, usize>::new();
        for (namespace, count) in wanted {
            *taken.entry(namespace).or_default() += count;
        }
        let mut counts: Vec<_> = taken.values_mut().rev().collect();
        counts.sort_by_key(|count| **count);
        let (mut free, mut others) = (limit, counts.len());
        for count in counts {
            *count = (*count).min(free / others);
            (free, others) = (free - *count, others - 1);
        }
        Self { free, taken }
    }

    /// Uses up places of a namespace. Returns false if it has fewer.
    pub(super) fn use_up(&mut self, namespace: &str, count: usize) -> bool {
        let places = self.taken.get_mut(namespace).filter(|places| **places >= count);
        places.map(|places| *places -= count).is_some()
    }
}

/// Separates the entries that have a place from the others. A namespace keeps its first entries.
pub(super) fn limit<T>(
    entries: Vec<T>,
    limit: usize,
    namespace: impl Fn(&T) -> Arc<str>,
) -> (Vec<T>, Vec<T>) {
    let mut shares = Shares::divide(limit, entries.iter().map(|entry| (namespace(entry), 1)));
    let has_place = |entry: &T| shares.use_up(&namespace(entry), 1);
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
            let (kept, _) = limit(entries.chars().collect(), 4, |name| name.to_string().into());
            assert_eq!(kept.into_iter().collect::<String>(), want, "{entries}, divided");
        }
    }

    #[test]
    fn a_namespace_that_wants_little_has_all_of_it_and_the_others_equal_parts() {
        let wanted = [("a", 50), ("b", 3), ("c", 60), ("d", 0), ("e", 7)];
        let wanted = wanted.into_iter().map(|(name, count)| (name.into(), count));
        let shares = Shares::divide(31, wanted);
        let places: Vec<_> = shares.taken.values().copied().collect();
        assert_eq!((places, shares.free), (vec![10, 3, 11, 0, 7], 0));
        let mut shares = Shares::divide(31, [("a".into(), 20), ("a".into(), 5)].into_iter());
        assert!(!shares.use_up("b", 0) && !shares.use_up("a", 26) && shares.use_up("a", 25));
        assert!(!shares.use_up("a", 1) && shares.use_up("a", 0));
    }
}
