//! The stream window of one connection: small at first, grown while its readers keep up.
//!
//! h2 gives stream and connection window back only together, so stalled tunnels hold connection
//! window. The window grows only while streams × window is at most a quarter of the connection
//! window: tunnels that stall at every size on the way hold less than all of it, and up to 128
//! of them leave the others going.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use h2::server::Connection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;

use super::budget::Charged;

/// The window of each stream at first.
pub const STREAM_WINDOW_MIN: u32 = 256 * 1024;
/// The largest window that a stream is ever given: 0.3 s between regions at 100 Mbit/s.
pub const STREAM_WINDOW_MAX: u32 = 4 * 1024 * 1024;
/// The connection window: exactly [`STREAMS_MAX`] streams with the first window fit into it.
pub const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// Streams of a connection. ztunnel opens up to 100, and needs at least as many (contract 1.2).
pub const STREAMS_MAX: u32 = 256;

/// Streams × window may grow up to here.
const GROWN_WINDOWS_MAX: u32 = CONNECTION_WINDOW / 4;

const _: () = assert!(STREAMS_MAX * STREAM_WINDOW_MIN == CONNECTION_WINDOW);

/// The window of a connection's streams, and its tunnels' wish for a larger one.
#[derive(Debug)]
pub struct StreamWindow {
    bytes: AtomicU32,
    wanted: AtomicBool,
    wish: Notify,
    streams: AtomicU32,
}

/// One stream of the connection, from its CONNECT to its end.
#[derive(Debug)]
pub struct OpenStream(Arc<StreamWindow>);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl StreamWindow {
    /// The window of a fresh connection.
    pub fn new() -> Self {
        Self {
            bytes: AtomicU32::new(STREAM_WINDOW_MIN),
            wanted: AtomicBool::new(false),
            wish: Notify::new(),
            streams: AtomicU32::new(0),
        }
    }

    /// The window in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counts one more stream. It counts before its dial: its client sends when it is answered.
    pub fn open(self: &Arc<Self>) -> OpenStream {
        self.streams.fetch_add(1, Ordering::Relaxed);
        OpenStream(Arc::clone(self))
    }

    /// Says that a tunnel took a whole window without its reader ever blocking.
    pub fn kept_up(&self) {
        if self.next_size(true) > self.bytes() && !self.wanted.swap(true, Ordering::Relaxed) {
            self.wish.notify_one();
        }
    }

    /// Waits until a tunnel has wished for a larger window.
    pub async fn wished(&self) {
        self.wish.notified().await;
    }

    /// Grows or shrinks the window of all streams to what the number of streams allows.
    ///
    /// h2 takes one change at a time. Returns whether this one was taken, or none was due.
    pub fn adjust<S>(&self, connection: &mut Connection<S, Charged>) -> bool
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let wanted = self.wanted.swap(false, Ordering::Relaxed);
        let next = self.next_size(wanted);
        if next != self.bytes() {
            if connection.set_initial_window_size(next).is_err() {
                self.wanted.fetch_or(wanted, Ordering::Relaxed);
                return false;
            }
            self.bytes.store(next, Ordering::Relaxed);
        }
        true
    }

    fn next_size(&self, grow: bool) -> u32 {
        let streams = self.streams.load(Ordering::Relaxed).clamp(1, STREAMS_MAX);
        let fits = |bytes: u32| bytes <= GROWN_WINDOWS_MAX / streams;
        let mut next = self.bytes();
        if grow && next < STREAM_WINDOW_MAX && fits(next * 2) {
            return next * 2;
        }
        while next > STREAM_WINDOW_MIN && !fits(next) {
            next /= 2;
        }
        next
    }
}

impl Default for StreamWindow {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_doubles_to_its_maximum_and_gives_way_to_streams() {
        let window = Arc::new(StreamWindow::new());
        let mut sizes = Vec::new();
        let first = window.open();
        while window.next_size(true) > window.bytes() {
            window
                .bytes
                .store(window.next_size(true), Ordering::Relaxed);
            sizes.push(window.bytes() / 1024);
        }
        assert_eq!(sizes, [512, 1024, 2048, 4096]);
        let more: Vec<_> = (0..15).map(|_| window.open()).collect();
        assert_eq!(
            window.next_size(true) / 1024,
            1024,
            "16 streams have 16 MiB together"
        );
        let all: Vec<_> = (0..240).map(|_| window.open()).collect();
        assert_eq!(window.next_size(true), STREAM_WINDOW_MIN);
        drop((first, more, all));
        assert_eq!(window.streams.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_wish_wakes_the_connection_once() {
        let window = StreamWindow::new();
        window.kept_up();
        window.kept_up();
        window.wished().await;
        let second = tokio::time::timeout(std::time::Duration::from_millis(20), window.wished());
        assert!(second.await.is_err());
    }
}
