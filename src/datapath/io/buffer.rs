//! Buffers for forwarded bytes.
//!
//! Each thread keeps spare buffers. A connection borrows one while it holds bytes, and dropping it
//! returns it.

use std::cell::RefCell;

/// Size of a buffer in bytes: eight TLS records.
pub const BUFFER_BYTES: usize = 128 * 1024;
/// Limit of spare buffers per thread. More connections seldom hold one at the same time.
const SPARES_MAX: usize = 8;

thread_local! {
    static SPARES: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of [`BUFFER_BYTES`] that returns to the thread on drop. Its content is arbitrary at
/// first.
#[derive(Debug)]
pub struct Buffer(Box<[u8]>);

impl Buffer {
    /// Borrows a spare buffer, or allocates one.
    pub fn borrow() -> Self {
        let spare = SPARES.with_borrow_mut(Vec::pop);
        Self(spare.unwrap_or_else(|| vec![0; BUFFER_BYTES].into()))
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        // The spare buffers of a thread that ends may be gone already.
        let _ = SPARES.try_with(|spares| {
            let mut spares = spares.borrow_mut();
            if spares.len() < SPARES_MAX {
                spares.push(buffer);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_and_few_are_kept() {
        drop(Buffer::borrow());
        drop(Buffer::borrow());
        assert_eq!(SPARES.with_borrow(Vec::len), 1);
        drop((0..20).map(|_| Buffer::borrow()).collect::<Vec<_>>());
        assert_eq!(SPARES.with_borrow(Vec::len), SPARES_MAX);
    }
}
