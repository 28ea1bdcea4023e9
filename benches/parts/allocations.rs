//! Allocator that counts for each thread.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;
use std::ops::Sub;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tikv_jemallocator::Jemalloc;

/// The binary's own allocator, with a count of each thread's allocations.
pub struct Counting;

/// Usage of a thread so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Number of allocations; a growing reallocation counts again.
    pub count: u64,
    /// Bytes allocated, including those freed since.
    pub bytes: u64,
    /// Processor time.
    pub time: Duration,
    /// Payload bytes copied by the byte path; none without the feature `count-copies`.
    pub copied: Option<u64>,
}

thread_local! {
    static ALLOCATED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

impl Usage {
    /// Returns the usage of this thread so far.
    pub fn of_this_thread() -> Self {
        let (count, bytes) = ALLOCATED.get();
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Self {
            count,
            bytes,
            time: time.try_into().expect("no negative time"),
            #[cfg(feature = "count-copies")]
            copied: Some(strait::datapath::io::copied::total()),
            #[cfg(not(feature = "count-copies"))]
            copied: None,
        }
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            count: self.count - earlier.count,
            bytes: self.bytes - earlier.bytes,
            time: self.time - earlier.time,
            copied: self.copied.zip(earlier.copied).map(|(now, then)| now - then),
        }
    }
}

fn note(bytes: usize) {
    // A thread that ends has no counter any more, and may still allocate.
    let _ = ALLOCATED.try_with(|allocated| {
        let (count, sum) = allocated.get();
        allocated.set((count + 1, sum + bytes as u64));
    });
}

// SAFETY: every call is forwarded to jemalloc unchanged; counting neither allocates nor panics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { Jemalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { Jemalloc.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller keeps the contract.
        unsafe { Jemalloc.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { Jemalloc.dealloc(place, layout) }
    }
}
