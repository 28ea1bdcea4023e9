//! Buffers for bytes that pass through: borrowed from the thread, and given back when empty.

use std::cell::RefCell;

/// The size of a buffer: four TLS records.
pub const BUFFER_BYTES: usize = 64 * 1024;
/// Spare buffers of a thread. More connections than these seldom hold one at the same time.
const SPARES_MAX: usize = 8;

thread_local! {
    static SPARES: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// [`BUFFER_BYTES`] bytes that go back to the thread on drop. What is in them is of no meaning.
#[derive(Debug)]
pub struct Buffer(Box<[u8]>);

impl Buffer {
    /// Borrows one, or makes one.
    pub fn borrow() -> Self {
        let spare = SPARES.with_borrow_mut(Vec::pop);
        Self(spare.unwrap_or_else(|| vec![0; BUFFER_BYTES].into()))
    }

    /// The whole buffer.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        // There are no spares any more while the thread ends.
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
