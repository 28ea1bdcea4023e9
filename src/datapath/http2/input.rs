//! Receive buffer of one connection: records are opened in place.
//!
//! The buffer is borrowed from the worker while it holds bytes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use crate::datapath::io::buffer::{BUFFER_BYTES, Buffer};
use crate::datapath::io::copied;
use crate::tls::record::{RECORD_BYTES, Record, RecordError, RecordLayer};

/// Limit of the bytes that are held after a read: four full records. The decryption and the write
/// to the endpoint still find this much in the processor's cache. A bulk transfer has full records,
/// so that reads end where a record ends.
const HELD_BYTES_MAX: usize = 4 * RECORD_BYTES;

/// Limit of the bytes that are parked in memory of their own size.
const PARKED_MAX: usize = 4 * 1024;

/// Bytes that were received and not processed: `start..end` of the buffer.
#[derive(Debug, Default)]
pub struct Input {
    buffer: Option<Buffer>,
    /// The bytes in place of the buffer, while the connection waits for more.
    parked: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Input {
    /// Creates a buffer that holds received bytes already.
    pub fn with(bytes: &[u8]) -> Self {
        let mut input = Self::default();
        if let Some(room) = input.buffer().get_mut(..bytes.len()) {
            room.copy_from_slice(bytes);
            input.end = bytes.len();
        }
        input.release_if_empty();
        input
    }

    /// Reads once from the socket. Returns the number of bytes, 0 at the end.
    pub fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
    ) -> Poll<io::Result<usize>> {
        if BUFFER_BYTES - self.start < HELD_BYTES_MAX {
            // The bytes that are left are less than a record.
            let (start, end) = (self.start, self.end);
            self.buffer().copy_within(start..end, 0);
            copied::count(end - start);
            (self.start, self.end) = (0, end - start);
        }
        let is_parked = !self.parked.is_empty();
        if is_parked {
            let parked = std::mem::take(&mut self.parked);
            self.buffer()[..parked.len()].copy_from_slice(&parked);
            self.end = parked.len();
            self.parked = parked;
        }
        let (start, end) = (self.start, self.end);
        let mut read = ReadBuf::new(&mut self.buffer()[end..start + HELD_BYTES_MAX]);
        let result = Pin::new(socket).poll_read(cx, &mut read);
        let count = read.filled().len();
        if is_parked && result.is_pending() {
            self.end = 0;
            self.buffer = None;
            return Poll::Pending;
        }
        self.parked = Box::default();
        self.end += count;
        self.release_if_empty();
        ready!(result)?;
        Poll::Ready(Ok(count))
    }

    /// Opens the next record. Its payload is in [`Input::bytes`] until the next read. None: the
    /// next record is incomplete.
    pub fn open(&mut self, layer: &mut RecordLayer) -> Result<Option<Record>, RecordError> {
        let (start, end) = (self.start, self.end);
        let Some(buffer) = &mut self.buffer else {
            return Ok(None);
        };
        let Some(mut record) = layer.open(&mut buffer.bytes()[start..end])? else {
            return Ok(None);
        };
        record.payload.start += start;
        record.payload.end += start;
        self.start += record.bytes;
        Ok(Some(record))
    }

    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| buffer.as_ref())
    }

    /// Returns true if the buffer holds bytes.
    pub fn is_held(&self) -> bool {
        self.buffer.is_some()
    }

    /// Returns the buffer to the worker if a few bytes of a record are left in it. Returns the
    /// number of bytes of memory that are held.
    pub fn park(&mut self) -> usize {
        let Some(buffer) = &self.buffer else {
            return self.parked.len();
        };
        let rest = self.end - self.start;
        if rest > PARKED_MAX {
            return BUFFER_BYTES;
        }
        copied::count(rest);
        self.parked = buffer.as_ref()[self.start..self.end].into();
        (self.start, self.end) = (0, 0);
        self.buffer = None;
        rest
    }

    /// Returns the buffer to the worker if it holds nothing.
    pub fn release_if_empty(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            self.buffer = None;
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.buffer.get_or_insert_with(Buffer::borrow).bytes()
    }
}
