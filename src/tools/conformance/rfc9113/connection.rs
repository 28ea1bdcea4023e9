//! Sections 3.4, 4.1, 4.2 and 5.5, and the frames of a connection: 6.5 to 6.8.

use anyhow::ensure;

use crate::tools::conformance::case::{Case, Group, case, frames, script};
use crate::tools::conformance::outcome::Outcome::{Closed, Connection, Ignored, Status, Stream};
use crate::tools::conformance::outcome::{
    FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, Outcome, PROTOCOL_ERROR, State, data,
};
use crate::tools::conformance::peer::{Limits, Names, Peer, Target};
use crate::tools::conformance::raw::{self, Frame};

pub(super) fn cases(to: &Names, limits: Limits) -> Vec<Case> {
    let parts = [
        section_3_4_the_preface(to),
        section_4_1_and_5_5_unknown_frames_flags_and_reserved_bits(to),
        section_4_2_the_size_of_a_frame(limits),
        section_6_5_settings(to),
        section_6_5_2_parameters(),
        sections_6_6_to_6_8_push_promise_ping_and_goaway(),
        vec![script(Group::Http2, "6.5.3", "ACK of SETTINGS and PING", acknowledgements)],
    ];
    parts.into_iter().flatten().collect()
}

fn settings(parameters: &[(u16, u32)]) -> Vec<u8> {
    let parameter = |(id, value): &(u16, u32)| {
        let (id, value) = (id.to_be_bytes(), value.to_be_bytes());
        [&id[..], &value].concat()
    };
    let payload: Vec<u8> = parameters.iter().flat_map(parameter).collect();
    raw::frame(raw::SETTINGS, 0, 0, &payload)
}

/// Largest length that the header of a frame can state (section 4.1).
const LENGTH_MAX: usize = (1 << 24) - 1;

/// Parameters of SETTINGS (section 6.5.2).
const TABLE: u16 = 1;
const PUSH: u16 = 2;
const WINDOW: u16 = 4;
const FRAME: u16 = 5;

fn section_3_4_the_preface(to: &Names) -> Vec<Case> {
    let unconnected = |name: &str, parts: [&[u8]; 2], expected: &[Outcome]| {
        case("3.4", name, State::Unconnected, parts.concat(), expected)
    };
    let settings = settings(&[]);
    let ping = raw::frame(raw::PING, 0, 0, &[0; 8]);
    let ack = raw::frame(raw::SETTINGS, raw::ACK, 0, &[]);
    let headers = raw::headers(1, &to.connect());
    let http1: &[u8] = b"GET / HTTP/1.1\r\nHost: echo.global\r\n\r\n";
    // GOAWAY may be omitted if the preface is invalid.
    let either = [Connection(PROTOCOL_ERROR), Closed];
    vec![
        unconnected("preface", [raw::PREFACE, &settings], &[Ignored]),
        unconnected("HTTP/1.1", [http1, &[]], &either),
        unconnected(
            "preface with another byte",
            [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r", &settings],
            &either,
        ),
        unconnected("PING before SETTINGS", [raw::PREFACE, &ping], &either),
        unconnected("HEADERS before SETTINGS", [raw::PREFACE, &headers], &either),
        unconnected("ACK before SETTINGS", [raw::PREFACE, &ack], &either),
    ]
}

fn section_4_1_and_5_5_unknown_frames_flags_and_reserved_bits(to: &Names) -> Vec<Case> {
    let line =
        |name: &str, frames, expected: &[Outcome]| case("4.1", name, State::Open, frames, expected);
    let reserved = 1 << 31;
    let ping = raw::frame(raw::PING, 0, reserved, &[0; 8]);
    let window = raw::frame(raw::WINDOW_UPDATE, 0, 1, &[0x80, 0, 0, 1]);
    vec![
        line("unknown frame on stream 0", raw::frame(0xbe, 0, 0, b"x"), &[Ignored]),
        line("unknown frame on an idle stream", raw::frame(0xbe, 0, 9, b"x"), &[Ignored]),
        line("empty unknown frame", raw::frame(0xff, 0xff, 0, &[]), &[Ignored]),
        line("DATA with undefined flags", raw::frame(raw::DATA, 0xf6, 1, b"x"), &[data(b"x")]),
        line(
            "DATA with the reserved bit",
            raw::frame(raw::DATA, 0, reserved | 1, b"x"),
            &[data(b"x")],
        ),
        line("PING with the reserved bit", ping, &[Ignored]),
        line("WINDOW_UPDATE with the reserved bit", window, &[Ignored]),
        line("SETTINGS with undefined flags", raw::frame(raw::SETTINGS, 0xfe, 0, &[]), &[Ignored]),
        line("PING with undefined flags", raw::frame(raw::PING, 0xfe, 0, &[0; 8]), &[Ignored]),
        line("GOAWAY with undefined flags", raw::frame(raw::GOAWAY, 0xff, 0, &[0; 8]), &[Ignored]),
        line(
            "RST_STREAM with undefined flags",
            raw::frame(raw::RST_STREAM, 0xff, 1, &[0; 4]),
            &[Ignored],
        ),
        line(
            "HEADERS with undefined flags",
            raw::frame(raw::HEADERS, 0xd2 | raw::END_HEADERS, 3, &raw::block(&to.connect())),
            &[Status(200)],
        ),
    ]
}

fn section_4_2_the_size_of_a_frame(limits: Limits) -> Vec<Case> {
    let advertised = limits.frame as usize;
    let line = |name: &str, state, frames, expected: &[Outcome]| {
        case("4.2", name, state, frames, expected)
    };
    let size = [Connection(FRAME_SIZE_ERROR)];
    let of = |kind, stream, length| raw::frame(kind, 0, stream, &vec![b'x'; length]);
    let mut cases = vec![line(
        "SETTINGS of 2^24 - 1 bytes",
        State::Idle,
        of(raw::SETTINGS, 0, LENGTH_MAX),
        &size,
    )];
    if limits.frame <= limits.window {
        // For the bytes that the endpoint returns.
        let increment = limits.frame.to_be_bytes();
        let window = |stream| raw::frame(raw::WINDOW_UPDATE, 0, stream, &increment);
        cases.push(line(
            "DATA of the advertised size",
            State::Open,
            frames([window(0), window(1), of(raw::DATA, 1, advertised)]),
            &[Outcome::Data(vec![b'x'; advertised].into())],
        ));
    }
    if advertised < LENGTH_MAX {
        let above = advertised + 1;
        let either = [Connection(FRAME_SIZE_ERROR), Stream(FRAME_SIZE_ERROR)];
        let [data, headers, unknown] = ["DATA", "HEADERS", "unknown frame"]
            .map(|kind| format!("{kind} above the advertised size"));
        cases.extend([
            line(&data, State::Open, of(raw::DATA, 1, above), &either),
            line(&headers, State::Idle, of(raw::HEADERS, 1, above), &size),
            line(&unknown, State::Idle, of(0xbe, 0, above), &size),
        ]);
    }
    cases
}

fn section_6_5_settings(to: &Names) -> Vec<Case> {
    let line =
        |name: &str, frames, expected: &[Outcome]| case("6.5", name, State::Open, frames, expected);
    let protocol = [Connection(PROTOCOL_ERROR)];
    let size = [Connection(FRAME_SIZE_ERROR)];
    let empty = |flags, stream| raw::frame(raw::SETTINGS, flags, stream, &[]);
    vec![
        line("SETTINGS on a stream", empty(0, 1), &protocol),
        line("ACK on a stream", empty(raw::ACK, 1), &protocol),
        line("ACK with a payload", raw::frame(raw::SETTINGS, raw::ACK, 0, &[0; 6]), &size),
        line("SETTINGS of 5 bytes", raw::frame(raw::SETTINGS, 0, 0, &[0; 5]), &size),
        line("SETTINGS of 7 bytes", raw::frame(raw::SETTINGS, 0, 0, &[0; 7]), &size),
        line("empty SETTINGS", empty(0, 0), &[Ignored]),
        line(
            "SETTINGS in a header block",
            frames([raw::frame(raw::HEADERS, 0, 3, &raw::block(&to.connect())), empty(0, 0)]),
            &protocol,
        ),
    ]
}

fn section_6_5_2_parameters() -> Vec<Case> {
    let line = |name: &str, parameters: &[(u16, u32)], expected: &[Outcome]| {
        let name = format!("{name}, {parameters:?}");
        case("6.5.2", &name, State::Open, settings(parameters), expected)
    };
    let ignored = [Ignored];
    let protocol = [Connection(PROTOCOL_ERROR)];
    let flow = [Connection(FLOW_CONTROL_ERROR)];
    let (most, frame_most) = ((1 << 31) - 1, (1 << 24) - 1);
    let window_above =
        frames([raw::frame(raw::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1]), settings(&[(WINDOW, most)])]);
    vec![
        line("unknown", &[(0xfff0, u32::MAX), (0, 1)], &ignored),
        line("table", &[(TABLE, 0)], &ignored),
        line("table", &[(TABLE, u32::MAX)], &ignored),
        line("push", &[(PUSH, 1), (PUSH, 0)], &ignored),
        line("push", &[(PUSH, 2)], &protocol),
        line("streams", &[(3, 0)], &ignored),
        line("window", &[(WINDOW, 0)], &ignored),
        line("window", &[(WINDOW, most)], &ignored),
        line("window", &[(WINDOW, most + 1)], &flow),
        line("window", &[(WINDOW, u32::MAX)], &flow),
        line("frame", &[(FRAME, 16_383)], &protocol),
        line("frame", &[(FRAME, 16_384)], &ignored),
        line("frame", &[(FRAME, frame_most)], &ignored),
        line("frame", &[(FRAME, frame_most + 1)], &protocol),
        line("header list", &[(6, 0)], &ignored),
        line("twice", &[(FRAME, 16_384), (FRAME, 1)], &protocol),
        line("extended CONNECT", &[(8, 1)], &ignored),
        case(
            "6.9.2",
            "a parameter that lets an open stream's window exceed 2^31 - 1",
            State::Open,
            window_above,
            flow,
        ),
    ]
}

fn sections_6_6_to_6_8_push_promise_ping_and_goaway() -> Vec<Case> {
    let line = |section, name: &str, frames, expected: &[Outcome]| {
        case(section, name, State::Open, frames, expected)
    };
    let protocol = [Connection(PROTOCOL_ERROR)];
    let size = [Connection(FRAME_SIZE_ERROR)];
    let of = |kind, stream, length| raw::frame(kind, 0, stream, &vec![0; length]);
    let goaway = |debug: &[u8]| {
        let payload = [&[0; 8][..], debug].concat();
        let echoed = raw::frame(raw::DATA, 0, 1, b"x");
        frames([raw::frame(raw::GOAWAY, 0, 0, &payload), echoed])
    };
    vec![
        line("6.6", "PUSH_PROMISE on stream 0", of(raw::PUSH_PROMISE, 0, 4), &protocol),
        line(
            "6.6",
            "empty PUSH_PROMISE",
            of(raw::PUSH_PROMISE, 1, 0),
            &[Connection(PROTOCOL_ERROR), Connection(FRAME_SIZE_ERROR)],
        ),
        line("6.7", "PING on a stream", of(raw::PING, 1, 8), &protocol),
        line("6.7", "PING of 7 bytes", of(raw::PING, 0, 7), &size),
        line("6.7", "PING of 9 bytes", of(raw::PING, 0, 9), &size),
        line("6.7", "empty PING", of(raw::PING, 0, 0), &size),
        line(
            "6.7",
            "ACK of a PING that was not sent",
            raw::frame(raw::PING, raw::ACK, 0, b"unsolici"),
            &[Ignored],
        ),
        line("6.8", "GOAWAY on a stream", of(raw::GOAWAY, 1, 8), &protocol),
        line("6.8", "GOAWAY of 7 bytes", of(raw::GOAWAY, 0, 7), &size),
        line("6.8", "GOAWAY leaves streams open", goaway(b""), &[data(b"x")]),
        line("6.8", "GOAWAY with debug data", goaway(b"debug"), &[data(b"x")]),
        line("6.8", "GOAWAY twice", frames([goaway(b""), goaway(b"")]), &[data(b"xx")]),
    ]
}

/// Checks sections 6.5.3 and 6.7: each is acknowledged once, in order, and with the payload of the
/// PING.
async fn acknowledgements(to: Target) -> anyhow::Result<()> {
    let mut peer = Peer::connect(&to, &[]).await?;
    let acknowledges = |frame: &Frame| {
        matches!(frame.kind, raw::SETTINGS | raw::PING) && frame.flags & raw::ACK != 0
    };
    let first = peer.until(acknowledges).await?;
    ensure!(first.kind == raw::SETTINGS, "no ACK of the SETTINGS after the preface: {first:?}");
    peer.write(&settings(&[(0xfff0, 1)])).await?;
    let ack = peer.until(acknowledges).await?;
    let expected = (raw::SETTINGS, 0, 0);
    ensure!((ack.kind, ack.stream, ack.payload.len()) == expected, "not an ACK: {ack:?}");
    for payload in [*b"payload1", [0; 8], [0xff; 8]] {
        peer.write(&raw::frame(raw::PING, 0, 0, &payload)).await?;
        let ack = peer.until(acknowledges).await?;
        ensure!((ack.kind, ack.stream) == (raw::PING, 0), "not an ACK: {ack:?}");
        ensure!(ack.payload == payload, "ACK with another payload: {ack:?}");
    }
    let outcome = peer.outcome(&[Ignored]).await?;
    ensure!(outcome == Ignored, "an ACK was answered: {outcome}");
    Ok(())
}
