//! The pool of descriptors, and the share of it that each holder may take.
//!
//! A holder is a cluster, an identity within it, or a source address without an identity. Shares
//! are dynamic thresholds, as in the buffers of switches (Choudhury and Hahne, 1998): a holder may
//! take another descriptor only while it holds less than a multiple of what is free. This refuses
//! nobody while half of the pool is free, lets a lone holder take half, shrinks every share as the
//! pool fills, and needs no knowledge of how many holders there are. The pool is as large as the
//! limit of open files allows, or as memory does (`Pool::set_memory`).

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use arc_swap::ArcSwap;

use crate::reason::Reason;

/// The memory that one descriptor stands for: a tunnel costs 2.7 to 11 KiB. What is measured
/// replaces the estimate every 100 ms.
const DESCRIPTOR_BYTES: usize = 8 * 1024;
/// Descriptors that a cluster, an identity or a source may take whatever the others hold: a
/// connection, and some tunnels.
const FLOOR: usize = 8;
/// A cluster may hold twice what is free: two thirds of the pool when it is alone, so that one
/// identity of it, which may hold half, leaves room for its siblings.
const CLUSTER_FACTOR: usize = 2;
/// A source address may hold as much as is free: half of the pool when it is alone.
const SOURCE_FACTOR: usize = 1;
/// The part of the pool that each listener always finds free of the others' descriptors: 1/16, and
/// less where there are more than eight listeners, as half of the pool stays common.
const LISTENER_PARTS: usize = 16;
/// The part that only holders below [`FLOOR`] may take.
const FLOOR_PARTS: usize = 16;
/// The part that only clusters and sources below [`FLOOR`] may take. Identities below it may take
/// the rest of the above, while their cluster holds less than three quarters of the pool.
const GROUP_PARTS: usize = 32;
/// The part into which connections do not grow, so that those that are open can have tunnels.
const TUNNEL_PARTS: usize = 5;

/// All descriptors of the data path.
#[derive(Debug)]
pub struct Pool {
    /// As the limit of open files allows.
    files: usize,
    /// As memory allows.
    memory: AtomicUsize,
    used: AtomicUsize,
    listeners: ArcSwap<Vec<Arc<AtomicUsize>>>,
    /// Those that hold something, or have a connection. An entry goes with its last holder.
    holders: Mutex<HashMap<Name, Weak<Count>>>,
}

/// A party that descriptors are counted for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// All identities of one cluster.
    Cluster(Arc<str>),
    /// One SPIFFE identity.
    Identity(Arc<str>),
    /// One IPv4 address, or one IPv6 /64.
    Source(IpAddr),
}

/// Number of descriptors that one party holds.
#[derive(Debug)]
struct Count {
    name: Name,
    held: AtomicUsize,
    pool: Arc<Pool>,
}

/// A listener, whose clients hold descriptors.
#[derive(Debug)]
pub struct ListenerShare {
    pool: Arc<Pool>,
    held: Arc<AtomicUsize>,
}

/// Those for whom a connection and its tunnels are counted.
#[derive(Clone, Debug)]
pub struct Holder(Arc<Parties>);

#[derive(Debug)]
struct Parties {
    listener: Arc<ListenerShare>,
    /// The cluster, or the source.
    group: Arc<Count>,
    identity: Option<Arc<Count>>,
}

/// A descriptor that is in use, given back on drop.
#[derive(Debug)]
pub struct Descriptor(Holder);

/// A descriptor of an end of a pipe, which serves all tunnels of a thread.
#[derive(Debug)]
pub struct PipeEnd(Arc<Pool>);

/// Reason for which no descriptor is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The holder has its share.
    Share,
    /// The process may open no more files.
    Files,
    /// The process has no memory for more.
    Memory,
}

/// Purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Connection,
    Upstream,
}

impl Pool {
    /// A pool of so many descriptors.
    pub fn new(files: usize) -> Arc<Self> {
        Arc::new(Self {
            files,
            memory: AtomicUsize::new(usize::MAX),
            used: AtomicUsize::new(0),
            listeners: ArcSwap::default(),
            holders: Mutex::default(),
        })
    }

    /// Bounds the pool by the memory that is free at the moment, in bytes.
    pub fn set_memory(&self, free: usize) {
        let used = self.used.load(Ordering::Relaxed);
        let max = used.saturating_add(free / DESCRIPTOR_BYTES);
        self.memory.store(max, Ordering::Relaxed);
    }

    /// Handshakes that the pool has places for, of 32 KiB each: a quarter of the files, and an
    /// eighth of the memory.
    pub fn handshakes(&self) -> usize {
        let by_memory = self.memory.load(Ordering::Relaxed) / (32 * 1024 / DESCRIPTOR_BYTES) / 8;
        (self.files / 4).min(by_memory)
    }

    /// Takes a descriptor for an end of a pipe. Pipes only save time, so they leave a quarter of
    /// the pool to connections and tunnels.
    pub fn pipe_end(self: &Arc<Self>) -> Option<PipeEnd> {
        let max = self.max();
        let room = |used: usize| (used < max - max / 4).then_some(used + 1);
        let order = Ordering::Relaxed;
        self.used.fetch_update(order, order, room).ok()?;
        Some(PipeEnd(Arc::clone(self)))
    }

    /// Registers a listener, whose part of the pool is reserved until [`ListenerShare::release`].
    pub fn listener(self: &Arc<Self>) -> Arc<ListenerShare> {
        let held = Arc::new(AtomicUsize::new(0));
        self.listeners.rcu(|all| {
            let mut all = Vec::clone(all);
            all.push(Arc::clone(&held));
            all
        });
        let pool = Arc::clone(self);
        Arc::new(ListenerShare { pool, held })
    }

    /// The holders with most, and how many descriptors there are and are used.
    pub fn usage(&self, most: usize) -> Usage {
        let live: Vec<_> = self.holders().values().filter_map(Weak::upgrade).collect();
        let mut holders: Vec<_> = live
            .iter()
            .map(|count| (count.name.clone(), count.held.load(Ordering::Relaxed)))
            .filter(|&(_, held)| held > 0)
            .collect();
        holders.sort_by(|a, b| (b.1, a.0.to_string()).cmp(&(a.1, b.0.to_string())));
        holders.truncate(most);
        Usage {
            used: self.used.load(Ordering::Relaxed),
            max: self.max(),
            holders,
        }
    }

    fn max(&self) -> usize {
        self.files.min(self.memory.load(Ordering::Relaxed))
    }

    /// The reason for which the pool is exhausted.
    fn full(&self) -> Full {
        match self.memory.load(Ordering::Relaxed) < self.files {
            true => Full::Memory,
            false => Full::Files,
        }
    }

    fn count(self: &Arc<Self>, name: Name) -> Arc<Count> {
        let mut holders = self.holders();
        if let Some(count) = holders.get(&name).and_then(Weak::upgrade) {
            return count;
        }
        let count = Arc::new(Count {
            name: name.clone(),
            held: AtomicUsize::new(0),
            pool: Arc::clone(self),
        });
        holders.insert(name, Arc::downgrade(&count));
        count
    }

    /// The map is whole at every unlock, so a poisoned lock is as good as any.
    fn holders(&self) -> MutexGuard<'_, HashMap<Name, Weak<Count>>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Usage of the pool, with its largest holders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Descriptors in use.
    pub used: usize,
    /// Descriptors that may be in use.
    pub max: usize,
    /// The holders with most, the largest first.
    pub holders: Vec<(Name, usize)>,
}

impl Drop for Count {
    fn drop(&mut self) {
        let mut holders = self.pool.holders();
        // Another thread may have found the entry dead and replaced it.
        if holders
            .get(&self.name)
            .is_some_and(|it| it.strong_count() == 0)
        {
            holders.remove(&self.name);
        }
    }
}

impl ListenerShare {
    /// Returns whether a connection could be accepted from a source that holds less than `FLOOR`.
    pub fn has_room(&self) -> bool {
        self.free() > 0
    }

    /// Ends the reserve of a listener that accepts no more. Its connections still hold the share.
    pub fn release(&self) {
        self.pool.listeners.rcu(|all| {
            let others = all.iter().filter(|it| !Arc::ptr_eq(it, &self.held));
            others.cloned().collect::<Vec<_>>()
        });
    }

    /// The holder that a connection is counted for before its peer is known.
    pub fn source(self: &Arc<Self>, address: IpAddr) -> Holder {
        Holder(Arc::new(Parties {
            listener: Arc::clone(self),
            group: self.pool.count(Name::Source(source(address))),
            identity: None,
        }))
    }

    /// Returns the number of descriptors that are free to this listener's clients, without those
    /// that are reserved for other listeners.
    fn free(&self) -> usize {
        let max = self.pool.max();
        let listeners = self.pool.listeners.load();
        let reserve = max / LISTENER_PARTS.max(2 * listeners.len());
        let others = listeners.iter().filter(|it| !Arc::ptr_eq(it, &self.held));
        let unclaimed: usize = others
            .map(|held| reserve.saturating_sub(held.load(Ordering::Relaxed)))
            .sum();
        let used = self.pool.used.load(Ordering::Relaxed);
        max.saturating_sub(used).saturating_sub(unclaimed)
    }
}

impl Drop for ListenerShare {
    fn drop(&mut self) {
        self.release();
    }
}

impl Holder {
    /// The holder that a connection of the same listener is counted for once its peer is known.
    pub fn identified(&self, cluster: &Arc<str>, principal: &Arc<str>) -> Self {
        let pool = &self.0.listener.pool;
        Self(Arc::new(Parties {
            listener: Arc::clone(&self.0.listener),
            group: pool.count(Name::Cluster(Arc::clone(cluster))),
            identity: Some(pool.count(Name::Identity(Arc::clone(principal)))),
        }))
    }

    /// Takes a descriptor for a connection.
    ///
    /// # Errors
    /// The holder has its share, or none is left.
    pub fn connection(&self) -> Result<Descriptor, Full> {
        self.take(Use::Connection)
    }

    /// Takes a descriptor for a socket to an endpoint.
    ///
    /// # Errors
    /// As [`Holder::connection`].
    pub fn upstream(&self) -> Result<Descriptor, Full> {
        self.take(Use::Upstream)
    }

    /// Judges and counts. Threads that take at once may pass a share by one each, but never the
    /// pool's size.
    fn take(&self, purpose: Use) -> Result<Descriptor, Full> {
        let pool = &self.0.listener.pool;
        self.judge(purpose)?;
        let room = |used: usize| (used < pool.max()).then_some(used + 1);
        let order = Ordering::Relaxed;
        let taken = pool.used.fetch_update(order, order, room);
        taken.map_err(|_| pool.full())?;
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

    fn counts(&self) -> impl Iterator<Item = &Arc<Count>> {
        let Parties {
            group, identity, ..
        } = &*self.0;
        std::iter::once(group).chain(identity)
    }

    fn judge(&self, purpose: Use) -> Result<(), Full> {
        let Parties {
            listener,
            group,
            identity,
        } = &*self.0;
        let free = listener.free();
        if free == 0 {
            return Err(listener.pool.full());
        }
        let (max, in_group) = (listener.pool.max(), group.held.load(Ordering::Relaxed));
        let kept = match purpose {
            Use::Connection => max / TUNNEL_PARTS,
            Use::Upstream => max / FLOOR_PARTS,
        };
        let factor = match identity {
            Some(_) => CLUSTER_FACTOR,
            None => SOURCE_FACTOR,
        };
        let threshold = free.saturating_mul(factor);
        let own = identity
            .as_ref()
            .map(|identity| identity.held.load(Ordering::Relaxed));
        let has_little = own.is_some_and(|own| own < FLOOR);
        let fits_in_group =
            has_little || own.is_none_or(|own| own.saturating_add(in_group) < threshold);
        let fits = free > kept && in_group < threshold && fits_in_group;
        // A quiet identity gets in though its siblings hold all that the cluster may.
        let is_quiet = has_little && in_group < max / 4 * 3 && free > max / GROUP_PARTS;
        match fits || in_group < FLOOR || is_quiet {
            true => Ok(()),
            false => Err(Full::Share),
        }
    }
}

impl Descriptor {
    /// Those that it is counted for.
    pub fn holder(&self) -> &Holder {
        &self.0
    }

    /// Counts a connection for its verified peer from now on.
    ///
    /// # Errors
    /// The peer has its share already.
    pub fn hand_over(&mut self, holder: &Holder) -> Result<(), Full> {
        holder.judge(Use::Connection)?;
        // The pool and the listener have as many as before.
        holder.add();
        self.0.remove();
        self.0 = holder.clone();
        Ok(())
    }
}

impl Full {
    /// The limit that a connection is turned away by, for its counter.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Files => "files",
            Self::Memory => "memory",
        }
    }

    /// The reason of a tunnel that is rejected.
    pub fn reason(self) -> Reason {
        match self {
            Self::Share => Reason::OverShare,
            Self::Files => Reason::Overloaded,
            Self::Memory => Reason::MemoryFull,
        }
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Share => {
                "the source has its share of the descriptors; see `strait status` for the holders"
            }
            Self::Files => "no descriptor is left; raise the limit of open files",
            Self::Memory => "memory is three quarters full; raise the memory limit",
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster(name) => write!(f, "cluster {name}"),
            Self::Identity(name) => write!(f, "identity {name}"),
            Self::Source(IpAddr::V4(ip)) => write!(f, "source {ip}"),
            Self::Source(IpAddr::V6(ip)) => write!(f, "source {ip}/64"),
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

/// One IPv4 address, or one IPv6 network of 64 bits: a host has a whole such network.
pub fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests;
