//! Both directions of a tunnel between two TCP connections, with exact TCP semantics.
//!
//! FIN becomes FIN, each direction by itself, and RST becomes RST. A side is read only when the
//! other one takes bytes, so that what is held is at most one read in each direction; an idle
//! tunnel holds nothing.

use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::ReadHalf;
use tokio::time::timeout;

use crate::reason::Reason;
use crate::telemetry::Record;

use super::super::budget::Account;
use super::super::buffer::Buffer;
use super::{DELIVERY_DEADLINE, Outcome, TURNS_MAX};

/// Copies until both directions have ended or one side broke. `hello` is what was read from the
/// peer before, and goes first.
pub async fn run(
    downstream: &mut TcpStream,
    upstream: &mut TcpStream,
    hello: Vec<u8>,
    account: &Arc<Account>,
    record: &mut Record,
) -> Outcome {
    let (mut peer, to_peer) = downstream.split();
    let (mut endpoint, to_endpoint) = upstream.split();
    let (to_peer, to_endpoint) = (to_peer.as_ref(), to_endpoint.as_ref());
    let mut upload = Direction::new(account, hello.into());
    let mut download = Direction::new(account, Bytes::new());
    let mut endpoint_left_first = false;
    let mut peer_failed = pin!(to_peer.ready(Interest::ERROR));
    let mut endpoint_failed = pin!(to_endpoint.ready(Interest::ERROR));
    // Whether the kernel has yet to tell the peer's reader how the peer went.
    let mut untold = false;
    let mut ended = poll_fn(|cx| {
        // Before anything is written to the peer, as a write that fails takes the error away which
        // tells the reader a reset from an end.
        if peer_failed.as_mut().poll(cx).is_ready() {
            untold = true;
            return Poll::Ready(Err(Reason::DownstreamReset));
        }
        // The endpoint is read first: what it sent before a reset of its own goes out before the
        // upload fails by this reset.
        let down = download.poll(cx, &mut endpoint, to_peer, |bytes| record.sent(bytes));
        let down = down.map_err(Broken::of_download)?;
        endpoint_left_first |= down.is_ready() && !upload.ended;
        let up = upload.poll(cx, &mut peer, to_endpoint, |bytes| record.received(bytes));
        let up = up.map_err(Broken::of_upload)?;
        if down.is_ready() && up.is_ready() {
            return Poll::Ready(Ok(()));
        }
        if down.is_ready() {
            // Nobody reads the endpoint any more, and the upload may have nothing to write.
            let reset = |_| Err(Reason::UpstreamReset);
            return endpoint_failed.as_mut().poll(cx).map(reset);
        }
        Poll::Pending
    })
    .await;
    let gone = !matches!(ended, Ok(()) | Err(Reason::UpstreamReset));
    if gone && !upload.done && (untold || upload.ended) {
        // What a peer sent before its FIN is delivered though it reset the connection after it
        // (contract 10, Ends). Without FIN this fails when all has been read.
        let rest = poll_fn(|cx| {
            let count = |bytes| record.received(bytes);
            let rest = upload.poll(cx, &mut peer, to_endpoint, count);
            rest.map_err(Broken::of_upload)
        });
        if let Ok(Err(reason)) = Box::pin(timeout(DELIVERY_DEADLINE, rest)).await {
            ended = Err(reason);
        }
    }
    Outcome {
        ended,
        delivered: upload.done,
        endpoint_left_first,
    }
}

/// The side of a direction that has broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    From(io::ErrorKind),
    To(io::ErrorKind),
}

impl Broken {
    fn from(error: io::Error) -> Self {
        Self::From(error.kind())
    }

    fn to(error: io::Error) -> Self {
        Self::To(error.kind())
    }

    fn of_upload(self) -> Reason {
        match self {
            Self::From(kind) => reason_of_peer(kind),
            Self::To(_) => Reason::UpstreamReset,
        }
    }

    fn of_download(self) -> Reason {
        match self {
            Self::From(_) => Reason::UpstreamReset,
            Self::To(kind) => reason_of_peer(kind),
        }
    }
}

fn reason_of_peer(kind: io::ErrorKind) -> Reason {
    match kind {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Reason::DownstreamReset,
        _ => Reason::DownstreamLost,
    }
}

/// From one socket to the other.
struct Direction<'a> {
    account: &'a Arc<Account>,
    /// What was read and not taken yet, on the account.
    pending: Bytes,
    ended: bool,
    done: bool,
}

impl<'a> Direction<'a> {
    fn new(account: &'a Arc<Account>, first: Bytes) -> Self {
        account.take(first.len());
        Self {
            account,
            pending: first,
            ended: false,
            done: false,
        }
    }

    /// Moves bytes; ready once `from` has ended and `to` has been told so.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut ReadHalf<'_>,
        to: &TcpStream,
        mut count: impl FnMut(u64),
    ) -> Poll<Result<(), Broken>> {
        for _ in 0..TURNS_MAX {
            if self.done {
                return Poll::Ready(Ok(()));
            }
            // A side that takes nothing now is not written to, and nothing is read for it.
            ready!(to.poll_write_ready(cx)).map_err(Broken::to)?;
            if !self.pending.is_empty() {
                let written = write(to, &self.pending)?;
                self.pending.advance(written);
                self.account.give_back(written);
                count(written as u64);
            } else if self.ended {
                let shutdown = SockRef::from(to).shutdown(Shutdown::Write);
                shutdown.map_err(Broken::to)?;
                self.done = true;
            } else {
                ready!(self.copy(cx, from, to, &mut count))?;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Reads once and writes that; what `to` does not take is kept without the buffer.
    fn copy(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut ReadHalf<'_>,
        to: &TcpStream,
        count: &mut impl FnMut(u64),
    ) -> Poll<Result<(), Broken>> {
        // No buffer is touched for a socket that has nothing.
        ready!(from.as_ref().poll_read_ready(cx)).map_err(Broken::from)?;
        let mut buffer = Buffer::borrow();
        let mut room = ReadBuf::new(buffer.bytes());
        ready!(Pin::new(from).poll_read(cx, &mut room)).map_err(Broken::from)?;
        let read = room.filled();
        self.ended = read.is_empty();
        let written = match read.is_empty() {
            true => 0,
            false => write(to, read)?,
        };
        count(written as u64);
        if written < read.len() {
            self.pending = Bytes::copy_from_slice(&read[written..]);
            self.account.take(self.pending.len());
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for Direction<'_> {
    fn drop(&mut self) {
        self.account.give_back(self.pending.len());
    }
}

/// Writes what fits; nothing may.
fn write(to: &TcpStream, bytes: &[u8]) -> Result<usize, Broken> {
    match to.try_write(bytes) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
        written => written.map_err(Broken::to),
    }
}
