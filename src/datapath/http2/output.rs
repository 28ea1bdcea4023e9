//! Send buffer of one connection: frames are gathered in TLS records, sealed in place, and sent
//! by one system call.
//!
//! A record is laid out as header, plaintext and room for its trailer. Endpoints are read straight
//! into the plaintext of consecutive records, behind the header of a DATA frame. The buffer is
//! borrowed from the worker while it holds bytes.

use std::io::{self, IoSliceMut};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustls::AlertDescription;
use tokio::io::AsyncWrite;

use crate::datapath::io::buffer::{BUFFER_BYTES, Buffer};
use crate::tls::record::{
    ContentType, HEADER_BYTES as RECORD_HEADER, KEY_UPDATE_BYTES, PLAINTEXT_MAX, RECORD_BYTES,
    RecordError, RecordLayer, TRAILER_BYTES,
};

use super::frame::{FrameHeader, HEADER_BYTES, flag, kind};

/// Limit of records that one read of an endpoint fills. With more, the kernel copies into memory
/// that has left the processor's cache.
const READ_RECORDS: usize = 3;
/// Limit of bytes of endpoints that are gathered before they are sent.
const GATHERED_MAX: usize = READ_RECORDS * RECORD_BYTES;
/// Smallest rest of a record that an endpoint is read into.
const READ_MIN: usize = 1024;

/// Records that are not sent yet. A [`RecordError`] means that one could not be sealed.
#[derive(Debug, Default)]
pub struct Output {
    buffer: Option<Buffer>,
    /// First byte that was not sent.
    sent: usize,
    /// Start of the record that is filled: everything before it is sealed.
    record: usize,
    /// End of the plaintext in that record; equal to `record` if it has none.
    end: usize,
    /// True if the last send did not take everything.
    is_blocked: bool,
    /// Number of bytes that were sent so far, which wraps.
    position: usize,
}

/// Limits of one read of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct ReadRoom {
    pub bytes: usize,
    pub records: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadBytes {
    pub bytes: usize,
    pub frames: usize,
    /// True if the endpoint had no more.
    pub is_drained: bool,
}

impl Output {
    /// Returns true if the peer did not take everything that was sent last.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Returns true if an endpoint may be read into the buffer.
    pub fn has_room(&self) -> bool {
        !self.is_blocked && self.end < GATHERED_MAX - READ_MIN
    }

    fn unsent(&self) -> usize {
        self.end - self.sent
    }

    /// Returns the position after all bytes that were written so far.
    pub fn written_position(&self) -> usize {
        self.position.wrapping_add(self.unsent())
    }

    /// Returns true if all bytes before `position` were sent. Positions are those of
    /// [`Output::written_position`].
    pub fn has_sent(&self, position: usize) -> bool {
        // The difference is at most the size of the buffer, so it tells the order despite the
        // wrap.
        self.position.wrapping_sub(position) <= usize::MAX / 2
    }

    /// Appends plaintext. The caller bounds it: [`Output::control_room`].
    pub fn append(&mut self, mut bytes: &[u8], layer: &mut RecordLayer) -> Result<(), RecordError> {
        while !bytes.is_empty() {
            let room = self.open_record(1, layer)?;
            let (now, rest) = bytes.split_at(bytes.len().min(room));
            let (end, buffer) = (self.end, self.buffer());
            buffer[end..end + now.len()].copy_from_slice(now);
            self.end += now.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Returns the number of plaintext bytes that [`Output::append`] may append.
    pub fn control_room(&self) -> usize {
        // Each record takes a header and a trailer; the last bytes are for a KeyUpdate or an
        // alert.
        (BUFFER_BYTES - self.end).saturating_sub(8 * KEY_UPDATE_BYTES)
    }

    /// Appends an empty DATA frame with END_STREAM.
    pub fn append_end(&mut self, stream: u32, layer: &mut RecordLayer) -> Result<(), RecordError> {
        let header = FrameHeader { length: 0, kind: kind::DATA, flags: flag::END_STREAM, stream };
        self.append(&header.encode(), layer)
    }

    /// Reads an endpoint into DATA frames of `stream`, within `room`. `read` is a vectored read; it
    /// returns 0 at the end of the endpoint's stream.
    ///
    /// # Errors
    /// Those of `read`, or a record could not be sealed.
    pub fn read_from(
        &mut self,
        stream: u32,
        room: ReadRoom,
        layer: &mut RecordLayer,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<ReadBytes> {
        let first = self.open_record(READ_MIN, layer).map_err(io::Error::other)?;
        let mut capacities = [first - HEADER_BYTES, 0, 0];
        let full = PLAINTEXT_MAX - HEADER_BYTES;
        let (mut wanted, mut end) = (room.bytes, self.end + first + TRAILER_BYTES);
        for (index, capacity) in capacities.iter_mut().enumerate() {
            if index > 0 {
                let fits = index < room.records && end + RECORD_BYTES <= GATHERED_MAX;
                *capacity = if fits { full } else { 0 };
                end += RECORD_BYTES;
            }
            *capacity = wanted.min(*capacity);
            wanted -= *capacity;
        }
        let start = self.end + HEADER_BYTES;
        let read = read_slices(self.buffer(), start, first - HEADER_BYTES, capacities, read);
        let count = *read.as_ref().unwrap_or(&0);
        let (mut left, mut frames) = (count, 0);
        for (index, capacity) in capacities.into_iter().enumerate() {
            let length = left.min(capacity);
            if length == 0 {
                break;
            }
            if index > 0 {
                self.seal(layer).map_err(io::Error::other)?;
                self.end = self.record + RECORD_HEADER;
            }
            self.put_data_header(stream, length);
            left -= length;
            frames += 1;
        }
        let is_drained = count < capacities.iter().sum();
        if count == 0 && self.end == self.record + RECORD_HEADER {
            // Nothing was read into a new record.
            self.end = self.record;
            self.release_if_empty();
        }
        read.map(|_| ReadBytes { bytes: count, frames, is_drained })
    }

    /// Writes the header of a DATA frame whose payload follows `end` already.
    fn put_data_header(&mut self, stream: u32, length: usize) {
        let header = FrameHeader { length, kind: kind::DATA, flags: 0, stream };
        let (end, buffer) = (self.end, self.buffer());
        buffer[end..end + HEADER_BYTES].copy_from_slice(&header.encode());
        self.end += HEADER_BYTES + length;
    }

    /// Makes sure that the open record has room for `least` bytes of plaintext. Returns the room.
    fn open_record(&mut self, least: usize, layer: &mut RecordLayer) -> Result<usize, RecordError> {
        let used = self.end - self.record;
        if used > 0 && RECORD_HEADER + PLAINTEXT_MAX - used < least {
            self.seal(layer)?;
        }
        if self.end == self.record {
            self.end += RECORD_HEADER;
        }
        let buffer_room = (BUFFER_BYTES - TRAILER_BYTES).saturating_sub(self.end);
        Ok((self.record + RECORD_HEADER + PLAINTEXT_MAX - self.end).min(buffer_room))
    }

    fn seal(&mut self, layer: &mut RecordLayer) -> Result<(), RecordError> {
        if self.end == self.record {
            return Ok(());
        }
        let (start, end) = (self.record, self.end + TRAILER_BYTES);
        layer.seal(ContentType::ApplicationData, &mut self.buffer()[start..end])?;
        (self.record, self.end) = (end, end);
        Ok(())
    }

    /// Appends a KeyUpdate, and switches the sending key.
    pub fn update_key(&mut self, layer: &mut RecordLayer) -> Result<(), RecordError> {
        self.seal(layer)?;
        let mut record = [0; KEY_UPDATE_BYTES];
        layer.update_sending_key(&mut record)?;
        self.append_sealed(&record);
        Ok(())
    }

    /// Appends an alert as the last record.
    pub fn append_alert(
        &mut self,
        alert: AlertDescription,
        layer: &mut RecordLayer,
    ) -> Result<(), RecordError> {
        self.seal(layer)?;
        self.append_sealed(&layer.seal_alert(alert)?);
        Ok(())
    }

    fn append_sealed(&mut self, record: &[u8]) {
        let end = self.end;
        if let Some(room) = self.buffer().get_mut(end..end + record.len()) {
            room.copy_from_slice(record);
            self.end += record.len();
            self.record = self.end;
        }
    }

    /// Sends everything, and returns the buffer once the peer has taken all of it.
    pub fn poll_flush<S: AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &mut S,
        layer: &mut RecordLayer,
    ) -> Poll<io::Result<()>> {
        if self.buffer.is_none() {
            return Poll::Ready(Ok(()));
        }
        if layer.needs_key_update() && !self.is_blocked {
            self.update_key(layer).map_err(io::Error::other)?;
        }
        self.seal(layer).map_err(io::Error::other)?;
        while self.sent < self.record {
            let (sent, record) = (self.sent, self.record);
            // Stays so unless the socket takes everything.
            self.is_blocked = true;
            let written = {
                let bytes = match &self.buffer {
                    Some(buffer) => &buffer.as_ref()[sent..record],
                    None => &[],
                };
                ready!(Pin::new(&mut *socket).poll_write(cx, bytes))?
            };
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.sent += written;
            self.position = self.position.wrapping_add(written);
        }
        self.is_blocked = false;
        self.release_if_empty();
        Poll::Ready(Ok(()))
    }

    fn release_if_empty(&mut self) {
        if self.sent == self.end {
            self.buffer = None;
            (self.sent, self.record, self.end) = (0, 0, 0);
        }
    }

    fn buffer(&mut self) -> &mut [u8] {
        self.buffer.get_or_insert_with(Buffer::borrow).bytes()
    }
}

/// Reads into up to three slices: `capacities[0]` bytes at `start`, where the record has
/// `first_room` bytes of payload, and then the payloads of the records that follow it.
fn read_slices(
    buffer: &mut [u8],
    start: usize,
    first_room: usize,
    capacities: [usize; READ_RECORDS],
    read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
) -> io::Result<usize> {
    let gap = TRAILER_BYTES + RECORD_HEADER + HEADER_BYTES;
    let (_, rest) = buffer.split_at_mut(start);
    let (first, rest) = rest.split_at_mut(first_room.min(rest.len()));
    let (second, rest) = split_payload(rest, gap);
    let (third, _) = split_payload(rest, gap);
    let [a, b, c] = capacities;
    let mut slices = [
        IoSliceMut::new(&mut first[..a]),
        IoSliceMut::new(&mut second[..b]),
        IoSliceMut::new(&mut third[..c]),
    ];
    let used = capacities.iter().filter(|capacity| **capacity > 0).count();
    read(&mut slices[..used])
}

/// Splits off the payload of the next record, which begins after `gap`.
fn split_payload(buffer: &mut [u8], gap: usize) -> (&mut [u8], &mut [u8]) {
    let (_, rest) = buffer.split_at_mut(gap.min(buffer.len()));
    let full = (PLAINTEXT_MAX - HEADER_BYTES).min(rest.len());
    rest.split_at_mut(full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_fails_leaves_no_record() {
        let (mut output, mut layer) = (Output::default(), RecordLayer::plaintext());
        let room = ReadRoom { bytes: 100, records: 1 };
        let fails = |_: &mut [IoSliceMut<'_>]| Err(io::ErrorKind::WouldBlock.into());
        assert!(output.read_from(1, room, &mut layer, fails).is_err());
        assert_eq!(output.unsent(), 0);
        output.append_end(1, &mut layer).unwrap();
        let before = output.unsent();
        assert!(output.read_from(1, room, &mut layer, fails).is_err());
        assert_eq!(output.unsent(), before);
    }
}
