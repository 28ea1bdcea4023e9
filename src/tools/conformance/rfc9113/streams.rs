//! Section 5.1.1, and the frames of streams: 6.1 to 6.4, 6.9 and 6.10.

use crate::tools::conformance::case::{Case, case, frames};
use crate::tools::conformance::outcome::Outcome::{Connection, Ignored, Status, Stream};
use crate::tools::conformance::outcome::{
    FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, Outcome, PROTOCOL_ERROR, STREAM_CLOSED, State, data,
};
use crate::tools::conformance::peer::Names;
use crate::tools::conformance::raw;

pub(super) fn cases(to: &Names) -> Vec<Case> {
    let parts = [
        section_5_1_1_identifiers(to),
        section_6_1_data(),
        section_6_2_headers(to),
        section_6_2_headers_with_missing_parts(),
        sections_6_3_and_6_4_priority_and_rst_stream(),
        section_6_9_window_update(),
        section_6_10_fragments_of_a_header_block(to),
        section_6_10_an_interrupted_header_block(to),
    ];
    parts.into_iter().flatten().collect()
}

fn padded(padding: u8, payload: &[u8]) -> Vec<u8> {
    let zeros = vec![0; usize::from(padding)];
    [&[padding][..], payload, &zeros].concat()
}

fn section_5_1_1_identifiers(to: &Names) -> Vec<Case> {
    let line = |name: &str, frames, expected: &[Outcome]| {
        case("5.1.1", name, State::Idle, frames, expected)
    };
    let protocol = [Connection(PROTOCOL_ERROR)];
    let reset = |stream| raw::frame(raw::RST_STREAM, 0, stream, &[0; 4]);
    vec![
        line("HEADERS on an even stream", raw::headers(2, &to.connect()), &protocol),
        line("DATA on an even stream", raw::frame(raw::DATA, 0, 2, b"x"), &protocol),
        line("RST_STREAM on an even stream", reset(2), &protocol),
        line(
            "WINDOW_UPDATE on an even stream",
            raw::frame(raw::WINDOW_UPDATE, 0, 2, &[0, 0, 0, 1]),
            &protocol,
        ),
        line("the largest identifier", raw::headers((1 << 31) - 1, &to.connect()), &[Status(200)]),
        line("an identifier after a gap", raw::headers(99, &to.connect()), &[Status(200)]),
        // Skipped identifiers are closed.
        line(
            "a lower identifier",
            frames([raw::headers(5, &to.rejected()), reset(5), raw::headers(3, &to.connect())]),
            &[Connection(PROTOCOL_ERROR), Connection(STREAM_CLOSED)],
        ),
        line(
            "DATA on a skipped stream",
            frames([raw::headers(5, &to.rejected()), reset(5), raw::frame(raw::DATA, 0, 3, b"x")]),
            &[Connection(PROTOCOL_ERROR), Connection(STREAM_CLOSED), Stream(STREAM_CLOSED)],
        ),
    ]
}

fn section_6_1_data() -> Vec<Case> {
    let line = |name: &str, flags, stream, payload: &[u8], expected: &[Outcome]| {
        let frame = raw::frame(raw::DATA, flags, stream, payload);
        case("6.1", name, State::Open, frame, expected)
    };
    let protocol = [Connection(PROTOCOL_ERROR)];
    let padding = raw::PADDED;
    vec![
        line("DATA on stream 0", 0, 0, b"x", &protocol),
        line("empty DATA", 0, 1, b"", &[Ignored]),
        line("DATA with padding of 0", padding, 1, &padded(0, b"x"), &[data(b"x")]),
        line("DATA with padding of 255", padding, 1, &padded(255, b"x"), &[data(b"x")]),
        line("DATA of padding alone", padding, 1, &padded(255, b""), &[Ignored]),
        line("DATA of a pad length alone", padding, 1, &[0], &[Ignored]),
        line(
            "DATA with nonzero padding",
            padding,
            1,
            b"\x02xyz",
            &[data(b"x"), Connection(PROTOCOL_ERROR)],
        ),
        line("DATA with padding of its length", padding, 1, b"\x02x", &protocol),
        line("DATA with padding above its length", padding, 1, b"\xffx", &protocol),
        line(
            "DATA without the pad length",
            padding,
            1,
            b"",
            &[Connection(FRAME_SIZE_ERROR), Connection(PROTOCOL_ERROR), Stream(FRAME_SIZE_ERROR)],
        ),
        line(
            "DATA with padding and END_STREAM",
            padding | raw::END_STREAM,
            1,
            &padded(9, b"x"),
            &[data(b"x")],
        ),
    ]
}

fn headers(name: &str, flags: u8, payload: &[u8], expected: &[Outcome]) -> Case {
    let frame = raw::frame(raw::HEADERS, flags | raw::END_HEADERS, 1, payload);
    case("6.2", name, State::Idle, frame, expected)
}

const PADDED_AND_PRIORITIZED: u8 = raw::PADDED | raw::PRIORITIZED;

fn section_6_2_headers(to: &Names) -> Vec<Case> {
    let opened = [Status(200)];
    // Section 5.3.2 deprecates priorities; RFC 7540 section 5.3.1 made this a stream error.
    let deprecated = [Status(200), Stream(PROTOCOL_ERROR)];
    let block = raw::block(&to.connect());
    let stream_0 = raw::frame(raw::HEADERS, raw::END_HEADERS, 0, &block);
    let long = padded(255, &block);
    let prioritized = [&[0x80, 0, 0, 3, 255][..], &block].concat();
    let own = [&[0, 0, 0, 1, 255][..], &block].concat();
    let both = padded(9, &prioritized);
    vec![
        case("6.2", "HEADERS on stream 0", State::Idle, stream_0, [Connection(PROTOCOL_ERROR)]),
        headers("HEADERS", 0, &block, &opened),
        headers("END_STREAM", raw::END_STREAM, &block, &opened),
        headers("padding", raw::PADDED, &long, &opened),
        headers("priority", raw::PRIORITIZED, &prioritized, &opened),
        headers("both", PADDED_AND_PRIORITIZED, &both, &opened),
        headers("own priority", raw::PRIORITIZED, &own, &deprecated),
    ]
}

fn section_6_2_headers_with_missing_parts() -> Vec<Case> {
    let protocol = [Connection(PROTOCOL_ERROR)];
    let size = [Connection(FRAME_SIZE_ERROR), Connection(PROTOCOL_ERROR)];
    vec![
        headers("padding of their length", raw::PADDED, b"\x01", &protocol),
        headers("more padding", raw::PADDED, b"\xff\x82", &protocol),
        headers("no pad length", raw::PADDED, b"", &size),
        headers("no priority", raw::PRIORITIZED, &[0; 4], &size),
        headers("only padding", PADDED_AND_PRIORITIZED, &[4; 5], &size),
    ]
}

/// Returns a line for a frame of zeros in a state of stream 1.
fn zeros(
    name: &str,
    state: State,
    kind: u8,
    stream: u32,
    length: usize,
    expected: Outcome,
) -> Case {
    let frame = raw::frame(kind, 0, stream, &vec![0; length]);
    let section = if kind == raw::PRIORITY { "6.3" } else { "6.4" };
    case(section, name, state, frame, [expected])
}

fn sections_6_3_and_6_4_priority_and_rst_stream() -> Vec<Case> {
    let priority = |name: &str, state, stream, length, expected| {
        let name = format!("PRIORITY {name}");
        zeros(&name, state, raw::PRIORITY, stream, length, expected)
    };
    let reset = |name: &str, state, stream, length, expected| {
        let name = format!("RST_STREAM {name}");
        zeros(&name, state, raw::RST_STREAM, stream, length, expected)
    };
    let (open, idle) = (State::Open, State::Idle);
    let protocol = || Connection(PROTOCOL_ERROR);
    let size = || Connection(FRAME_SIZE_ERROR);
    let unknown = raw::frame(raw::RST_STREAM, 0, 1, &[0xff; 4]);
    let own = raw::frame(raw::PRIORITY, 0, 1, &[0, 0, 0, 1, 15]);
    vec![
        priority("on stream 0", open, 0, 5, protocol()),
        priority("of 4 bytes", open, 1, 4, Stream(FRAME_SIZE_ERROR)),
        priority("of 6 bytes", open, 1, 6, Stream(FRAME_SIZE_ERROR)),
        priority("on an even stream", idle, 2, 5, Ignored),
        priority("of 4 bytes on an idle stream", idle, 1, 4, size()),
        case("6.3", "PRIORITY, itself, idle", idle, own, [Ignored]),
        reset("on stream 0", open, 0, 4, protocol()),
        reset("of 3 bytes", open, 1, 3, size()),
        reset("of 5 bytes", open, 1, 5, size()),
        case("6.4", "RST_STREAM, unknown code", open, unknown, [Ignored]),
    ]
}

fn section_6_9_window_update() -> Vec<Case> {
    let line = |name: &str, stream, payload: &[u8], expected: &[Outcome]| {
        let frame = raw::frame(raw::WINDOW_UPDATE, 0, stream, payload);
        case("6.9", name, State::Open, frame, expected)
    };
    let size = [Connection(FRAME_SIZE_ERROR)];
    // Both windows begin at 65,535.
    let to_limit = (i32::MAX - 65_535).to_be_bytes();
    let above = (i32::MAX - 65_534).to_be_bytes();
    let both = |stream| {
        let update = |bytes: &[u8]| raw::frame(raw::WINDOW_UPDATE, 0, stream, bytes);
        frames([update(&to_limit), update(&[0, 0, 0, 1])])
    };
    vec![
        line("WINDOW_UPDATE of 3 bytes", 0, &[0; 3], &size),
        line("WINDOW_UPDATE of 5 bytes on a stream", 1, &[0; 5], &size),
        line("WINDOW_UPDATE of 0 for the connection", 0, &[0; 4], &[Connection(PROTOCOL_ERROR)]),
        line("WINDOW_UPDATE of 0 for a stream", 1, &[0; 4], &[Stream(PROTOCOL_ERROR)]),
        line("connection window of 2^31 - 1", 0, &to_limit, &[Ignored]),
        line("stream window of 2^31 - 1", 1, &to_limit, &[Ignored]),
        line("connection window of 2^31", 0, &above, &[Connection(FLOW_CONTROL_ERROR)]),
        line("stream window of 2^31", 1, &above, &[Stream(FLOW_CONTROL_ERROR)]),
        case(
            "6.9.1",
            "connection window of 2^31 in two steps",
            State::Open,
            both(0),
            [Connection(FLOW_CONTROL_ERROR)],
        ),
        case(
            "6.9.1",
            "stream window of 2^31 in two steps",
            State::Open,
            both(1),
            [Stream(FLOW_CONTROL_ERROR)],
        ),
    ]
}

fn next(flags: u8, stream: u32, part: &[u8]) -> Vec<u8> {
    raw::frame(raw::CONTINUATION, flags, stream, part)
}

/// Returns HEADERS with the beginning of the block of a CONNECT, and the rest of it.
fn began(to: &Names, flags: u8) -> (Vec<u8>, Vec<u8>) {
    let block = raw::block(&to.connect());
    let (first, rest) = block.split_at(7);
    (raw::frame(raw::HEADERS, flags, 1, first), rest.to_vec())
}

fn section_6_10_fragments_of_a_header_block(to: &Names) -> Vec<Case> {
    let line = |name: &str, parts: &[Vec<u8>]| {
        case("6.10", name, State::Idle, parts.concat(), [Status(200)])
    };
    let (headers, rest) = began(to, 0);
    let (last, _) = began(to, raw::END_STREAM);
    let end = next(raw::END_HEADERS, 1, &rest);
    let undefined = next(0xfb | raw::END_HEADERS, 1, &rest);
    let block = raw::block(&to.connect());
    let (empty, empty_end) = (raw::frame(raw::HEADERS, 0, 1, &[]), next(4, 1, &[]));
    let pieces: Vec<u8> = block.chunks(16).flat_map(|part| next(0, 1, part)).collect();
    let padded = raw::frame(raw::HEADERS, raw::PADDED, 1, &padded(9, &headers[9..]));
    vec![
        line("two fragments", &[headers.clone(), end.clone()]),
        line("two fragments and END_STREAM", &[last, end.clone()]),
        line("sixteen octets each", &[empty.clone(), pieces, empty_end.clone()]),
        line("empty ones", &[empty, next(0, 1, &block), empty_end]),
        line("padding of the first", &[padded, end]),
        line("undefined flags", &[headers, undefined]),
    ]
}

fn section_6_10_an_interrupted_header_block(to: &Names) -> Vec<Case> {
    let line = |name: &str, parts: &[Vec<u8>]| {
        let expected = [Connection(PROTOCOL_ERROR)];
        case("6.10", name, State::Idle, parts.concat(), expected)
    };
    let (headers, rest) = began(to, 0);
    let within = |name: &str, kind, stream, length| {
        let frame = raw::frame(kind, 0, stream, &vec![1; length]);
        let name = format!("{name} in a header block");
        line(&name, &[headers.clone(), frame, next(4, 1, &rest)])
    };
    let complete = raw::headers(1, &to.connect());
    let more = next(4, 1, &raw::block(&[("a", b"b")]));
    let on = |stream| [headers.clone(), next(4, stream, &rest)];
    vec![
        line("CONTINUATION on stream 0", &on(0)),
        line("CONTINUATION on another stream", &on(3)),
        line("CONTINUATION after END_HEADERS", &[complete, more]),
        within("DATA", raw::DATA, 1, 1),
        within("HEADERS", raw::HEADERS, 3, 0),
        within("PRIORITY", raw::PRIORITY, 1, 5),
        within("RST_STREAM", raw::RST_STREAM, 1, 4),
        within("SETTINGS", raw::SETTINGS, 0, 0),
        within("PING", raw::PING, 0, 8),
        within("GOAWAY", raw::GOAWAY, 0, 8),
        within("WINDOW_UPDATE", raw::WINDOW_UPDATE, 0, 4),
        within("unknown frame", 0xbe, 1, 1),
    ]
}
