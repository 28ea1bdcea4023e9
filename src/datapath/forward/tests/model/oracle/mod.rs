//! Reference implementation of a server for CONNECT (RFC 9113), as simple as possible.
//!
//! It is fed with the frames of the peer and the actions of tasks and endpoints. It knows each
//! answer that is due, and checks each message of the gateway.

mod checks;

use std::collections::{BTreeMap, VecDeque};

use super::super::rig::CONNECT;
use super::super::wire::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, Frame, GOAWAY, HEADERS, PADDED, PING,
    PRIORITIZED, PRIORITY, PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE,
};

const PROTOCOL_ERROR: u32 = 1;
pub(super) const INTERNAL_ERROR: u32 = 2;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const COMPRESSION_ERROR: u32 = 9;
const CONNECT_ERROR: u32 = 10;
const ENHANCE_YOUR_CALM: u32 = 11;

/// Header block of a request with a field that CONNECT forbids (RFC 9113 section 8.5).
pub(super) const MALFORMED: &[u8] =
    b"\x00\x07:method\x07CONNECT\x00\x0a:authority\x0becho.app:80\x84";
/// Limits of the gateway's SETTINGS, which docs/wire-contract.md 1.2 has.
const FRAME_MAX: usize = 64 * 1024;
pub(super) const STREAM_WINDOW: i64 = 256 * 1024;
const STREAM_WINDOW_MAX: i64 = 4 * 1024 * 1024;
const CONNECTION_WINDOW: i64 = 64 * 1024 * 1024;
const HEADER_BLOCK_MAX: usize = 64 * 1024;
/// Limit of a window, and the window of a connection before any update (section 6.9).
const WINDOW_MAX: i64 = (1 << 31) - 1;
const DEFAULT_WINDOW: i64 = 65_535;
/// Largest DATA frame that the peer accepts (section 4.2).
const PEER_FRAME_MAX: usize = 16 * 1024;
const DRAINED: &[u8] = b"drained?";
/// Stands for the payload of a keepalive PING, which the gateway draws.
const KEEPALIVE: &[u8] = b"(random)";

/// State of the task or tunnel of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Requested,
    Answered,
    Open,
    /// GOAWAY excludes the stream, or its request was malformed.
    Never,
}

/// Cause of a stream's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    No,
    ByPeer,
    ByGateway,
    /// Both sides have sent END_STREAM.
    Done,
}

/// State of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Far {
    None,
    Open,
    /// It has sent FIN.
    Ended,
    /// It has closed its socket, with nothing unread.
    Left,
    /// It has closed its socket, with unread bytes.
    Reset,
}

/// Reset of a stream by the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResetBy {
    None,
    Due(u32),
    Seen,
}

#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) phase: Phase,
    pub(super) closed: Closed,
    pub(super) far: Far,
    pub(super) peer_ended: bool,
    /// The peer's reset was followed by a time in which nothing was left to send.
    is_reset_settled: bool,
    /// Bytes that the peer has sent and the endpoint has taken.
    pub(super) sent: usize,
    pub(super) taken: usize,
    /// Bytes that the endpoint has sent and the peer has received.
    pub(super) produced: usize,
    pub(super) received: usize,
    /// Bytes that the peer may still send.
    pub(super) allowance: i64,
    /// Bytes that the gateway may send in total, now and at any time since its last
    /// acknowledgement of SETTINGS.
    credit: i64,
    limit: i64,
    status_due: Option<u16>,
    is_answered: bool,
    reset: ResetBy,
    /// The gateway has sent END_STREAM.
    pub(super) gateway_ended: bool,
}

impl Stream {
    /// Returns the number of bytes that the gateway may send now.
    pub(super) fn window(&self) -> i64 {
        self.credit - self.received as i64
    }

    /// Returns true if the gateway's next action depends on the time at which it looks at the
    /// endpoint.
    pub(super) fn is_ambiguous(&self) -> bool {
        self.closed == Closed::No
            && (self.far == Far::Reset
                || self.peer_ended && matches!(self.far, Far::Ended | Far::Left))
    }

    /// Returns true if frames on the stream have one effect.
    pub(super) fn is_live(&self) -> bool {
        self.closed == Closed::No && !self.is_ambiguous()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goaway {
    NotSent,
    Announced,
    Final(u32),
}

pub(super) struct Oracle {
    pub(super) streams: BTreeMap<u32, Stream>,
    pub(super) last: u32,
    pub(super) initial_window: i64,
    /// Bytes that the gateway may send in total, and has sent.
    credit: i64,
    received: i64,
    /// Bytes that the peer may still send on the connection.
    allowance: i64,
    /// Connection frames that are due, in order.
    due: VecDeque<Frame>,
    /// Requests of a KeyUpdate since the peer has last received everything. One answer may be for
    /// several (RFC 8446 section 4.6.3).
    key_updates_requested: usize,
    is_key_update_due: bool,
    block: Option<(Frame, Vec<u8>)>,
    goaway: Goaway,
    pub(super) is_leaving: bool,
    pub(super) is_fatal: bool,
    is_closing: bool,
    pub(super) is_ping_sent: bool,
    /// Payload of the last keepalive PING that the peer has read.
    pub(super) ping: Option<[u8; 8]>,
    has_alert: bool,
    decoder: loona_hpack::Decoder<'static>,
}

impl Oracle {
    /// Returns the state of a new connection, whose first frames are due.
    pub(super) fn new() -> Self {
        let settings: [(u16, u32); 4] = [(3, 256), (4, 256 << 10), (5, 64 << 10), (6, 16 << 10)];
        let payload: Vec<u8> = settings
            .iter()
            .flat_map(|(name, value)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat())
            .collect();
        let raised = u32::try_from(CONNECTION_WINDOW - DEFAULT_WINDOW).expect("a window");
        let mut due = VecDeque::new();
        due.push_back(Frame::new(SETTINGS, 0, 0, &payload));
        due.push_back(Frame::new(WINDOW_UPDATE, 0, 0, &raised.to_be_bytes()));
        Self {
            streams: BTreeMap::new(),
            last: 0,
            initial_window: DEFAULT_WINDOW,
            credit: DEFAULT_WINDOW,
            received: 0,
            allowance: CONNECTION_WINDOW,
            due,
            key_updates_requested: 0,
            is_key_update_due: false,
            block: None,
            goaway: Goaway::NotSent,
            is_leaving: false,
            is_fatal: false,
            is_closing: false,
            is_ping_sent: false,
            ping: None,
            has_alert: false,
            decoder: loona_hpack::Decoder::new(),
        }
    }

    pub(super) fn window(&self) -> i64 {
        self.credit - self.received
    }

    pub(super) fn is_drain_announced(&self) -> bool {
        self.goaway == Goaway::Announced
    }

    pub(super) fn is_goaway_sent(&self) -> bool {
        self.goaway != Goaway::NotSent
    }

    fn fail(&mut self, code: u32) {
        self.push_goaway(code);
        self.is_fatal = true;
    }

    fn push_goaway(&mut self, code: u32) {
        let last = match self.goaway {
            Goaway::Final(last) => last,
            _ => self.last,
        };
        self.goaway = Goaway::Final(last);
        let payload = [last.to_be_bytes(), code.to_be_bytes()].concat();
        self.due.push_back(Frame::new(GOAWAY, 0, 0, &payload));
    }

    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id > self.last
    }

    /// Resets a stream.
    fn reset(&mut self, id: u32, code: u32) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.closed = Closed::ByGateway;
            if stream.reset == ResetBy::None {
                stream.reset = ResetBy::Due(code);
            }
        }
    }

    fn closed(&self, id: u32) -> Closed {
        self.streams.get(&id).map_or(Closed::Done, |it| it.closed)
    }

    /// Receives a frame of the peer.
    pub(super) fn receive(&mut self, frame: &Frame) {
        if self.is_fatal {
            return;
        }
        let (id, length) = (frame.stream, frame.payload.len());
        let is_interrupted = match &self.block {
            Some((headers, _)) => frame.kind != CONTINUATION || headers.stream != id,
            None => frame.kind == CONTINUATION,
        };
        let is_stream_frame = matches!(frame.kind, DATA | HEADERS | PRIORITY | RST_STREAM);
        let is_connection_frame = matches!(frame.kind, SETTINGS | PING | GOAWAY);
        let has_wrong_length = match frame.kind {
            RST_STREAM | WINDOW_UPDATE => length != 4,
            PRIORITY => length != 5 && self.is_idle(id),
            PING => length != 8,
            GOAWAY => length < 8,
            SETTINGS => length % 6 != 0 || frame.has(ACK) && length > 0,
            DATA => frame.has(PADDED) && length == 0,
            _ => false,
        };
        if length > FRAME_MAX {
            return self.fail(FRAME_SIZE_ERROR);
        }
        if is_interrupted
            || frame.kind == PUSH_PROMISE
            || is_stream_frame && id == 0
            || is_connection_frame && id != 0
        {
            return self.fail(PROTOCOL_ERROR);
        }
        if has_wrong_length {
            return self.fail(FRAME_SIZE_ERROR);
        }
        match frame.kind {
            DATA => self.receive_data(frame),
            HEADERS | CONTINUATION => self.receive_block(frame),
            PRIORITY => {
                if length != 5 {
                    self.reset(id, FRAME_SIZE_ERROR);
                } else if frame.number(0) == id && self.closed(id) == Closed::No {
                    self.reset(id, PROTOCOL_ERROR);
                }
            }
            RST_STREAM if self.is_idle(id) => self.fail(PROTOCOL_ERROR),
            RST_STREAM => {
                if let Some(stream) = self.streams.get_mut(&id)
                    && stream.closed == Closed::No
                {
                    stream.closed = Closed::ByPeer;
                }
            }
            SETTINGS if !frame.has(ACK) => self.receive_settings(&frame.payload),
            PING if !frame.has(ACK) => {
                self.due.push_back(Frame::new(PING, ACK, 0, &frame.payload));
            }
            PING if frame.payload == DRAINED && self.goaway == Goaway::Announced => {
                self.push_goaway(0);
            }
            PING => self.is_ping_sent &= self.ping.is_none_or(|sent| frame.payload != sent),
            GOAWAY => self.is_leaving = true,
            WINDOW_UPDATE => self.receive_update(id, i64::from(frame.number(0))),
            _ => {}
        }
    }

    fn receive_data(&mut self, frame: &Frame) {
        let (id, length) = (frame.stream, frame.payload.len());
        if self.is_idle(id) {
            return self.fail(PROTOCOL_ERROR);
        }
        self.allowance -= length as i64;
        let padding = match frame.has(PADDED) {
            true => 1 + usize::from(frame.payload[0]),
            false => 0,
        };
        if padding > length {
            return self.fail(PROTOCOL_ERROR);
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        match stream.closed {
            Closed::ByGateway => return,
            Closed::ByPeer | Closed::Done => return self.reset(id, STREAM_CLOSED),
            Closed::No => {}
        }
        if stream.peer_ended {
            return self.reset(id, STREAM_CLOSED);
        }
        stream.allowance -= length as i64;
        if stream.allowance < 0 {
            return self.reset(id, FLOW_CONTROL_ERROR);
        }
        stream.sent += length - padding;
        stream.peer_ended |= frame.has(END_STREAM);
        if stream.far == Far::Left && length > padding {
            self.reset(id, CONNECT_ERROR);
        }
    }

    fn receive_block(&mut self, frame: &Frame) {
        let (mut headers, mut block) = match self.block.take() {
            Some(block) => block,
            None => (frame.clone(), Vec::new()),
        };
        let mut part = frame.payload.as_slice();
        if frame.kind == HEADERS && frame.has(PADDED) {
            let (padding, rest) = part.split_first().expect("a pad length");
            part = &rest[..rest.len() - usize::from(*padding)];
        }
        if frame.kind == HEADERS && frame.has(PRIORITIZED) {
            part = &part[5..];
        }
        block.extend_from_slice(part);
        if block.len() > HEADER_BLOCK_MAX {
            return self.fail(ENHANCE_YOUR_CALM);
        }
        if !frame.has(END_HEADERS) {
            self.block = Some((headers, block));
            return;
        }
        headers.payload = block;
        self.receive_headers(&headers);
    }

    fn receive_headers(&mut self, headers: &Frame) {
        let id = headers.stream;
        if id.is_multiple_of(2) {
            return self.fail(PROTOCOL_ERROR);
        }
        let is_request = headers.payload == CONNECT;
        if !is_request && headers.payload != MALFORMED {
            return self.fail(COMPRESSION_ERROR);
        }
        if id <= self.last {
            return match self.streams.get(&id) {
                Some(stream) if stream.closed == Closed::ByGateway => {}
                Some(stream) if stream.closed == Closed::No => {
                    let code = match stream.peer_ended {
                        true => STREAM_CLOSED,
                        false => PROTOCOL_ERROR,
                    };
                    self.reset(id, code);
                }
                _ => self.fail(STREAM_CLOSED),
            };
        }
        self.last = id;
        let is_excluded = matches!(self.goaway, Goaway::Final(last) if id > last);
        let stream = Stream {
            phase: match is_excluded || !is_request {
                true => Phase::Never,
                false => Phase::Requested,
            },
            closed: match is_excluded {
                true => Closed::Done,
                false => Closed::No,
            },
            far: Far::None,
            peer_ended: headers.has(END_STREAM),
            is_reset_settled: false,
            sent: 0,
            taken: 0,
            produced: 0,
            received: 0,
            allowance: STREAM_WINDOW,
            credit: self.initial_window,
            limit: self.initial_window,
            status_due: None,
            is_answered: false,
            reset: ResetBy::None,
            gateway_ended: false,
        };
        self.streams.insert(id, stream);
        if !is_excluded && !is_request {
            self.reset(id, PROTOCOL_ERROR);
        }
    }

    fn receive_settings(&mut self, payload: &[u8]) {
        let mut window = None;
        for entry in payload.chunks(6) {
            let value = i64::from(u32::from_be_bytes([entry[2], entry[3], entry[4], entry[5]]));
            match entry[1] {
                2 if value > 1 => return self.fail(PROTOCOL_ERROR),
                5 if !(16_384..=16_777_215).contains(&value) => return self.fail(PROTOCOL_ERROR),
                4 if value > WINDOW_MAX => return self.fail(FLOW_CONTROL_ERROR),
                4 => window = Some(value),
                _ => {}
            }
        }
        if let Some(window) = window {
            for stream in self.streams.values_mut() {
                stream.credit += window - self.initial_window;
                stream.limit = stream.limit.max(stream.credit);
            }
            self.initial_window = window;
        }
        self.due.push_back(Frame::new(SETTINGS, ACK, 0, &[]));
    }

    fn receive_update(&mut self, id: u32, increment: i64) {
        if id == 0 {
            self.credit += increment;
            match increment {
                0 => self.fail(PROTOCOL_ERROR),
                _ if self.window() > WINDOW_MAX => self.fail(FLOW_CONTROL_ERROR),
                _ => {}
            }
            return;
        }
        if self.is_idle(id) {
            return self.fail(PROTOCOL_ERROR);
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.credit += increment;
        stream.limit = stream.limit.max(stream.credit);
        let window = stream.window();
        if stream.closed != Closed::No {
        } else if increment == 0 {
            self.reset(id, PROTOCOL_ERROR);
        } else if window > WINDOW_MAX {
            self.reset(id, FLOW_CONTROL_ERROR);
        }
    }

    /// Notes the answer of a task. Any status but 200 ends the stream.
    pub(super) fn answer(&mut self, id: u32, status: u16) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.status_due = Some(status);
        if status == 200 {
            stream.phase = Phase::Answered;
        } else if stream.peer_ended {
            stream.closed = Closed::Done;
        } else {
            self.reset(id, 0);
        }
    }

    /// Notes that a task or the gateway resets a stream.
    pub(super) fn abort(&mut self, id: u32, code: u32) {
        self.reset(id, code);
    }

    pub(super) fn request_key_update(&mut self) {
        self.key_updates_requested += 1;
        self.is_key_update_due = true;
    }

    /// Notes a keepalive PING.
    pub(super) fn ping(&mut self) {
        self.is_ping_sent = true;
        self.ping = None;
        self.due.push_back(Frame::new(PING, 0, 0, KEEPALIVE));
    }

    /// Notes the start of a graceful shutdown.
    pub(super) fn shut_down(&mut self) {
        self.goaway = Goaway::Announced;
        let payload = [0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0];
        self.due.push_back(Frame::new(GOAWAY, 0, 0, &payload));
        self.due.push_back(Frame::new(PING, 0, 0, DRAINED));
    }

    /// Notes that the gateway closes the connection.
    pub(super) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closing, true)
            && !self.is_fatal
            && !matches!(self.goaway, Goaway::Final(_))
        {
            self.push_goaway(0);
        }
    }

    /// Returns true if the connection ends without open streams.
    fn is_going(&self) -> bool {
        self.is_leaving || matches!(self.goaway, Goaway::Final(_))
    }

    /// Returns true if the connection has to end, because no stream is open.
    pub(super) fn must_end(&self) -> bool {
        self.is_going() && self.streams.values().all(|it| it.closed != Closed::No)
    }

    /// Returns true if the connection may end, because each stream was ended by both sides.
    pub(super) fn may_end(&self) -> bool {
        let has_ended = |it: &Stream| it.closed != Closed::No || it.peer_ended && it.gateway_ended;
        self.is_going() && self.streams.values().all(has_ended)
    }
}
