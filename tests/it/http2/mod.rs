//! Conformance to RFC 9113 by its sections: raw frames over TLS, and the expected result of each.

mod connection;
mod messages;
mod states;
mod streams;
mod windows;

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::raw::{self, Frame, RawPeer};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, run};

/// Error codes (RFC 9113 section 7).
const PROTOCOL_ERROR: u32 = 1;
const FLOW_CONTROL_ERROR: u32 = 3;
const STREAM_CLOSED: u32 = 5;
const FRAME_SIZE_ERROR: u32 = 6;
const COMPRESSION_ERROR: u32 = 9;

const METHOD: (&str, &[u8]) = (":method", b"CONNECT");
const AUTHORITY: (&str, &[u8]) = (":authority", b"echo.global:80");
const CONNECT: [(&str, &[u8]); 2] = [METHOD, AUTHORITY];
const REJECTED: [(&str, &[u8]); 2] = [METHOD, (":authority", b"nothing.here:80")];

/// First byte after which the endpoint ends its direction.
const END: u8 = b'E';
/// Limit of the time to a result.
const RESULT_DEADLINE: Duration = Duration::from_secs(5);

/// State of stream 1 before the frames of a case.
#[derive(Clone, Copy)]
enum State {
    /// No SETTINGS and no preface were sent.
    Unconnected,
    Idle,
    Open,
    /// The peer has sent END_STREAM.
    HalfClosedRemote,
    /// The gateway has sent END_STREAM.
    HalfClosedLocal,
    /// Both have sent END_STREAM.
    Ended,
    /// The peer has sent RST_STREAM.
    Reset,
    /// The gateway has sent RST_STREAM.
    ResetByGateway,
    /// The gateway has answered 503 with END_STREAM.
    Rejected,
}

/// Result of a case.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    /// GOAWAY with this code.
    Connection(u32),
    /// The connection ends without GOAWAY.
    Closed,
    /// RST_STREAM with this code.
    Stream(u32),
    /// HEADERS with this status.
    Status(String),
    /// The bytes that the endpoint returns in stream 1.
    Data(Vec<u8>),
    /// Nothing but the answer to PING.
    Ignored,
}

use Outcome::{Closed, Connection, Ignored, Stream};

fn status(status: &str) -> Outcome {
    Outcome::Status(status.to_owned())
}

fn data(bytes: &[u8]) -> Outcome {
    Outcome::Data(bytes.to_vec())
}

/// Line of the conformance table.
struct Case {
    section: &'static str,
    /// Description of the frames, unique in the section.
    name: String,
    state: State,
    frames: Vec<u8>,
    /// Results that the section permits.
    expected: Vec<Outcome>,
}

fn case(
    section: &'static str,
    name: &str,
    state: State,
    frames: Vec<u8>,
    expected: impl Into<Vec<Outcome>>,
) -> Case {
    Case { section, name: name.to_owned(), state, frames, expected: expected.into() }
}

/// Returns the frames of several parts.
fn frames<const N: usize>(parts: [Vec<u8>; N]) -> Vec<u8> {
    parts.concat()
}

/// Peer with a decoder of its own, independent of the gateway's.
struct Peer {
    raw: RawPeer,
    decoder: loona_hpack::Decoder<'static>,
}

impl Peer {
    /// Connects and acknowledges the gateway's SETTINGS.
    async fn connect(gateway: &Gateway, settings: &[u8]) -> Self {
        let mut raw = RawPeer::with_settings(gateway, settings).await;
        loop {
            let frame = raw.next().await.expect("the gateway's SETTINGS");
            if frame.kind == raw::SETTINGS && frame.flags & raw::ACK == 0 {
                break;
            }
        }
        raw.write(&raw::frame(raw::SETTINGS, raw::ACK, 0, &[])).await;
        Self::new(raw)
    }

    fn new(raw: RawPeer) -> Self {
        let decoder = loona_hpack::Decoder::new();
        Self { raw, decoder }
    }

    /// Brings stream 1 into a state.
    async fn in_state(gateway: &Gateway, state: State) -> Self {
        if let State::Unconnected = state {
            return Self::new(RawPeer::with_preface(gateway, &[]).await);
        }
        let mut peer = Self::connect(gateway, &[]).await;
        let end = raw::frame(raw::DATA, raw::END_STREAM, 1, &[]);
        match state {
            State::Unconnected | State::Idle => {}
            State::Open => peer.open(1).await,
            State::HalfClosedRemote => {
                peer.open(1).await;
                peer.raw.write(&end).await;
            }
            State::HalfClosedLocal | State::Ended => {
                peer.open(1).await;
                peer.raw.write(&raw::frame(raw::DATA, 0, 1, &[END])).await;
                peer.until(|frame| frame.kind == raw::DATA && frame.flags & raw::END_STREAM != 0)
                    .await;
                if let State::Ended = state {
                    peer.raw.write(&end).await;
                }
            }
            State::Reset => {
                peer.open(1).await;
                let reset = raw::frame(raw::RST_STREAM, 0, 1, &[0, 0, 0, 8]);
                peer.raw.write(&reset).await;
            }
            State::ResetByGateway => {
                let malformed = [METHOD, AUTHORITY, (":path", b"/".as_slice())];
                peer.raw.headers(1, &malformed).await;
                peer.until(|frame| frame.kind == raw::RST_STREAM).await;
            }
            State::Rejected => {
                peer.raw.headers(1, &REJECTED).await;
                peer.until(|frame| frame.kind == raw::HEADERS).await;
            }
        }
        peer
    }

    /// Opens a tunnel, and waits for its answer.
    async fn open(&mut self, stream: u32) {
        self.raw.headers(stream, &CONNECT).await;
        let answer = self.until(|frame| frame.kind == raw::HEADERS).await;
        assert_eq!(self.status(&answer), "200");
    }

    /// Returns the next frame of a kind.
    async fn until(&mut self, is_wanted: impl Fn(&Frame) -> bool) -> Frame {
        loop {
            let next = timeout(RESULT_DEADLINE, self.raw.next()).await;
            let frame = next.expect("in time").expect("an open connection");
            assert_ne!(frame.kind, raw::GOAWAY, "{frame:?}");
            if is_wanted(&frame) {
                return frame;
            }
        }
    }

    fn status(&mut self, answer: &Frame) -> String {
        let fields = self.decoder.decode(&answer.payload).expect("a header block");
        let (name, value) = fields.first().expect("a status");
        assert_eq!(name, b":status");
        String::from_utf8(value.clone()).expect("digits")
    }

    /// Returns the result of the frames sent before. Two rounds of PING follow them, as answers to
    /// PING may overtake the results of earlier frames.
    async fn outcome(&mut self, expected: &[Outcome]) -> Outcome {
        let is_later = |outcome: &Outcome| matches!(outcome, Outcome::Status(_) | Outcome::Data(_));
        let waits = expected.iter().any(is_later);
        let mut received = Vec::new();
        let ping = |round| raw::frame(raw::PING, 0, 0, &[0xfe, 0, 0, 0, 0, 0, 0, round]);
        self.raw.try_write(&ping(1)).await;
        loop {
            let Ok(next) = timeout(RESULT_DEADLINE, self.raw.next()).await else {
                return Outcome::Data(received);
            };
            let Some(frame) = next else {
                return Closed;
            };
            match (frame.kind, frame.payload.as_slice()) {
                (raw::GOAWAY, &[_, _, _, _, a, b, c, d, ..]) if [a, b, c, d] != [0; 4] => {
                    return Connection(u32::from_be_bytes([a, b, c, d]));
                }
                (raw::RST_STREAM, &[a, b, c, d]) => {
                    return Stream(u32::from_be_bytes([a, b, c, d]));
                }
                (raw::HEADERS, _) => return Outcome::Status(self.status(&frame)),
                (raw::DATA, payload) if frame.stream == 1 && !payload.is_empty() => {
                    received.extend(payload);
                    if expected.contains(&Outcome::Data(received.clone())) {
                        return Outcome::Data(received);
                    }
                }
                (raw::PING, &[0xfe, .., 1]) => self.raw.try_write(&ping(2)).await,
                (raw::PING, &[0xfe, .., 2]) if received.is_empty() && !waits => return Ignored,
                (raw::PING, &[0xfe, .., 2]) if !waits => return Outcome::Data(received),
                _ => {}
            }
        }
    }
}

/// Echoes until its client ends, and then keeps the connection. [`END`] ends its own direction.
async fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        if buffer[0] == END {
            let _ = stream.shutdown().await;
        } else if stream.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
    std::future::pending().await
}

async fn start(net: Net) -> (Gateway, Endpoint) {
    let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let endpoint = Endpoint::new(net.listen(11, 9000).await, echo);
    (Gateway::start(&settings).await, endpoint)
}

/// Runs a part of the table.
fn check(cases: Vec<Case>) {
    run(async {
        let (gateway, _endpoint) = start(Net::new()).await;
        let mut findings = Vec::new();
        for case in cases {
            let Case { section, name, .. } = &case;
            let mut peer = Peer::in_state(&gateway, case.state).await;
            peer.raw.try_write(&case.frames).await;
            let outcome = peer.outcome(&case.expected).await;
            let conforms = case.expected.contains(&outcome);
            if !conforms {
                let expected = &case.expected;
                findings.push(format!("{section} {name}: {outcome:?}, not {expected:?}"));
            }
        }
        assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
    });
}
