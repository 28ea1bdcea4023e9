//! Pool of file descriptors.
//!
//! Sources have shares of it (`crate::limits`), and each listener has a reserve. The limit of open
//! files or the free memory (`DescriptorPool::set_memory`) bounds the pool, whichever is lower.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use thiserror::Error;

use crate::limits::{self, Account, Pool, Resource, Source, SourceMap, Terms};
use crate::reason::Reason;
use crate::tls::INCOMING_BYTES_MAX;

/// Memory estimate of one descriptor: an idle tunnel takes 1 KiB, a connection while it opens up
/// to 11 KiB. Measured usage replaces the
/// estimate every 100 ms.
const DESCRIPTOR_BYTES: usize = 8 * 1024;
/// Divisor of the pool for the reserve that tunnels leave to sources below their floor.
const FLOOR_RESERVE_DIVISOR: usize = 16;
/// Divisor of the pool for the reserve that connections leave to the tunnels of open
/// connections.
const TUNNEL_RESERVE_DIVISOR: usize = 5;

#[derive(Debug)]
pub struct DescriptorPool {
    /// Limit by open files.
    files: usize,
    memory: AtomicUsize,
    pool: Arc<Pool>,
    /// Tunnels of each source, which hold descriptors too.
    tunnels: Arc<Pool>,
    /// Dials in flight, whose endpoint has not answered.
    dials: Arc<Pool>,
}

/// Share of one listener, whose clients hold descriptors.
#[derive(Debug)]
pub struct ListenerReserve {
    pool: Arc<DescriptorPool>,
    held: Arc<AtomicUsize>,
    /// Holders in use. Connections of one source share them.
    holders: Mutex<SourceMap<Weak<HolderAccounts>>>,
}

/// Listener and source that a connection and its tunnels are counted for.
#[derive(Clone, Debug)]
pub struct Holders(Arc<HolderAccounts>);

#[derive(Debug)]
struct HolderAccounts {
    listener: Arc<ListenerReserve>,
    descriptors: Account,
    tunnels: Account,
    dials: Account,
}

/// Descriptor in use, returned on drop. It consists of one pointer, as each tunnel has one.
#[derive(Debug)]
pub struct Descriptor(Holders);

#[derive(Debug)]
pub struct TunnelDescriptor(Descriptor);

/// Descriptor of a tunnel whose endpoint has not answered yet. It consists of one pointer, as the
/// future that opens a tunnel has a place for it at each of its stages.
#[derive(Debug)]
pub struct Dialling(TunnelDescriptor);

/// Descriptor of one end of a pipe, which serves all tunnels of a thread.
#[derive(Debug)]
pub struct PipeEnd(Arc<DescriptorPool>);

/// Reason for which no descriptor is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitReached {
    #[error(
        "the source has used its share of the descriptors; see `strait status` for the holders"
    )]
    Share,
    #[error("no descriptor is left; raise the limit of open files")]
    Files,
    #[error("memory is three quarters full; raise the memory limit")]
    Memory,
}

impl DescriptorPool {
    /// Creates a pool that open files limit to `files` descriptors.
    pub fn new(files: usize) -> Arc<Self> {
        Arc::new(Self {
            files,
            memory: AtomicUsize::new(usize::MAX),
            pool: Pool::new(Resource::Descriptors, files),
            tunnels: Pool::new(Resource::Tunnels, usize::MAX),
            dials: Pool::new(Resource::Dials, dials_max(files)),
        })
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Limits the pool by the memory that is free now, in bytes.
    pub fn set_memory(&self, free: usize) {
        let max = self.pool.used().saturating_add(free / DESCRIPTOR_BYTES);
        self.memory.store(max, Ordering::Relaxed);
        self.pool.set_max(self.files.min(max));
        self.dials.set_max(dials_max(self.files.min(max)));
    }

    /// Returns the limit of concurrent handshakes, of [`INCOMING_BYTES_MAX`] each: a quarter of the
    /// files, and an eighth of the memory.
    pub fn handshakes_max(&self) -> usize {
        let by_memory =
            self.memory.load(Ordering::Relaxed) / (INCOMING_BYTES_MAX / DESCRIPTOR_BYTES) / 8;
        (self.files / 4).min(by_memory)
    }

    /// Takes a descriptor for one end of a pipe. Pipes only save time, so they leave a quarter
    /// of the pool to connections and tunnels.
    pub fn pipe_end(self: &Arc<Self>) -> Option<PipeEnd> {
        let max = self.pool.max();
        let is_taken = self.pool.take_common(1, max - max / 4);
        is_taken.then(|| PipeEnd(Arc::clone(self)))
    }

    /// Registers a listener, whose part of the pool is reserved until
    /// [`ListenerReserve::release`].
    pub fn register_listener(self: &Arc<Self>) -> Arc<ListenerReserve> {
        let held = self.pool.reserve_for_listener();
        let pool = Arc::clone(self);
        Arc::new(ListenerReserve { pool, held, holders: Mutex::default() })
    }

    /// Returns the pools of descriptors, tunnels and dials.
    pub fn pools(&self) -> [&Arc<Pool>; 3] {
        [&self.pool, &self.tunnels, &self.dials]
    }

    /// Returns the identities of peers with open tunnels, and the number of these.
    pub fn tunnels(&self) -> Vec<(Arc<str>, usize)> {
        let of_peer = |(source, open): (Source, usize)| {
            let is_peer = source.parent() == Some(source.root());
            let name = source.principal().filter(|_| is_peer)?;
            Some((Arc::clone(name), open))
        };
        self.tunnels.holders().into_iter().filter_map(of_peer).collect()
    }

    pub fn free_percent(&self) -> u32 {
        let max = self.pool.max().max(1);
        u32::try_from(self.pool.free().saturating_mul(100) / max).unwrap_or(100)
    }

    /// Returns the limit that a request has reached.
    fn limit_reached(&self, limit: limits::LimitReached) -> LimitReached {
        match limit {
            limits::LimitReached::Share(_) => LimitReached::Share,
            limits::LimitReached::Full(_) if self.pool.max() < self.files => LimitReached::Memory,
            limits::LimitReached::Full(_) => LimitReached::Files,
        }
    }
}

/// Returns the limit of dials in flight: half of the descriptors, as an endpoint that does not
/// answer holds one for two seconds.
fn dials_max(descriptors: usize) -> usize {
    descriptors.div_ceil(2)
}

impl ListenerReserve {
    /// Returns whether a connection could be accepted from a source that holds less than its
    /// floor.
    pub fn has_free_descriptor(&self) -> bool {
        self.free() > 0
    }

    /// Ends the reserve of a listener that accepts no more. Its connections keep the share
    /// alive.
    pub fn release(&self) {
        self.pool.pool.end_reserve(&self.held);
    }

    /// Returns the holders of a connection before its peer is authenticated.
    pub fn source(self: &Arc<Self>, address: IpAddr) -> Holders {
        self.holders(&Source::prefix(address))
    }

    pub fn holders(self: &Arc<Self>, source: &Source) -> Holders {
        let mut all = self.holders.lock();
        if let Some(accounts) = all.get(source).and_then(Weak::upgrade) {
            return Holders(accounts);
        }
        let accounts = Arc::new(HolderAccounts {
            listener: Arc::clone(self),
            descriptors: self.pool.pool.account(source),
            tunnels: self.pool.tunnels.account(source),
            dials: self.pool.dials.account(source),
        });
        all.insert(source.clone(), Arc::downgrade(&accounts));
        Holders(accounts)
    }

    /// Returns the number of descriptors that are free for this listener's clients, without the
    /// reserves of other listeners.
    fn free(&self) -> usize {
        self.pool.pool.free_for(&self.held)
    }

    fn terms(&self, reserve_divisor: usize) -> Terms {
        Terms { free: self.free(), reserve: self.pool.pool.max() / reserve_divisor }
    }
}

impl Drop for ListenerReserve {
    fn drop(&mut self) {
        self.release();
    }
}

impl Drop for HolderAccounts {
    fn drop(&mut self) {
        let (mut all, source) = (self.listener.holders.lock(), self.descriptors.source());
        // Another thread may have replaced the entry after the last reference was dropped.
        if all.get(source).is_some_and(|it| it.strong_count() == 0) {
            all.remove(source);
        }
    }
}

impl Holders {
    pub fn source(&self) -> &Source {
        self.0.descriptors.source()
    }

    /// Returns the holders of another source at the same listener.
    pub fn of(&self, source: &Source) -> Self {
        self.0.listener.holders(source)
    }

    /// Returns the holders of a connection of the same listener once its peer is authenticated. A
    /// client of a binding stays a part of that.
    pub fn for_identity(&self, cluster: &Arc<str>, principal: &Arc<str>) -> Self {
        let group = match self.source().parent() {
            Some(binding) if binding.is_binding() => binding.clone(),
            _ => Source::cluster(cluster),
        };
        self.of(&group.identity(principal))
    }

    pub fn connection(&self) -> Result<Descriptor, LimitReached> {
        self.take(TUNNEL_RESERVE_DIVISOR)
    }

    /// Takes a descriptor for a tunnel to an endpoint, and a place for its dial.
    pub fn dial(&self) -> Result<Dialling, LimitReached> {
        let dial = self.0.dials.take(1);
        let dial = dial.map_err(|limit| self.0.listener.pool.limit_reached(limit))?;
        let descriptor = self.take(FLOOR_RESERVE_DIVISOR)?;
        dial.keep();
        Ok(Dialling(self.tunnel_descriptor(descriptor)))
    }

    fn tunnel_descriptor(&self, descriptor: Descriptor) -> TunnelDescriptor {
        self.0.tunnels.charge(1).keep();
        TunnelDescriptor(descriptor)
    }

    /// Counts a descriptor, which the account holds already, at the listener.
    fn descriptor(&self) -> Descriptor {
        self.0.listener.held.fetch_add(1, Ordering::Relaxed);
        Descriptor(self.clone())
    }

    fn take(&self, reserve_divisor: usize) -> Result<Descriptor, LimitReached> {
        let listener = &self.0.listener;
        let terms = listener.terms(reserve_divisor);
        let taken = self.0.descriptors.take_on(1, terms);
        taken.map_err(|limit| listener.pool.limit_reached(limit))?.keep();
        Ok(self.descriptor())
    }
}

impl Descriptor {
    pub fn holders(&self) -> &Holders {
        &self.0
    }

    /// Moves the count of a connection to its authenticated peer.
    pub fn move_to(&mut self, holders: &Holders) -> Result<(), LimitReached> {
        let listener = &holders.0.listener;
        let mut terms = listener.terms(TUNNEL_RESERVE_DIVISOR);
        // The connection itself has taken one.
        terms.free = terms.free.max(1);
        let checked = holders.0.descriptors.check_on(1, terms);
        checked.map_err(|limit| listener.pool.limit_reached(limit))?;
        // The totals of pool and listener do not change.
        holders.0.descriptors.charge(1).keep();
        self.0.0.descriptors.give_back(1);
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

    pub fn reason(self) -> Reason {
        match self {
            Self::Share => Reason::OverShare,
            Self::Files => Reason::Overloaded,
            Self::Memory => Reason::MemoryFull,
        }
    }
}

impl Dialling {
    pub fn source(&self) -> &Source {
        self.0.source()
    }

    /// Ends the dial. The tunnel has a descriptor of its own before that of the dial goes.
    pub fn connected(self) -> TunnelDescriptor {
        let holders = self.0.0.holders();
        holders.0.descriptors.charge(1).keep();
        holders.tunnel_descriptor(holders.descriptor())
    }
}

impl Drop for Dialling {
    fn drop(&mut self) {
        self.0.0.holders().0.dials.give_back(1);
    }
}

impl TunnelDescriptor {
    pub fn source(&self) -> &Source {
        self.0.holders().source()
    }
}

impl Drop for TunnelDescriptor {
    fn drop(&mut self) {
        self.0.holders().0.tunnels.give_back(1);
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let HolderAccounts { listener, descriptors, .. } = &*self.0.0;
        descriptors.give_back(1);
        listener.held.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        self.0.pool.give_back(1);
    }
}

#[cfg(test)]
mod tests;
