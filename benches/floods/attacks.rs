//! The floods and bombs of a hostile client with a valid certificate.

use crate::records::{ALERT, APPLICATION_DATA, RecordWriter};
use crate::support::raw::{self, frame, headers};

/// Repeated part of a flood, by the number of the round.
pub type Round = fn(u32) -> Vec<u8>;

/// Repeated part of a flood of TLS records.
pub type RecordRound = fn(&mut RecordWriter, u32);

/// Flood, or a way of holding resources.
pub struct Attack {
    pub name: &'static str,
    /// Window that the client gives to streams. With 0, answers cannot be sent.
    pub window: u32,
    pub what: AttackKind,
}

pub enum AttackKind {
    /// CONNECT on stream 1, the bytes of the function once, then rounds without a pause.
    Flood(fn() -> Vec<u8>, Round),
    /// CONNECT on stream 1, then rounds of TLS records without a pause.
    Records(RecordRound),
    /// As many CONNECTs as a connection allows streams, and then nothing.
    Leave,
    /// The preface and SETTINGS, and then nothing.
    Silence,
}

pub const CONNECT: [(&str, &[u8]); 2] =
    [(":method", b"CONNECT"), (":authority", b"echo.global:80")];
const REFUSED: [(&str, &[u8]); 2] = [(":method", b"CONNECT"), (":authority", b"nothing.here:80")];

/// Number of streams opened and left on each connection: the limit that Strait gives a client.
pub const STREAMS: u32 = 256;
/// Default window of RFC 9113.
const WINDOW: u32 = 65_535;

/// Returns the stream of the round: 1 is the open tunnel, the others are new.
fn stream(round: u32) -> u32 {
    3 + 2 * round
}

/// Returns all CONNECTs of [`AttackKind::Leave`], except for stream 1.
pub fn left_streams() -> Vec<u8> {
    (0..STREAMS - 1).flat_map(|round| headers(stream(round), &CONNECT)).collect()
}

/// Number of closed streams that a flood uses in turn: more than Strait remembers.
const CLOSED: u32 = 2000;

/// Closes [`CLOSED`] streams: a stream that is opened closes all idle ones before it.
fn close_streams() -> Vec<u8> {
    opened_and_reset(CLOSED, &CONNECT)
}

fn opened_and_reset(round: u32, fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = headers(stream(round), fields);
    bytes.extend(frame(raw::RST_STREAM, 0, stream(round), &[0, 0, 0, 8]));
    bytes
}

/// Returns a field that stays in the peer's HPACK table: `x` with 4,000 bytes, of its 4,096.
fn kept_field() -> Vec<u8> {
    // A literal with incremental indexing and a new name (RFC 7541 6.2.1), the length as
    // 127 + 33 + 30 * 128 (5.1).
    let mut block = vec![0x40, 1, b'x', 127, 0x80 | 33, 30];
    block.resize(block.len() + 4000, b'y');
    let mut request = headers(3, &CONNECT);
    request.extend(block);
    // headers() makes a whole frame, so the length is corrected for the added bytes.
    let length = u16::try_from(request.len() - 9).expect("a short block");
    request[1..3].copy_from_slice(&length.to_be_bytes());
    request
}

/// Returns a request that refers to the kept field 3,000 times, with one byte each: 12 MB when
/// decoded.
fn references(round: u32) -> Vec<u8> {
    let mut request = headers(stream(1 + round), &CONNECT);
    request.extend([0x80 | 62; 3000]);
    let length = u16::try_from(request.len() - 9).expect("a short block");
    request[1..3].copy_from_slice(&length.to_be_bytes());
    request
}

const fn flood(name: &'static str, round: Round) -> Attack {
    opened(name, Vec::new, round)
}

const fn opened(name: &'static str, opening: fn() -> Vec<u8>, round: Round) -> Attack {
    Attack { name, window: WINDOW, what: AttackKind::Flood(opening, round) }
}

const fn records(name: &'static str, round: RecordRound) -> Attack {
    Attack { name, window: WINDOW, what: AttackKind::Records(round) }
}

/// Size of the frames that arrive in one-byte records.
const LARGE: u32 = 16 * 1024;
/// The warning `user_canceled`, which ends nothing (RFC 8446 6.1).
const USER_CANCELED: [u8; 2] = [1, 90];

/// Returns a byte of a sequence of large frames of an unknown type, which need no window.
fn byte_of_frames(index: u32) -> u8 {
    let header = [0, 0x40, 0, 0xbe, 0, 0, 0, 0, 0];
    let at = index % (LARGE + 9);
    header.get(at as usize).copied().unwrap_or_default()
}

pub const ATTACKS: [Attack; 24] = [
    flood("rapid reset, good authority", |round| opened_and_reset(round, &CONNECT)),
    flood("rapid reset, bad authority", |round| opened_and_reset(round, &REFUSED)),
    opened(
        "CONTINUATION, full",
        || frame(raw::HEADERS, 0, 3, &[0x82; 16]),
        |_| frame(raw::CONTINUATION, 0, 3, &[0x82; 1024]),
    ),
    opened(
        "CONTINUATION, empty",
        || frame(raw::HEADERS, 0, 3, &[]),
        |_| frame(raw::CONTINUATION, 0, 3, &[]),
    ),
    flood("PING", |_| frame(raw::PING, 0, 0, &[0; 8])),
    flood("SETTINGS", |_| frame(raw::SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0])),
    flood("empty DATA", |_| frame(raw::DATA, 0, 1, &[])),
    flood("one-byte DATA", |_| frame(raw::DATA, 0, 1, &[7])),
    opened("END_STREAM on a closed stream", close_streams, |_| {
        frame(raw::DATA, raw::END_STREAM, stream(0), &[])
    }),
    opened("32-byte DATA on a closed stream", close_streams, |_| {
        frame(raw::DATA, 0, stream(0), &[7; 32])
    }),
    opened("END_STREAM on 2,000 closed streams", close_streams, |round| {
        frame(raw::DATA, raw::END_STREAM, stream(round % CLOSED), &[])
    }),
    opened("32-byte DATA on 2,000 closed streams", close_streams, |round| {
        frame(raw::DATA, 0, stream(round % CLOSED), &[7; 32])
    }),
    flood("one-byte WINDOW_UPDATE", |_| frame(raw::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
    flood("window overflow", |round| {
        let mut bytes = headers(stream(round), &CONNECT);
        let most = 0x7fff_ffff_u32.to_be_bytes();
        bytes.extend(frame(raw::WINDOW_UPDATE, 0, stream(round), &most));
        bytes
    }),
    flood("PRIORITY", |round| frame(raw::PRIORITY, 0, stream(round), &[0, 0, 0, 1, 16])),
    flood("unknown frames", |_| frame(0xbe, 0, 0, &[0; 64])),
    records("empty records", |write, _| {
        write.push(APPLICATION_DATA, &[]);
    }),
    records("one-byte records", |write, index| {
        write.push(APPLICATION_DATA, &[byte_of_frames(index)]);
    }),
    records("KeyUpdate", |write, _| write.push_key_update()),
    records("alerts", |write, _| write.push(ALERT, &USER_CANCELED)),
    Attack {
        name: "HPACK references, closed window",
        window: 0,
        what: AttackKind::Flood(kept_field, references),
    },
    flood("3,000 header fields", |round| {
        let fields: Vec<(&str, &[u8])> = vec![("x", b"y"); 3000];
        headers(stream(round), &fields)
    }),
    Attack { name: "streams opened and left", window: WINDOW, what: AttackKind::Leave },
    Attack { name: "silence after TLS and SETTINGS", window: WINDOW, what: AttackKind::Silence },
];

/// Returns the number of frames in `bytes`, which are whole frames of ours.
pub fn frames(mut bytes: &[u8]) -> u64 {
    let mut count = 0;
    while let [high, middle, low, rest @ ..] = bytes {
        let length = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
        bytes = rest.get(6 + length..).unwrap_or_default();
        count += 1;
    }
    count
}
