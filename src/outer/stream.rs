//! Open tunnel through a gateway, with the operations of a non-blocking socket.
//!
//! END_STREAM is FIN and RST_STREAM is RST. Window is given back to the gateway only for bytes
//! that were read here. Bytes are sent only as far as the gateway's window and the send buffer
//! allow, so a stream holds at most one window in each direction. The caller charges bytes that
//! wait for the socket by a value that is dropped with them.

use std::future::poll_fn;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use atomic_waker::AtomicWaker;
use bytes::Bytes;
use h2::{RecvStream, SendStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use crate::snapshot::{RemoteGateway, Snapshot};

use super::connection::{Slot, State};
use super::unread::Unread;
use super::verify::{ExpectedWorkloads, Verified};

/// Limit of the bytes that are passed to HTTP/2 at once.
const WRITE_BYTES_MAX: usize = 64 * 1024;
/// Limit of bytes that are discarded for a tunnel whose peer has disconnected.
const DISCARDED_MAX: usize = 256 * 1024;
/// Size below which bytes wait at their source while earlier ones of the stream wait for the
/// socket. Each write becomes a DATA frame, as the h2 crate does not append to a queued one. It
/// takes some 300 bytes besides its own, and 64 writes of this size fill the send buffer.
const GATHERED_BELOW: usize = 2 * 1024;

/// Open tunnel. A drop before both directions have ended resets it.
#[derive(Debug)]
pub struct Stream {
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// Received bytes, whose window is not given back.
    unread: Unread,
    /// Error to report after `unread`.
    failed: Option<io::Error>,
    /// Code by which a drop resets the stream.
    abort: h2::Reason,
    has_ended: bool,
    is_shut_down: bool,
    is_cancelled: bool,
    /// The last write was small.
    is_gathering: bool,
    queue: Arc<Queue>,
    connection: Held,
}

/// Part of the stream's connection that ends with the stream.
#[derive(Debug)]
pub(super) enum Held {
    /// Place on a pooled connection.
    Slot(Slot),
    /// Connection of this stream alone. Its task learns of the end by the drop.
    Own { _ended: oneshot::Sender<()>, servers: Servers },
}

/// Verified servers of a stream: the gateway and, of a connection inside its tunnel, the workload.
#[derive(Clone, Debug)]
pub struct Servers {
    pub(super) gateway: Arc<State>,
    pub(super) workload: Option<Arc<Verified>>,
}

impl Servers {
    pub fn check_gateway(&self, wanted: &RemoteGateway, snapshot: &Snapshot) -> Result<(), String> {
        self.gateway.peer.server().check_gateway(wanted, snapshot)
    }

    /// Checks that the workload, if there is one, is still an expected one of a cluster.
    pub fn check_workload(
        &self,
        wanted: &ExpectedWorkloads,
        cluster: &str,
        snapshot: &Snapshot,
    ) -> Result<(), String> {
        let workload = self.workload.as_ref();
        workload.map_or(Ok(()), |it| it.server().check_workload(wanted, (cluster, snapshot)))
    }
}

/// Number of writes that wait for the socket.
#[derive(Debug, Default)]
struct Queue {
    writes: AtomicUsize,
    emptied: AtomicWaker,
}

/// Bytes that wait for the socket, with their charge.
struct Write<C> {
    bytes: Vec<u8>,
    queue: Arc<Queue>,
    _charge: C,
}

impl<C> AsRef<[u8]> for Write<C> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<C> Drop for Write<C> {
    fn drop(&mut self) {
        if self.queue.writes.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.queue.emptied.wake();
        }
    }
}

impl Stream {
    pub(super) fn new(send: SendStream<Bytes>, receive: RecvStream, connection: Held) -> Self {
        Self {
            send,
            receive,
            unread: Unread::default(),
            failed: None,
            abort: h2::Reason::INTERNAL_ERROR,
            has_ended: false,
            is_shut_down: false,
            is_cancelled: false,
            is_gathering: false,
            queue: Arc::default(),
            connection,
        }
    }

    /// Returns the verified servers at the other end.
    pub fn servers(&self) -> Servers {
        match &self.connection {
            Held::Slot(slot) => Servers { gateway: Arc::clone(slot.state()), workload: None },
            Held::Own { servers, .. } => servers.clone(),
        }
    }

    /// Returns the number of received bytes that were not read.
    pub const fn held(&self) -> usize {
        self.unread.len()
    }

    /// Returns true if the gateway has reset the stream with CANCEL or NO_ERROR, as ztunnel and
    /// Envoy do once the connection inside the tunnel has closed.
    pub fn is_cancelled(&self) -> bool {
        self.is_cancelled
    }

    /// Returns true if the last write was small. If it was refused, it was for earlier bytes that
    /// wait for the socket, and not for the window.
    pub const fn is_gathering(&self) -> bool {
        self.is_gathering
    }

    /// Returns true if a small write has to wait for others to leave for the socket.
    fn waits_for_socket(&self) -> bool {
        self.is_gathering && self.queue.writes.load(Ordering::SeqCst) > 0
    }

    /// Returns true if END_STREAM was sent.
    pub(super) const fn is_shut_down(&self) -> bool {
        self.is_shut_down
    }

    /// Polls whether the gateway has reset the stream, or its connection has failed. Both
    /// directions may have ended. Returns true if it was a normal end, as
    /// [`Stream::is_cancelled`].
    pub fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let is_end = |code| matches!(code, h2::Reason::CANCEL | h2::Reason::NO_ERROR);
        let broken = self.send.poll_reset(cx).map(|code| code.is_ok_and(is_end));
        self.is_cancelled |= broken == Poll::Ready(true);
        broken
    }

    /// Makes a drop reset the stream with CANCEL, as the peer of the tunnel has done.
    pub fn cancel_on_drop(&mut self) {
        self.abort = h2::Reason::CANCEL;
    }

    /// Polls whether a read has bytes, the end of the stream, or an error. Takes over all frames
    /// that have arrived, so that [`Stream::held`] counts them.
    pub fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.has_ended && self.failed.is_none() {
            match self.receive.poll_data(cx) {
                Poll::Pending => break,
                Poll::Ready(Some(Ok(bytes))) => self.unread.push(bytes),
                Poll::Ready(Some(Err(error))) => self.failed = Some(self.fail(error)),
                Poll::Ready(None) => self.has_ended = true,
            }
        }
        if self.has_ended || self.unread.len() > 0 {
            return Poll::Ready(Ok(()));
        }
        match self.failed.take() {
            Some(error) => {
                // A later read fails as well.
                self.failed = Some(error.kind().into());
                Poll::Ready(Err(error))
            }
            None => Poll::Pending,
        }
    }

    /// Reads what [`Stream::poll_read_ready`] has found; 0 bytes are the end of the stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] without bytes.
    pub fn try_read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if self.unread.len() == 0 {
            let is_ended = self.has_ended.then_some(0);
            return is_ended.ok_or_else(|| io::ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for slice in slices {
            count += self.unread.read(slice);
        }
        let released = self.receive.flow_control().release_capacity(count);
        released.map_err(|error| self.fail(error))?;
        Ok(count)
    }

    /// Writes as many bytes as the window allows. What `charge` returns for their number is
    /// dropped once they have left for the socket. Few bytes are taken only if none are waiting,
    /// so that small writes gather at their source and become few frames.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if it takes none, or the stream was reset.
    pub fn try_write<C: Send + 'static>(
        &mut self,
        slices: &[IoSlice<'_>],
        charge: impl FnOnce(usize) -> C,
    ) -> io::Result<usize> {
        let count: usize = slices.iter().map(|slice| slice.len()).sum();
        let wanted = count.min(WRITE_BYTES_MAX);
        if wanted == 0 {
            return Ok(0);
        }
        self.send.reserve_capacity(wanted);
        let room = self.send.capacity().min(wanted);
        self.is_gathering = room > 0 && room < GATHERED_BELOW;
        if room == 0 || self.waits_for_socket() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut bytes = Vec::with_capacity(room);
        for slice in slices {
            let length = slice.len().min(room - bytes.len());
            bytes.extend_from_slice(&slice[..length]);
        }
        self.queue.writes.fetch_add(1, Ordering::SeqCst);
        let write = Write { bytes, queue: Arc::clone(&self.queue), _charge: charge(room) };
        let sent = self.send.send_data(Bytes::from_owner(write), false);
        sent.map_err(|error| self.fail(error))?;
        Ok(room)
    }

    /// Polls whether the last [`Stream::try_write`] would take bytes now.
    pub fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.send.capacity() == 0 {
            match ready!(self.send.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(self.fail(error))),
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            }
        }
        if self.waits_for_socket() {
            self.queue.emptied.register(cx.waker());
            // Writes that have left before the registration have woken no task.
            if self.waits_for_socket() {
                // A reset or the end of the connection drops all writes.
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Writes some of `bytes`, and waits until that is possible. Charges as
    /// [`Stream::try_write`] does.
    pub async fn write<C: Send + 'static>(
        &mut self,
        bytes: &[u8],
        charge: impl Fn(usize) -> C,
    ) -> io::Result<usize> {
        poll_fn(|cx| self.poll_write(cx, bytes, &charge)).await
    }

    pub(super) fn poll_write<C: Send + 'static>(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &[u8],
        charge: impl Fn(usize) -> C,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.try_write(&[IoSlice::new(bytes)], &charge) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
            ready!(self.poll_write_ready(cx))?;
        }
    }

    /// Sends END_STREAM.
    pub fn shut_down(&mut self) -> io::Result<()> {
        if !self.is_shut_down {
            let ended = self.send.send_data(Bytes::new(), true);
            ended.map_err(|error| self.fail(error))?;
            self.is_shut_down = true;
        }
        Ok(())
    }

    /// Discards what the gateway still sends, until it ends the stream or `deadline`. END_STREAM
    /// was sent, and a reset would revoke bytes that were not delivered.
    pub async fn deliver(mut self, deadline: Instant) {
        let mut discarded = std::mem::take(&mut self.unread).len();
        let _ = self.receive.flow_control().release_capacity(discarded);
        let ended = async {
            while let Some(Ok(bytes)) = self.receive.data().await {
                discarded += bytes.len();
                // Without window the gateway sends no more.
                if discarded <= DISCARDED_MAX {
                    let _ = self.receive.flow_control().release_capacity(bytes.len());
                }
            }
        };
        // At the deadline the drop resets the stream.
        let is_ended = timeout_at(deadline, ended).await.is_ok();
        self.has_ended |= is_ended;
    }

    fn fail(&mut self, error: h2::Error) -> io::Error {
        let code = error.reason().filter(|_| error.is_reset());
        self.is_cancelled |= matches!(code, Some(h2::Reason::CANCEL | h2::Reason::NO_ERROR));
        io::Error::new(io::ErrorKind::ConnectionReset, error)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !(self.has_ended && self.is_shut_down) {
            self.send.send_reset(self.abort);
        }
    }
}
