//! GOAWAY of a server, seen in the bytes of its connection.
//!
//! A server that ends connections by age, as istiod does about every 30 minutes, sends GOAWAY with
//! NO_ERROR and closes the connection a while later. h2 then reports a broken pipe for the open
//! stream, as it does for a server that died. `Watched` tells both ends apart.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The head of a frame (RFC 9113 section 4.1).
const HEAD_BYTES: usize = 9;
/// The type of GOAWAY (RFC 9113 section 6.8).
const GOAWAY: u8 = 7;

/// Mark of a connection whose server has announced its end by GOAWAY.
#[derive(Clone, Debug, Default)]
pub struct GoAway(Arc<AtomicBool>);

impl GoAway {
    /// Returns whether the server has sent GOAWAY.
    pub fn is_received(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A connection to a server whose frames are followed, head by head.
#[derive(Debug)]
pub(super) struct Watched<T> {
    stream: T,
    head: [u8; HEAD_BYTES],
    /// Bytes of `head` that have come.
    filled: usize,
    /// Bytes of the payload that have not come yet.
    payload: usize,
    received: GoAway,
}

impl<T> Watched<T> {
    pub(super) fn new(stream: T, received: GoAway) -> Self {
        Self {
            stream,
            head: [0; HEAD_BYTES],
            filled: 0,
            payload: 0,
            received,
        }
    }

    fn follow(&mut self, mut bytes: &[u8]) {
        while let Some((&byte, rest)) = bytes.split_first() {
            if self.payload > 0 {
                let passed = self.payload.min(bytes.len());
                self.payload -= passed;
                bytes = bytes.split_at(passed).1;
                continue;
            }
            if let Some(place) = self.head.get_mut(self.filled) {
                *place = byte;
            }
            self.filled += 1;
            if self.filled == HEAD_BYTES {
                self.began();
            }
            bytes = rest;
        }
    }

    /// Reads a head that is whole.
    fn began(&mut self) {
        let [high, middle, low, kind, ..] = self.head;
        let length = u32::from_be_bytes([0, high, middle, low]);
        self.payload = usize::try_from(length).unwrap_or(usize::MAX);
        self.filled = 0;
        if kind == GOAWAY {
            self.received.0.store(true, Ordering::Release);
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.follow(buffer.filled().split_at(before).1);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Watched<T> {
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

    #[test]
    fn goaway_is_found_wherever_reads_are_cut_and_nothing_else_is_taken_for_it() {
        let others = [frame(4, &[]), frame(0, &[GOAWAY; 300]), frame(1, &[7])].concat();
        let all = [others.clone(), frame(GOAWAY, &[0; 8])].concat();
        for size in 1..=all.len() {
            let received = GoAway::default();
            let mut watched = Watched::new((), received.clone());
            for part in others.chunks(size) {
                watched.follow(part);
            }
            assert!(!received.is_received(), "parts of {size} bytes");
            let mut watched = Watched::new((), received.clone());
            for part in all.chunks(size) {
                watched.follow(part);
            }
            assert!(received.is_received(), "parts of {size} bytes");
        }
    }
}
