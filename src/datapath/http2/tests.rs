//! Work of the server for each frame, and what it does without credit. No sockets.

use tokio::time::Instant;

use super::frame::{self, FrameHeader, PREFACE, flag, kind};
use super::meter::CreditExhausted;
use super::server::{ConnectionError, Event, Server};
use crate::reason::Reason;

const CONNECT: &[u8] = b"\x00\x07:method\x07CONNECT\x00\x0a:authority\x0becho.app:80";
const END: u8 = flag::END_HEADERS;
const ENHANCE_YOUR_CALM: u32 = 11;
const STREAM_CLOSED: u32 = 5;

/// Frames of a flood, by the number of the round.
type Round = fn(u32) -> Vec<u8>;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::push(&mut bytes, kind, flags, stream, payload);
    bytes
}

fn connect(stream: u32) -> Vec<u8> {
    frame(kind::HEADERS, END, stream, CONNECT)
}

/// Returns a server that has received preface and SETTINGS.
fn server() -> Server {
    let mut server = Server::default();
    let settings = frame(kind::SETTINGS, 0, 0, &[]);
    receive(&mut server, &[&PREFACE[..], &settings].concat()).expect("a connection");
    server.control.clear();
    server
}

/// Receives in as many turns as it takes, and removes streams that were reset after each.
fn receive(server: &mut Server, input: &[u8]) -> Result<Vec<Event>, ConnectionError> {
    let (mut at, mut all) = (0, Vec::new());
    while at < input.len() {
        server.meter.begin_turn(false);
        let mut events = Vec::new();
        at = server.receive(input, at, &mut events)?;
        for event in &events {
            if let Event::Reset(key, _) = event {
                server.remove(*key);
            }
        }
        all.extend(events);
    }
    Ok(all)
}

/// Receives while the credit lasts. Returns the number of times.
fn receive_all(server: &mut Server, round: impl Fn(u32) -> Vec<u8>) -> u32 {
    for index in 0..200_000 {
        match receive(server, &round(index)) {
            Ok(_) => server.control.clear(),
            Err(error) => {
                assert_eq!(error, ConnectionError::EXHAUSTED);
                return index;
            }
        }
    }
    panic!("not ended")
}

/// Returns streams and codes of the RST_STREAM frames that the server has sent.
fn resets(server: &mut Server) -> Vec<(u32, u32)> {
    let mut bytes = std::mem::take(&mut server.control).into_iter();
    let mut resets = Vec::new();
    while bytes.len() > 0 {
        let header: Vec<u8> = bytes.by_ref().take(9).collect();
        let header = FrameHeader::parse(header.try_into().expect("a header"));
        let payload: Vec<u8> = bytes.by_ref().take(header.length).collect();
        if header.kind == kind::RST_STREAM {
            let code = u32::from_be_bytes(payload.try_into().expect("a code"));
            resets.push((header.stream, code));
        }
    }
    resets
}

/// Opens streams 1, 3, … with a window of one byte, which are blocked by it.
fn blocked(count: u32) -> Server {
    let mut server = server();
    for index in 0..count {
        receive(&mut server, &connect(1 + 2 * index)).expect("credit");
    }
    for key in server.keys() {
        server.respond(key, 200, None);
    }
    let window = frame(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0]);
    receive(&mut server, &window).expect("credit");
    for key in server.keys() {
        assert_eq!(server.capacity(key), 0);
    }
    server
}

#[tokio::test(start_paused = true)]
async fn the_operations_of_a_frame_do_not_grow_with_the_streams() {
    const FRAMES: u32 = 300;
    let kinds: [(&str, Round); 9] = [
        ("connection window", |_| frame(kind::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
        ("stream window", |_| frame(kind::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
        ("DATA", |_| frame(kind::DATA, 0, 1, &[0; 32])),
        ("end on closed streams", |index| {
            frame(kind::DATA, flag::END_STREAM, 10_001 + 2 * index, &[])
        }),
        ("rapid reset", |index| {
            let stream = 30_001 + 2 * index;
            let reset = frame(kind::RST_STREAM, 0, stream, &[0; 4]);
            [connect(stream), reset].concat()
        }),
        ("refused streams", |index| connect(50_001 + 2 * index)),
        ("same window again", |_| frame(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 0])),
        ("PRIORITY", |_| frame(kind::PRIORITY, 0, 10_001, &[0; 4])),
        ("PING", |_| frame(kind::PING, 0, 0, &[0; 8])),
    ];
    for streams in [16, 256] {
        let mut server = blocked(streams);
        // Streams up to here are closed.
        let opened = connect(20_001);
        receive(&mut server, &opened).expect("credit");
        let reset = frame(kind::RST_STREAM, 0, 20_001, &[0; 4]);
        receive(&mut server, &reset).expect("credit");
        for (name, round) in kinds {
            server.streams.visited = 0;
            for index in 0..FRAMES {
                let events = receive(&mut server, &round(index)).expect(name);
                assert!(events.len() <= 2, "{name}: {events:?}");
                while let Some(key) = server.take_writable() {
                    // The connection has a window, and the stream none.
                    server.capacity(key);
                }
            }
            assert_eq!(server.streams.visited, 0, "{name} with {streams} streams");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_of_all_windows_is_charged_by_the_streams() {
    let changes = |streams| {
        let mut server = blocked(streams);
        server.streams.visited = 0;
        let count = receive_all(&mut server, |index| {
            let value = u8::try_from(index % 2).expect("a bit");
            frame(kind::SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 1 - value])
        });
        (count, server.streams.visited)
    };
    let (few, many) = (changes(8), changes(256));
    assert!(few.0 > 9 * many.0, "{few:?} {many:?}");
    assert!(many.1 < 20 * 20_000, "{many:?}");
}

#[tokio::test(start_paused = true)]
async fn many_windows_in_one_settings_frame_visit_the_streams_once() {
    let entry = |value: u32| [&[0, 4], value.to_be_bytes().as_slice()].concat();
    let entries: Vec<u8> = (0..10_000).flat_map(entry).collect();
    let mut server = server();
    receive(&mut server, &connect(1)).expect("credit");
    server.streams.visited = 0;
    receive(&mut server, &frame(kind::SETTINGS, 0, 0, &entries)).expect("credit");
    assert_eq!(server.streams.visited, 2, "windows, and blocked streams");
    let key = server.find(1).expect("a stream");
    assert_eq!(server.capacity(key), 9_999, "the last value counts");
}

#[tokio::test(start_paused = true)]
async fn data_on_closed_streams_uses_the_credit_up_for_any_number_of_them() {
    let end = flag::END_STREAM;
    let rounds: [(&str, u8, &[u8]); 3] = [
        ("empty with END_STREAM", end, &[]),
        ("32 bytes", 0, &[0; 32]),
        ("32 bytes with END_STREAM", end, &[0; 32]),
    ];
    for (name, flags, payload) in rounds {
        for streams in [1, 1_000, 1_025, 2_000] {
            let mut server = server();
            let last = 2 * streams - 1;
            receive(&mut server, &connect(last)).expect("credit");
            let reset = frame(kind::RST_STREAM, 0, last, &[0; 4]);
            receive(&mut server, &reset).expect("credit");
            let count = receive_all(&mut server, |index| {
                frame(kind::DATA, flags, 1 + 2 * (index % streams), payload)
            });
            assert!(count <= 10_000, "{name}, {streams} streams: {count}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_closed_stream_is_reset_once() {
    let mut server = server();
    receive(&mut server, &connect(7)).expect("credit");
    server.control.clear();
    for _ in 0..3 {
        receive(&mut server, &frame(kind::DATA, 0, 3, &[0])).expect("credit");
        receive(&mut server, &frame(kind::PRIORITY, 0, 5, &[0; 4])).expect("credit");
    }
    assert_eq!(resets(&mut server), [(3, STREAM_CLOSED), (5, 6)]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_its_peer_has_reset_is_closed_within_the_same_turn() {
    let mut server = server();
    let reset = frame(kind::RST_STREAM, 0, 1, &[0; 4]);
    let data = frame(kind::DATA, 0, 1, &[0]);
    let events = receive(&mut server, &[connect(1), reset, data.clone(), data].concat());
    let events = events.expect("credit");
    assert!(matches!(events[..], [Event::Request { .. }, Event::Reset(..)]), "{events:?}");
    assert_eq!(resets(&mut server), [(1, STREAM_CLOSED)]);

    let reset = frame(kind::RST_STREAM, 0, 3, &[0; 4]);
    let trailers = frame(kind::HEADERS, flag::END_HEADERS, 3, &[]);
    let received = receive(&mut server, &[connect(3), reset, trailers].concat());
    assert_eq!(u32::from(received.unwrap_err().code), STREAM_CLOSED);
}

#[tokio::test(start_paused = true)]
async fn a_turn_receives_a_bounded_number_of_frames_and_the_next_continues() {
    let mut server = server();
    receive(&mut server, &connect(1)).expect("credit");
    let data = frame(kind::DATA, 0, 1, &[7; 32]);
    let input = data.repeat(1_000);
    let (mut at, mut turns, mut count) = (0, 0, 0);
    while at < input.len() {
        server.meter.begin_turn(false);
        let mut events = Vec::new();
        let next = server.receive(&input, at, &mut events).expect("credit");
        assert!(next - at <= 257 * data.len(), "{}", next - at);
        (at, turns, count) = (next, turns + 1, count + events.len());
    }
    assert_eq!((turns, count), (4, 1_000));
}

#[tokio::test(start_paused = true)]
async fn a_header_block_up_to_64_kib_is_answered_and_a_larger_one_ends_the_connection() {
    let field = |length: usize| {
        let mut block = CONNECT.to_vec();
        let rest = length - block.len() - 6;
        block.extend([0, 1, b'x', 127]);
        let group = |shift: usize| u8::try_from((rest - 128) >> shift & 127).expect("7 bits");
        block.extend([0x80 | group(0), 0x80 | group(7), group(14)]);
        block.resize(length, 0xff);
        block
    };
    let parts = |stream: u32, block: &[u8]| {
        let (first, rest) = block.split_at(40_000);
        let first = frame(kind::HEADERS, 0, stream, first);
        [first, frame(kind::CONTINUATION, END, stream, rest)].concat()
    };
    let block = field(64 * 1024);
    let mut server = server();
    receive(&mut server, &connect(1)).expect("credit");
    let events = receive(&mut server, &parts(3, &block)).expect("a request");
    let [Event::Request { request, .. }] = events.as_slice() else {
        panic!("{events:?}");
    };
    let rejected = request.target.as_ref().err();
    assert_eq!(rejected, Some(&Reason::TooManyFields));
    let ended = receive(&mut server, &frame(kind::HEADERS, END, 5, &block));
    assert_eq!(ended.map(|events| events.len()), Ok(1), "in one frame");
    let larger = parts(7, &[&block[..], &[0]].concat());
    let ended = receive(&mut server, &larger).err().map(|error| error.code);
    assert_eq!(ended, Some(h2::Reason::ENHANCE_YOUR_CALM));
}

/// Opens streams of first peers on a connection from a gateway.
fn gateway(streams: &[(u32, &str)]) -> Server {
    let mut server = server();
    server.meter.set_for_gateway(true);
    for (stream, source) in streams {
        receive(&mut server, &connect(*stream)).expect("credit");
        let key = server.find(*stream).expect("a stream");
        assert!(server.charge_first_peer(key, source.as_bytes(), 4).is_ok());
        server.respond(key, 200, None);
    }
    server.control.clear();
    server
}

#[tokio::test(start_paused = true)]
async fn one_byte_frames_of_a_first_peer_reset_its_streams_and_no_others() {
    let mut server = gateway(&[(1, "a"), (3, "b"), (5, "a")]);
    let mut all = Vec::new();
    while all.is_empty() {
        let events = receive(&mut server, &frame(kind::DATA, 0, 1, &[7])).expect("credit");
        let reset = |event: &Event| matches!(event, Event::Reset(_, Reason::CreditExhausted));
        all = events.into_iter().filter(reset).collect();
    }
    assert_eq!(all.len(), 2);
    let mut sent = resets(&mut server);
    sent.sort_unstable();
    assert_eq!(sent, [(1, ENHANCE_YOUR_CALM), (5, ENHANCE_YOUR_CALM)]);
    // Frames that were under way are paid for by the connection.
    for _ in 0..10_000 {
        receive(&mut server, &frame(kind::DATA, 0, 5, &[7])).expect("credit");
        let open = receive(&mut server, &frame(kind::DATA, 0, 3, &[7])).expect("credit");
        if server.find(3).is_none() {
            break;
        }
        assert_eq!(open.len(), 1, "{open:?}");
    }
    let connect = connect(7);
    receive(&mut server, &connect).expect("credit");
    let key = server.find(7).expect("a stream");
    assert!(server.charge_first_peer(key, b"a", 4).is_err());
}

#[tokio::test(start_paused = true)]
async fn abandoned_connects_of_a_first_peer_leave_the_tunnel_of_another() {
    let mut server = gateway(&[(1, "quiet")]);
    let (started, mut refused) = (Instant::now(), 0);
    for index in 0..50_000 {
        let stream = 3 + 2 * index;
        receive(&mut server, &connect(stream)).expect("credit");
        let key = server.find(stream).expect("a stream");
        let has_credit = server.charge_first_peer(key, b"abandoning", 4).is_ok();
        if has_credit {
            receive(&mut server, &frame(kind::RST_STREAM, 0, stream, &[0; 4])).expect("credit");
        } else {
            refused += 1;
            server.reset(key, h2::Reason::ENHANCE_YOUR_CALM);
            server.remove(key);
        }
        // 875 a second.
        tokio::time::advance(std::time::Duration::from_micros(1_143)).await;
    }
    assert!(started.elapsed().as_secs() > 50 && refused > 20_000);
    assert!(server.find(1).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_reset_in_the_same_turn_is_charged_with_its_reset() {
    let mut server = gateway(&[(1, "other"), (3, "rapid")]);
    let open = server.find(3).expect("a stream");
    let mut count = 0;
    loop {
        let stream = 5 + 2 * count;
        let reset = frame(kind::RST_STREAM, 0, stream, &[0; 4]);
        let both = [connect(stream), reset].concat();
        let events = receive(&mut server, &both).expect("credit");
        let [Event::Request { key, price, .. }, Event::Reset(..)] = events[..] else {
            panic!("{events:?}");
        };
        if let Err(reset) = server.charge_first_peer(key, b"rapid", price) {
            assert_eq!(reset, [open]);
            break;
        }
        count += 1;
    }
    assert_eq!(count, 2_500);
    let exhausted = server.meter.first_peer(b"rapid");
    let charged = server.meter.charge(8, Some(exhausted));
    assert_eq!(charged, Err(CreditExhausted::FirstPeer(exhausted)));
}
