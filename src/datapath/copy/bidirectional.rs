//! Copying of both directions of a tunnel between two sides, with exact TCP semantics.
//!
//! The end of a direction is passed on by itself, and a reset becomes a reset. A side is read only
//! when the other one takes bytes, so at most one read is held in each direction, besides the
//! window of a tunnel through a gateway. An idle tunnel holds nothing. Small reads are copied.
//! After a large read from a socket, bytes for another socket pass through a pipe and never enter
//! this process.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::datapath::handshake::SEND_BUFFER;
use crate::datapath::io::buffer::{BUFFER_BYTES, Buffer};
use crate::datapath::io::endpoint::{EndpointStream, OuterStream};
use crate::datapath::io::pipe::Pipe;
use crate::datapath::io::shared_socket::SharedSocket;
use crate::datapath::io::side::Side;
use crate::datapath::limits::admission::Admission;
use crate::datapath::limits::budget::{BufferAccount, HeldBytes};
use crate::datapath::limits::loop_detection::InFlight;
use crate::reason::{Fault, Reason};
use crate::telemetry::Record;

use super::{CopyOutcome, DELIVERY_DEADLINE, Timer};

/// Limit of reads and writes of one direction per turn, after which other tunnels of the worker
/// run. Two reads into pipes and their writes move 1 MiB at most.
const OPERATIONS_PER_TURN: usize = 4;
/// Size in bytes of a read that indicates more to come; a pipe carries the bytes after it.
const BULK_READ_MIN: usize = BUFFER_BYTES / 2;
/// Size in bytes below which a copy is faster than the hand-over of two pages.
const SPLICE_BYTES_MIN: usize = 4 * 1024;

/// Initial state of a tunnel whose peer has sent a ClientHello.
#[derive(Debug)]
pub struct InitialState {
    /// Bytes that were read from the peer before. They are sent first.
    pub client_hello: Vec<u8>,
    /// Entry of the ClientHello in the loop detection, until the endpoint answers.
    pub loop_entry: Option<InFlight>,
}

/// Sides of a tunnel: the peer above its socket, and the endpoint.
struct Sides<'a, P, E, B> {
    socket: &'a TcpStream,
    peer: &'a mut P,
    endpoint: &'a mut E,
    /// Polls whether the endpoint has broken, even if both directions have ended. Returns true if
    /// that is a normal end.
    poll_broken: B,
}

#[derive(Clone, Copy, Debug)]
pub struct CopyLimits<'a> {
    /// Account of the bytes that wait in this process.
    pub account: &'a Arc<BufferAccount>,
    /// Descriptors for pipes.
    pub admission: &'a Admission,
}

/// Copies between a peer above its socket and an endpoint, until both directions have ended, one
/// side broke, or the endpoint missed the deadline for its first byte. Keeps the number of bytes of
/// both directions in `moved`.
pub async fn run<P: Side>(
    (socket, peer): (&TcpStream, &mut P),
    endpoint: &mut EndpointStream,
    initial: Option<Box<InitialState>>,
    limits: &CopyLimits<'_>,
    record: &mut Record,
    moved: &AtomicU64,
) -> CopyOutcome {
    match endpoint {
        EndpointStream::Tcp(stream) => {
            let stream = &*stream;
            // Boxed: few tunnels have an endpoint that ends first.
            let mut failed = None;
            let poll_broken = |_: &mut _, cx: &mut Context<'_>| {
                let wait = || Box::pin(stream.ready(Interest::ERROR));
                failed.get_or_insert_with(wait).as_mut().poll(cx).map(|_| false)
            };
            let endpoint = &mut SharedSocket::from(stream);
            let sides = Sides { socket, peer, endpoint, poll_broken };
            copy(sides, initial, limits, record, moved).await
        }
        EndpointStream::Outer(endpoint) => {
            let (endpoint, poll_broken) = (&mut **endpoint, OuterStream::poll_broken);
            let sides = Sides { socket, peer, endpoint, poll_broken };
            copy(sides, initial, limits, record, moved).await
        }
    }
}

/// Copies between the sides. The future is built of its state, as the arguments of an `async fn`
/// would be kept besides it.
fn copy<'a, P: Side, E: Side, B>(
    sides: Sides<'a, P, E, B>,
    initial: Option<Box<InitialState>>,
    limits: &'a CopyLimits<'a>,
    record: &'a mut Record,
    moved: &'a AtomicU64,
) -> impl Future<Output = CopyOutcome>
where
    B: FnMut(&mut E, &mut Context<'_>) -> Poll<bool>,
{
    let download = Direction::new(limits, Bytes::new());
    let (first, timer) = match initial.map(|initial| *initial) {
        // Boxed: an idle tunnel has none after its start.
        Some(InitialState { client_hello, loop_entry }) => {
            (client_hello.into(), Some(Box::new(Timer::start(loop_entry))))
        }
        None => (Bytes::new(), None),
    };
    let upload = Direction::new(limits, first);
    let mut copy = Copy { sides, upload, download, timer, record, moved };
    async move {
        let socket = copy.sides.socket;
        let mut peer_failed = pin!(socket.ready(Interest::ERROR));
        // True if the reader has not received the end of the peer yet, which is FIN or RST.
        let mut end_unread = false;
        let mut ended = poll_fn(|cx| {
            // Checked before any write to the peer: a failed write clears the error by which the
            // reader distinguishes RST from FIN.
            if peer_failed.as_mut().poll(cx).is_ready() {
                end_unread = true;
                return Poll::Ready(Err(Reason::DownstreamReset));
            }
            copy.poll(cx)
        })
        .await;
        let deadline = Instant::now() + DELIVERY_DEADLINE;
        let gone = matches!(ended, Err(reason) if reason.blame() == Fault::Downstream);
        if gone && !copy.upload.done && (end_unread || copy.upload.ended) {
            // Bytes before a FIN are delivered even if the peer reset the connection afterwards
            // (docs/wire-contract.md 1.6). Without FIN this fails when everything has been read.
            let rest = poll_fn(|cx| copy.poll_upload(cx));
            if let Ok(Err(reason)) = Box::pin(timeout_at(deadline, rest)).await {
                ended = Err(reason);
            }
        }
        let delivery_deadline = copy.upload.done.then_some(deadline);
        CopyOutcome { result: ended, delivery_deadline }
    }
}

struct Copy<'a, P, E, B> {
    sides: Sides<'a, P, E, B>,
    upload: Direction<'a>,
    download: Direction<'a>,
    timer: Option<Box<Timer>>,
    record: &'a mut Record,
    moved: &'a AtomicU64,
}

impl<P: Side, E: Side, B> Copy<'_, P, E, B>
where
    B: FnMut(&mut E, &mut Context<'_>) -> Poll<bool>,
{
    /// Moves bytes in both directions. Ready once both have ended, or the tunnel has to end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        // The endpoint is read first: its bytes before a reset are sent before this reset fails
        // the upload.
        let Sides { peer, endpoint, .. } = &mut self.sides;
        let count = |bytes| self.record.add_sent(bytes);
        self.download.is_last = self.upload.done;
        let down = self.download.poll(cx, (&mut **endpoint, &mut **peer), count);
        let down = down.map_err(BrokenSide::download_reason)?.is_ready();
        let has_answered = down || self.record.sent_bytes() > 0;
        let up = self.poll_upload(cx)?.is_ready();
        let bytes = self.record.sent_bytes() + self.record.received_bytes();
        let has_sent = down || up || bytes != self.moved.load(Ordering::Relaxed);
        if has_sent && self.timer.is_none() {
            self.timer = Some(Box::new(Timer::acks()));
        }
        self.moved.store(bytes, Ordering::Relaxed);
        if down && up {
            return Poll::Ready(Ok(()));
        }
        if let Some(timer) = &mut self.timer {
            let sides = (self.sides.socket, &mut *self.sides.endpoint);
            match timer.poll(cx, sides, has_answered) {
                Ok(true) => {}
                Ok(false) => self.timer = None,
                Err((reason, why)) => {
                    self.record.set_detail(why);
                    return Poll::Ready(Err(reason));
                }
            }
        }
        // The endpoint is no longer read, and the upload may have nothing to write.
        if down && let Poll::Ready(is_end) = (self.sides.poll_broken)(self.sides.endpoint, cx) {
            return Poll::Ready(if is_end { Ok(()) } else { Err(Reason::UpstreamReset) });
        }
        Poll::Pending
    }

    /// Moves bytes of the peer. Ready once it has ended and the endpoint was sent the end.
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Reason>> {
        let Sides { peer, endpoint, .. } = &mut self.sides;
        let count = |bytes| self.record.add_received(bytes);
        let up = self.upload.poll(cx, (&mut **peer, &mut **endpoint), count);
        up.map_err(BrokenSide::upload_reason)
    }
}

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

/// Returns the reason of a failed read of or write to the peer.
fn downstream_reason(kind: io::ErrorKind) -> Reason {
    match kind {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Reason::DownstreamReset,
        _ => Reason::DownstreamLost,
    }
}

/// Direction from one side to the other.
struct Direction<'a> {
    limits: &'a CopyLimits<'a>,
    /// Bytes that were read and not taken yet, on the account.
    pending: Bytes,
    /// Pipe with such bytes. Never empty, and never set together with `pending`.
    piped: Option<Pipe>,
    /// Send buffer of TLS, while it may have bytes.
    sealed: Option<HeldBytes>,
    /// True if the last read was large.
    is_bulk: bool,
    /// True if the sides are closed once this direction has ended.
    is_last: bool,
    ended: bool,
    done: bool,
}

impl<'a> Direction<'a> {
    fn new(limits: &'a CopyLimits<'a>, first: Bytes) -> Self {
        limits.account.charge(first.len());
        Self {
            limits,
            pending: first,
            piped: None,
            sealed: None,
            is_bulk: false,
            is_last: false,
            ended: false,
            done: false,
        }
    }

    /// Moves bytes. Ready once `from` has ended and `to` has been shut down for writing.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut impl Side, &mut impl Side),
        mut count: impl FnMut(u64),
    ) -> Poll<Result<(), BrokenSide>> {
        for _ in 0..OPERATIONS_PER_TURN {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            let Poll::Ready(moved) = self.poll_once(cx, (from, to), &mut count) else {
                if from.socket().is_none() {
                    // Takes over and charges what has arrived, also while `to` takes nothing.
                    let _ = from.poll_read_ready(cx);
                }
                return Poll::Pending;
            };
            moved?;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Performs one read or write.
    fn poll_once(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut impl Side, &mut impl Side),
        count: &mut impl FnMut(u64),
    ) -> Poll<Result<(), BrokenSide>> {
        // A side that takes nothing now is not written to, and nothing is read for it.
        let flushed = Pin::new(&mut *to).poll_flush(cx);
        if flushed.is_ready() {
            self.sealed = None;
        } else if to.socket().is_none() && self.sealed.is_none() {
            // The number of sealed bytes is unknown.
            self.sealed = Some(self.limits.account.hold(SEND_BUFFER));
        }
        ready!(flushed).map_err(BrokenSide::to)?;
        if let Some(to) = to.socket().filter(|_| self.piped.is_some()) {
            count(self.drain(to)? as u64);
        } else if !self.pending.is_empty() {
            let written = Pin::new(to).poll_write(cx, &self.pending);
            let written = ready!(written).map_err(BrokenSide::to)?;
            self.pending.advance(written);
            if self.pending.is_empty() {
                // Frees the allocation too: an idle tunnel keeps nothing.
                self.pending = Bytes::new();
            }
            self.limits.account.release(written);
            count(written as u64);
        } else if self.ended {
            // The close of a socket sends FIN as well.
            if !self.is_last || to.socket().is_none() {
                ready!(Pin::new(to).poll_shutdown(cx)).map_err(BrokenSide::to)?;
            }
            self.done = true;
        } else {
            // A side without data takes neither a buffer nor a pipe.
            ready!(from.poll_read_ready(cx)).map_err(BrokenSide::from)?;
            if self.limits.account.must_pause_reads() {
                return Poll::Pending;
            }
            if self.is_bulk
                && let (Some(from), Some(_)) = (from.socket(), to.socket())
                && let Some(pipe) = Pipe::borrow(self.limits.admission)
            {
                self.fill(pipe, from)?;
            } else {
                ready!(self.copy(cx, (from, to), count))?;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads once and writes the bytes. Keeps those that `to` does not take, without the buffer.
    fn copy(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut impl Side, &mut impl Side),
        count: &mut impl FnMut(u64),
    ) -> Poll<Result<(), BrokenSide>> {
        let mut buffer = Buffer::borrow();
        let mut room = ReadBuf::new(buffer.bytes());
        ready!(Pin::new(from).poll_read(cx, &mut room)).map_err(BrokenSide::from)?;
        let read = room.filled();
        self.ended = read.is_empty();
        self.is_bulk = read.len() >= BULK_READ_MIN;
        let written = match read {
            [] => 0,
            // The next operation waits.
            read => match Pin::new(to).poll_write(cx, read) {
                Poll::Ready(written) => written.map_err(BrokenSide::to)?,
                Poll::Pending => 0,
            },
        };
        count(written as u64);
        if written < read.len() {
            self.pending = Bytes::copy_from_slice(&read[written..]);
            self.limits.account.charge(self.pending.len());
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
        let Some(moved) = moved else {
            self.is_bulk = false;
            return Ok(());
        };
        self.ended = moved == 0;
        self.is_bulk = moved >= SPLICE_BYTES_MIN;
        self.limits.account.charge(moved);
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
        self.limits.account.release(moved);
        if pipe.filled() == 0 {
            self.piped = None;
        }
        Ok(moved)
    }
}

impl Drop for Direction<'_> {
    fn drop(&mut self) {
        let piped = self.piped.as_ref().map_or(0, Pipe::filled);
        self.limits.account.release(self.pending.len() + piped);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus_client::metrics::gauge::Gauge;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::task::yield_now;
    use tokio::time::timeout;
    use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

    use super::*;
    use crate::datapath::identity::Peer;
    use crate::datapath::io::pipe;
    use crate::datapath::limits::budget::BufferBudget;
    use crate::datapath::tests::{FAR, peer, tcp_pair as pair};
    use crate::limits::Source;
    use crate::outer::tests::echo_tunnel;
    use crate::telemetry::Metrics;
    use crate::tls;
    use crate::tls::tests::samples::{MATERIAL, OWN, domain};

    /// Time without progress after which a writer counts as stopped.
    const STOPPED: Duration = Duration::from_millis(500);
    /// Limit of a wait for something that happens at once.
    const SOON: Duration = Duration::from_secs(10);
    /// Bytes that fit into the send buffer of TLS.
    const BYTES: usize = 20_000;

    /// Returns bytes that do not repeat at short distances.
    fn bytes(count: usize) -> Vec<u8> {
        let word = |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        (0..count / 8).flat_map(word).collect()
    }

    fn initial(client_hello: &[u8]) -> Option<Box<InitialState>> {
        Some(Box::new(InitialState { client_hello: client_hello.to_vec(), loop_entry: None }))
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
        let (mut client, downstream) = pair().await;
        let (upstream, mut server) = pair().await;
        let (budget, account, admission, mut record) = limits();
        let moved = AtomicU64::new(0);
        let (all, hello) = (bytes(32 << 20), b"hello".to_vec());
        let peer = (&downstream, &mut SharedSocket::from(&downstream));
        let mut endpoint = EndpointStream::Tcp(upstream);
        let limits = &CopyLimits { account: &account, admission: &admission };
        let copy = run(peer, &mut endpoint, initial(&hello), limits, &mut record, &moved);
        let up = async {
            client.write_all(&all).await.expect("bytes");
            client.shutdown().await.expect("an end");
            // The other direction continues.
            let mut answer = [0; 6];
            client.read_exact(&mut answer).await.expect("an answer");
            answer
        };
        let down = async {
            let mut got = Vec::new();
            // Nothing is read at first: the kernel holds the bytes meanwhile.
            yield_now().await;
            server.read_to_end(&mut got).await.expect("bytes");
            server.write_all(b"thanks").await.expect("an answer");
            server.shutdown().await.expect("an end");
            got
        };
        let (outcome, answer, got) = tokio::join!(copy, up, down);
        assert_eq!(outcome.result, Ok(()));
        assert!(outcome.delivery_deadline.is_some());
        assert_eq!(&answer, b"thanks");
        drop(downstream);
        assert_eq!(client.read(&mut [0]).await.expect("an end"), 0, "by the close");
        assert!(got == [hello, all].concat(), "every byte in its place");
        assert!(pipe::spares() > 0, "pipes were used");
        assert_eq!((record.sent_bytes(), budget.held()), (6, 0));
        assert_eq!(moved.into_inner(), 6 + record.received_bytes());
    }

    #[tokio::test]
    async fn what_waits_in_a_pipe_is_charged_and_bounded() {
        let (mut client, downstream) = pair().await;
        let (upstream, server) = pair().await;
        let (budget, account, admission, mut record) = limits();
        let moved = AtomicU64::new(0);
        let all = bytes(64 << 20);
        let peer = (&downstream, &mut SharedSocket::from(&downstream));
        let mut endpoint = EndpointStream::Tcp(upstream);
        let limits = &CopyLimits { account: &account, admission: &admission };
        let copy = run(peer, &mut endpoint, initial(&[]), limits, &mut record, &moved);
        let write = async {
            // More than the kernel buffers for connections that are not read.
            let written = timeout(STOPPED, client.write_all(&all)).await;
            assert!(written.is_err(), "the writer is stopped");
            // Under load the copy may not have run yet.
            let charged = async {
                while budget.held() == 0 {
                    yield_now().await;
                }
            };
            timeout(SOON, charged).await.expect("bytes wait in the pipe");
            assert!(budget.held() <= pipe::PIPE_BYTES, "{}", budget.held());
        };
        tokio::select! {
            outcome = copy => panic!("{outcome:?}"),
            () = write => {}
        }
        // The dropped copy has given back its bytes.
        assert_eq!(budget.held(), 0);
        drop(server);
    }

    /// Returns a TLS connection over a pipe that takes few bytes.
    async fn tls_pair() -> (server::TlsStream<DuplexStream>, client::TlsStream<DuplexStream>) {
        let domains = vec![domain("east.local")];
        let server = TlsAcceptor::from(tls::endpoint_server_config(&MATERIAL, domains).unwrap());
        let client = TlsConnector::from(tls::client_config(&MATERIAL, &[OWN]).unwrap());
        let (near, far) = duplex(64);
        let name = "gateway".try_into().unwrap();
        let (server, client) = tokio::join!(server.accept(near), client.connect(name, far));
        let mut server = server.unwrap();
        server.get_mut().1.set_buffer_limit(Some(SEND_BUFFER));
        (server, client.unwrap())
    }

    #[tokio::test]
    async fn the_send_buffer_of_tls_is_charged_until_the_client_reads() {
        let (_gateway, tunnel) = echo_tunnel().await;
        let (mut server, mut client) = tls_pair().await;
        let (socket, _far) = pair().await;
        let budget = Arc::new(BufferBudget::new(1 << 20, Gauge::default()));
        let account = budget.account(&Source::prefix([192, 0, 2, 1].into()));
        let source = Arc::clone(&peer(std::time::SystemTime::now() + FAR).source);
        let mut record = Record::new(&Arc::new(Metrics::new()), &source, "echo.app:80");
        let admission = Admission::new(1000);
        let mut tunnel = EndpointStream::outer(tunnel, Arc::clone(&account));
        let limits = &CopyLimits { account: &account, admission: &admission };
        let moved = AtomicU64::new(0);
        let copy = run((&socket, &mut server), &mut tunnel, None, limits, &mut record, &moved);
        let reads = async {
            client.write_all(&[7; BYTES]).await.unwrap();
            client.flush().await.unwrap();
            while budget.held() < SEND_BUFFER {
                yield_now().await;
            }
            client.read_exact(&mut [0; BYTES]).await.unwrap();
            while budget.held() > 0 {
                yield_now().await;
            }
        };
        let charged = timeout(SOON, async {
            tokio::select! {
                outcome = copy => panic!("{outcome:?}"),
                () = reads => {}
            }
        });
        charged.await.expect("a charge, and its end");
    }
}
