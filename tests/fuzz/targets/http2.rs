//! Scripted HTTP/2 connection through the real handler, under a clock that only the script
//! advances.
//!
//! The peer's side is in memory. The endpoint is an echo on a loopback socket, so that tunnels
//! carry bytes and end in every way.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use strait::datapath::accept::ConnectionResources;
use strait::datapath::forward::connection;
use strait::datapath::handshake::Transport;
use strait::datapath::limits::load::LoadGuard;
use strait::snapshot::ExposureTable;
use strait::snapshot::builder::Change;
use strait::telemetry::Metrics;
use strait::tls::record::{ContentType, RecordLayer, TRAILER_BYTES};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{advance, timeout};

use super::frames::{DEFAULT_WINDOW, PREFACE};
use super::gateway::{World, answer, endpoint, peer};
use super::plain::{self, PlainRecords};
use super::received::{Received, Sent};
use super::script::{self, PeerFlags, Step};

/// Limit of a connection after the peer's last byte. Without an answer to a PING, it ends within 30
/// s (10 s to the PING, 20 s for the answer); a GOAWAY has one second more.
const END: Duration = Duration::from_secs(32);
/// Limit of tunnels after their peer has gone: its bytes are delivered within 30 s, and a dial
/// takes at most 10 s.
const TUNNELS_END: Duration = Duration::from_secs(45);
/// Limit of the output per input. Each frame of the peer, of nine bytes or more, causes at most a
/// few small ones, and each byte of a tunnel is echoed once.
const OUTPUT_PER_INPUT: usize = 16;
/// Output for our SETTINGS, PINGs, and GOAWAY.
const OUTPUT_BYTES: usize = 16 * 1024;
/// Limit of loopback's delay, in real time, when everything else is done.
const LOOPBACK: Duration = Duration::from_secs(5);
/// Number of turns of the runtime in which a frame is answered.
const TURNS: usize = 4;
/// Held by an execution. The listener of the endpoints is shared, and an execution beside another
/// would accept, and count, the connections of the other.
static EXECUTION: Mutex<()> = Mutex::new(());

/// Checks that the gateway survives this peer, sends it valid frames only, and releases it in
/// bounded time. Returns the metrics of the gateway.
pub fn http2(data: &[u8]) -> Arc<Metrics> {
    // A failed execution leaves nothing behind that the next one uses.
    let _alone = EXECUTION.lock().unwrap_or_else(PoisonError::into_inner);
    let (mode, steps) = script::read(data);
    let mut runtime = Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build();
    runtime.expect("a runtime").block_on(run(mode, &steps))
}

async fn run(mode: PeerFlags, steps: &[Step]) -> Arc<Metrics> {
    let endpoint = endpoint().try_clone().expect("a listener");
    let unasked = Arc::new(AtomicUsize::new(0));
    let endpoint = tokio::spawn(answer(
        TcpListener::from_std(endpoint).expect("a listener"),
        Arc::clone(&unasked),
    ));
    let world = World::new();
    let data_path = &world.data_path;
    let (ours, theirs) = duplex(if mode.reads() { 1 << 20 } else { 32 * 1024 });
    let mut served = world.serve(ours, mode.has_expired());
    let (read, mut write) = split(theirs);
    let reads = mode.reads().then(|| tokio::spawn(receive(PlainRecords::new(read))));

    let sent = world.send(mode, steps, &mut write).await;
    let left = if mode.leaves() {
        drop(write.shutdown().await);
        None
    } else {
        Some(write)
    };
    // deadline: that the connection ends in bounded time is what is tested
    if timeout(END, &mut served).await.is_err() {
        wait(|| served.is_finished(), "the connection goes on").await;
    }
    drop(left);
    if let Some(reads) = reads {
        let received = reads.await.expect("no panic");
        let most = OUTPUT_BYTES + OUTPUT_PER_INPUT * sent.bytes() + 2 * unasked.load(Relaxed);
        let bytes = received.bytes();
        assert!(bytes <= most, "{} bytes made {bytes}", sent.bytes());
        let granted = u64::from(DEFAULT_WINDOW) + sent.granted();
        assert!(received.data_bytes() <= granted, "data beyond {granted}");
    }
    advance(TUNNELS_END).await;
    wait(|| data_path.lifecycle.tasks() == 0, "a tunnel goes on").await;
    assert_eq!(Arc::strong_count(data_path), 1, "something still holds the data path");
    endpoint.abort();
    Arc::clone(&data_path.metrics)
}

/// Waits for events that only loopback can still delay.
async fn wait(done: impl Fn() -> bool, what: &str) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < LOOPBACK, "{what}");
        yield_now().await;
    }
}

impl World {
    fn serve(&self, stream: DuplexStream, has_expired: bool) -> JoinHandle<()> {
        let data_path = Arc::clone(&self.data_path);
        let listener = Arc::clone(&self.listener);
        tokio::spawn(async move {
            let source = data_path.admission.pool.register_listener();
            let descriptor = source.source([192, 0, 2, 1].into()).connection();
            let descriptor = descriptor.expect("a descriptor");
            let peer = peer(&data_path, has_expired, descriptor.holders().clone(), listener);
            let held = ConnectionResources { load: LoadGuard::default(), descriptor };
            let transport = Box::new(Transport {
                socket: stream,
                layer: RecordLayer::plaintext(),
                received: Vec::new(),
            });
            // A rejection is a valid end like any other.
            drop(connection::serve_stream(&data_path, transport, &held, peer).await);
        })
    }

    /// Plays the script until its end or that of the connection.
    async fn send(
        &self,
        mode: PeerFlags,
        steps: &[Step],
        write: &mut WriteHalf<DuplexStream>,
    ) -> Sent {
        let mut sent = Sent::default();
        let preface = Step::Send(PREFACE.to_vec());
        for step in std::iter::once(&preface).chain(steps) {
            match step {
                Step::Wait(time) => advance(*time).await,
                Step::Drain => self.listener.drain.drain(),
                Step::Close => self.listener.drain.close(),
                Step::Revoke => self.publisher.update(Change {
                    exposure: Some(ExposureTable::new(false)),
                    ..Change::default()
                }),
                Step::Send(bytes) => {
                    let mut records = BytesMut::new();
                    for payload in bytes.chunks(mode.record_bytes()) {
                        plain::push_record(&mut records, payload);
                    }
                    sent.push(bytes);
                    if !write_segments(mode, write, &records).await {
                        return sent;
                    }
                }
                Step::Record(kind, payload) => {
                    let mut record = BytesMut::new();
                    plain::push_record(&mut record, payload);
                    let trailer = record.len() - TRAILER_BYTES;
                    record[trailer] = *kind;
                    if *kind == ContentType::ApplicationData as u8 {
                        sent.push(payload);
                    }
                    if !write_segments(mode, write, &record).await {
                        return sent;
                    }
                }
            }
            if !mode.hurries() || matches!(step, Step::Drain | Step::Close | Step::Revoke) {
                turn().await;
            }
        }
        turn().await;
        sent
    }
}

/// Writes records. Returns false if the gateway has closed, or waits for the peer to read.
async fn write_segments(
    mode: PeerFlags,
    write: &mut WriteHalf<DuplexStream>,
    records: &[u8],
) -> bool {
    for segment in records.chunks(mode.segment_bytes()) {
        // deadline: a gateway that has closed, or that waits for us to read
        let written = timeout(Duration::from_secs(1), write.write_all(segment)).await;
        if !matches!(written, Ok(Ok(()))) {
            return false;
        }
        if !mode.hurries() {
            yield_now().await;
        }
    }
    true
}

/// Runs all tasks and polls the sockets, while the clock stands still.
async fn turn() {
    for _ in 0..TURNS {
        yield_now().await;
    }
}

async fn receive(mut read: PlainRecords<ReadHalf<DuplexStream>>) -> Received {
    let (mut received, mut buffer) = (Received::default(), vec![0; 16 * 1024]);
    while let Ok(bytes @ 1..) = read.read(&mut buffer).await {
        received.receive(&buffer[..bytes]);
    }
    received
}
