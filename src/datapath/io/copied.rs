//! Number of payload bytes that the byte path copies itself, for `make parts`.
//!
//! Only builds with the feature `count-copies` count. Early bytes of a tunnel that is not open yet
//! are not part of the byte path.

#[cfg(feature = "count-copies")]
thread_local! {
    static COPIED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[cfg(feature = "count-copies")]
pub fn count(bytes: usize) {
    COPIED.set(COPIED.get() + bytes as u64);
}

/// Does nothing without the feature `count-copies`.
#[cfg(not(feature = "count-copies"))]
pub fn count(_bytes: usize) {}

/// Returns the number of bytes that this thread has copied.
#[cfg(feature = "count-copies")]
pub fn total() -> u64 {
    COPIED.get()
}
