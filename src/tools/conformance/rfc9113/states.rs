//! Section 5.1: each state of a stream and each type of frame.

use crate::tools::conformance::case::{Case, case};
use crate::tools::conformance::outcome::Outcome::{Connection, Ignored, Status, Stream};
use crate::tools::conformance::outcome::{Outcome, PROTOCOL_ERROR, STREAM_CLOSED, State, data};
use crate::tools::conformance::peer::Names;
use crate::tools::conformance::raw;

/// Returns the cases of the rows of each state, and those of [`IN_ANY_STATE`] for frames that have
/// none.
pub(super) fn cases(to: &Names) -> Vec<Case> {
    let in_state = |(name, state, rows): &(&str, State, &'static [Row])| {
        let is_other = |(kind, _): &&Row| rows.iter().all(|(own, _)| own != kind);
        let all = rows.iter().chain(IN_ANY_STATE.iter().filter(is_other));
        let line = |(kind, expected): &Row| {
            case("5.1", &format!("{kind} in state {name}"), *state, frame_of(to, kind), *expected)
        };
        all.map(line).collect::<Vec<_>>()
    };
    STATES.iter().flat_map(in_state).collect()
}

/// Type of a frame, and the outcomes that are permitted.
type Row = (&'static str, &'static [Outcome]);

/// Frames on stream 1, one of each type.
const DATA: &str = "DATA";
const HEADERS: &str = "HEADERS";
const TRAILERS: &str = "HEADERS with END_STREAM";
const PRIORITY: &str = "PRIORITY";
const RST_STREAM: &str = "RST_STREAM";
const PUSH_PROMISE: &str = "PUSH_PROMISE";
const WINDOW_UPDATE: &str = "WINDOW_UPDATE";
const CONTINUATION: &str = "CONTINUATION";
const UNKNOWN: &str = "a frame of unknown type";

fn frame_of(to: &Names, kind: &str) -> Vec<u8> {
    let block = raw::block(&[("a", b"b")]);
    let end = raw::END_STREAM | raw::END_HEADERS;
    let [data, headers] = [raw::DATA, raw::HEADERS];
    match kind {
        DATA => raw::frame(data, 0, 1, b"x"),
        HEADERS => raw::headers(1, &to.connect()),
        TRAILERS => raw::frame(headers, end, 1, &block),
        PRIORITY => raw::frame(raw::PRIORITY, 0, 1, &[0, 0, 0, 0, 15]),
        RST_STREAM => raw::frame(raw::RST_STREAM, 0, 1, &[0, 0, 0, 8]),
        PUSH_PROMISE => {
            let promised = [&[0, 0, 0, 2][..], &block].concat();
            raw::frame(raw::PUSH_PROMISE, raw::END_HEADERS, 1, &promised)
        }
        WINDOW_UPDATE => raw::frame(raw::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 9]),
        CONTINUATION => raw::frame(raw::CONTINUATION, raw::END_HEADERS, 1, &block),
        _ => raw::frame(0xbe, 0xff, 1, b"unknown"),
    }
}

const CONNECTION_PROTOCOL: &[Outcome] = &[Connection(PROTOCOL_ERROR)];
/// A closed stream may also be a connection error (section 5.1), and section 6.1 names a stream
/// error for DATA.
const CLOSED: &[Outcome] = &[Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)];
/// A new use of an identifier is also an error of section 5.1.1.
const REUSED: &[Outcome] =
    &[Connection(STREAM_CLOSED), Stream(STREAM_CLOSED), Connection(PROTOCOL_ERROR)];
/// A closed stream may also be discarded (section 5.1). Section 6.1 excludes that for DATA.
const DISCARDED_OR_REUSED: &[Outcome] =
    &[Ignored, Connection(STREAM_CLOSED), Stream(STREAM_CLOSED), Connection(PROTOCOL_ERROR)];
const IGNORED: &[Outcome] = &[Ignored];

const IN_ANY_STATE: &[Row] = &[
    (PRIORITY, IGNORED),
    (PUSH_PROMISE, CONNECTION_PROTOCOL),
    (CONTINUATION, CONNECTION_PROTOCOL),
    (UNKNOWN, IGNORED),
];
/// HEADERS on a connected stream is a stream error (section 8.5).
const CONNECTED: &[Outcome] = &[Stream(PROTOCOL_ERROR)];
const CLOSED_STREAM: &[Outcome] = &[Stream(STREAM_CLOSED)];
const DISCARDED: &[Outcome] = &[Ignored, Stream(STREAM_CLOSED)];

const STATES: &[(&str, State, &[Row])] = &[
    (
        "idle",
        State::Idle,
        &[
            (DATA, CONNECTION_PROTOCOL),
            (HEADERS, &[Status(200)]),
            (RST_STREAM, CONNECTION_PROTOCOL),
            (WINDOW_UPDATE, CONNECTION_PROTOCOL),
        ],
    ),
    (
        "open",
        State::Open,
        &[
            (DATA, &[data(b"x")]),
            (HEADERS, CONNECTED),
            (TRAILERS, CONNECTED),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    ),
    (
        "half-closed (remote)",
        State::HalfClosedRemote,
        &[
            (DATA, CLOSED_STREAM),
            (HEADERS, CLOSED_STREAM),
            (TRAILERS, CLOSED_STREAM),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    ),
    (
        "half-closed (local)",
        State::HalfClosedLocal,
        &[
            (DATA, IGNORED),
            (HEADERS, CONNECTED),
            (TRAILERS, CONNECTED),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    ),
    (
        "closed by END_STREAM of both",
        State::Ended,
        &[
            (DATA, CLOSED),
            (HEADERS, REUSED),
            (TRAILERS, DISCARDED_OR_REUSED),
            // The gateway has sent END_STREAM, after which these may still arrive.
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    ),
    (
        "closed by the peer's RST_STREAM",
        State::Reset,
        &[
            (DATA, CLOSED),
            (HEADERS, REUSED),
            (TRAILERS, DISCARDED_OR_REUSED),
            // RST_STREAM never answers RST_STREAM (section 5.4.2).
            (RST_STREAM, &[Ignored, Connection(STREAM_CLOSED)]),
            (WINDOW_UPDATE, &[Ignored, Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)]),
        ],
    ),
    (
        "closed by the gateway's RST_STREAM",
        State::ResetByGateway,
        &[
            // Frames that the peer has sent before it receives RST_STREAM are discarded.
            (DATA, IGNORED),
            (TRAILERS, IGNORED),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
            (PUSH_PROMISE, &[Ignored, Connection(PROTOCOL_ERROR)]),
        ],
    ),
    (
        "rejected with END_STREAM",
        State::Rejected,
        &[(DATA, DISCARDED), (RST_STREAM, IGNORED), (WINDOW_UPDATE, IGNORED)],
    ),
];
