//! Frames that a fuzzed gateway has received and sent, checked against RFC 9113.

use std::collections::HashMap;

use super::frames::{
    DATA, DEFAULT_FRAME_BYTES, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PREFACE, RST_STREAM,
    SETTINGS, WINDOW_UPDATE,
};

const HEADER_BYTES: usize = 9;
/// Connection preface without SETTINGS.
const MAGIC_BYTES: usize = PREFACE.len() - HEADER_BYTES;

/// A frame.
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

/// Returns the first frame of `bytes` and removes it. None: the frame is incomplete.
fn take_frame(bytes: &mut Vec<u8>) -> Option<Frame> {
    let &[high, middle, low, kind, flags, a, b, c, d] = bytes.first_chunk::<HEADER_BYTES>()?;
    let end = HEADER_BYTES + u32::from_be_bytes([0, high, middle, low]) as usize;
    let payload = bytes.get(HEADER_BYTES..end)?.to_vec();
    bytes.drain(..end);
    Some(Frame { kind, flags, stream: u32::from_be_bytes([a & 0x7f, b, c, d]), payload })
}

/// Bytes of the peer.
#[derive(Default)]
pub struct Sent(Vec<u8>);

impl Sent {
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Returns the sum of the increments of the connection's window.
    pub fn granted(mut self) -> u64 {
        self.0.drain(..MAGIC_BYTES.min(self.0.len()));
        let mut granted = 0;
        while let Some(frame) = take_frame(&mut self.0) {
            if let (WINDOW_UPDATE, 0, &[a, b, c, d]) =
                (frame.kind, frame.stream, &frame.payload[..])
            {
                granted += u64::from(u32::from_be_bytes([a & 0x7f, b, c, d]));
            }
        }
        granted
    }
}

/// State of a stream on the gateway's side.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Answered,
    Ended,
    Reset,
}

/// Frames of the gateway. Panics at the first that RFC 9113 forbids.
#[derive(Default)]
pub struct Received {
    unread: Vec<u8>,
    bytes: usize,
    data_bytes: u64,
    has_settings: bool,
    last_stream: Option<u32>,
    streams: HashMap<u32, State>,
}

impl Received {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of bytes that the connection's window counts.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    pub fn receive(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len();
        self.unread.extend_from_slice(bytes);
        while let Some(frame) = take_frame(&mut self.unread) {
            self.check(&frame);
        }
    }

    fn check(&mut self, frame: &Frame) {
        let Frame { kind, stream, .. } = *frame;
        let length = frame.payload.len();
        assert!(length <= DEFAULT_FRAME_BYTES, "frame {kind} of {length} bytes");
        assert_eq!(self.has_settings, kind != SETTINGS || frame.flags == 1);
        self.has_settings = true;
        let of_connection = matches!(kind, SETTINGS | PING | GOAWAY);
        assert!(kind == WINDOW_UPDATE || of_connection == (stream == 0), "{kind} on {stream}");
        match (kind, &frame.payload[..]) {
            (SETTINGS, payload) => assert_eq!(payload.len() % 6, 0),
            (PING, payload) => assert_eq!(payload.len(), 8),
            (GOAWAY, &[a, b, c, d, _, _, _, _, ..]) => {
                let last = u32::from_be_bytes([a, b, c, d]);
                assert!(self.last_stream.is_none_or(|before| last <= before), "GOAWAY grows");
                self.last_stream = Some(last);
            }
            (WINDOW_UPDATE, &[a, b, c, d]) => {
                let increment = u32::from_be_bytes([a, b, c, d]);
                assert!((1..1 << 31).contains(&increment), "increment of {increment}");
                assert_ne!(self.streams.get(&stream), Some(&State::Reset), "{stream}");
            }
            (HEADERS | DATA | RST_STREAM, payload) => self.check_stream(frame, payload),
            _ => panic!("frame {kind} of {length} bytes"),
        }
    }

    fn check_stream(&mut self, frame: &Frame, payload: &[u8]) {
        let Frame { kind, stream, .. } = *frame;
        assert_eq!(stream % 2, 1, "a stream of the gateway");
        let state = self.streams.get(&stream).copied();
        match kind {
            HEADERS => {
                assert_eq!(state, None, "second HEADERS on {stream}");
                assert_ne!(frame.flags & END_HEADERS, 0, "a fragment");
            }
            DATA => {
                assert_eq!(state, Some(State::Answered), "DATA on {stream}");
                self.data_bytes += payload.len() as u64;
            }
            _ => assert_eq!(payload.len(), 4),
        }
        let ends = kind != RST_STREAM && frame.flags & END_STREAM != 0;
        let next = match kind {
            RST_STREAM => State::Reset,
            _ if ends => State::Ended,
            _ => State::Answered,
        };
        self.streams.insert(stream, next);
    }
}
