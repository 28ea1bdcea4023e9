//! Stage 10: both directions of a tunnel, with exact TCP semantics.
//!
//! END_STREAM becomes FIN and FIN becomes END_STREAM, each direction by itself; a reset on one
//! side becomes a reset on the other. Back-pressure runs end to end: the peer's window is given
//! back only when the endpoint took the bytes, and the endpoint is read only as far as the peer's
//! window reaches. An idle tunnel holds no buffer.

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

use crate::reason::{Blame, Reason};
use crate::telemetry::Record;

use super::buffer::{BUFFER_BYTES, Buffer, compact};
use super::hellos::{self, InFlight};
use super::tunnel::{RECORD_DATA_BYTES, Tunnel};
use super::window::StreamWindow;
use progress::Progress;

/// The most that is read from an endpoint at once: DATA frames that fill eight TLS records.
const READ_BYTES_MAX: usize = 8 * RECORD_DATA_BYTES;
/// DATA frames that are written to an endpoint at once, well under the kernel's 1,024 (`IOV_MAX`).
const FRAMES_MAX: usize = 32;
/// Reads and writes of one direction in one turn: then other tunnels of the worker have theirs.
const TURNS_MAX: usize = 8;

/// A read of this much leaves in the buffer that it was made into. Less is copied out of it: a slow
/// peer then holds what it was sent, and not a large buffer for a small message.
const HANDED_OVER_MIN: usize = READ_BYTES_MAX / 2;

/// How a tunnel ended.
#[derive(Debug)]
pub struct Outcome {
    /// Nothing, or the reason for which the tunnel broke. The caller then resets both sides.
    pub ended: Result<(), Reason>,
    /// By when the endpoint has to have taken what it was sent. None unless it was sent all that
    /// the peer sent, and FIN.
    pub deliver_by: Option<Instant>,
}

impl Outcome {
    /// A tunnel that neither of its sides ended.
    pub fn broken(reason: Reason) -> Self {
        Self {
            ended: Err(reason),
            deliver_by: None,
        }
    }
}

/// The time for an endpoint to take what a peer sent before it went away, until its kernel has
/// acknowledged FIN.
const DELIVERY_DEADLINE: Duration = Duration::from_secs(30);

/// Copies until both directions have ended or one side broke. A tunnel that begins with a
/// ClientHello ends if the hello comes round in a loop.
pub async fn run(
    tunnel: &mut Tunnel,
    upstream: &mut TcpStream,
    window: &StreamWindow,
    record: &mut Record,
) -> Outcome {
    let (mut read, write) = upstream.split();
    let upstream = write.as_ref();
    let mut upload = Upload::default();
    let mut download = Download::default();
    let mut ended = poll_fn(|cx| {
        // The endpoint is read first: what it sent before a reset of its own goes out before the
        // upload fails by this reset.
        let down = download.poll(cx, tunnel, &mut read, (&mut upload.progress, record))?;
        let up = upload.poll(cx, tunnel, upstream, window, record)?;
        if upload.in_flight.is_some() && record.sent_bytes() > 0 {
            upload.in_flight = None;
        }
        if down.is_ready() && up.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if upload.ended {
            return tunnel.poll_reset(cx).map(Err);
        }
        // Until then, receiving tells of a reset too.
        Poll::Pending
    })
    .await;
    let deadline = Instant::now() + DELIVERY_DEADLINE;
    // Of a loop nothing more is to reach the endpoint.
    let gone = matches!(
        ended,
        Err(reason) if matches!(reason.blame(), Blame::Nobody | Blame::Downstream)
    );
    if gone && !upload.done {
        // A peer that sent END_STREAM and then went away has been promised delivery (contract 10,
        // Ends). h2 still holds what it sent; without END_STREAM this fails at once.
        let rest = poll_fn(|cx| upload.poll(cx, tunnel, upstream, window, record));
        // Boxed: few tunnels end like this, and all would have room for it.
        let rest = Box::pin(timeout_at(deadline, rest));
        if let Ok(Err(Reason::UpstreamReset)) = rest.await {
            ended = Err(Reason::UpstreamReset);
        }
    }
    if let Err(reason) = ended {
        let unsent = upload.pending.iter().map(Bytes::len).sum();
        let is_lost = download.reserved || tunnel.account().has_dropped_bytes();
        ended = Err(upload.progress.judge(reason, unsent, is_lost));
    }
    Outcome {
        ended,
        deliver_by: upload.done.then_some(deadline),
    }
}

/// From the peer to the endpoint.
#[derive(Default)]
struct Upload {
    /// What the endpoint has not taken yet. Its window was not given back either.
    pending: VecDeque<Bytes>,
    ended: bool,
    done: bool,
    /// The first bytes have come.
    begun: bool,
    /// The place of the hello that they were, until the endpoint answers.
    in_flight: Option<Box<InFlight>>,
    /// Bytes since the endpoint last made us wait.
    unblocked_bytes: u32,
    /// Progress of both directions.
    progress: Progress,
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
        for _ in 0..TURNS_MAX {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            self.receive(cx, tunnel)?;
            if !self.begun
                && let Some(first) = self.pending.front()
            {
                self.begun = true;
                let entered = hellos::enter(first).map_err(|found| found.told(record))?;
                self.in_flight = entered.map(Box::new);
            }
            if self.pending.is_empty() {
                // The queue's own memory goes too: an idle tunnel keeps none.
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
            self.taken(written);
            tunnel.release(written)?;
            record.received(written as u64);
            let written = u32::try_from(written).unwrap_or(u32::MAX);
            self.unblocked_bytes = self.unblocked_bytes.saturating_add(written);
            if self.unblocked_bytes >= window.bytes() {
                self.unblocked_bytes = 0;
                window.kept_up();
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn receive(&mut self, cx: &mut Context<'_>, tunnel: &mut Tunnel) -> Result<(), Reason> {
        // All of it, which the window bounds: behind it may stand the end of the stream, and h2
        // forgets that when the connection breaks.
        while !self.ended {
            match tunnel.poll_receive(cx) {
                Poll::Pending => break,
                Poll::Ready(Err(reason)) => return Err(reason),
                Poll::Ready(Ok(None)) => self.ended = true,
                Poll::Ready(Ok(Some(bytes))) if bytes.is_empty() => {}
                Poll::Ready(Ok(Some(bytes))) => {
                    self.progress.asked(&bytes);
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
            // The system has a shorter way for one slice.
            return upstream.try_write(bytes);
        }
        let mut slices = [IoSlice::new(&[]); FRAMES_MAX];
        let count = self.pending.len().min(FRAMES_MAX);
        for (slice, bytes) in slices.iter_mut().zip(&self.pending) {
            *slice = IoSlice::new(bytes);
        }
        upstream.try_write_vectored(&slices[..count])
    }

    fn taken(&mut self, mut written: usize) {
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

/// From the endpoint to the peer.
#[derive(Default)]
struct Download {
    reserved: bool,
    done: bool,
}

impl Download {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        tunnel: &mut Tunnel,
        upstream: &mut ReadHalf<'_>,
        (progress, record): (&mut Progress, &mut Record),
    ) -> Poll<Result<(), Reason>> {
        for _ in 0..TURNS_MAX {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            // Readable first, then capacity: a reservation that waits for an idle endpoint would
            // hold window of the connection that busy tunnels need.
            let Poll::Ready(readable) = upstream.as_ref().poll_read_ready(cx) else {
                self.release(tunnel);
                return Poll::Pending;
            };
            readable.map_err(|_| Reason::UpstreamReset)?;
            if tunnel.account().must_pause() {
                self.release(tunnel);
                return Poll::Pending;
            }
            self.reserved = true;
            let capacity = ready!(tunnel.poll_capacity(cx, READ_BYTES_MAX))?;
            match poll_read(cx, upstream, capacity) {
                Poll::Ready(Ok((bytes, _))) if bytes.is_empty() => {
                    tunnel.finish()?;
                    self.done = true;
                }
                Poll::Ready(Ok((bytes, size))) => {
                    record.sent(bytes.len() as u64);
                    progress.answered(&bytes);
                    tunnel.send(bytes, size)?;
                }
                // It was readable no more; the next round gives the reservation up.
                Poll::Pending => {}
                Poll::Ready(Err(_)) => return Poll::Ready(Err(Reason::UpstreamReset)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Gives the window back to the other tunnels of the connection.
    fn release(&mut self, tunnel: &mut Tunnel) {
        if std::mem::take(&mut self.reserved) {
            tunnel.release_capacity();
        }
    }
}

/// Reads once; gives the bytes, and how much memory they keep. By `poll_read`, as it knows from a
/// short read that there is no more for now, which would otherwise be a system call.
fn poll_read(
    cx: &mut Context<'_>,
    upstream: &mut ReadHalf<'_>,
    most: usize,
) -> Poll<io::Result<(Bytes, usize)>> {
    let mut buffer = Buffer::borrow();
    let mut room = ReadBuf::new(&mut buffer.bytes()[..most]);
    ready!(Pin::new(upstream).poll_read(cx, &mut room))?;
    let read = room.filled().len();
    Poll::Ready(Ok(if read >= HANDED_OVER_MIN {
        (Bytes::from_owner(buffer).slice(..read), BUFFER_BYTES)
    } else {
        (Bytes::copy_from_slice(room.filled()), read)
    }))
}
