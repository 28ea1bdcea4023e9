//! Buffers for forwarded bytes, and compaction of bytes that wait.
//!
//! Each thread lends buffers and takes them back when they are empty. Small pieces that wait are
//! copied out of the large buffers that they arrived in.

use std::cell::RefCell;
use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

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

    /// Returns the whole buffer.
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

/// Size in bytes below which a piece that waits is copied out of its buffer.
const SMALL_PIECE_BYTES: usize = 4 * 1024;
/// Number of pieces of any size that may keep their buffers.
const UNCOMPACTED_PIECES_MAX: usize = 8;

/// Merges small pieces that wait. Each is a slice of a much larger h2 buffer and keeps all of it:
/// one byte in its own frame would hold 8 KiB.
pub fn compact(pieces: &mut VecDeque<Bytes>) {
    if pieces.len() <= UNCOMPACTED_PIECES_MAX {
        return;
    }
    let mut together = BytesMut::new();
    for piece in std::mem::take(pieces) {
        if piece.len() < SMALL_PIECE_BYTES {
            together.extend_from_slice(&piece);
            continue;
        }
        if !together.is_empty() {
            pieces.push_back(together.split().freeze());
        }
        pieces.push_back(piece);
    }
    if !together.is_empty() {
        pieces.push_back(together.freeze());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_pieces_that_wait_leave_their_buffers_and_keep_their_order() {
        let whole = Bytes::from(
            (0..200_000_u32)
                .map(|at| (at / 3).to_be_bytes()[3])
                .collect::<Vec<_>>(),
        );
        let (mut pieces, mut at) = (VecDeque::new(), 0);
        for size in [1, 5000, 1, 2, 3, 9000, 4095, 4096, 1, 1, 1, 70_000, 8] {
            pieces.push_back(whole.slice(at..at + size));
            at += size;
        }
        compact(&mut pieces);
        assert!(pieces.len() == 9, "{} pieces", pieces.len());
        assert!(pieces.iter().flatten().eq(whole[..at].iter()));
        let mut few: VecDeque<_> = (0..UNCOMPACTED_PIECES_MAX)
            .map(|_| whole.slice(..1))
            .collect();
        compact(&mut few);
        assert_eq!(few.len(), UNCOMPACTED_PIECES_MAX);
    }

    #[test]
    fn a_buffer_is_used_again_and_few_are_kept() {
        drop(Buffer::borrow());
        drop(Buffer::borrow());
        assert_eq!(SPARES.with_borrow(Vec::len), 1);
        drop((0..20).map(|_| Buffer::borrow()).collect::<Vec<_>>());
        assert_eq!(SPARES.with_borrow(Vec::len), SPARES_MAX);
    }
}
