//! Streams of one connection: their states and flow-control windows (RFC 9113 sections 5.1, 5.2).

use std::collections::VecDeque;
use std::time::Duration;

use foldhash::HashMap;
use tokio::time::Instant;

use super::frame::{DEFAULT_WINDOW, WINDOW_MAX};
use super::meter::FirstPeerId;

/// Initial receive window of each stream, in bytes.
pub const STREAM_WINDOW_MIN: u32 = 256 * 1024;
/// Largest receive window of a stream, in bytes: 0.3 s between regions at 100 Mbit/s.
const STREAM_WINDOW_MAX: u32 = 4 * 1024 * 1024;
/// Receive window of the connection in bytes: [`STREAMS_MAX`] streams with the initial window fit
/// into it.
pub const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// Limit of streams of a connection. ztunnel opens up to 100, and needs at least as many
/// (docs/wire-contract.md 1.2).
pub const STREAMS_MAX: u32 = 256;
/// Limit of streams × window for growth. It bounds the memory that one connection can fill.
const GROWN_WINDOWS_MAX: u32 = CONNECTION_WINDOW / 4;

/// Number of streams in [`Streams::waiting`] below which those that are gone are kept.
const WAITING_MIN: usize = 64;

const _: () = assert!(STREAMS_MAX * STREAM_WINDOW_MIN == CONNECTION_WINDOW);

/// Handle of a stream. A handle of a stream that is gone finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamKey {
    pub id: u32,
    slot: u32,
}

impl StreamKey {
    /// Returns an index that no other stream of the connection has at the same time.
    pub const fn slot(self) -> usize {
        self.slot as usize
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Stream {
    id: u32,
    /// Bytes that may be sent. Negative after the peer has reduced its initial window.
    pub send_window: i64,
    /// Bytes that the peer may still send.
    pub receive_window: i64,
    /// Bytes that were taken from the stream and not announced to the peer yet.
    released: u32,
    /// Size of the receive window, which grows.
    window: u32,
    /// Time of the last increment.
    announced_at: Instant,
    /// First peer that its frames are charged to, besides the connection.
    pub first_peer: Option<FirstPeerId>,
    state: State,
    /// True if the driver had bytes to send and the stream no window.
    pub is_blocked: bool,
    /// True while the stream is in [`Streams::waiting`].
    is_waiting: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    sent_end: bool,
    received_end: bool,
    is_reset: bool,
}

impl State {
    /// Returns true if the stream counts for [`STREAMS_MAX`].
    const fn counts(self) -> bool {
        !(self.is_reset || self.sent_end && self.received_end)
    }
}

/// End of a stream in one or both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamEnd {
    Sent,
    Received,
    /// Either side has reset the stream, which stays until the driver removes it.
    Reset,
}

/// Streams that are open or not removed yet. Operations take constant time, except for those that
/// concern all streams.
#[derive(Debug, Default)]
pub struct Streams {
    slots: Vec<Option<Stream>>,
    free: Vec<u32>,
    index: HashMap<u32, u32>,
    /// Number of streams that count for [`STREAMS_MAX`].
    counted: usize,
    /// Streams that wait for the window of the connection, oldest first. Some are gone.
    waiting: VecDeque<StreamKey>,
    /// Number of slots that operations on all streams have visited.
    #[cfg(test)]
    pub visited: usize,
}

impl Streams {
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns true if there is no stream.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns true if [`STREAMS_MAX`] streams are open. Streams that have ended do not count.
    pub fn is_full(&self) -> bool {
        self.counted >= STREAMS_MAX as usize
    }

    pub fn insert(&mut self, id: u32, peer_window: i64) -> StreamKey {
        let stream = Stream {
            id,
            send_window: peer_window,
            receive_window: i64::from(STREAM_WINDOW_MIN),
            released: 0,
            window: STREAM_WINDOW_MIN,
            announced_at: Instant::now(),
            first_peer: None,
            state: State::default(),
            is_blocked: false,
            is_waiting: false,
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            // At most STREAMS_MAX, and those that have ended in one turn.
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let key = StreamKey { id, slot };
        self.slots[key.slot()] = Some(stream);
        self.index.insert(id, slot);
        self.counted += 1;
        key
    }

    pub fn remove(&mut self, key: StreamKey) {
        let Some(stream) = self.get(key) else {
            return;
        };
        self.counted -= usize::from(stream.state.counts());
        self.slots[key.slot()] = None;
        self.free.push(key.slot);
        self.index.remove(&key.id);
    }

    pub fn end(&mut self, key: StreamKey, end: StreamEnd) {
        let Some(stream) = self.get_mut(key) else {
            return;
        };
        let before = stream.state.counts();
        match end {
            StreamEnd::Sent => stream.state.sent_end = true,
            StreamEnd::Received => stream.state.received_end = true,
            StreamEnd::Reset => stream.state.is_reset = true,
        }
        let has_ended = before && !stream.state.counts();
        self.counted -= usize::from(has_ended);
    }

    pub fn find(&self, id: u32) -> Option<StreamKey> {
        let slot = *self.index.get(&id)?;
        Some(StreamKey { id, slot })
    }

    pub fn get(&self, key: StreamKey) -> Option<&Stream> {
        let stream = self.slots.get(key.slot())?.as_ref();
        stream.filter(|stream| stream.id == key.id)
    }

    pub fn get_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        let stream = self.slots.get_mut(key.slot())?.as_mut();
        stream.filter(|stream| stream.id == key.id)
    }

    /// Returns all streams with their handles. This and what uses it takes time for each stream.
    fn all(&mut self) -> impl Iterator<Item = (StreamKey, &mut Stream)> {
        #[cfg(test)]
        {
            self.visited += self.slots.len();
        }
        (0..).zip(&mut self.slots).filter_map(|(slot, stream)| {
            let stream = stream.as_mut()?;
            let id = stream.id;
            Some((StreamKey { id, slot }, stream))
        })
    }

    /// Returns the handles of all streams, oldest first.
    pub fn keys(&mut self) -> Vec<StreamKey> {
        let mut keys: Vec<_> = self.all().map(|(key, _)| key).collect();
        keys.sort_unstable_by_key(|key| key.id);
        keys
    }

    /// Returns the handles of the streams of a first peer that were not reset.
    pub fn keys_of(&mut self, first_peer: FirstPeerId) -> Vec<StreamKey> {
        let is_of = |stream: &Stream| stream.first_peer == Some(first_peer) && !stream.is_reset();
        let all = self.all();
        all.filter_map(|(key, stream)| is_of(stream).then_some(key)).collect()
    }

    /// Adds `delta` to the send windows of all streams (RFC 9113 section 6.9.2). Returns false if
    /// one of them exceeds the largest window.
    pub fn shift_send_windows(&mut self, delta: i64) -> bool {
        let mut valid = true;
        for (_, stream) in self.all() {
            stream.send_window += delta;
            valid &= stream.send_window <= WINDOW_MAX;
        }
        valid
    }

    /// Marks a stream as blocked, by its own window or by that of the connection.
    pub fn block(&mut self, key: StreamKey) {
        let Some(stream) = self.get_mut(key) else {
            return;
        };
        if stream.send_window <= 0 {
            stream.is_blocked = true;
        } else if !std::mem::replace(&mut stream.is_waiting, true) {
            if self.waiting.len() > 2 * self.len() + WAITING_MIN {
                // Rare enough for a constant time on average: more than half of them are gone.
                let mut waiting = std::mem::take(&mut self.waiting);
                #[cfg(test)]
                {
                    self.visited += waiting.len();
                }
                waiting.retain(|key| self.get(*key).is_some());
                self.waiting = waiting;
            }
            self.waiting.push_back(key);
        }
    }

    /// Takes the stream that has waited longest for the window of the connection. Otherwise a small
    /// window for all streams would always be used up by the same ones.
    pub fn take_waiting(&mut self) -> Option<StreamKey> {
        loop {
            let key = self.waiting.pop_front()?;
            if let Some(stream) = self.get_mut(key) {
                stream.is_waiting = false;
                return Some(key);
            }
        }
    }

    /// Returns true if a stream may wait for the window of the connection.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes the streams that were blocked by their own windows, and have some now.
    pub fn take_unblocked(&mut self) -> Vec<StreamKey> {
        let is_unblocked =
            |stream: &mut Stream| stream.send_window > 0 && std::mem::take(&mut stream.is_blocked);
        let all = self.all();
        all.filter_map(|(key, stream)| is_unblocked(stream).then_some(key)).collect()
    }

    /// Adds `bytes` that were taken from a stream, without an increment.
    pub fn withhold(&mut self, key: StreamKey, bytes: u32) {
        if let Some(stream) = self.get_mut(key) {
            stream.released += bytes;
        }
    }

    /// Adds `bytes` that were taken from a stream. Returns the increment to announce once it is
    /// half of the window. A window that no longer fits is halved by withholding increments.
    pub fn release(&mut self, key: StreamKey, bytes: u32) -> Option<u32> {
        let fitting = self.fitting_window();
        let stream = self.get_mut(key)?;
        if stream.has_received_end() || stream.is_reset() {
            return None;
        }
        stream.released += bytes;
        let limit = fitting.max(STREAM_WINDOW_MIN);
        while stream.window > limit && stream.released >= stream.window / 2 {
            stream.window /= 2;
            stream.released -= stream.window;
        }
        let is_due = stream.released > 0 && stream.released >= stream.window / 2;
        is_due.then(|| stream.announce())
    }

    /// Returns the time since the last increment, which was announced now.
    pub fn restart_clock(&mut self, key: StreamKey) -> Option<Duration> {
        let (stream, now) = (self.get_mut(key)?, Instant::now());
        Some(now - std::mem::replace(&mut stream.announced_at, now))
    }

    /// Doubles the receive window of a stream if all windows together stay within their limit.
    /// Returns the increment to announce.
    pub fn grow(&mut self, key: StreamKey) -> Option<u32> {
        let fitting = self.fitting_window();
        let stream = self.get_mut(key)?;
        let doubled = stream.window * 2;
        if doubled > fitting.min(STREAM_WINDOW_MAX)
            || stream.has_received_end()
            || stream.is_reset()
        {
            return None;
        }
        stream.released += stream.window;
        stream.window = doubled;
        Some(stream.announce())
    }

    pub fn window(&self, key: StreamKey) -> u32 {
        self.get(key).map_or(STREAM_WINDOW_MIN, |stream| stream.window)
    }

    fn fitting_window(&self) -> u32 {
        let count = u32::try_from(self.len()).unwrap_or(STREAMS_MAX);
        GROWN_WINDOWS_MAX / count.clamp(1, STREAMS_MAX)
    }
}

impl Stream {
    /// Returns true once END_STREAM was received.
    pub const fn has_received_end(&self) -> bool {
        self.state.received_end
    }

    /// Returns true once the stream was reset by either side.
    pub const fn is_reset(&self) -> bool {
        self.state.is_reset
    }

    fn announce(&mut self) -> u32 {
        let increment = std::mem::take(&mut self.released);
        self.receive_window += i64::from(increment);
        increment
    }
}

#[derive(Debug)]
pub struct ConnectionWindows {
    /// Bytes that may be sent.
    pub send: i64,
    /// Bytes that the peer may still send.
    pub receive: i64,
    /// Bytes received and not announced yet.
    released: u32,
}

impl Default for ConnectionWindows {
    /// Windows of a new connection, after the increment that raises the receive window.
    fn default() -> Self {
        Self { send: DEFAULT_WINDOW, receive: i64::from(CONNECTION_WINDOW), released: 0 }
    }
}

impl ConnectionWindows {
    /// Takes received bytes from the window. Returns the increment to announce, or `Err` if the
    /// peer has exceeded the window.
    ///
    /// The window is given back on receipt: the windows of the streams bound what is held, and a
    /// stalled stream does not block the others.
    pub fn receive(&mut self, bytes: u32) -> Result<Option<u32>, WindowExceeded> {
        if i64::from(bytes) > self.receive {
            return Err(WindowExceeded);
        }
        self.receive -= i64::from(bytes);
        self.released += bytes;
        if self.released < CONNECTION_WINDOW / 4 {
            return Ok(None);
        }
        let increment = std::mem::take(&mut self.released);
        self.receive += i64::from(increment);
        Ok(Some(increment))
    }
}

/// Error of a peer that sent more than its window.
#[derive(Clone, Copy, Debug)]
pub struct WindowExceeded;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_and_old_keys_find_nothing() {
        let mut streams = Streams::default();
        let [first, second] = [1, 3].map(|id| streams.insert(id, 10));
        streams.remove(first);
        let third = streams.insert(5, 10);
        assert_eq!(third.slot, first.slot);
        assert!(streams.get(first).is_none() && streams.get(third).is_some());
        assert_eq!((streams.find(1), streams.find(3)), (None, Some(second)));
        streams.remove(first);
        assert_eq!(streams.len(), 2);
    }

    #[test]
    fn a_window_doubles_to_its_maximum_and_shrinks_when_streams_are_added() {
        let mut streams = Streams::default();
        let key = streams.insert(1, 0);
        let mut sizes = Vec::new();
        while let Some(increment) = streams.grow(key) {
            sizes.push((streams.window(key) / 1024, increment / 1024));
        }
        assert_eq!(sizes, [(512, 256), (1024, 512), (2048, 1024), (4096, 2048)]);
        let full = i64::from(STREAM_WINDOW_MAX);
        assert_eq!(streams.get(key).map(|it| it.receive_window), Some(full));
        for id in 1..8 {
            streams.insert(1 + 2 * id, 0);
        }
        let taken = STREAM_WINDOW_MAX / 2;
        if let Some(stream) = streams.get_mut(key) {
            stream.receive_window -= i64::from(2 * taken);
        }
        assert_eq!(streams.release(key, taken), None, "half is withheld");
        assert_eq!(streams.release(key, taken), Some(taken));
        assert_eq!(streams.window(key), STREAM_WINDOW_MAX / 2);
        assert_eq!(streams.grow(key), None, "eight streams have 2 MiB each");
    }

    #[test]
    fn a_window_that_shrinks_at_once_is_announced() {
        let mut streams = Streams::default();
        let key = streams.insert(1, 0);
        while streams.grow(key).is_some() {}
        for id in 1..64 {
            streams.insert(1 + 2 * id, 0);
        }
        if let Some(stream) = streams.get_mut(key) {
            stream.receive_window = 0;
        }
        let announced = streams.release(key, STREAM_WINDOW_MAX);
        assert_eq!(streams.window(key), STREAM_WINDOW_MIN);
        assert_eq!(announced, Some(STREAM_WINDOW_MIN));
    }

    #[test]
    fn streams_that_have_ended_do_not_count_once_each() {
        let mut streams = Streams::default();
        let keys: Vec<_> = (0..STREAMS_MAX).map(|index| streams.insert(1 + 2 * index, 0)).collect();
        assert!(streams.is_full());
        for ends in [
            &[StreamEnd::Sent][..],
            &[StreamEnd::Received],
            &[StreamEnd::Sent, StreamEnd::Received, StreamEnd::Reset],
            &[StreamEnd::Reset, StreamEnd::Sent, StreamEnd::Received],
        ] {
            let (mut streams, key) = (Streams::default(), keys[0]);
            streams.insert(key.id, 0);
            for end in ends {
                streams.end(key, *end);
            }
            assert_eq!(streams.counted, usize::from(ends.len() == 1), "{ends:?}");
            streams.remove(key);
            assert_eq!(streams.counted, 0, "{ends:?}");
        }
        streams.end(keys[7], StreamEnd::Reset);
        assert!(!streams.is_full());
    }

    #[test]
    fn streams_that_wait_for_the_connection_come_in_their_order_and_are_bounded() {
        let mut streams = Streams::default();
        let [first, second] = [1, 3].map(|id| streams.insert(id, 10));
        for key in [second, first, second] {
            streams.block(key);
        }
        for id in 2..10_000 {
            let key = streams.insert(1 + 2 * id, 10);
            streams.block(key);
            streams.remove(key);
        }
        assert!(streams.waiting.len() <= 2 * 3 + WAITING_MIN + 1);
        let waiting = std::iter::from_fn(|| streams.take_waiting());
        assert_eq!(waiting.collect::<Vec<_>>(), [second, first]);
    }

    #[test]
    fn the_connection_window_is_given_back_on_receipt() {
        let mut windows = ConnectionWindows::default();
        let quarter = CONNECTION_WINDOW / 4;
        assert!(matches!(windows.receive(quarter - 1), Ok(None)));
        assert!(matches!(windows.receive(1), Ok(Some(increment)) if increment == quarter));
        assert!(windows.receive(CONNECTION_WINDOW + 1).is_err());
    }
}
