//! HTTP/2 server for CONNECT (RFC 9113) as a state machine without I/O (sans-I/O).
//!
//! [`Server::receive`] turns decrypted bytes into events for the connection
//! ([`HboneConnection`](crate::datapath::forward::turn::HboneConnection)), and answers control
//! frames by itself. All frames that it sends except DATA are appended to `control`, which the
//! connection sends in order with its DATA frames.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::time::Duration;

use h2::Reason as ErrorCode;
use tokio::time::Instant;

use crate::reason::Reason;

use super::frame::setting;
use super::frame::{self, DEFAULT_WINDOW, FrameHeader, HEADER_BYTES, WINDOW_MAX, flag, kind};
use super::hpack;
use super::meter::{CreditExhausted, FIRST_PEERS_MAX, FirstPeerId, FrameMeter, PRICE_RESET};
use super::request::{HEADER_LIST_BYTES_MAX, Request};
use super::resets::Resets;
use super::streams::{
    CONNECTION_WINDOW, ConnectionWindows, STREAM_WINDOW_MIN, STREAMS_MAX, StreamEnd, StreamKey,
    Streams,
};

/// Limit of received frames in bytes. Larger frames would delay the bytes of other tunnels.
pub const FRAME_BYTES_MAX: usize = 64 * 1024;
/// Round trips in which a peer uses half of a window that limits it: one for its bytes and the
/// increment, as in Chromium's QUIC two because of delays, and twice that where packets are lost.
const LIMITING_TRIPS: u32 = 4;
/// Payload of the PING that follows the first GOAWAY. Its acknowledgement shows that the peer has
/// received the GOAWAY (RFC 9113 section 6.8).
const GOAWAY_PING: [u8; 8] = *b"drained?";

const _: () = assert!(FIRST_PEERS_MAX == STREAMS_MAX as usize);

#[derive(Debug)]
pub enum Event {
    /// The event was handled together with an earlier one.
    Handled,
    Request {
        key: StreamKey,
        request: Request,
        /// True if END_STREAM came with it.
        ended: bool,
        price: u64,
    },
    /// DATA bytes of a stream were received, within the input.
    Data {
        key: StreamKey,
        /// Position within the input.
        bytes: Range<usize>,
    },
    /// A small DATA frame that was split over several inputs was received.
    SmallData {
        key: StreamKey,
        bytes: Box<[u8]>,
    },
    End(StreamKey),
    Reset(StreamKey, Reason),
    /// A stream that had no window has some. Those that had no window of the connection are
    /// returned by [`Server::take_writable`].
    Writable(StreamKey),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionError {
    pub code: ErrorCode,
    /// Violated rule, for the log.
    pub rule: &'static str,
}

impl ConnectionError {
    /// The credit of the [`FrameMeter`] is used up.
    pub const EXHAUSTED: Self = Self::new(
        ErrorCode::ENHANCE_YOUR_CALM,
        "frame credit exhausted: more frames than its tunnels account for",
    );

    pub(super) const fn new(code: ErrorCode, rule: &'static str) -> Self {
        Self { code, rule }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GoAway {
    NotSent,
    /// GOAWAY with the largest identifier was sent; streams are still accepted.
    Announced,
    /// GOAWAY with this last identifier was sent. Later streams are ignored.
    Final(u32),
}

/// Position within the input.
#[derive(Debug)]
pub(super) enum Read {
    Preface(usize),
    /// Number of bytes of the frame header that were received.
    Header(usize),
    PadLength(FrameHeader, Option<StreamKey>),
    Data(DataFrame),
    /// Payload of another frame, which is collected.
    Payload(FrameHeader),
    /// Payload that is skipped: number of bytes.
    Skip(usize),
}

/// DATA frame whose payload is received.
#[derive(Debug)]
pub(super) struct DataFrame {
    /// None: the stream is closed.
    pub(super) key: Option<StreamKey>,
    pub(super) left: usize,
    pub(super) padding: usize,
    pub(super) ends: bool,
}

/// HTTP/2 state of one connection.
#[derive(Debug)]
pub struct Server {
    pub(super) read: Read,
    pub(super) header: [u8; HEADER_BYTES],
    /// Payload of the frame that is received, unless it is DATA.
    pub(super) payload: Vec<u8>,
    /// Header block that CONTINUATION frames follow, with the HEADERS frame.
    pub(super) block: Option<(FrameHeader, Vec<u8>)>,
    pub(super) decoder: hpack::Decoder,
    /// Credit for the frames of the peer.
    pub meter: FrameMeter,
    pub(super) has_settings: bool,
    pub(super) streams: Streams,
    pub(super) windows: ConnectionWindows,
    /// Initial send window of streams, by the peer's SETTINGS.
    pub(super) peer_window: i64,
    /// Highest identifier of a stream that the peer has opened.
    pub(super) last_stream: u32,
    pub(super) resets: Resets,
    goaway: GoAway,
    pub(super) peer_is_leaving: bool,
    /// True if the next header block begins with a table size update (RFC 7541 section 4.2).
    pub(super) owes_table_update: bool,
    /// Payload of the keepalive PING that is not acknowledged yet. Only who reads knows it.
    unanswered_ping: Option<[u8; 8]>,
    /// Time of the SETTINGS or PING that is not acknowledged yet.
    probed_at: Option<Instant>,
    /// Least round trip time so far.
    rtt: Option<Duration>,
    /// Events of the input that is being received; empty in between.
    pub(super) events: Vec<Event>,
    /// Frames to send, except DATA.
    pub control: Vec<u8>,
}

impl Default for Server {
    /// Creates the state of a new connection, with SETTINGS to send.
    fn default() -> Self {
        let mut control = Vec::new();
        let value = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let settings = [
            (setting::MAX_CONCURRENT_STREAMS, STREAMS_MAX),
            (setting::INITIAL_WINDOW_SIZE, STREAM_WINDOW_MIN),
            (setting::MAX_FRAME_SIZE, value(FRAME_BYTES_MAX)),
            (setting::MAX_HEADER_LIST_SIZE, value(HEADER_LIST_BYTES_MAX)),
        ];
        frame::push_settings(&mut control, &settings);
        let raised = i64::from(CONNECTION_WINDOW) - DEFAULT_WINDOW;
        frame::push_window_update(&mut control, 0, u32::try_from(raised).unwrap_or(0));
        Self {
            read: Read::Preface(0),
            header: [0; HEADER_BYTES],
            payload: Vec::new(),
            block: None,
            decoder: hpack::Decoder::default(),
            meter: FrameMeter::default(),
            has_settings: false,
            streams: Streams::default(),
            windows: ConnectionWindows::default(),
            peer_window: DEFAULT_WINDOW,
            last_stream: 0,
            resets: Resets::default(),
            goaway: GoAway::NotSent,
            peer_is_leaving: false,
            owes_table_update: false,
            unanswered_ping: None,
            probed_at: Some(Instant::now()),
            rtt: None,
            events: Vec::new(),
            control,
        }
    }
}

impl Server {
    /// Returns true once the preface was received.
    pub fn has_preface(&self) -> bool {
        !matches!(self.read, Read::Preface(_))
    }

    /// Returns true once the preface and the first SETTINGS were received.
    pub fn is_established(&self) -> bool {
        self.has_settings
    }

    /// Returns true once the connection has nothing left to do: a side has sent its last GOAWAY,
    /// and no stream is open.
    pub fn is_finished(&self) -> bool {
        let leaving = matches!(self.goaway, GoAway::Final(_)) || self.peer_is_leaving;
        leaving && self.streams.is_empty()
    }

    /// Returns the streams that are open or not removed yet.
    pub fn keys(&mut self) -> Vec<StreamKey> {
        self.streams.keys()
    }

    /// Returns true if the stream exists and was not reset.
    pub fn is_open(&self, key: StreamKey) -> bool {
        self.streams.get(key).is_some_and(|stream| !stream.is_reset())
    }

    /// Returns true if the stream was not removed yet.
    pub fn has(&self, key: StreamKey) -> bool {
        self.streams.get(key).is_some()
    }

    #[cfg(test)]
    pub fn find(&self, id: u32) -> Option<StreamKey> {
        self.streams.find(id)
    }

    /// Sends the header list of a response: 200 opens the tunnel, any other status ends the
    /// stream. `field` is a header besides the status.
    pub fn respond(&mut self, key: StreamKey, status: u16, field: Option<(&str, &str)>) {
        let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_reset()) else {
            return;
        };
        let (ended, first_peer) = (stream.has_received_end(), stream.first_peer);
        let ends = status != 200;
        let mut block = Vec::with_capacity(16);
        if std::mem::take(&mut self.owes_table_update) {
            // Dynamic table size update to 0: responses use the static table only.
            block.push(0x20);
        }
        hpack::encode_status(status, &mut block);
        if let Some((name, value)) = field {
            hpack::encode_field(name, value, &mut block);
        }
        let end_stream = if ends { flag::END_STREAM } else { 0 };
        let flags = flag::END_HEADERS | end_stream;
        frame::push(&mut self.control, kind::HEADERS, flags, key.id, &block);
        if !ends {
            return self.meter.sent_answer(block.len(), first_peer);
        }
        self.meter.sent_refusal(first_peer);
        self.streams.end(key, StreamEnd::Sent);
        if !ended {
            // The peer may send what it likes on a rejected stream, so nothing more is read from
            // it (RFC 9113 section 8.1).
            self.reset(key, ErrorCode::NO_ERROR);
        }
    }

    /// Resets a stream, unless it was reset before.
    pub fn reset(&mut self, key: StreamKey, code: ErrorCode) {
        if self.is_open(key) {
            self.streams.end(key, StreamEnd::Reset);
            self.push_reset(key.id, code);
        }
    }

    pub(super) fn push_reset(&mut self, id: u32, code: ErrorCode) {
        self.resets.insert(id);
        frame::push_reset(&mut self.control, id, code);
    }

    /// Charges a request to its first peer, which a gateway has sent as `source`, and its stream's
    /// later frames.
    ///
    /// # Errors
    /// The first peer has no credit. If the peer has reset the stream in the same turn, all streams
    /// of the first peer are reset, as by a reset in a later turn, and returned.
    pub fn charge_first_peer(
        &mut self,
        key: StreamKey,
        source: &[u8],
        price: u64,
    ) -> Result<(), Vec<StreamKey>> {
        let id = self.meter.first_peer(source);
        let stream = self.streams.get_mut(key);
        let is_open = stream.map(|stream| stream.first_peer = Some(id)).is_some();
        let price = if is_open { price } else { price + PRICE_RESET };
        if self.meter.charge_first_peer(price, Some(id)).is_ok() {
            return Ok(());
        }
        self.meter.sent_refusal(None);
        Err(if is_open { Vec::new() } else { self.reset_streams_of(id) })
    }

    /// Resets the streams of a first peer that has used its credit up. Returns them.
    fn reset_streams_of(&mut self, id: FirstPeerId) -> Vec<StreamKey> {
        let keys = self.streams.keys_of(id);
        for key in &keys {
            self.reset(*key, ErrorCode::ENHANCE_YOUR_CALM);
        }
        keys
    }

    /// Resets the streams of a first peer that has used its credit up.
    pub(super) fn settle(
        &mut self,
        charged: Result<(), CreditExhausted>,
    ) -> Result<(), ConnectionError> {
        match charged {
            Err(CreditExhausted::Connection) => return Err(ConnectionError::EXHAUSTED),
            Err(CreditExhausted::FirstPeer(id)) => {
                let keys = self.reset_streams_of(id).into_iter();
                self.events.extend(keys.map(|key| Event::Reset(key, Reason::CreditExhausted)));
            }
            Ok(()) => {}
        }
        Ok(())
    }

    pub fn remove(&mut self, key: StreamKey) {
        self.streams.remove(key);
    }

    /// Returns the number of bytes that may be sent on a stream. If it is 0, an
    /// [`Event::Writable`] follows, or the stream is returned by [`Self::take_writable`].
    pub fn capacity(&mut self, key: StreamKey) -> usize {
        let connection = self.windows.send;
        let Some(stream) = self.streams.get_mut(key).filter(|stream| !stream.is_reset()) else {
            return 0;
        };
        let capacity = usize::try_from(stream.send_window.min(connection)).unwrap_or(0);
        stream.is_blocked = false;
        if capacity == 0 {
            self.streams.block(key);
        }
        capacity
    }

    /// Takes the stream that has waited longest for the window of the connection, if it has any.
    pub fn take_writable(&mut self) -> Option<StreamKey> {
        self.has_writable().then(|| self.streams.take_waiting())?
    }

    /// Returns true if [`Self::take_writable`] may return a stream.
    pub fn has_writable(&self) -> bool {
        self.windows.send > 0 && self.streams.has_waiting()
    }

    /// Takes `bytes` of DATA that the driver sends from the windows.
    pub fn sent_data(&mut self, key: StreamKey, bytes: usize, frames: usize, ends: bool) {
        let count = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.windows.send -= count;
        let Some(stream) = self.streams.get_mut(key) else {
            return;
        };
        stream.send_window -= count;
        let is_cut = stream.send_window <= 0 || self.windows.send <= 0;
        let first_peer = stream.first_peer;
        let answers = frames.saturating_sub(usize::from(is_cut && !ends));
        self.meter.sent_data(answers, bytes, first_peer);
        if ends {
            self.streams.end(key, StreamEnd::Sent);
        }
    }

    /// Gives back window for bytes of a stream that the driver has forwarded or dropped. Returns
    /// true if the window may limit the peer: half of it was used within a few round trips.
    pub fn release(&mut self, key: StreamKey, bytes: usize) -> bool {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Some(increment) = self.streams.release(key, bytes) else { return false };
        frame::push_window_update(&mut self.control, key.id, increment);
        let used_in = self.streams.restart_clock(key);
        used_in.zip(self.rtt).is_some_and(|(used_in, rtt)| used_in < LIMITING_TRIPS * rtt)
    }

    /// Notes such bytes whose window is given back with a later [`Self::release`].
    pub fn withhold(&mut self, key: StreamKey, bytes: usize) {
        self.streams.withhold(key, u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// Enlarges the receive window of a stream, whose reader keeps up with a whole window.
    pub fn grow(&mut self, key: StreamKey) {
        if let Some(increment) = self.streams.grow(key) {
            frame::push_window_update(&mut self.control, key.id, increment);
        }
    }

    /// Returns the receive window of a stream in bytes.
    pub fn window(&self, key: StreamKey) -> u32 {
        self.streams.window(key)
    }

    /// Starts a graceful shutdown: streams that the peer has opened before it receives GOAWAY are
    /// served (RFC 9113 section 6.8).
    pub fn shut_down_gracefully(&mut self) {
        if self.goaway == GoAway::NotSent {
            self.goaway = GoAway::Announced;
            frame::push_goaway(&mut self.control, u32::MAX >> 1, ErrorCode::NO_ERROR);
            frame::push(&mut self.control, kind::PING, 0, 0, &GOAWAY_PING);
        }
    }

    /// Sends the last GOAWAY. An error is sent even if a GOAWAY without one was the last so far
    /// (RFC 9113 section 5.4.1).
    pub fn shut_down(&mut self, code: ErrorCode) {
        let last = match self.goaway {
            GoAway::Final(_) if code == ErrorCode::NO_ERROR => return,
            GoAway::Final(last) => last,
            GoAway::NotSent | GoAway::Announced => self.last_stream,
        };
        self.goaway = GoAway::Final(last);
        frame::push_goaway(&mut self.control, last, code);
    }

    /// Returns true if a stream with this identifier comes after the last GOAWAY.
    pub(super) fn is_after_goaway(&self, id: u32) -> bool {
        matches!(self.goaway, GoAway::Final(last) if id > last)
    }

    /// Sends a keepalive PING. Returns false if the previous one was not answered.
    pub fn ping(&mut self) -> bool {
        if self.unanswered_ping.is_some() {
            return false;
        }
        // The keys of the hasher are secret.
        let payload = RandomState::new().hash_one(()).to_ne_bytes();
        self.unanswered_ping = Some(payload);
        // Unless SETTINGS are not acknowledged yet: that is no answer to this.
        self.probed_at.get_or_insert_with(Instant::now);
        frame::push(&mut self.control, kind::PING, 0, 0, &payload);
        true
    }

    pub(super) fn receive_pong(&mut self, payload: &[u8]) {
        if self.unanswered_ping.is_some_and(|sent| sent == payload) {
            self.unanswered_ping = None;
            self.measure_rtt();
        } else if payload == GOAWAY_PING && self.goaway == GoAway::Announced {
            self.shut_down(ErrorCode::NO_ERROR);
        }
    }

    /// Notes the round trip time of the SETTINGS or PING that was acknowledged.
    pub(super) fn measure_rtt(&mut self) {
        let sample = self.probed_at.take().map(|at| at.elapsed());
        self.rtt = self.rtt.into_iter().chain(sample).min();
    }

    /// Applies a new initial window of the peer to all streams (RFC 9113 section 6.9.2).
    pub(super) fn set_peer_window(&mut self, value: u32) -> Result<(), ConnectionError> {
        let value = i64::from(value);
        if value == self.peer_window {
            return Ok(());
        }
        let charged = self.meter.changed_windows(self.streams.len());
        self.settle(charged)?;
        if value > WINDOW_MAX || !self.streams.shift_send_windows(value - self.peer_window) {
            let rule = "SETTINGS_INITIAL_WINDOW_SIZE above 2^31 - 1";
            return Err(ConnectionError::new(ErrorCode::FLOW_CONTROL_ERROR, rule));
        }
        self.peer_window = value;
        let unblocked = self.streams.take_unblocked();
        let charged = self.meter.unblocked(unblocked.len());
        self.events.extend(unblocked.into_iter().map(Event::Writable));
        self.settle(charged)
    }
}
