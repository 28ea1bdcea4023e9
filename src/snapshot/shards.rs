//! Maps of which a copy shares what has not changed.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Shards of a map: a change of a map of 100,000 copies some 400 entries.
const SHARDS: usize = 256;

/// A map that is cheap to copy: the copy shares all shards, and a change copies its own.
#[derive(Debug)]
pub struct Shards<K, V> {
    shards: Arc<[Arc<HashMap<K, V>>]>,
    len: usize,
}

impl<K: Clone + Eq + Hash, V: Clone> Shards<K, V> {
    /// What stands under a key.
    pub fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.shards.get(place(key))?.get(key)
    }

    /// Whether something stands under a key.
    pub fn contains_key<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// Puts a value under a key; returns what stood there.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        let old = self.shard(place(&key))?.insert(key, value);
        self.len += usize::from(old.is_none());
        old
    }

    /// Takes out what stands under a key. Nothing is copied if nothing does.
    pub fn remove<Q: Eq + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        if !self.contains_key(key) {
            return None;
        }
        let old = self.shard(place(key))?.remove(key);
        self.len -= usize::from(old.is_some());
        old
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All entries, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.iter())
    }

    /// All values, in no order.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// All keys, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values in the order of their keys.
    pub fn sorted(&self) -> Vec<&V>
    where
        K: Ord,
    {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries.into_iter().map(|(_, value)| value).collect()
    }

    /// What is not the same in `old` and here: the key, the old value and the new one. Shards that
    /// both share are not looked at.
    pub fn changes<'a>(
        &'a self,
        old: &'a Self,
        same: impl Fn(&V, &V) -> bool,
    ) -> Vec<(&'a K, Option<&'a V>, Option<&'a V>)> {
        let mut changes = Vec::new();
        for (old, new) in old.shards.iter().zip(self.shards.iter()) {
            if Arc::ptr_eq(old, new) {
                continue;
            }
            for (key, value) in new.iter() {
                let before = old.get(key);
                if !before.is_some_and(|before| same(before, value)) {
                    changes.push((key, before, Some(value)));
                }
            }
            let gone = old.iter().filter(|(key, _)| !new.contains_key(*key));
            changes.extend(gone.map(|(key, value)| (key, Some(value), None)));
        }
        changes
    }

    fn shard(&mut self, place: usize) -> Option<&mut HashMap<K, V>> {
        Arc::make_mut(&mut self.shards)
            .get_mut(place)
            .map(Arc::make_mut)
    }
}

/// Where a key belongs, in every map alike: maps are compared shard by shard.
fn place<Q: Hash + ?Sized>(key: &Q) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    usize::try_from(hasher.finish() % SHARDS as u64).unwrap_or(0)
}

impl<K, V> Default for Shards<K, V> {
    fn default() -> Self {
        let empty = Arc::new(HashMap::new());
        Self {
            shards: (0..SHARDS).map(|_| Arc::clone(&empty)).collect(),
            len: 0,
        }
    }
}

impl<K, V> Clone for Shards<K, V> {
    fn clone(&self) -> Self {
        Self {
            shards: Arc::clone(&self.shards),
            len: self.len,
        }
    }
}

impl<K: Eq + Hash, V: PartialEq> PartialEq for Shards<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.shards == other.shards
    }
}

impl<K: Clone + Eq + Hash, V: Clone> FromIterator<(K, V)> for Shards<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut shards = Self::default();
        for (key, value) in entries {
            shards.insert(key, value);
        }
        shards
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_what_it_had_and_shares_what_has_not_changed() {
        let mut map: Shards<u32, u32> = (0..1000).map(|at| (at, at)).collect();
        let old = map.clone();
        assert_eq!((map.insert(1, 2), map.insert(1000, 1)), (Some(1), None));
        assert_eq!(
            (map.remove(&3), map.remove(&3), map.len()),
            (Some(3), None, 1000)
        );
        assert_eq!(
            (old.get(&1), old.get(&3), old.len()),
            (Some(&1), Some(&3), 1000)
        );
        let pairs = || old.shards.iter().zip(map.shards.iter());
        let shared = pairs().filter(|(old, new)| Arc::ptr_eq(old, new)).count();
        assert!((SHARDS - 3..SHARDS).contains(&shared), "{shared}");
        let mut changes = map.changes(&old, u32::eq);
        changes.sort_unstable();
        let want = [
            (&1, Some(&1), Some(&2)),
            (&3, Some(&3), None),
            (&1000, None, Some(&1)),
        ];
        assert_eq!(changes, want);
    }

    #[test]
    fn maps_of_the_same_entries_are_equal_and_sorted_by_key() {
        let one: Shards<_, _> = (0..100).map(|at| (at, at)).collect();
        let other: Shards<_, _> = (0..100).rev().map(|at| (at, at)).collect();
        assert_eq!(one, other);
        assert!(one.changes(&other, i32::eq).is_empty());
        assert!(other.sorted().into_iter().copied().eq(0..100));
        assert!(one != (1..101).map(|at| (at, at)).collect());
    }
}
