//! Pool of file descriptors, and the share of it that each holder may take.
//!
//! A holder is a cluster, an identity within it, or a source address without an identity. Shares
//! are dynamic thresholds, as in the buffers of switches (Choudhury and Hahne, 1998): a holder
//! may take another descriptor only while it holds less than a multiple of the free ones. This
//! rejects nobody while half of the pool is free, lets a single identity or source take half and a
//! single cluster two thirds, shrinks every share as the pool fills, and does not depend on the
//! number of holders. The limit of open files or the free memory (`Pool::set_memory`) bounds the
//! pool, whichever is lower.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use derive_more::Display;
use parking_lot::Mutex;
use thiserror::Error;

use crate::reason::Reason;
use crate::status::DescriptorUsage;

/// Memory estimate of one descriptor: an idle tunnel takes 1 KiB, a connection while it opens up
/// to 11 KiB. Measured usage replaces the
/// estimate every 100 ms.
const DESCRIPTOR_BYTES: usize = 8 * 1024;
/// Number of descriptors that a cluster, an identity or a source may take regardless of other
/// holders: a connection, and some tunnels.
const SHARE_MIN: usize = 8;
/// Multiple of the free descriptors that a cluster may hold. 2 gives it two thirds of the pool
/// when it is alone; one identity of it may hold half, and leaves descriptors for other
/// identities.
const CLUSTER_FACTOR: usize = 2;
/// Multiple of the free descriptors that a source address may hold: half of the pool when it is
/// alone.
const SOURCE_FACTOR: usize = 1;
/// Divisor of the pool for the reserve of each listener, which other listeners cannot take:
/// 1/16. It is less with more than eight listeners, as half of the pool stays common.
const LISTENER_RESERVE_DIVISOR: usize = 16;
/// Divisor of the pool for the reserve of holders below [`SHARE_MIN`].
const SHARE_MIN_RESERVE_DIVISOR: usize = 16;
/// Divisor of the pool for the reserve of clusters and sources below [`SHARE_MIN`]. Identities
/// below it may take the rest of the previous reserve, while their cluster holds less than three
/// quarters of the pool.
const GROUP_RESERVE_DIVISOR: usize = 32;
/// Divisor of the pool for the reserve that connections leave to the tunnels of open
/// connections.
const TUNNEL_RESERVE_DIVISOR: usize = 5;

/// Pool of all descriptors of the data path.
#[derive(Debug)]
pub struct DescriptorPool {
    /// Limit by open files.
    files: usize,
    /// Limit by memory.
    memory: AtomicUsize,
    used: AtomicUsize,
    listeners: ArcSwap<Vec<Arc<AtomicUsize>>>,
    /// Counts of live holders. An entry is removed with its last reference.
    holders: Mutex<HashMap<Holder, Weak<HolderCount>>>,
}

/// Holder that descriptors are counted for.
#[derive(Clone, Debug, Display, PartialEq, Eq, Hash)]
pub enum Holder {
    /// All identities of one cluster.
    #[display("cluster {_0}")]
    Cluster(Arc<str>),
    /// One SPIFFE identity.
    #[display("identity {_0}")]
    Identity(Arc<str>),
    /// One IPv4 address, or one IPv6 /64.
    #[display("source {_0}{}", if _0.is_ipv6() { "/64" } else { "" })]
    Source(IpAddr),
}

/// Number of descriptors that one holder has.
#[derive(Debug)]
struct HolderCount {
    name: Holder,
    held: AtomicUsize,
    /// Descriptors of tunnels, which are counted in `held` too.
    tunnels: AtomicUsize,
    pool: Arc<DescriptorPool>,
}

/// Share of one listener, whose clients hold descriptors.
#[derive(Debug)]
pub struct ListenerReserve {
    pool: Arc<DescriptorPool>,
    held: Arc<AtomicUsize>,
}

/// Holders that a connection and its tunnels are counted for.
#[derive(Clone, Debug)]
pub struct Holders(Arc<HolderCounts>);

#[derive(Debug)]
struct HolderCounts {
    listener: Arc<ListenerReserve>,
    /// The cluster, or the source.
    group: Arc<HolderCount>,
    identity: Option<Arc<HolderCount>>,
}

/// Descriptor in use, returned on drop.
#[derive(Debug)]
pub struct Descriptor(Holders);

/// Descriptor of a tunnel to an endpoint.
#[derive(Debug)]
pub struct TunnelDescriptor(Descriptor);

/// Descriptor of one end of a pipe, which serves all tunnels of a thread.
#[derive(Debug)]
pub struct PipeEnd(Arc<DescriptorPool>);

/// Reason for which no descriptor is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitReached {
    /// The holder has used up its share.
    #[error(
        "the source has used its share of the descriptors; see `strait status` for the holders"
    )]
    Share,
    /// The process has reached its limit of open files.
    #[error("no descriptor is left; raise the limit of open files")]
    Files,
    /// The process has no memory for more.
    #[error("memory is three quarters full; raise the memory limit")]
    Memory,
}

/// Purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Connection,
    Upstream,
}

impl DescriptorPool {
    /// Creates a pool that open files limit to `files` descriptors.
    pub fn new(files: usize) -> Arc<Self> {
        Arc::new(Self {
            files,
            memory: AtomicUsize::new(usize::MAX),
            used: AtomicUsize::new(0),
            listeners: ArcSwap::default(),
            holders: Mutex::default(),
        })
    }

    /// Limits the pool by the memory that is free now, in bytes.
    pub fn set_memory(&self, free: usize) {
        let used = self.used.load(Ordering::Relaxed);
        let max = used.saturating_add(free / DESCRIPTOR_BYTES);
        self.memory.store(max, Ordering::Relaxed);
    }

    /// Returns the limit of concurrent handshakes, of 32 KiB each: a quarter of the files, and
    /// an eighth of the memory.
    pub fn handshakes_max(&self) -> usize {
        let by_memory = self.memory.load(Ordering::Relaxed) / (32 * 1024 / DESCRIPTOR_BYTES) / 8;
        (self.files / 4).min(by_memory)
    }

    /// Takes a descriptor for one end of a pipe. Pipes only save time, so they leave a quarter
    /// of the pool to connections and tunnels.
    pub fn pipe_end(self: &Arc<Self>) -> Option<PipeEnd> {
        let max = self.max();
        let room = |used: usize| (used < max - max / 4).then_some(used + 1);
        let order = Ordering::Relaxed;
        self.used.fetch_update(order, order, room).ok()?;
        Some(PipeEnd(Arc::clone(self)))
    }

    /// Registers a listener, whose part of the pool is reserved until
    /// [`ListenerReserve::release`].
    pub fn register_listener(self: &Arc<Self>) -> Arc<ListenerReserve> {
        let held = Arc::new(AtomicUsize::new(0));
        self.listeners.rcu(|all| {
            let mut all = Vec::clone(all);
            all.push(Arc::clone(&held));
            all
        });
        let pool = Arc::clone(self);
        Arc::new(ListenerReserve { pool, held })
    }

    /// Returns the size and use of the pool, with the `most` largest holders.
    pub fn usage(&self, most: usize) -> DescriptorUsage {
        let live: Vec<_> = self
            .holders
            .lock()
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        let mut holders: Vec<_> = live
            .iter()
            .map(|count| (count.name.to_string(), count.held.load(Ordering::Relaxed)))
            .filter(|&(_, held)| held > 0)
            .collect();
        holders.sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        holders.truncate(most);
        DescriptorUsage {
            used: self.used.load(Ordering::Relaxed),
            max: self.max(),
            holders,
        }
    }

    /// Returns the identities with open tunnels, and the number of these.
    pub fn tunnels(&self) -> Vec<(Arc<str>, usize)> {
        let live: Vec<_> = self
            .holders
            .lock()
            .values()
            .filter_map(Weak::upgrade)
            .collect();
        let of_identity = |count: &Arc<HolderCount>| match &count.name {
            Holder::Identity(name) => {
                let open = count.tunnels.load(Ordering::Relaxed);
                (open > 0).then(|| (Arc::clone(name), open))
            }
            Holder::Cluster(_) | Holder::Source(_) => None,
        };
        live.iter().filter_map(of_identity).collect()
    }

    fn max(&self) -> usize {
        self.files.min(self.memory.load(Ordering::Relaxed))
    }

    /// Returns the free share of the pool, in percent.
    pub fn free_percent(&self) -> u32 {
        let max = self.max().max(1);
        let free = max.saturating_sub(self.used.load(Ordering::Relaxed));
        u32::try_from(free.saturating_mul(100) / max).unwrap_or(100)
    }

    /// Returns the resource that limits the pool.
    fn exhausted_by(&self) -> LimitReached {
        if self.memory.load(Ordering::Relaxed) < self.files {
            LimitReached::Memory
        } else {
            LimitReached::Files
        }
    }

    fn count_of(self: &Arc<Self>, name: Holder) -> Arc<HolderCount> {
        let mut holders = self.holders.lock();
        if let Some(count) = holders.get(&name).and_then(Weak::upgrade) {
            return count;
        }
        let count = Arc::new(HolderCount {
            name: name.clone(),
            held: AtomicUsize::new(0),
            tunnels: AtomicUsize::new(0),
            pool: Arc::clone(self),
        });
        holders.insert(name, Arc::downgrade(&count));
        count
    }
}

impl Drop for HolderCount {
    fn drop(&mut self) {
        let mut holders = self.pool.holders.lock();
        // Another thread may have replaced the entry after the last reference was dropped.
        if holders
            .get(&self.name)
            .is_some_and(|it| it.strong_count() == 0)
        {
            holders.remove(&self.name);
        }
    }
}

impl ListenerReserve {
    /// Returns whether a connection could be accepted from a source that holds less than
    /// `SHARE_MIN`.
    pub fn has_free_descriptor(&self) -> bool {
        self.free() > 0
    }

    /// Ends the reserve of a listener that accepts no more. Its connections keep the share
    /// alive.
    pub fn release(&self) {
        self.pool.listeners.rcu(|all| {
            let others = all.iter().filter(|it| !Arc::ptr_eq(it, &self.held));
            others.cloned().collect::<Vec<_>>()
        });
    }

    /// Returns the holders of a connection before its peer is authenticated.
    pub fn source(self: &Arc<Self>, address: IpAddr) -> Holders {
        Holders(Arc::new(HolderCounts {
            listener: Arc::clone(self),
            group: self.pool.count_of(Holder::Source(source(address))),
            identity: None,
        }))
    }

    /// Returns the number of descriptors that are free for this listener's clients, without the
    /// reserves of other listeners.
    fn free(&self) -> usize {
        let max = self.pool.max();
        let listeners = self.pool.listeners.load();
        let reserve = max / LISTENER_RESERVE_DIVISOR.max(2 * listeners.len());
        let others = listeners.iter().filter(|it| !Arc::ptr_eq(it, &self.held));
        let unclaimed: usize = others
            .map(|held| reserve.saturating_sub(held.load(Ordering::Relaxed)))
            .sum();
        let used = self.pool.used.load(Ordering::Relaxed);
        max.saturating_sub(used).saturating_sub(unclaimed)
    }
}

impl Drop for ListenerReserve {
    fn drop(&mut self) {
        self.release();
    }
}

impl Holders {
    /// Returns the holders of a connection of the same listener once its peer is authenticated.
    pub fn for_identity(&self, cluster: &Arc<str>, principal: &Arc<str>) -> Self {
        let pool = &self.0.listener.pool;
        Self(Arc::new(HolderCounts {
            listener: Arc::clone(&self.0.listener),
            group: pool.count_of(Holder::Cluster(Arc::clone(cluster))),
            identity: Some(pool.count_of(Holder::Identity(Arc::clone(principal)))),
        }))
    }

    /// Takes a descriptor for a connection.
    ///
    /// # Errors
    /// The share of the holder or the pool is used up.
    pub fn connection(&self) -> Result<Descriptor, LimitReached> {
        self.take(Purpose::Connection)
    }

    /// Takes a descriptor for a tunnel to an endpoint.
    ///
    /// # Errors
    /// As [`Holders::connection`].
    pub fn upstream(&self) -> Result<TunnelDescriptor, LimitReached> {
        let descriptor = self.take(Purpose::Upstream)?;
        for count in self.counts() {
            count.tunnels.fetch_add(1, Ordering::Relaxed);
        }
        Ok(TunnelDescriptor(descriptor))
    }

    /// Checks the share and counts. Concurrent threads may exceed a share by one each, but never
    /// the size of the pool.
    fn take(&self, purpose: Purpose) -> Result<Descriptor, LimitReached> {
        let pool = &self.0.listener.pool;
        self.check_share(purpose)?;
        let room = |used: usize| (used < pool.max()).then_some(used + 1);
        let order = Ordering::Relaxed;
        let taken = pool.used.fetch_update(order, order, room);
        taken.map_err(|_| pool.exhausted_by())?;
        self.0.listener.held.fetch_add(1, order);
        self.add();
        Ok(Descriptor(self.clone()))
    }

    fn add(&self) {
        for count in self.counts() {
            count.held.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remove(&self) {
        for count in self.counts() {
            count.held.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> impl Iterator<Item = &Arc<HolderCount>> {
        let HolderCounts {
            group, identity, ..
        } = &*self.0;
        std::iter::once(group).chain(identity)
    }

    fn check_share(&self, purpose: Purpose) -> Result<(), LimitReached> {
        let HolderCounts {
            listener,
            group,
            identity,
        } = &*self.0;
        let free = listener.free();
        if free == 0 {
            return Err(listener.pool.exhausted_by());
        }
        let (max, in_group) = (listener.pool.max(), group.held.load(Ordering::Relaxed));
        let reserve = match purpose {
            Purpose::Connection => max / TUNNEL_RESERVE_DIVISOR,
            Purpose::Upstream => max / SHARE_MIN_RESERVE_DIVISOR,
        };
        let factor = match identity {
            Some(_) => CLUSTER_FACTOR,
            None => SOURCE_FACTOR,
        };
        let threshold = free.saturating_mul(factor);
        let own = identity
            .as_ref()
            .map(|identity| identity.held.load(Ordering::Relaxed));
        let is_below_floor = own.is_some_and(|own| own < SHARE_MIN);
        let fits_in_group =
            is_below_floor || own.is_none_or(|own| own.saturating_add(in_group) < threshold);
        let fits = free > reserve && in_group < threshold && fits_in_group;
        // Admits an identity with few descriptors even if others of its cluster hold all of the
        // share.
        let is_identity_below_floor =
            is_below_floor && in_group < max / 4 * 3 && free > max / GROUP_RESERVE_DIVISOR;
        let is_admitted = fits || in_group < SHARE_MIN || is_identity_below_floor;
        is_admitted.then_some(()).ok_or(LimitReached::Share)
    }
}

impl Descriptor {
    /// Returns the holders that it is counted for.
    pub fn holders(&self) -> &Holders {
        &self.0
    }

    /// Moves the count of a connection to its authenticated peer.
    ///
    /// # Errors
    /// The peer's share is used up.
    pub fn move_to(&mut self, holders: &Holders) -> Result<(), LimitReached> {
        holders.check_share(Purpose::Connection)?;
        // The totals of pool and listener do not change.
        holders.add();
        self.0.remove();
        self.0 = holders.clone();
        Ok(())
    }
}

impl LimitReached {
    /// Returns the metric label of the limit for a rejected connection.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Files => "files",
            Self::Memory => "memory",
        }
    }

    /// Returns the reason for a rejected tunnel.
    pub fn reason(self) -> Reason {
        match self {
            Self::Share => Reason::OverShare,
            Self::Files => Reason::Overloaded,
            Self::Memory => Reason::MemoryFull,
        }
    }
}

impl Drop for TunnelDescriptor {
    fn drop(&mut self) {
        for count in self.0.holders().counts() {
            count.tunnels.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.0.remove();
        let listener = &self.0.0.listener;
        listener.held.fetch_sub(1, Ordering::Relaxed);
        listener.pool.used.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the source of an address: one IPv4 address, or an IPv6 /64, as a host has a whole
/// /64.
pub fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests;
