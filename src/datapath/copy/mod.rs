//! Stage 10: copying of both directions of a tunnel, with exact TCP semantics.
//!
//! END_STREAM becomes FIN and FIN becomes END_STREAM, each direction by itself. A reset on one
//! side becomes a reset on the other. Back-pressure is end to end: window is given back to the
//! peer only when the endpoint took the bytes. The endpoint is read only as far as the window of
//! the peer allows. An idle tunnel holds no buffer.

mod progress;
pub mod raw;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;
use tokio::time::{Instant, timeout_at};

use crate::reason::{Fault, Reason};
use crate::telemetry::Record;

use super::http2::tunnel::{RECORD_DATA_BYTES, Tunnel};
use super::http2::window::StreamWindow;
use super::io::buffer::{BUFFER_BYTES, Buffer, compact};
use super::limits::hellos::{self, InFlight};
use progress::InnerProgress;

/// Limit of one read from an endpoint in bytes: DATA frames that fill eight TLS records.
const READ_BYTES_MAX: usize = 8 * RECORD_DATA_BYTES;
/// Limit of DATA frames in one write to an endpoint, well under the kernel's 1,024 (`IOV_MAX`).
const FRAMES_MAX: usize = 32;
/// Limit of reads and writes of one direction per turn, after which other tunnels of the worker
/// run.
const OPERATIONS_PER_TURN: usize = 8;

/// Size in bytes from which a read is sent in its own buffer. Smaller reads are copied: a slow
/// peer then holds what it was sent, and not a large buffer for a small message.
const ZERO_COPY_MIN: usize = READ_BYTES_MAX / 2;

/// End of a tunnel.
#[derive(Debug)]
pub struct CopyOutcome {
    /// Clean end, or the reason for which the tunnel broke. The caller then resets both sides.
    pub result: Result<(), Reason>,
    /// Deadline for the endpoint to take what it was sent. `None` unless it was sent FIN and
    /// everything that the peer sent.
    pub delivery_deadline: Option<Instant>,
}

impl CopyOutcome {
    /// Returns the outcome of a tunnel that neither side ended.
    pub fn broken(reason: Reason) -> Self {
        Self {
            result: Err(reason),
            delivery_deadline: None,
        }
    }
}

/// Time for an endpoint to take what a peer sent before it disconnected, until the endpoint's
/// kernel has acknowledged FIN.
const DELIVERY_DEADLINE: Duration = Duration::from_secs(30);

/// Copies until both directions have ended or one side broke. Ends a tunnel whose ClientHello is
/// routed in a loop.
pub async fn run(
    tunnel: &mut Tunnel,
    upstream: &mut TcpStream,
    window: &StreamWindow,
    record: &mut Record,
) -> CopyOutcome {
    let (mut read, write) = upstream.split();
    let upstream = write.as_ref();
    let mut upload = Upload::default();
    let mut download = Download::default();
    let mut ended = poll_fn(|cx| {
        // The endpoint is read first: its bytes before a reset are sent before this reset fails
        // the upload.
        let down = download.poll(cx, tunnel, &mut read, (&mut upload.progress, record))?;
        let up = upload.poll(cx, tunnel, upstream, window, record)?;
        if upload.loop_entry.is_some() && record.sent_bytes() > 0 {
            upload.loop_entry = None;
        }
        if down.is_ready() && up.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if upload.ended {
            return tunnel.poll_reset(cx).map(Err);
        }
        // Before the peer ends its direction, receiving reports a reset too.
        Poll::Pending
    })
    .await;
    let deadline = Instant::now() + DELIVERY_DEADLINE;
    // Excludes a loop, after which nothing more may reach the endpoint.
    let peer_gone = matches!(
        ended,
        Err(reason) if matches!(reason.blame(), Fault::Nobody | Fault::Downstream)
    );
    if peer_gone && !upload.done {
        // A peer that disconnects after END_STREAM was promised delivery
        // (docs/wire-contract.md 1.6). h2 still holds its bytes; without END_STREAM this fails at
        // once.
        let rest = poll_fn(|cx| upload.poll(cx, tunnel, upstream, window, record));
        // Boxed: few tunnels end like this, and all of them would have room for it.
        let rest = Box::pin(timeout_at(deadline, rest));
        if let Ok(Err(Reason::UpstreamReset)) = rest.await {
            ended = Err(Reason::UpstreamReset);
        }
    }
    if let Err(reason) = ended {
        let unsent = upload.pending.iter().map(Bytes::len).sum();
        let is_lost = download.has_reservation || tunnel.account().has_dropped_bytes();
        ended = Err(upload.progress.classify_end(reason, unsent, is_lost));
    }
    CopyOutcome {
        result: ended,
        delivery_deadline: upload.done.then_some(deadline),
    }
}

/// Direction from the peer to the endpoint.
#[derive(Default)]
struct Upload {
    /// Bytes that the endpoint has not taken. Their window was not given back either.
    pending: VecDeque<Bytes>,
    ended: bool,
    done: bool,
    /// True once the first bytes have arrived.
    has_first_bytes: bool,
    /// Entry in the loop detection, if they are a ClientHello, until the endpoint answers.
    loop_entry: Option<Box<InFlight>>,
    /// Number of bytes since the endpoint last blocked, counted up to one window.
    unblocked_bytes: u32,
    /// Progress of both directions.
    progress: InnerProgress,
}

impl Upload {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Tunnel,
        upstream: &TcpStream,
        window: &StreamWindow,
        record: &mut Record,
    ) -> Poll<Result<(), Reason>> {
        for _ in 0..OPERATIONS_PER_TURN {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            self.receive(cx, tunnel)?;
            if !self.has_first_bytes
                && let Some(first) = self.pending.front()
            {
                self.has_first_bytes = true;
                let entered = hellos::register(first).map_err(|found| found.record(record))?;
                self.loop_entry = entered.map(Box::new);
            }
            if self.pending.is_empty() {
                // Frees the memory of the queue too: an idle tunnel keeps none.
                self.pending = VecDeque::new();
                if !self.ended {
                    return Poll::Pending;
                }
                SockRef::from(upstream)
                    .shutdown(Shutdown::Write)
                    .map_err(|_| Reason::UpstreamReset)?;
                self.done = true;
                return Poll::Ready(Ok(()));
            }
            let written = match self.write(upstream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.unblocked_bytes = 0;
                    compact(&mut self.pending);
                    ready!(upstream.poll_write_ready(cx)).map_err(|_| Reason::UpstreamReset)?;
                    continue;
                }
                written => written.map_err(|_| Reason::UpstreamReset)?,
            };
            self.advance(written);
            tunnel.release(written)?;
            record.add_received(written as u64);
            let written = u32::try_from(written).unwrap_or(u32::MAX);
            self.unblocked_bytes = self.unblocked_bytes.saturating_add(written);
            if self.unblocked_bytes >= window.bytes() {
                self.unblocked_bytes = 0;
                window.request_growth();
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn receive(&mut self, cx: &mut Context<'_>, tunnel: &mut Tunnel) -> Result<(), Reason> {
        // Receives everything, which the window bounds. END_STREAM may follow it, and h2 forgets
        // that when the connection breaks.
        while !self.ended {
            match tunnel.poll_receive(cx) {
                Poll::Pending => break,
                Poll::Ready(Err(reason)) => return Err(reason),
                Poll::Ready(Ok(None)) => self.ended = true,
                Poll::Ready(Ok(Some(bytes))) if bytes.is_empty() => {}
                Poll::Ready(Ok(Some(bytes))) => {
                    self.progress.record_peer_bytes(&bytes);
                    self.pending.push_back(bytes);
                }
            }
        }
        Ok(())
    }

    fn write(&self, upstream: &TcpStream) -> io::Result<usize> {
        if let [bytes] = self.pending.as_slices().0
            && self.pending.len() == 1
        {
            // The kernel has a shorter path for one slice.
            return upstream.try_write(bytes);
        }
        let mut slices = [IoSlice::new(&[]); FRAMES_MAX];
        let count = self.pending.len().min(FRAMES_MAX);
        for (slice, bytes) in slices.iter_mut().zip(&self.pending) {
            *slice = IoSlice::new(bytes);
        }
        upstream.try_write_vectored(&slices[..count])
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(first) = self.pending.front_mut() {
            if first.len() > written {
                first.advance(written);
                return;
            }
            written -= first.len();
            self.pending.pop_front();
        }
    }
}

/// Direction from the endpoint to the peer.
#[derive(Default)]
struct Download {
    has_reservation: bool,
    done: bool,
}

impl Download {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Tunnel,
        upstream: &mut ReadHalf<'_>,
        (progress, record): (&mut InnerProgress, &mut Record),
    ) -> Poll<Result<(), Reason>> {
        for _ in 0..OPERATIONS_PER_TURN {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            // Readiness before capacity: a reservation for an idle endpoint would hold window of
            // the connection that busy tunnels need.
            let Poll::Ready(readable) = upstream.as_ref().poll_read_ready(cx) else {
                self.release_reservation(tunnel);
                return Poll::Pending;
            };
            readable.map_err(|_| Reason::UpstreamReset)?;
            if tunnel.account().must_pause_reads() {
                self.release_reservation(tunnel);
                return Poll::Pending;
            }
            self.has_reservation = true;
            let capacity = ready!(tunnel.poll_capacity(cx, READ_BYTES_MAX))?;
            match poll_read(cx, upstream, capacity) {
                Poll::Ready(Ok((bytes, _))) if bytes.is_empty() => {
                    tunnel.finish()?;
                    self.done = true;
                }
                Poll::Ready(Ok((bytes, size))) => {
                    record.add_sent(bytes.len() as u64);
                    progress.record_endpoint_bytes(&bytes);
                    tunnel.send(bytes, size)?;
                }
                // The socket was no longer readable; the next round gives the reservation up.
                Poll::Pending => {}
                Poll::Ready(Err(_)) => return Poll::Ready(Err(Reason::UpstreamReset)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Returns the reserved window to the other tunnels of the connection.
    fn release_reservation(&mut self, tunnel: &mut Tunnel) {
        if std::mem::take(&mut self.has_reservation) {
            tunnel.release_capacity();
        }
    }
}

/// Reads once. Returns the bytes and the amount of memory that they keep. `poll_read` infers from
/// a short read that nothing more has arrived, which saves a system call.
fn poll_read(
    cx: &mut Context<'_>,
    upstream: &mut ReadHalf<'_>,
    most: usize,
) -> Poll<io::Result<(Bytes, usize)>> {
    let mut buffer = Buffer::borrow();
    let mut room = ReadBuf::new(&mut buffer.bytes()[..most]);
    ready!(Pin::new(upstream).poll_read(cx, &mut room))?;
    let read = room.filled().len();
    Poll::Ready(Ok(if read >= ZERO_COPY_MIN {
        (Bytes::from_owner(buffer).slice(..read), BUFFER_BYTES)
    } else {
        (Bytes::copy_from_slice(room.filled()), read)
    }))
}
