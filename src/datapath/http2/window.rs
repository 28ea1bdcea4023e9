//! Stream window of one connection, which grows while its readers keep up.
//!
//! h2 releases stream and connection window only together, so stalled tunnels hold connection
//! window. The window grows only while streams × window is at most a quarter of the connection
//! window: tunnels that stall at every size on the way hold less than all of it, and up to 128
//! of them do not block the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use h2::server::Connection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;

use crate::datapath::limits::budget::ChargedBytes;

/// Initial window of each stream, in bytes.
pub const STREAM_WINDOW_MIN: u32 = 256 * 1024;
/// Largest window of a stream, in bytes: 0.3 s between regions at 100 Mbit/s.
pub const STREAM_WINDOW_MAX: u32 = 4 * 1024 * 1024;
/// Connection window in bytes: exactly [`STREAMS_MAX`] streams with the initial window fit into
/// it.
pub const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// Limit of streams of a connection. ztunnel opens up to 100, and needs at least as many
/// (docs/wire-contract.md 1.2).
pub const STREAMS_MAX: u32 = 256;

/// Limit of streams × window for growth.
const GROWN_WINDOWS_MAX: u32 = CONNECTION_WINDOW / 4;

const _: () = assert!(STREAMS_MAX * STREAM_WINDOW_MIN == CONNECTION_WINDOW);

/// Window of a connection's streams, requests of tunnels to grow it, and the slots of tunnels.
#[derive(Debug)]
pub struct StreamWindow {
    bytes: AtomicU32,
    wanted: AtomicBool,
    growth: Notify,
    streams: AtomicU32,
    slot_freed: Notify,
}

/// One of the [`STREAMS_MAX`] slots of a connection, held from the CONNECT until the socket to
/// the endpoint is closed. h2's own count ends with the stream, which may be earlier.
#[derive(Debug)]
pub struct StreamSlot(Arc<StreamWindow>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
        self.0.slot_freed.notify_one();
    }
}

impl StreamWindow {
    /// Creates the window of a new connection.
    pub fn new() -> Self {
        Self {
            bytes: AtomicU32::new(STREAM_WINDOW_MIN),
            wanted: AtomicBool::new(false),
            growth: Notify::new(),
            streams: AtomicU32::new(0),
            slot_freed: Notify::new(),
        }
    }

    /// Returns the window in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes a slot for one more stream, if one is free. The stream counts before its dial, as
    /// its client sends as soon as it is answered.
    pub fn try_take_slot(self: &Arc<Self>) -> Option<StreamSlot> {
        let free = |count: u32| (count < STREAMS_MAX).then_some(count + 1);
        self.streams
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, free)
            .ok()?;
        Some(StreamSlot(Arc::clone(self)))
    }

    /// Waits until a slot is free, and takes it.
    pub async fn take_slot(self: &Arc<Self>) -> StreamSlot {
        loop {
            if let Some(stream) = self.try_take_slot() {
                return stream;
            }
            self.slot_freed.notified().await;
        }
    }

    /// Reports that a tunnel used a whole window without its reader ever blocking.
    pub fn request_growth(&self) {
        if self.next_size(true) > self.bytes() && !self.wanted.swap(true, Ordering::Relaxed) {
            self.growth.notify_one();
        }
    }

    /// Waits until a tunnel requests a larger window.
    pub async fn growth_requested(&self) {
        self.growth.notified().await;
    }

    /// Grows or shrinks the window of all streams to the size that the number of streams allows.
    ///
    /// h2 accepts one change at a time. Returns false if it did not accept this one, otherwise
    /// true.
    pub fn adjust<S>(&self, connection: &mut Connection<S, ChargedBytes>) -> bool
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
        let first = window.try_take_slot().expect("a place");
        while window.next_size(true) > window.bytes() {
            window
                .bytes
                .store(window.next_size(true), Ordering::Relaxed);
            sizes.push(window.bytes() / 1024);
        }
        assert_eq!(sizes, [512, 1024, 2048, 4096]);
        let more: Vec<_> = (0..15).map(|_| window.try_take_slot()).collect();
        assert_eq!(
            window.next_size(true) / 1024,
            1024,
            "16 streams have 16 MiB together"
        );
        let all: Vec<_> = (0..240).map(|_| window.try_take_slot()).collect();
        assert_eq!(window.next_size(true), STREAM_WINDOW_MIN);
        drop((first, more, all));
        assert_eq!(window.streams.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_has_256_places_and_one_that_is_freed_goes_to_who_waits() {
        let window = Arc::new(StreamWindow::new());
        let mut open: Vec<_> = (0..STREAMS_MAX).map(|_| window.try_take_slot()).collect();
        assert!(open.iter().all(Option::is_some) && window.try_take_slot().is_none());
        let waits = || {
            let window = Arc::clone(&window);
            tokio::spawn(async move { window.take_slot().await })
        };
        let waiting = [waits(), waits()];
        tokio::task::yield_now().await;
        open.truncate(open.len() - 2);
        for waiting in waiting {
            open.push(Some(waiting.await.expect("a place")));
        }
        assert!(window.try_take_slot().is_none());
        drop(open);
        assert_eq!(window.streams.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_wish_wakes_the_connection_once() {
        let window = StreamWindow::new();
        window.request_growth();
        window.request_growth();
        window.growth_requested().await;
        let second = tokio::time::timeout(
            std::time::Duration::from_millis(20),
            window.growth_requested(),
        );
        assert!(second.await.is_err());
    }
}
