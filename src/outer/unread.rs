//! Received bytes of a tunnel that were not read.
//!
//! A frame of one byte would take 32 bytes of the queue, and keep the read buffer of its connection
//! alive. Small frames are therefore copied into chunks, so that the memory is about that of the
//! bytes, which the window of the stream limits.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

/// Size from which a frame is kept as it is. The connection reads into buffers of up to 64 KiB.
const WHOLE_MIN: usize = 4 * 1024;
/// Size at which a chunk of small frames is complete.
const CHUNK: usize = 16 * 1024;

#[derive(Debug, Default)]
pub(super) struct Unread {
    whole: VecDeque<Bytes>,
    /// Small frames after `whole`.
    chunk: BytesMut,
    bytes: usize,
}

impl Unread {
    pub(super) const fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        let is_whole = frame.len() >= WHOLE_MIN;
        if !is_whole {
            self.chunk.extend_from_slice(&frame);
        }
        if is_whole || self.chunk.len() >= CHUNK {
            self.complete_chunk();
        }
        if is_whole {
            self.whole.push_back(frame);
        }
    }

    /// Moves bytes into `room`, and returns their number.
    pub(super) fn read(&mut self, mut room: &mut [u8]) -> usize {
        let mut count = 0;
        while !room.is_empty() {
            if self.whole.is_empty() {
                self.complete_chunk();
            }
            let Some(front) = self.whole.front_mut() else {
                break;
            };
            let length = room.len().min(front.len());
            let (now, rest) = std::mem::take(&mut room).split_at_mut(length);
            front.copy_to_slice(now);
            (room, count) = (rest, count + length);
            if front.is_empty() {
                self.whole.pop_front();
            }
        }
        self.bytes -= count;
        count
    }

    fn complete_chunk(&mut self) {
        if !self.chunk.is_empty() {
            let chunk = std::mem::take(&mut self.chunk);
            self.whole.push_back(chunk.freeze());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_of_small_frames_takes_little_more_than_its_bytes() {
        const WINDOW: usize = 640 * 1024;
        for size in [1, 100, WHOLE_MIN - 1, WHOLE_MIN] {
            let mut unread = Unread::default();
            for at in 0..WINDOW / size {
                let byte = at.to_le_bytes()[0];
                unread.push(Bytes::from(vec![byte; size]));
            }
            assert_eq!(unread.len(), WINDOW / size * size);
            let most = WINDOW / WHOLE_MIN;
            assert!(unread.whole.len() <= most, "{} frames", unread.whole.len());
            let (mut read, mut at) = (vec![0; size], 0);
            while unread.read(&mut read) == size {
                assert!(read.iter().all(|byte| *byte == at), "frame {at}");
                at = at.wrapping_add(1);
            }
            assert_eq!(unread.len(), 0);
        }
    }

    #[test]
    fn frames_of_all_sizes_keep_their_order() {
        let mut unread = Unread::default();
        let sizes = [1, WHOLE_MIN, 0, 3, 5, WHOLE_MIN + 1, 7];
        let want: Vec<u8> = (1..).zip(sizes).flat_map(|(byte, size)| vec![byte; size]).collect();
        for (byte, size) in (1..).zip(sizes) {
            unread.push(Bytes::from(vec![byte; size]));
        }
        let mut read = vec![0; want.len() + 1];
        assert_eq!(unread.read(&mut read), want.len());
        assert!(read[..want.len()] == want);
        unread.push(Bytes::new());
        assert_eq!((unread.len(), unread.whole.len()), (0, 0));
    }
}
