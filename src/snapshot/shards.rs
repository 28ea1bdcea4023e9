//! Persistent hash map: a copy shares all entries, and a change copies a few dozen of them.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::hash::{BuildHasher as _, Hash};
use std::sync::{Arc, OnceLock};

use foldhash::fast::RandomState;

/// Mean number of entries in a shard above which the number of shards doubles.
const SHARD_MEAN_MAX: usize = 32;
/// Bits of the number of shards of a map that is empty.
const BITS_MIN: u32 = 2;
/// Bits of the largest number of shards: a map of millions of entries has larger shards.
const BITS_MAX: u32 = 16;

/// Spare capacity of a shard that grows, in entries.
const SPARE: usize = 4;

/// Map that is cheap to copy. The copy shares all shards, and a change copies its own shard and
/// two lists of references: some 150 references in a map of 100,000 entries.
///
/// Entries are ordered by the hash of their key. Its upper bits select a shard.
#[derive(Debug)]
pub struct Shards<K, V> {
    /// Groups of shards: `2^(bits / 2)` groups of the same number of shards, or half of it.
    groups: Arc<[Group<K, V>]>,
    /// Binary logarithm of the number of shards.
    bits: u32,
    len: usize,
}

type Group<K, V> = Arc<[Shard<K, V>]>;

/// Entries in the order of their hashes.
type Shard<K, V> = Arc<Vec<Entry<K, V>>>;

#[derive(Clone, Debug)]
struct Entry<K, V> {
    hash: u32,
    key: K,
    value: V,
}

/// Difference of a key between two maps: the key, the old value and the new one.
type Difference<'a, K, V> = (&'a K, Option<&'a V>, Option<&'a V>);

impl<K: Clone + Ord + Hash, V: Clone> Shards<K, V> {
    pub fn get<Q: Ord + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        // Nothing is hashed while the first state is joined with none.
        if self.is_empty() {
            return None;
        }
        let hash = hash(key);
        let shard = self.shard(hash)?;
        let place = find(shard, hash, key).ok()?;
        shard.get(place).map(|entry| &entry.value)
    }

    /// Returns true if the map has a value for the key.
    pub fn contains_key<Q: Ord + Hash + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// Sets the value of a key. Returns the previous value.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.reserve(self.len + 1);
        let hash = hash(&key);
        let shard = self.shard_mut(hash)?;
        match find(shard, hash, &key) {
            Ok(place) => {
                let entry = shard.get_mut(place)?;
                Some(std::mem::replace(&mut entry.value, value))
            }
            Err(place) => {
                // Doubling the capacity would leave a third of the memory unused.
                shard.reserve_exact(if shard.len() == shard.capacity() { SPARE } else { 0 });
                shard.insert(place, Entry { hash, key, value });
                self.len += 1;
                None
            }
        }
    }

    /// Sets the value of a key, or removes the key if there is none.
    pub fn set(&mut self, key: K, value: Option<V>) {
        match value {
            Some(value) => drop(self.insert(key, value)),
            None => drop(self.remove(&key)),
        }
    }

    /// Removes a key. Returns its value. Copies nothing if the key is absent.
    pub fn remove<Q: Ord + Hash + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let hash = hash(key);
        let place = find(self.shard(hash)?, hash, key).ok()?;
        let old = self.shard_mut(hash)?.remove(place);
        self.len -= 1;
        Some(old.value)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns all entries, in no meaningful order.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries().map(|entry| (&entry.key, &entry.value))
    }

    /// Returns all values, in no meaningful order.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries().map(|entry| &entry.value)
    }

    /// Returns all keys, in no meaningful order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.entries().map(|entry| &entry.key)
    }

    /// Returns all values in the order of their keys.
    pub fn sorted(&self) -> Vec<&V> {
        let mut entries: Vec<_> = self.iter().collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries.into_iter().map(|(_, value)| value).collect()
    }

    /// Returns the differences from `old` to this map. Shards in common are skipped.
    pub fn changes<'a>(
        &'a self,
        old: &'a Self,
        same: impl Fn(&V, &V) -> bool,
    ) -> Vec<Difference<'a, K, V>> {
        let mut changes = Vec::new();
        if self.bits != old.bits {
            compare(old.entries(), self.entries(), &same, &mut changes);
            return changes;
        }
        for (old, new) in old.groups.iter().zip(self.groups.iter()) {
            if Arc::ptr_eq(old, new) {
                continue;
            }
            for (old, new) in old.iter().zip(new.iter()) {
                if !Arc::ptr_eq(old, new) {
                    compare(old.iter(), new.iter(), &same, &mut changes);
                }
            }
        }
        changes
    }

    /// Makes as many shards as a map of `len` entries has.
    pub fn reserve(&mut self, len: usize) {
        let mut bits = self.bits;
        while len > SHARD_MEAN_MAX << bits && bits < BITS_MAX {
            bits += 1;
        }
        if bits > self.bits {
            self.split(bits);
        }
    }

    fn split(&mut self, bits: u32) {
        // Doubling capacities would leave a fourth of the memory unused.
        let shard = |_| Vec::with_capacity(SHARD_MEAN_MAX / 2 + SPARE);
        let mut shards: Vec<Vec<Entry<K, V>>> = (0..1 << bits).map(shard).collect();
        for entry in self.entries() {
            if let Some(shard) = shards.get_mut(place(entry.hash, bits)) {
                shard.push(entry.clone());
            }
        }
        let mut shards = shards.into_iter().map(Arc::new);
        let (groups, each) = (1 << (bits / 2), 1 << (bits - bits / 2));
        let group = |_| shards.by_ref().take(each).collect();
        self.groups = (0..groups).map(group).collect();
        self.bits = bits;
    }

    fn shard(&self, hash: u32) -> Option<&Shard<K, V>> {
        let (group, shard) = self.position(hash);
        self.groups.get(group)?.get(shard)
    }

    fn shard_mut(&mut self, hash: u32) -> Option<&mut Vec<Entry<K, V>>> {
        let (group, shard) = self.position(hash);
        let group = Arc::make_mut(&mut self.groups).get_mut(group)?;
        Arc::make_mut(group).get_mut(shard).map(Arc::make_mut)
    }

    /// Returns the group of a hash, and the shard in the group.
    fn position(&self, hash: u32) -> (usize, usize) {
        let each = self.bits - self.bits / 2;
        let place = place(hash, self.bits);
        (place >> each, place & ((1 << each) - 1))
    }
}

impl<K, V> Shards<K, V> {
    /// Returns all entries in the order of their hashes.
    fn entries(&self) -> impl Iterator<Item = &Entry<K, V>> {
        self.groups.iter().flat_map(|group| group.iter()).flat_map(|shard| shard.iter())
    }
}

/// Appends the differences between two lists of entries in the order of entries.
fn compare<'a, K: Ord + 'a, V: 'a>(
    old: impl Iterator<Item = &'a Entry<K, V>>,
    new: impl Iterator<Item = &'a Entry<K, V>>,
    same: impl Fn(&V, &V) -> bool,
    changes: &mut Vec<Difference<'a, K, V>>,
) {
    let (mut old, mut new) = (old.peekable(), new.peekable());
    loop {
        let order = match (old.peek(), new.peek()) {
            (Some(old), Some(new)) => (old.hash, &old.key).cmp(&(new.hash, &new.key)),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return,
        };
        let before = old.next_if(|_| order.is_le());
        let after = new.next_if(|_| order.is_ge());
        let values = [before, after].map(|entry| entry.map(|entry| &entry.value));
        let is_same = matches!(values, [Some(before), Some(after)] if same(before, after));
        if let Some(entry) = after.or(before).filter(|_| !is_same) {
            changes.push((&entry.key, values[0], values[1]));
        }
    }
}

/// Returns the index of a key in a shard, or the index at which its entry belongs.
fn find<K, V, Q>(shard: &[Entry<K, V>], hash: u32, key: &Q) -> Result<usize, usize>
where
    K: Borrow<Q>,
    Q: Ord + ?Sized,
{
    shard.binary_search_by(|entry| {
        let order = entry.hash.cmp(&hash);
        order.then_with(|| entry.key.borrow().cmp(key))
    })
}

/// Returns the hash of a key. All maps share one random state, because maps are compared by hash.
/// A collision costs a few comparisons, because a shard is searched by bisection.
fn hash<Q: Hash + ?Sized>(key: &Q) -> u32 {
    static STATE: OnceLock<RandomState> = OnceLock::new();
    let hash = STATE.get_or_init(RandomState::default).hash_one(key);
    u32::try_from(hash >> 32).unwrap_or_default()
}

/// Returns the shard of a hash, among `2^bits`.
fn place(hash: u32, bits: u32) -> usize {
    usize::try_from(hash >> (u32::BITS - bits)).unwrap_or_default()
}

impl<K, V> Default for Shards<K, V> {
    fn default() -> Self {
        let empty: Shard<K, V> = Arc::default();
        let group: Group<K, V> = [Arc::clone(&empty), empty].into();
        Self { groups: [Arc::clone(&group), group].into(), bits: BITS_MIN, len: 0 }
    }
}

impl<K, V> Clone for Shards<K, V> {
    fn clone(&self) -> Self {
        Self { groups: Arc::clone(&self.groups), bits: self.bits, len: self.len }
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Shards<K, V> {
    fn eq(&self, other: &Self) -> bool {
        let equal = |(one, other): (&Entry<K, V>, &Entry<K, V>)| {
            one.key == other.key && one.value == other.value
        };
        self.len == other.len && self.entries().zip(other.entries()).all(equal)
    }
}

impl<K: Clone + Ord + Hash, V: Clone> FromIterator<(K, V)> for Shards<K, V> {
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
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn shared(one: &Shards<u32, u32>, other: &Shards<u32, u32>) -> (usize, usize) {
        let shards = |map: &Shards<u32, u32>| -> Vec<_> {
            let shards = map.groups.iter().flat_map(|group| group.iter());
            shards.map(Arc::as_ptr).collect()
        };
        let pairs = shards(one).into_iter().zip(shards(other));
        let shared = pairs.clone().filter(|(one, other)| one == other).count();
        (shared, pairs.count())
    }

    #[test]
    fn a_copy_keeps_its_entries_and_shares_unchanged_shards() {
        let mut map: Shards<u32, u32> = (0..1000).map(|at| (at, at)).collect();
        let old = map.clone();
        assert_eq!((map.insert(1, 2), map.insert(1000, 1)), (Some(1), None));
        assert_eq!((map.remove(&3), map.remove(&3), map.len()), (Some(3), None, 1000));
        assert_eq!((old.get(&1), old.get(&3), old.len()), (Some(&1), Some(&3), 1000));
        let (shared, all) = shared(&map, &old);
        assert!((all - 3..all).contains(&shared), "{shared} of {all}");
        let mut changes = map.changes(&old, u32::eq);
        changes.sort_unstable();
        let want = [(&1, Some(&1), Some(&2)), (&3, Some(&3), None), (&1000, None, Some(&1))];
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

    #[test]
    fn shards_stay_small_as_a_map_grows() {
        let map: Shards<u32, u32> = (0..100_000).map(|at| (at, at)).collect();
        let shards = map.groups.iter().flat_map(|group| group.iter());
        let sizes: Vec<_> = shards.map(|shard| shard.len()).collect();
        assert_eq!(sizes.len(), 4096);
        assert_eq!((map.groups.len(), map.groups[0].len()), (64, 64));
        assert_eq!(sizes.iter().sum::<usize>(), map.len());
        assert!(sizes.into_iter().max() < Some(4 * SHARD_MEAN_MAX));
    }

    /// Key type with many equal hashes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    struct Colliding(u16);

    impl Hash for Colliding {
        fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
            (self.0 % 7).hash(state);
        }
    }

    proptest! {
        #[test]
        fn a_map_has_the_entries_of_a_hash_map_and_finds_all_differences(
            first in prop::collection::vec((0..400_u16, any::<bool>()), 0..300),
            second in prop::collection::vec((0..400_u16, any::<bool>()), 0..300),
        ) {
            let (mut map, mut oracle) = (Shards::default(), HashMap::new());
            let mut apply = |map: &mut Shards<_, _>, edits: Vec<(u16, bool)>| {
                for (index, (key, is_put)) in edits.into_iter().enumerate() {
                    let (old, want) = if is_put {
                        (map.insert(Colliding(key), index), oracle.insert(key, index))
                    } else {
                        (map.remove(&Colliding(key)), oracle.remove(&key))
                    };
                    assert_eq!(old, want);
                }
                assert_eq!(map.len(), oracle.len());
                let has = |key| map.get(&Colliding(key)) == oracle.get(&key);
                assert!((0..400).all(has));
                oracle.clone()
            };
            let before = apply(&mut map, first);
            let old = map.clone();
            let after = apply(&mut map, second);
            prop_assert_eq!(old.iter().count(), before.len());
            let mut changes: Vec<_> = map.changes(&old, usize::eq);
            changes.sort_unstable();
            let differs = |key: &u16| before.get(key) != after.get(key);
            let want: Vec<_> = (0..400).filter(differs).collect();
            let keys: Vec<_> = changes.iter().map(|(key, ..)| key.0).collect();
            prop_assert_eq!(keys, want);
            for (key, old, new) in changes {
                prop_assert_eq!((old, new), (before.get(&key.0), after.get(&key.0)));
            }
        }
    }
}
