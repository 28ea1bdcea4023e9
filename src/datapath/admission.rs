//! Admission: how much of this process strangers and floods of connections may take.
//!
//! Everything is on by default, with figures that a busy gateway does not reach. What is over a
//! limit is turned away at once: a queue would only make good clients wait behind bad ones.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Handshakes in flight. Each holds at most 32 KiB for at most 5 s: 32 MiB in all.
const HANDSHAKES_MAX: usize = 1024;
/// Handshakes in flight from one source, once half of all places are taken: many clients may
/// share an address, and reconnect together after a restart of ours.
const HANDSHAKES_PER_SOURCE_MAX: usize = 128;
/// Descriptors that are kept back: listeners, epoll, files, and 64 connections to the admin ports.
const DESCRIPTORS_RESERVED: usize = 128;

/// What is admitted at the moment.
#[derive(Debug)]
pub struct Admission {
    descriptors: Arc<AtomicUsize>,
    descriptors_max: usize,
    handshakes: Arc<Mutex<Handshakes>>,
}

#[derive(Debug, Default)]
struct Handshakes {
    all: usize,
    by_source: HashMap<IpAddr, usize>,
}

/// A descriptor that is in use, given back on drop.
#[derive(Debug)]
pub struct Descriptor(Arc<AtomicUsize>);

/// A handshake in flight, given back on drop.
#[derive(Debug)]
pub struct Handshake {
    handshakes: Arc<Mutex<Handshakes>>,
    source: IpAddr,
}

/// Which limit a connection was over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shed {
    /// All handshakes together.
    Handshakes,
    /// The handshakes of its source.
    Source,
}

impl Shed {
    /// The metric label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Handshakes => "handshakes",
            Self::Source => "source",
        }
    }
}

impl Admission {
    /// Limits for a process that may open `descriptors` files.
    pub fn new(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self {
            descriptors: Arc::default(),
            descriptors_max: descriptors.saturating_sub(DESCRIPTORS_RESERVED).max(1),
            handshakes: Arc::default(),
        }
    }

    /// Whether another connection may be accepted. Connections stop at four fifths, so that those
    /// that are open can still have tunnels.
    pub fn has_room(&self) -> bool {
        self.descriptors.load(Ordering::Relaxed) < self.descriptors_max / 5 * 4 + 1
    }

    /// Takes a descriptor for an accepted connection.
    pub fn connection(&self) -> Descriptor {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        Descriptor(Arc::clone(&self.descriptors))
    }

    /// Takes a descriptor for an endpoint, if one is left.
    pub fn upstream(&self) -> Option<Descriptor> {
        let free = |used: usize| (used < self.descriptors_max).then_some(used + 1);
        self.descriptors
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, free)
            .ok()?;
        Some(Descriptor(Arc::clone(&self.descriptors)))
    }

    /// Takes a place for a handshake.
    ///
    /// # Errors
    /// The limit that leaves none.
    pub fn handshake(&self, address: IpAddr) -> Result<Handshake, Shed> {
        let source = source(address);
        let mut handshakes = lock(&self.handshakes);
        if handshakes.all >= HANDSHAKES_MAX {
            return Err(Shed::Handshakes);
        }
        let all = handshakes.all;
        let of_source = handshakes.by_source.entry(source).or_default();
        if *of_source >= HANDSHAKES_PER_SOURCE_MAX && all >= HANDSHAKES_MAX / 2 {
            return Err(Shed::Source);
        }
        *of_source += 1;
        handshakes.all += 1;
        Ok(Handshake {
            handshakes: Arc::clone(&self.handshakes),
            source,
        })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut handshakes = lock(&self.handshakes);
        handshakes.all = handshakes.all.saturating_sub(1);
        if let Some(of_source) = handshakes.by_source.get_mut(&self.source) {
            *of_source = of_source.saturating_sub(1);
            if *of_source == 0 {
                handshakes.by_source.remove(&self.source);
            }
        }
    }
}

/// One IPv4 address, or one IPv6 network of 64 bits: a host has a whole such network.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
    }
}

/// The counts are whole at every unlock, so a poisoned lock is as good as any.
fn lock(handshakes: &Mutex<Handshakes>) -> MutexGuard<'_, Handshakes> {
    handshakes.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn one_source_leaves_room_for_the_others_and_gives_its_own_back() {
        let admission = Admission::new(10_000);
        let take = |text: &str| admission.handshake(ip(text));
        let held: Vec<_> = (0..HANDSHAKES_MAX / 2)
            .map(|index| take(&format!("2001:db8::{index:x}")).expect("a place"))
            .collect();
        assert_eq!(
            take("2001:db8::ffff:1").err(),
            Some(Shed::Source),
            "the same /64"
        );
        let other = take("2001:db8:0:1::1").expect("another /64");
        drop(held);
        drop((take("2001:db8::1").expect("a place again"), other));
        assert!(
            lock(&admission.handshakes).by_source.is_empty(),
            "nothing is kept of sources"
        );
    }

    #[test]
    fn all_sources_together_have_a_limit_too() {
        let admission = Admission::new(10_000);
        let held: Vec<_> = (0..HANDSHAKES_MAX)
            .map(|index| {
                let source = Ipv6Addr::from_bits((index as u128) << 64);
                admission.handshake(source.into()).expect("a place")
            })
            .collect();
        assert_eq!(
            admission.handshake(ip("192.0.2.1")).err(),
            Some(Shed::Handshakes)
        );
        drop(held);
    }

    #[test]
    fn connections_leave_descriptors_for_tunnels_and_tunnels_for_the_admin_ports() {
        let admission = Admission::new(228);
        let mut held = Vec::new();
        while admission.has_room() {
            held.push(admission.connection());
        }
        assert_eq!(held.len(), 81);
        while let Some(upstream) = admission.upstream() {
            held.push(upstream);
        }
        assert_eq!(held.len(), 100);
        drop(held);
        assert!(admission.has_room());
    }
}
