//! Places of a resource whose holders are evicted for others, such as handshakes.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Held, LimitReached, Pool, Resource, Source, SourceMap};

/// Places of one resource. While all are taken, the largest holder loses its oldest one to a source
/// below its share. Nothing is queued: a queue would make good clients wait behind bad ones.
#[derive(Debug)]
pub struct Places {
    pool: Arc<Pool>,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    next_serial: u64,
    /// Places of each source, oldest first.
    by_source: SourceMap<VecDeque<Taking>>,
}

#[derive(Debug)]
struct Taking {
    serial: u64,
    evicted: Arc<Notify>,
    _held: Held,
}

/// Place in use, released on drop.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    source: Source,
    evicted: Arc<Notify>,
}

impl Places {
    pub fn new(resource: Resource, max: usize) -> Arc<Self> {
        Arc::new(Self { pool: Pool::new(resource, max), taken: Mutex::default() })
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Takes a place. Returns none if the source has used its share.
    pub fn take(self: &Arc<Self>, source: &Source) -> Option<Place> {
        let account = self.pool.account(source);
        let mut taken = self.taken.lock();
        let held = match account.take(1) {
            Ok(held) => held,
            Err(LimitReached::Full(_)) if account.excess() == 0 => {
                taken.evict();
                account.charge(1)
            }
            Err(_) => return None,
        };
        Some(taken.add(self, source, held))
    }

    /// Takes a place, for the oldest one of the source if it has used its share.
    pub fn take_or_replace(self: &Arc<Self>, source: &Source) -> Option<Place> {
        self.take(source).or_else(|| {
            let mut taken = self.taken.lock();
            let is_replaced = taken.evict_oldest(source);
            let held = is_replaced.then(|| self.pool.account(source).charge(1))?;
            Some(taken.add(self, source, held))
        })
    }
}

impl Taken {
    fn add(&mut self, places: &Arc<Places>, source: &Source, held: Held) -> Place {
        let evicted = Arc::new(Notify::new());
        let own = self.by_source.entry(source.clone()).or_default();
        own.push_back(Taking {
            serial: self.next_serial,
            evicted: Arc::clone(&evicted),
            _held: held,
        });
        self.next_serial += 1;
        Place { places: Arc::clone(places), source: source.clone(), evicted }
    }

    /// Evicts the oldest place of the source with the most places. Among sources with the same
    /// number, evicts the oldest of all.
    fn evict(&mut self) {
        let oldest = |own: &VecDeque<Taking>| own.front().map(|one| Reverse(one.serial));
        let largest = self.by_source.iter().max_by_key(|(_, own)| (own.len(), oldest(own)));
        if let Some(source) = largest.map(|(source, _)| source.clone()) {
            self.evict_oldest(&source);
        }
    }

    /// Evicts the oldest place of a source. Returns false if it has none.
    fn evict_oldest(&mut self, source: &Source) -> bool {
        let oldest = self.by_source.get(source).and_then(VecDeque::front);
        let Some(evicted) = oldest.map(|one| Arc::clone(&one.evicted)) else {
            return false;
        };
        evicted.notify_one();
        self.remove(source, &evicted);
        true
    }

    /// Removes a place. Does nothing if it was evicted before.
    fn remove(&mut self, source: &Source, place: &Arc<Notify>) {
        if let Some(own) = self.by_source.get_mut(source) {
            own.retain(|one| !Arc::ptr_eq(&one.evicted, place));
            if own.is_empty() {
                self.by_source.remove(source);
            }
        }
    }
}

impl Place {
    /// Waits until this place is evicted in favour of another one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken.lock().remove(&self.source, &self.evicted);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::IpAddr;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    const MAX: usize = 1024;

    fn source(text: &str) -> Source {
        Source::prefix(text.parse::<IpAddr>().expect("an address"))
    }

    pub(in crate::limits) fn evicted(place: &Place) -> bool {
        let mut context = Context::from_waker(Waker::noop());
        pin!(place.evicted()).poll(&mut context).is_ready()
    }

    #[test]
    fn one_source_leaves_room_for_the_others_and_gives_its_own_back() {
        let places = Places::new(Resource::Handshakes, MAX);
        let take = |text: &str| places.take(&source(text));
        let held: Vec<_> = (0..MAX / 2)
            .map(|index| take(&format!("2001:db8::{index:x}")).expect("a place"))
            .collect();
        assert!(take("2001:db8::ffff:1").is_none(), "the same /64");
        let other = take("2001:db8:0:1::1").expect("another /64");
        drop(held);
        drop((take("2001:db8::1").expect("a place again"), other));
        assert!(
            places.taken.lock().by_source.is_empty() && places.pool.nodes_len() == 0,
            "nothing is kept of sources"
        );
    }

    #[test]
    fn where_all_places_are_taken_the_largest_source_loses_its_oldest() {
        let places = Places::new(Resource::Handshakes, MAX);
        let take = |text: &str| places.take(&source(text)).expect("a place");
        let largest: Vec<_> = (0..100).map(|_| take("192.0.2.1")).collect();
        let mut thin = Vec::new();
        for index in 0..MAX - largest.len() {
            thin.push(take(&format!("2001:db8:0:{index:x}::1")));
        }
        let later = [take("192.0.2.2"), take("192.0.2.3")];
        assert!(evicted(&largest[0]) && evicted(&largest[1]) && !evicted(&largest[2]));
        assert!(!thin.iter().chain(&later).any(evicted));
        assert!(places.take(&source("192.0.2.1")).is_none(), "no place for it");
        let replaced = places.take_or_replace(&source("192.0.2.1"));
        assert!(replaced.is_some() && evicted(&largest[2]));
        assert_eq!(places.pool.used(), MAX);
        drop((largest, thin, later, replaced));

        let spread = |index: usize| take(&format!("2001:db8:1:{index:x}::1"));
        let all: Vec<_> = (0..MAX + 100).map(spread).collect();
        let gone: Vec<_> = all.iter().map(evicted).collect();
        assert!(gone[..100].iter().all(|&gone| gone), "the oldest of equals");
        assert!(!gone[100..].contains(&true));
        drop(all);
        assert!(places.pool.used() == 0 && places.taken.lock().by_source.is_empty());
    }

    #[test]
    fn a_source_that_fills_its_share_replaces_its_own_oldest() {
        let places = Places::new(Resource::DnsClients, 64);
        let silent: Vec<_> = (0..200)
            .map(|_| places.take_or_replace(&source("127.0.0.1")).expect("a place"))
            .collect();
        assert_eq!(places.pool.used(), 32);
        let open = silent.iter().filter(|one| !evicted(one)).count();
        assert_eq!(open, 32);
        assert!(places.take(&source("127.0.0.2")).is_some());
    }
}
