//! Admission control: limits of the handshakes and descriptors that unauthenticated clients and
//! floods of connections may take.
//!
//! All limits are on by default, with values that a busy gateway does not reach. Work over a limit
//! is rejected at once, or evicts the work that has waited longest. Nothing is queued: a queue
//! would make good clients wait behind bad ones.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::limits::prefix;

use super::descriptors::DescriptorPool;

/// Limit of handshakes in flight. Each holds at most 32 KiB for at most 5 s: 32 MiB in all. The
/// limit is lower if files or memory are short ([`DescriptorPool::handshakes_max`]).
const HANDSHAKES_MAX: usize = 1024;
/// Divisor of the limit for one source: 128 handshakes, enforced once half of all are in flight.
/// Many clients may share an address, and reconnect together after a restart of the gateway.
const SOURCE_DIVISOR: usize = 8;
/// Number of descriptors kept back for listeners, epoll, files, and 64 connections to the admin
/// ports.
const DESCRIPTORS_RESERVED: usize = 128;

/// Current admissions: the descriptor pool and the handshakes in flight.
#[derive(Debug)]
pub struct Admission {
    /// Descriptor pool, which divides the descriptors among their holders.
    pub pool: Arc<DescriptorPool>,
    handshakes: Arc<Mutex<Handshakes>>,
}

#[derive(Debug, Default)]
struct Handshakes {
    all: usize,
    /// Number of handshakes so far, and serial number of the next one.
    next_serial: u64,
    /// Handshakes of each source with their serial numbers, oldest first.
    by_source: HashMap<IpAddr, VecDeque<(u64, Arc<Notify>)>>,
}

/// Detail of a handshake that was evicted, for the log.
pub const EVICTED_DETAIL: &str = "handshake evicted: limit of concurrent handshakes reached, \
     oldest of the source with the most";

/// Slot of a handshake in flight, released on drop.
#[derive(Debug)]
pub struct HandshakeSlot {
    handshakes: Arc<Mutex<Handshakes>>,
    source: IpAddr,
    evicted: Arc<Notify>,
}

impl Admission {
    /// Creates the limits for a process that may open `descriptors` files.
    pub fn new(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self {
            pool: DescriptorPool::new(descriptors.saturating_sub(DESCRIPTORS_RESERVED).max(1)),
            handshakes: Arc::default(),
        }
    }

    /// Takes a slot for a handshake. Returns `None` if the source holds too many already.
    ///
    /// At the limit, the source with the most handshakes loses its oldest one. A good
    /// client finishes within a few round trips, so an old handshake is slow on purpose.
    pub fn acquire_handshake(&self, address: IpAddr) -> Option<HandshakeSlot> {
        let source = prefix(address);
        let max = self.pool.handshakes_max().clamp(1, HANDSHAKES_MAX);
        let evicted = Arc::new(Notify::new());
        let mut handshakes = self.handshakes.lock();
        let of_source = handshakes.by_source.get(&source).map_or(0, VecDeque::len);
        if of_source >= max.div_ceil(SOURCE_DIVISOR) && handshakes.all >= max / 2 {
            return None;
        }
        if handshakes.all >= max {
            handshakes.evict();
        }
        let number = handshakes.next_serial;
        let own = handshakes.by_source.entry(source).or_default();
        own.push_back((number, Arc::clone(&evicted)));
        handshakes.next_serial += 1;
        handshakes.all += 1;
        Some(HandshakeSlot {
            handshakes: Arc::clone(&self.handshakes),
            source,
            evicted,
        })
    }
}

impl Handshakes {
    /// Evicts the oldest handshake of the source with the most handshakes. Among sources with the
    /// same number, evicts the oldest of all.
    fn evict(&mut self) {
        let largest = self
            .by_source
            .iter()
            .filter_map(|(&source, own)| Some((source, own.len(), own.front()?)))
            .max_by_key(|&(_, count, &(number, _))| (count, Reverse(number)));
        if let Some((source, _, (_, oldest))) = largest {
            let oldest = Arc::clone(oldest);
            oldest.notify_one();
            self.remove(source, &oldest);
        }
    }

    /// Removes a handshake. Does nothing if it was evicted before.
    fn remove(&mut self, source: IpAddr, handshake: &Arc<Notify>) {
        let Some(own) = self.by_source.get_mut(&source) else {
            return;
        };
        let before = own.len();
        own.retain(|(_, other)| !Arc::ptr_eq(other, handshake));
        self.all -= before - own.len();
        if own.is_empty() {
            self.by_source.remove(&source);
        }
    }
}

impl HandshakeSlot {
    /// Waits until this handshake is evicted in favour of another one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.handshakes.lock().remove(self.source, &self.evicted);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_source_leaves_room_for_the_others_and_gives_its_own_back() {
        let admission = Admission::new(10_000);
        let take = |text: &str| admission.acquire_handshake(ip(text));
        let held: Vec<_> = (0..HANDSHAKES_MAX / 2)
            .map(|index| take(&format!("2001:db8::{index:x}")).expect("a place"))
            .collect();
        assert!(take("2001:db8::ffff:1").is_none(), "the same /64");
        let other = take("2001:db8:0:1::1").expect("another /64");
        drop(held);
        drop((take("2001:db8::1").expect("a place again"), other));
        assert!(
            admission.handshakes.lock().by_source.is_empty(),
            "nothing is kept of sources"
        );
    }

    #[tokio::test]
    async fn where_all_places_are_taken_the_largest_source_loses_its_oldest() {
        let admission = Admission::new(10_000);
        let take = |text: &str| admission.acquire_handshake(ip(text)).expect("a place");
        let evicted = |handshake: &HandshakeSlot| {
            let mut context = Context::from_waker(Waker::noop());
            pin!(handshake.evicted()).poll(&mut context).is_ready()
        };
        let largest: Vec<_> = (0..100).map(|_| take("192.0.2.1")).collect();
        let mut thin = Vec::new();
        for index in 0..HANDSHAKES_MAX - largest.len() {
            thin.push(take(&format!("2001:db8:0:{index:x}::1")));
        }
        let later = [take("192.0.2.2"), take("192.0.2.3")];
        assert!(evicted(&largest[0]) && evicted(&largest[1]) && !evicted(&largest[2]));
        assert!(!thin.iter().chain(&later).any(evicted));
        assert_eq!(admission.handshakes.lock().all, HANDSHAKES_MAX);
        drop((largest, thin, later));

        let spread = |index: usize| take(&format!("2001:db8:1:{index:x}::1"));
        let all: Vec<_> = (0..HANDSHAKES_MAX + 100).map(spread).collect();
        let gone: Vec<_> = all.iter().map(evicted).collect();
        assert!(gone[..100].iter().all(|&gone| gone), "the oldest of equals");
        assert!(!gone[100..].contains(&true));
        drop(all);
        let handshakes = admission.handshakes.lock();
        assert!(handshakes.all == 0 && handshakes.by_source.is_empty());
    }
}
