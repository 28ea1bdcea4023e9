//! Floods and bombs of a client with a valid certificate.

use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{interval, timeout};
use tokio_rustls::client::TlsStream;

use crate::tools::hbone::Client;

use super::case::{CASE_DEADLINE, Case, Group, script};
use super::peer::{Names, Peer, RESULT_DEADLINE, Target};
use super::raw::{self, Field, frame, headers};

/// Repeated part of a flood, by the number of the round.
pub type Round = fn(&Names, u32) -> Vec<u8>;

/// CONNECT on stream 1, bytes once, then rounds without a pause.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    pub name: &'static str,
    /// Window that the client gives to streams. With 0, answers cannot be sent.
    pub window: u32,
    pub opening: fn(&Names) -> Vec<u8>,
    pub round: Round,
}

/// Default window of RFC 9113.
const WINDOW: u32 = 65_535;
/// Number of closed streams that a flood uses in turn: more than Strait remembers.
const CLOSED: u32 = 2000;

/// Returns the stream of the round: 1 is the open tunnel, the others are new.
pub fn stream(round: u32) -> u32 {
    3 + 2 * round
}

/// Closes [`CLOSED`] streams: a stream that is opened closes all idle ones before it.
fn close_streams(names: &Names) -> Vec<u8> {
    opened_and_reset(CLOSED, &names.connect())
}

/// Returns a request, and its reset with CANCEL.
pub fn opened_and_reset(round: u32, fields: &[Field<'_>]) -> Vec<u8> {
    let mut bytes = headers(stream(round), fields);
    bytes.extend(frame(raw::RST_STREAM, 0, stream(round), &[0, 0, 0, 8]));
    bytes
}

/// Returns a field that stays in the peer's HPACK table: `x` with 4,000 bytes, of its 4,096.
fn kept_field(names: &Names) -> Vec<u8> {
    // A literal with incremental indexing and a new name (RFC 7541 6.2.1), the length as
    // 127 + 33 + 30 * 128 (5.1).
    let mut block = raw::block(&names.connect());
    block.extend([0x40, 1, b'x', 127, 0x80 | 33, 30]);
    block.resize(block.len() + 4000, b'y');
    frame(raw::HEADERS, raw::END_HEADERS, 3, &block)
}

/// Returns a request that refers to the kept field 3,000 times, with one byte each: 12 MB when
/// decoded.
fn references(names: &Names, round: u32) -> Vec<u8> {
    let mut block = raw::block(&names.connect());
    block.extend([0x80 | 62; 3000]);
    frame(raw::HEADERS, raw::END_HEADERS, stream(1 + round), &block)
}

const fn flood(name: &'static str, round: Round) -> Flood {
    opened(name, |_| Vec::new(), round)
}

const fn opened(name: &'static str, opening: fn(&Names) -> Vec<u8>, round: Round) -> Flood {
    Flood { name, window: WINDOW, opening, round }
}

pub const FLOODS: [Flood; 19] = [
    flood("rapid reset, good authority", |to, round| opened_and_reset(round, &to.connect())),
    flood("rapid reset, bad authority", |to, round| opened_and_reset(round, &to.rejected())),
    opened(
        "CONTINUATION, full",
        |_| frame(raw::HEADERS, 0, 3, &[0x82; 16]),
        |_, _| frame(raw::CONTINUATION, 0, 3, &[0x82; 1024]),
    ),
    opened(
        "CONTINUATION, empty",
        |_| frame(raw::HEADERS, 0, 3, &[]),
        |_, _| frame(raw::CONTINUATION, 0, 3, &[]),
    ),
    flood("PING", |_, _| frame(raw::PING, 0, 0, &[0; 8])),
    flood("SETTINGS", |_, _| raw::initial_window(1 << 16)),
    flood("empty DATA", |_, _| frame(raw::DATA, 0, 1, &[])),
    flood("one-byte DATA", |_, _| frame(raw::DATA, 0, 1, &[7])),
    opened("END_STREAM on a closed stream", close_streams, |_, _| {
        frame(raw::DATA, raw::END_STREAM, stream(0), &[])
    }),
    opened("32-byte DATA on a closed stream", close_streams, |_, _| {
        frame(raw::DATA, 0, stream(0), &[7; 32])
    }),
    opened("END_STREAM on 2,000 closed streams", close_streams, |_, round| {
        frame(raw::DATA, raw::END_STREAM, stream(round % CLOSED), &[])
    }),
    opened("32-byte DATA on 2,000 closed streams", close_streams, |_, round| {
        frame(raw::DATA, 0, stream(round % CLOSED), &[7; 32])
    }),
    flood("one-byte WINDOW_UPDATE", |_, _| frame(raw::WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
    flood("window overflow", |to, round| {
        let mut bytes = headers(stream(round), &to.connect());
        let most = 0x7fff_ffff_u32.to_be_bytes();
        bytes.extend(frame(raw::WINDOW_UPDATE, 0, stream(round), &most));
        bytes
    }),
    flood("PRIORITY", |_, round| frame(raw::PRIORITY, 0, stream(round), &[0, 0, 0, 1, 16])),
    flood("unknown frames", |_, _| frame(0xbe, 0, 0, &[0; 64])),
    // References to entry 22 of the static table, `accept: ...` (RFC 7541 appendix A).
    flood("static HPACK references", |_, round| {
        frame(raw::HEADERS, raw::END_HEADERS, stream(round), &[0x80 | 22; 8000])
    }),
    Flood {
        name: "HPACK references, closed window",
        window: 0,
        opening: kept_field,
        round: references,
    },
    flood("3,000 header fields", |_, round| {
        headers(stream(round), &[("x", b"y".as_slice()); 3000])
    }),
];

/// Minimum of bytes per write, as rounds are small.
const WRITE_BYTES: usize = 16 * 1024;
/// Time from the end of a flood's writes to the gateway's last frame.
const LAST_FRAMES: Duration = Duration::from_secs(1);
/// Time between two requests of the other client, and the longest that one may take.
const PACE: Duration = Duration::from_millis(20);
const LATENCY_MAX: Duration = Duration::from_secs(1);

pub(super) fn cases(duration: Duration) -> Vec<Case> {
    let line = |flood: Flood| {
        let run = move |to| withstands(to, flood, duration);
        let mut case = script(Group::Floods, "10.5", flood.name, run);
        case.deadline = duration + CASE_DEADLINE;
        case
    };
    FLOODS.map(line).into_iter().collect()
}

/// Floods the gateway. Its connection has to be ended, and another client must not notice.
async fn withstands(to: Target, flood: Flood, duration: Duration) -> anyhow::Result<()> {
    let client = Client::connect(to.address, &to.tls).await.context("the other client")?;
    let echo = to.names.echo.to_string();
    let other: JoinHandle<anyhow::Result<Duration>> = tokio::spawn(async move {
        let (mut slowest, mut pace, begun) = (Duration::ZERO, interval(PACE), Instant::now());
        while begun.elapsed() < duration {
            pace.tick().await;
            let due = Instant::now();
            let request = async {
                let mut tunnel = client.tunnel(&echo).await?;
                tunnel.write_all(b"victim").await?;
                let mut answer = [0; 6];
                tunnel.read_exact(&mut answer).await?;
                anyhow::Ok(answer)
            };
            let answer = timeout(RESULT_DEADLINE, request).await.context("no answer")??;
            ensure!(&answer == b"victim", "other bytes than those sent");
            slowest = slowest.max(due.elapsed());
        }
        Ok(slowest)
    });
    let ended = timeout(duration, flood_until_the_end(&to, flood)).await;
    let slowest = other.await?.context("a request of another client failed")?;
    ensure!(slowest <= LATENCY_MAX, "a request of another client took {slowest:.1?}");
    let rounds = ended.with_context(|| format!("not ended after {duration:?}"))??;
    ensure!(rounds > 0, "the flood did not begin");
    let again = Peer::connect(&to, &[]).await.context("a new connection after the flood")?;
    drop(again);
    Ok(())
}

/// Floods until the gateway ends the connection. Returns the number of rounds.
async fn flood_until_the_end(to: &Target, flood: Flood) -> anyhow::Result<u32> {
    let mut peer = Peer::connect(to, &raw::initial_window(flood.window)[9..]).await?;
    peer.open(to, 1).await?;
    let (read, mut write) = peer.split();
    let mut reading = pin!(read_to_end(read));
    let mut bytes = (flood.opening)(&to.names);
    for round in 0.. {
        bytes.extend((flood.round)(&to.names, round));
        if bytes.len() < WRITE_BYTES {
            continue;
        }
        let written = async {
            write.write_all(&bytes).await?;
            write.flush().await
        };
        tokio::select! {
            biased;
            _ = &mut reading => return Ok(round),
            written = written => {
                if written.is_err() {
                    // The gateway's last frames are still under way.
                    let _ = timeout(LAST_FRAMES, &mut reading).await;
                    return Ok(round);
                }
            }
        }
        bytes.clear();
        tokio::task::yield_now().await;
    }
    Ok(u32::MAX)
}

async fn read_to_end(mut read: ReadHalf<TlsStream<TcpStream>>) {
    while raw::read_frame(&mut read).await.is_some() {}
}
