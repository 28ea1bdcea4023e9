//! Admission control: limits of the handshakes and descriptors that unauthenticated clients and
//! floods of connections may take.
//!
//! All limits are on by default, with values that a busy gateway does not reach. Work over a limit
//! is rejected at once, or evicts the work that has waited longest. A good client finishes its
//! handshake within a few round trips, so an old handshake is slow on purpose.

use std::sync::Arc;

use crate::limits::{Place, Places, Resource, Source};

use super::descriptors::DescriptorPool;

/// Limit of handshakes in flight. Each holds at most 72 KiB for at most 5 s: 72 MiB in all. The
/// limit is lower if files or memory are short ([`DescriptorPool::handshakes_max`]).
const HANDSHAKES_MAX: usize = 1024;
/// Number of descriptors kept back for listeners, epoll, files, and 64 connections to the admin
/// ports.
const DESCRIPTORS_RESERVED: usize = 128;

/// Current admissions: the descriptor pool and the handshakes in flight.
#[derive(Debug)]
pub struct Admission {
    /// Descriptor pool, which divides the descriptors among their holders.
    pub pool: Arc<DescriptorPool>,
    pub handshakes: Arc<Places>,
}

/// Detail of a handshake that was evicted, for the log.
pub const EVICTED_DETAIL: &str = "handshake evicted: limit of concurrent handshakes reached, \
     oldest of the source with the most";

impl Admission {
    /// Creates the limits for a process that may open `descriptors` files.
    pub fn new(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self {
            pool: DescriptorPool::new(descriptors.saturating_sub(DESCRIPTORS_RESERVED).max(1)),
            handshakes: Places::new(Resource::Handshakes, HANDSHAKES_MAX),
        }
    }

    /// Takes a place for a handshake. Returns none if the source holds too many already. Load
    /// balancers replace the oldest of theirs: a peer behind one may send nothing.
    pub fn acquire_handshake(&self, source: &Source) -> Option<Place> {
        let max = self.pool.handshakes_max().clamp(1, HANDSHAKES_MAX);
        self.handshakes.pool().set_max(max);
        if source.is_balancers() {
            return self.handshakes.take_or_replace(source);
        }
        self.handshakes.take(source)
    }
}
