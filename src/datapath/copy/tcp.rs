//! Copying of both directions of a tunnel between two TCP connections, with exact TCP semantics.
//!
//! FIN becomes FIN, each direction by itself, and RST becomes RST. A side is read only when the
//! other one takes bytes, so at most one read is held in each direction. An idle tunnel holds
//! nothing. Small reads are copied. After a large read, bytes pass through a pipe and never enter
//! this process.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;
use tokio::time::{Instant, sleep, timeout_at};

use crate::datapath::io::buffer::{BUFFER_BYTES, Buffer};
use crate::datapath::io::pipe::Pipe;
use crate::datapath::limits::admission::Admission;
use crate::datapath::limits::budget::BufferAccount;
use crate::datapath::limits::loop_detection::InFlight;
use crate::reason::{Fault, Reason};
use crate::telemetry::Record;

use super::{ANSWER_DEADLINE, CopyOutcome, DELIVERY_DEADLINE, SILENT};

/// Limit of reads and writes of one direction per turn, after which other tunnels of the worker
/// run.
const OPERATIONS_PER_TURN: usize = 8;
/// Size in bytes of a read that indicates more to come; a pipe carries the bytes after it.
const BULK_READ_MIN: usize = BUFFER_BYTES / 2;
/// Size in bytes below which a copy is faster than the hand-over of two pages.
const SPLICE_BYTES_MIN: usize = 4 * 1024;
/// Initial state of a tunnel.
#[derive(Debug)]
pub struct InitialState {
    /// Bytes that were read from the peer before. They are sent first.
    pub client_hello: Vec<u8>,
    /// Entry of the ClientHello in the loop detection, until the endpoint answers.
    pub loop_entry: Option<InFlight>,
}

/// Completes when the endpoint has been silent for too long. Holds the entry in the loop
/// detection.
async fn first_byte_timeout(_in_flight: Option<InFlight>) {
    sleep(ANSWER_DEADLINE).await;
}

/// Returns true if the wait is over before the answer. Frees the wait once there is an answer.
fn poll_first_byte_timeout(
    silence: &mut Option<Pin<Box<impl Future<Output = ()>>>>,
    cx: &mut Context<'_>,
    is_answered: bool,
) -> bool {
    if is_answered {
        *silence = None;
    }
    silence.as_mut().is_some_and(|waiting| waiting.as_mut().poll(cx).is_ready())
}

/// Copies until both directions have ended, one side broke, or the endpoint missed the deadline
/// for its first byte. Keeps the number of bytes of both directions in `moved`.
pub async fn run(
    downstream: &mut TcpStream,
    upstream: &mut TcpStream,
    initial: Box<InitialState>,
    account: &Arc<BufferAccount>,
    admission: &Admission,
    record: &mut Record,
    moved: &AtomicU64,
) -> CopyOutcome {
    let (mut peer, to_peer) = downstream.split();
    let (mut endpoint, to_endpoint) = upstream.split();
    let (to_peer, to_endpoint) = (to_peer.as_ref(), to_endpoint.as_ref());
    let mut upload = Direction::new(account, admission, initial.client_hello.into());
    // Boxed: it is freed once the endpoint has answered.
    let mut silence = Some(Box::pin(first_byte_timeout(initial.loop_entry)));
    let mut download = Direction::new(account, admission, Bytes::new());
    let mut peer_failed = pin!(to_peer.ready(Interest::ERROR));
    let mut endpoint_failed = pin!(to_endpoint.ready(Interest::ERROR));
    // True if the reader has not received the end of the peer yet, which is FIN or RST.
    let mut end_unread = false;
    let mut ended = poll_fn(|cx| {
        // Checked before any write to the peer: a failed write clears the error by which the
        // reader distinguishes RST from FIN.
        if peer_failed.as_mut().poll(cx).is_ready() {
            end_unread = true;
            return Poll::Ready(Err(Reason::DownstreamReset));
        }
        // The endpoint is read first: its bytes before a reset are sent before this reset fails
        // the upload.
        let down = download.poll(cx, &mut endpoint, to_peer, |bytes| record.add_sent(bytes));
        let down = down.map_err(BrokenSide::download_reason)?;
        if poll_first_byte_timeout(&mut silence, cx, down.is_ready() || record.sent_bytes() > 0) {
            record.set_detail(SILENT.to_owned());
            return Poll::Ready(Err(Reason::EndpointSilent));
        }
        let count = |bytes| record.add_received(bytes);
        let up = upload.poll(cx, &mut peer, to_endpoint, count);
        let up = up.map_err(BrokenSide::upload_reason)?;
        let bytes = record.sent_bytes() + record.received_bytes();
        moved.store(bytes, Ordering::Relaxed);
        if down.is_ready() && up.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if down.is_ready() {
            // The endpoint is no longer read, and the upload may have nothing to write.
            let reset = |_| Err(Reason::UpstreamReset);
            return endpoint_failed.as_mut().poll(cx).map(reset);
        }
        Poll::Pending
    })
    .await;
    let deadline = Instant::now() + DELIVERY_DEADLINE;
    let gone = matches!(ended, Err(reason) if reason.blame() != Fault::Upstream);
    if gone && !upload.done && (end_unread || upload.ended) {
        // Bytes before a FIN are delivered even if the peer reset the connection afterwards
        // (docs/wire-contract.md 1.6). Without FIN this fails when everything has been read.
        let rest = poll_fn(|cx| {
            let count = |bytes| record.add_received(bytes);
            let rest = upload.poll(cx, &mut peer, to_endpoint, count);
            rest.map_err(BrokenSide::upload_reason)
        });
        if let Ok(Err(reason)) = Box::pin(timeout_at(deadline, rest)).await {
            ended = Err(reason);
        }
    }
    CopyOutcome { result: ended, delivery_deadline: upload.done.then_some(deadline) }
}

/// Side of a direction that has broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BrokenSide {
    From(io::ErrorKind),
    To(io::ErrorKind),
}

impl BrokenSide {
    fn from(error: io::Error) -> Self {
        Self::From(error.kind())
    }

    fn to(error: io::Error) -> Self {
        Self::To(error.kind())
    }

    fn upload_reason(self) -> Reason {
        match self {
            Self::From(kind) => downstream_reason(kind),
            Self::To(_) => Reason::UpstreamReset,
        }
    }

    fn download_reason(self) -> Reason {
        match self {
            Self::From(_) => Reason::UpstreamReset,
            Self::To(kind) => downstream_reason(kind),
        }
    }
}

/// Returns the reason of a failed read of or write to the client.
pub(super) fn downstream_reason(kind: io::ErrorKind) -> Reason {
    match kind {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Reason::DownstreamReset,
        _ => Reason::DownstreamLost,
    }
}

/// Direction from one socket to the other.
struct Direction<'a> {
    account: &'a Arc<BufferAccount>,
    admission: &'a Admission,
    /// Bytes that were read and not taken yet, on the account.
    pending: Bytes,
    /// Pipe with such bytes. Never empty, and never set together with `pending`.
    piped: Option<Pipe>,
    /// True if the last read was large.
    is_bulk: bool,
    ended: bool,
    done: bool,
}

impl<'a> Direction<'a> {
    fn new(account: &'a Arc<BufferAccount>, admission: &'a Admission, first: Bytes) -> Self {
        account.charge(first.len());
        Self {
            account,
            admission,
            pending: first,
            piped: None,
            is_bulk: false,
            ended: false,
            done: false,
        }
    }

    /// Moves bytes. Ready once `from` has ended and `to` has been shut down for writing.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut ReadHalf<'_>,
        to: &TcpStream,
        mut count: impl FnMut(u64),
    ) -> Poll<Result<(), BrokenSide>> {
        for _ in 0..OPERATIONS_PER_TURN {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            // A side that takes nothing now is not written to, and nothing is read for it.
            ready!(to.poll_write_ready(cx)).map_err(BrokenSide::to)?;
            if self.piped.is_some() {
                count(self.drain(to)? as u64);
            } else if !self.pending.is_empty() {
                let written = write(to, &self.pending)?;
                self.pending.advance(written);
                if self.pending.is_empty() {
                    // Frees the allocation too: an idle tunnel keeps nothing.
                    self.pending = Bytes::new();
                }
                self.account.release(written);
                count(written as u64);
            } else if self.ended {
                let shutdown = SockRef::from(to).shutdown(Shutdown::Write);
                shutdown.map_err(BrokenSide::to)?;
                self.done = true;
            } else {
                // A socket without data takes neither a buffer nor a pipe.
                ready!(from.as_ref().poll_read_ready(cx)).map_err(BrokenSide::from)?;
                if self.account.must_pause_reads() {
                    return Poll::Pending;
                }
                let pipe = self.is_bulk.then(|| Pipe::borrow(self.admission)).flatten();
                match pipe {
                    Some(pipe) => self.fill(pipe, from.as_ref())?,
                    None => ready!(self.copy(cx, from, to, &mut count))?,
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads once and writes the bytes. Keeps those that `to` does not take, without the buffer.
    fn copy(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut ReadHalf<'_>,
        to: &TcpStream,
        count: &mut impl FnMut(u64),
    ) -> Poll<Result<(), BrokenSide>> {
        let mut buffer = Buffer::borrow();
        let mut room = ReadBuf::new(buffer.bytes());
        ready!(Pin::new(from).poll_read(cx, &mut room)).map_err(BrokenSide::from)?;
        let read = room.filled();
        self.ended = read.is_empty();
        self.is_bulk = read.len() >= BULK_READ_MIN;
        let written = if read.is_empty() { 0 } else { write(to, read)? };
        count(written as u64);
        if written < read.len() {
            self.pending = Bytes::copy_from_slice(&read[written..]);
            self.account.charge(self.pending.len());
        }
        Poll::Ready(Ok(()))
    }

    /// Moves bytes of `from` into a pipe, and keeps the pipe while it holds bytes.
    fn fill(&mut self, mut pipe: Pipe, from: &TcpStream) -> Result<(), BrokenSide> {
        let moved = match pipe.read_from(from) {
            // The socket was no longer readable; the next round waits for it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            moved => moved.map_err(BrokenSide::from)?,
        };
        self.ended = moved == 0;
        self.is_bulk = moved >= SPLICE_BYTES_MIN;
        self.account.charge(moved);
        self.piped = Some(pipe).filter(|pipe| pipe.filled() > 0);
        Ok(())
    }

    /// Moves bytes that `to` takes out of the pipe. Returns the pipe to the thread when it is
    /// empty.
    fn drain(&mut self, to: &TcpStream) -> Result<usize, BrokenSide> {
        let Some(pipe) = &mut self.piped else {
            return Ok(0);
        };
        let moved = match pipe.write_to(to) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            moved => moved.map_err(BrokenSide::to)?,
        };
        self.account.release(moved);
        if pipe.filled() == 0 {
            self.piped = None;
        }
        Ok(moved)
    }
}

impl Drop for Direction<'_> {
    fn drop(&mut self) {
        let piped = self.piped.as_ref().map_or(0, Pipe::filled);
        self.account.release(self.pending.len() + piped);
    }
}

/// Writes as many bytes as fit, possibly none.
fn write(to: &TcpStream, bytes: &[u8]) -> Result<usize, BrokenSide> {
    match to.try_write(bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        written => written.map_err(BrokenSide::to),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::timeout;

    use crate::telemetry::Metrics;

    use super::super::super::identity::Peer;
    use super::*;
    use crate::datapath::io::pipe;
    use crate::datapath::limits::budget::BufferBudget;
    use crate::datapath::tests::tcp_pair as pair;
    use crate::limits::Source;

    /// Time without progress after which a writer counts as stopped.
    const STOPPED: Duration = Duration::from_millis(500);

    /// Returns bytes that do not repeat at short distances.
    fn bytes(count: usize) -> Vec<u8> {
        let word = |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        (0..count / 8).flat_map(word).collect()
    }

    fn initial(client_hello: &[u8]) -> Box<InitialState> {
        Box::new(InitialState { client_hello: client_hello.to_vec(), loop_entry: None })
    }

    /// State that a copy needs, and the budget that its account belongs to.
    fn limits() -> (Arc<BufferBudget>, Arc<BufferAccount>, Admission, Record) {
        let metrics = Arc::new(Metrics::new());
        let held = metrics.set_buffer_limit(1 << 30);
        let budget = Arc::new(BufferBudget::new(1 << 30, held));
        let peer = Peer::unauthenticated(([127, 0, 0, 1], 1).into(), Arc::default(), None);
        let record = Record::for_client_hello(&metrics, &peer.source, None);
        let account = budget.account(&Source::prefix([192, 0, 2, 1].into()));
        (budget, account, Admission::new(1000), record)
    }

    #[tokio::test]
    async fn much_goes_through_a_pipe_and_all_of_it_arrives_behind_the_hello() {
        let (mut client, mut downstream) = pair().await;
        let (mut upstream, mut server) = pair().await;
        let (budget, account, admission, mut record) = limits();
        let moved = AtomicU64::new(0);
        let (all, hello) = (bytes(32 << 20), b"hello".to_vec());
        let copy = run(
            &mut downstream,
            &mut upstream,
            initial(&hello),
            &account,
            &admission,
            &mut record,
            &moved,
        );
        let up = async {
            client.write_all(&all).await.expect("bytes");
            client.shutdown().await.expect("an end");
            // The other direction continues.
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("an answer");
            answer
        };
        let down = async {
            let mut got = Vec::new();
            // Nothing is read at first: the kernel holds the bytes meanwhile.
            tokio::task::yield_now().await;
            server.read_to_end(&mut got).await.expect("bytes");
            server.write_all(b"thanks").await.expect("an answer");
            server.shutdown().await.expect("an end");
            got
        };
        let (outcome, answer, got) = tokio::join!(copy, up, down);
        assert_eq!(outcome.result, Ok(()));
        assert!(outcome.delivery_deadline.is_some());
        assert_eq!(answer, b"thanks");
        assert!(got == [hello, all].concat(), "every byte in its place");
        assert!(pipe::spares() > 0, "pipes were used");
        assert_eq!((record.sent_bytes(), budget.held()), (6, 0));
        assert_eq!(moved.into_inner(), 6 + record.received_bytes());
    }

    #[tokio::test]
    async fn what_waits_in_a_pipe_is_charged_and_bounded() {
        let (mut client, mut downstream) = pair().await;
        let (mut upstream, server) = pair().await;
        let (budget, account, admission, mut record) = limits();
        let moved = AtomicU64::new(0);
        let all = bytes(64 << 20);
        let copy = run(
            &mut downstream,
            &mut upstream,
            initial(&[]),
            &account,
            &admission,
            &mut record,
            &moved,
        );
        let write = async {
            // More than the kernel buffers for connections that are not read.
            let written = timeout(STOPPED, client.write_all(&all)).await;
            assert!(written.is_err(), "the writer is stopped");
            let held = budget.held();
            assert!((1..=256 * 1024).contains(&held), "{held}");
        };
        tokio::select! {
            outcome = copy => panic!("{outcome:?}"),
            () = write => {}
        }
        // The dropped copy has given back its bytes.
        assert_eq!(budget.held(), 0);
        drop(server);
    }
}
