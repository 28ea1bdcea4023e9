//! Detection of GOAWAY frames in the bytes that a server sends.
//!
//! A server that limits the age of connections, as istiod does (about 30 minutes), sends GOAWAY
//! with NO_ERROR and closes the connection later. h2 then reports a broken pipe for the open
//! stream, exactly as for a server that crashed. `Watched` distinguishes the two, and also a
//! GOAWAY with an error such as ENHANCE_YOUR_CALM.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use h2::Reason;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of a frame header (RFC 9113 section 4.1).
const HEAD_BYTES: usize = 9;
/// Frame type of GOAWAY (RFC 9113 section 6.8).
const GOAWAY: u8 = 7;
/// Bytes of the fixed fields of GOAWAY: last stream and error code, 4 bytes each.
const FIELDS_BYTES: usize = 8;
const GOAWAY_BYTES: usize = HEAD_BYTES + FIELDS_BYTES;

/// GOAWAY state of a connection: the error code plus one, or zero before a GOAWAY.
#[derive(Clone, Debug, Default)]
pub struct GoAwayCode(Arc<AtomicU64>);

impl GoAwayCode {
    /// Returns the error code of the server's GOAWAY, if it sent one. With several GOAWAY
    /// frames, an error takes precedence over the NO_ERROR that announces a shutdown.
    pub fn reason(&self) -> Option<Reason> {
        let code = self.0.load(Ordering::Acquire).checked_sub(1)?;
        u32::try_from(code).ok().map(Reason::from)
    }

    fn record(&self, code: u32) {
        self.0.fetch_max(u64::from(code) + 1, Ordering::AcqRel);
    }
}

/// Connection to a server that tracks received frames by their headers.
#[derive(Debug)]
pub(super) struct GoAwayObserver<T> {
    stream: T,
    /// The frame header, followed by the fixed fields if the frame is GOAWAY.
    header: [u8; GOAWAY_BYTES],
    /// Number of bytes of `head` received.
    filled: usize,
    /// Number of payload bytes still to skip.
    payload_left: usize,
    goaway: GoAwayCode,
}

impl<T> GoAwayObserver<T> {
    pub(super) fn new(stream: T, received: GoAwayCode) -> Self {
        Self { stream, header: [0; GOAWAY_BYTES], filled: 0, payload_left: 0, goaway: received }
    }

    fn track_frames(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.payload_left > 0 {
                let passed = self.payload_left.min(bytes.len());
                self.payload_left -= passed;
                bytes = bytes.split_at(passed).1;
                continue;
            }
            if let Some(place) = self.header.get_mut(self.filled) {
                *place = byte;
            }
            self.filled += 1;
            match self.filled {
                HEAD_BYTES => self.on_header(),
                GOAWAY_BYTES => self.on_goaway(),
                _ => {}
            }
            bytes = rest;
        }
    }

    /// Handles a complete frame header. If the frame is GOAWAY, its fixed fields follow in
    /// `head`.
    fn on_header(&mut self) {
        let [_, _, _, kind, ..] = self.header;
        let length = self.length();
        if kind != GOAWAY || length < FIELDS_BYTES {
            (self.payload_left, self.filled) = (length, 0);
        }
    }

    fn on_goaway(&mut self) {
        let [.., a, b, c, d] = self.header;
        (self.payload_left, self.filled) = (self.length().saturating_sub(FIELDS_BYTES), 0);
        self.goaway.record(u32::from_be_bytes([a, b, c, d]));
    }

    fn length(&self) -> usize {
        let [high, middle, low, ..] = self.header;
        let length = u32::from_be_bytes([0, high, middle, low]);
        usize::try_from(length).unwrap_or(usize::MAX)
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for GoAwayObserver<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.track_frames(buffer.filled().split_at(before).1);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for GoAwayObserver<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("a length");
        let head = [&length.to_be_bytes()[1..], &[kind, 0, 0, 0, 0, 0]].concat();
        [&head, payload].concat()
    }

    fn goaway(code: u8) -> Vec<u8> {
        frame(GOAWAY, &[0x7f, 255, 255, 255, 0, 0, 0, code, b'd', b'e', b'b'])
    }

    /// Returns the reason found in `bytes` when they are read in chunks of `size`.
    fn reason_in(bytes: &[u8], size: usize) -> Option<Reason> {
        let received = GoAwayCode::default();
        let mut watched = GoAwayObserver::new((), received.clone());
        for part in bytes.chunks(size) {
            watched.track_frames(part);
        }
        received.reason()
    }

    #[test]
    fn the_code_of_goaway_is_read_wherever_reads_are_cut() {
        // A GOAWAY that is too short for its fields does not count: h2 ends the connection for
        // it.
        let others =
            [frame(4, &[]), frame(0, &[GOAWAY; 300]), frame(1, &[7]), frame(GOAWAY, &[0; 7])];
        let others = others.concat();
        let calm = Some(Reason::ENHANCE_YOUR_CALM);
        for (frames, reason) in [
            (vec![], None),
            (vec![goaway(0)], Some(Reason::NO_ERROR)),
            (vec![goaway(11)], calm),
            (vec![goaway(0), others.clone(), goaway(11)], calm),
            (vec![goaway(11), goaway(0)], calm),
        ] {
            let all = [others.clone(), frames.concat(), others.clone()].concat();
            for size in 1..=all.len() {
                assert_eq!(reason_in(&all, size), reason, "parts of {size} bytes");
            }
        }
    }
}
