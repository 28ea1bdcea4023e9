//! Streams of one connection: their states and flow-control windows (RFC 9113 sections 5.1, 5.2).

use super::frame::{DEFAULT_WINDOW, WINDOW_MAX};

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

const _: () = assert!(STREAMS_MAX * STREAM_WINDOW_MIN == CONNECTION_WINDOW);

/// Handle of a stream. A handle of a stream that is gone finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamKey {
    /// Identifier of the stream.
    pub id: u32,
    slot: u32,
}

impl StreamKey {
    /// Returns an index that no other stream of the connection has at the same time.
    pub const fn slot(self) -> usize {
        self.slot as usize
    }
}

/// State of one stream.
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
    /// True once END_STREAM was sent.
    pub sent_end: bool,
    /// True once END_STREAM was received.
    pub received_end: bool,
    /// True once the stream was reset by either side. It stays until the driver removes it.
    pub is_reset: bool,
    /// True if the driver had bytes to send and no window.
    pub is_blocked: bool,
}

/// Streams that are open or not removed yet.
#[derive(Debug, Default)]
pub struct Streams {
    slots: Vec<Option<Stream>>,
    free: Vec<u32>,
    /// Identifiers in ascending order, as peers open them, with their slots.
    index: Vec<StreamKey>,
    /// Slot of the stream that was first blocked by the connection since blocked streams were taken
    /// last.
    first_blocked: Option<u32>,
}

impl Streams {
    /// Returns the number of streams.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns true if there is no stream.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Returns true if [`STREAMS_MAX`] streams are open. Streams that have ended do not count.
    pub fn is_full(&self) -> bool {
        let limit = STREAMS_MAX as usize;
        if self.len() < limit {
            return false;
        }
        let is_open = |stream: &&Stream| {
            let has_ended = stream.sent_end && stream.received_end;
            !(stream.is_reset || has_ended)
        };
        self.slots.iter().flatten().filter(is_open).count() >= limit
    }

    /// Inserts a stream whose identifier is above all others.
    pub fn insert(&mut self, id: u32, peer_window: i64) -> StreamKey {
        let stream = Stream {
            id,
            send_window: peer_window,
            receive_window: i64::from(STREAM_WINDOW_MIN),
            released: 0,
            window: STREAM_WINDOW_MIN,
            sent_end: false,
            received_end: false,
            is_reset: false,
            is_blocked: false,
        };
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            // A few more than STREAMS_MAX at most.
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let key = StreamKey { id, slot };
        self.slots[key.slot()] = Some(stream);
        self.index.push(key);
        key
    }

    /// Removes a stream.
    pub fn remove(&mut self, key: StreamKey) {
        if self.get(key).is_none() {
            return;
        }
        self.slots[key.slot()] = None;
        self.free.push(key.slot);
        if let Ok(at) = self.index.binary_search_by_key(&key.id, |key| key.id) {
            self.index.remove(at);
        }
    }

    /// Returns the handle of the stream with this identifier.
    pub fn find(&self, id: u32) -> Option<StreamKey> {
        let at = self.index.binary_search_by_key(&id, |key| key.id);
        at.ok().map(|at| self.index[at])
    }

    /// Returns a stream.
    pub fn get(&self, key: StreamKey) -> Option<&Stream> {
        let stream = self.slots.get(key.slot())?.as_ref();
        stream.filter(|stream| stream.id == key.id)
    }

    /// Returns a stream.
    pub fn get_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        let stream = self.slots.get_mut(key.slot())?.as_mut();
        stream.filter(|stream| stream.id == key.id)
    }

    /// Returns the handles of all streams, oldest first.
    pub fn keys(&self) -> &[StreamKey] {
        &self.index
    }

    /// Adds `delta` to the send windows of all streams (RFC 9113 section 6.9.2). Returns false if
    /// one of them exceeds the largest window.
    pub fn shift_send_windows(&mut self, delta: i64) -> bool {
        let mut valid = true;
        for stream in self.slots.iter_mut().flatten() {
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
        stream.is_blocked = true;
        if stream.send_window > 0 {
            self.first_blocked.get_or_insert(key.slot);
        }
    }

    /// Takes the streams that are blocked. The one that the connection blocked first comes first.
    /// Otherwise a small window for all streams would always be used up by the same ones.
    pub fn take_blocked(&mut self) -> Vec<StreamKey> {
        let mut blocked = Vec::new();
        for (slot, stream) in (0..).zip(&mut self.slots) {
            if let Some(stream) = stream
                && std::mem::take(&mut stream.is_blocked)
            {
                let id = stream.id;
                blocked.push(StreamKey { id, slot });
            }
        }
        let first = self.first_blocked.take().unwrap_or(0);
        let before = blocked.partition_point(|key| key.slot < first);
        blocked.rotate_left(before);
        blocked
    }

    /// Adds `bytes` that were taken from a stream. Returns the increment to announce once it is
    /// half of the window. A window that no longer fits is halved by withholding increments.
    pub fn release(&mut self, key: StreamKey, bytes: u32) -> Option<u32> {
        let fitting = self.fitting_window();
        let stream = self.get_mut(key)?;
        if stream.received_end || stream.is_reset {
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

    /// Doubles the receive window of a stream if all windows together stay within their limit.
    /// Returns the increment to announce.
    pub fn grow(&mut self, key: StreamKey) -> Option<u32> {
        let fitting = self.fitting_window();
        let stream = self.get_mut(key)?;
        let doubled = stream.window * 2;
        if doubled > fitting.min(STREAM_WINDOW_MAX) || stream.received_end || stream.is_reset {
            return None;
        }
        stream.released += stream.window;
        stream.window = doubled;
        Some(stream.announce())
    }

    /// Returns the size of the receive window of a stream.
    pub fn window(&self, key: StreamKey) -> u32 {
        self.get(key)
            .map_or(STREAM_WINDOW_MIN, |stream| stream.window)
    }

    fn fitting_window(&self) -> u32 {
        let count = u32::try_from(self.len()).unwrap_or(STREAMS_MAX);
        GROWN_WINDOWS_MAX / count.clamp(1, STREAMS_MAX)
    }
}

impl Stream {
    fn announce(&mut self) -> u32 {
        let increment = std::mem::take(&mut self.released);
        self.receive_window += i64::from(increment);
        increment
    }
}

/// Connection-level windows.
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
        Self {
            send: DEFAULT_WINDOW,
            receive: i64::from(CONNECTION_WINDOW),
            released: 0,
        }
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
    fn the_connection_window_is_given_back_on_receipt() {
        let mut windows = ConnectionWindows::default();
        let quarter = CONNECTION_WINDOW / 4;
        assert!(matches!(windows.receive(quarter - 1), Ok(None)));
        assert!(matches!(windows.receive(1), Ok(Some(increment)) if increment == quarter));
        assert!(windows.receive(CONNECTION_WINDOW + 1).is_err());
    }
}
