//! Section 5.1: each state of a stream and each type of frame.

use crate::support::raw;

use super::{
    CONNECT, Connection, Ignored, Outcome, PROTOCOL_ERROR, STREAM_CLOSED, State, Stream, case,
    check, data, status,
};

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

fn frame_of(kind: &str) -> Vec<u8> {
    let block = raw::block(&[("a", b"b")]);
    let end = raw::END_STREAM | raw::END_HEADERS;
    let [data, headers] = [raw::DATA, raw::HEADERS];
    match kind {
        DATA => raw::frame(data, 0, 1, b"x"),
        HEADERS => raw::headers(1, &CONNECT),
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

/// Checks the rows, and those of [`IN_ANY_STATE`] for frames that have none.
fn check_state(name: &str, state: State, rows: &[(&str, &[Outcome])]) {
    let is_other = |(kind, _): &&(&str, &[Outcome])| rows.iter().all(|(own, _)| own != kind);
    let all = rows.iter().chain(IN_ANY_STATE.iter().filter(is_other));
    let line = |(kind, expected): &(&str, &[Outcome])| {
        let name = format!("{kind} in state {name}");
        case("5.1", &name, state, frame_of(kind), *expected)
    };
    check(all.map(line).collect());
}

const CONNECTION_PROTOCOL: &[Outcome] = &[Connection(PROTOCOL_ERROR)];
/// A closed stream may also be a connection error (section 5.1), and section 6.1 names a stream
/// error for DATA.
const CLOSED: &[Outcome] = &[Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)];
/// A new use of an identifier is also an error of section 5.1.1.
const REUSED: &[Outcome] =
    &[Connection(STREAM_CLOSED), Stream(STREAM_CLOSED), Connection(PROTOCOL_ERROR)];
const IGNORED: &[Outcome] = &[Ignored];

const IN_ANY_STATE: &[(&str, &[Outcome])] = &[
    (PRIORITY, IGNORED),
    (PUSH_PROMISE, CONNECTION_PROTOCOL),
    (CONTINUATION, CONNECTION_PROTOCOL),
    (UNKNOWN, IGNORED),
];
/// HEADERS on a connected stream is a stream error (section 8.5).
const CONNECTED: &[Outcome] = &[Stream(PROTOCOL_ERROR)];
const CLOSED_STREAM: &[Outcome] = &[Stream(STREAM_CLOSED)];

#[test]
fn in_state_idle() {
    check_state(
        "idle",
        State::Idle,
        &[
            (DATA, CONNECTION_PROTOCOL),
            (HEADERS, &[status("200")]),
            (RST_STREAM, CONNECTION_PROTOCOL),
            (WINDOW_UPDATE, CONNECTION_PROTOCOL),
        ],
    );
}

#[test]
fn in_state_open() {
    check_state(
        "open",
        State::Open,
        &[
            (DATA, &[data(b"x")]),
            (HEADERS, CONNECTED),
            (TRAILERS, CONNECTED),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    );
}

#[test]
fn in_state_half_closed_remote() {
    check_state(
        "half-closed (remote)",
        State::HalfClosedRemote,
        &[
            (DATA, CLOSED_STREAM),
            (HEADERS, CLOSED_STREAM),
            (TRAILERS, CLOSED_STREAM),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    );
}

#[test]
fn in_state_half_closed_local() {
    check_state(
        "half-closed (local)",
        State::HalfClosedLocal,
        &[
            (DATA, IGNORED),
            (HEADERS, CONNECTED),
            (TRAILERS, CONNECTED),
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    );
}

#[test]
fn in_state_closed_by_both_ends() {
    check_state(
        "closed by END_STREAM of both",
        State::Ended,
        &[
            (DATA, CLOSED),
            (HEADERS, REUSED),
            (TRAILERS, REUSED),
            // The gateway has sent END_STREAM, after which these may still arrive.
            (RST_STREAM, IGNORED),
            (WINDOW_UPDATE, IGNORED),
        ],
    );
}

#[test]
fn in_state_closed_by_a_reset_of_the_peer() {
    check_state(
        "closed by the peer's RST_STREAM",
        State::Reset,
        &[
            (DATA, CLOSED),
            (HEADERS, REUSED),
            (TRAILERS, REUSED),
            (RST_STREAM, &[Ignored, Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)]),
            (WINDOW_UPDATE, &[Ignored, Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)]),
        ],
    );
}

#[test]
fn in_state_closed_by_a_reset_of_the_gateway() {
    check_state(
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
    );
}

#[test]
fn in_state_rejected() {
    // A reset with NO_ERROR may follow the complete answer (section 8.1).
    const DISCARDED: &[Outcome] = &[Ignored, Stream(0), Stream(STREAM_CLOSED)];
    check_state(
        "rejected with END_STREAM",
        State::Rejected,
        &[
            (DATA, DISCARDED),
            (PRIORITY, &[Ignored, Stream(0)]),
            (RST_STREAM, &[Ignored, Stream(0)]),
            (WINDOW_UPDATE, &[Ignored, Stream(0)]),
            (PUSH_PROMISE, &[Connection(PROTOCOL_ERROR), Stream(0)]),
            (CONTINUATION, &[Connection(PROTOCOL_ERROR), Stream(0)]),
            (UNKNOWN, &[Ignored, Stream(0)]),
        ],
    );
}
