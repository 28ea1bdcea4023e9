//! Byte stream to an endpoint: a socket, or a tunnel through a gateway of another network.

use std::future::{pending, poll_fn};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::datapath::limits::budget::{BufferAccount, HeldBytes};
use crate::outer;

use super::acks::AckWatch;
use super::linger;
use super::shared_socket::read_vectored;
use super::side::Side;

/// Byte stream to an endpoint. A drop resets it, unless it was closed. An error other than
/// [`io::ErrorKind::WouldBlock`] means that it has failed.
#[derive(Debug)]
pub enum EndpointStream {
    /// Socket with zero linger: every close that is not announced is an RST.
    Tcp(TcpStream),
    /// Tunnel through a gateway of another network.
    Outer(Box<OuterStream>),
}

/// Keepalive of upstream connections, as no PING of ours runs inside the tunnel. It detects a dead
/// endpoint within 30 s, and [`AckWatch`] one that owes acknowledgements.
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(10))
    .with_interval(Duration::from_secs(10))
    .with_retries(2);

/// Turns keepalive on for the socket of an endpoint: after the first seconds, which few tunnels
/// live for. The time without a byte counts from the last one, so a dead endpoint is detected as
/// soon as with keepalive from the dial on.
pub fn keep_alive(stream: &TcpStream) {
    // Fails only if the connection is already dead.
    let _: io::Result<()> = SockRef::from(stream).set_tcp_keepalive(&KEEPALIVE);
}

/// Tunnel through a gateway of another network, with the account of its bytes that wait for the
/// socket.
#[derive(Debug)]
pub struct OuterStream {
    stream: outer::Stream,
    account: Arc<BufferAccount>,
    /// Received bytes that were not read, on the account.
    received: Option<HeldBytes>,
}

impl EndpointStream {
    /// Creates the stream of a tunnel whose memory is on `account`.
    pub fn outer(stream: outer::Stream, account: Arc<BufferAccount>) -> Self {
        Self::Outer(Box::new(OuterStream { stream, account, received: None }))
    }

    /// Returns the account of the memory that a tunnel through another gateway takes.
    pub const fn account(&self) -> Option<&Arc<BufferAccount>> {
        match self {
            Self::Tcp(_) => None,
            Self::Outer(outer) => Some(&outer.account),
        }
    }

    /// Returns true if a refusal of the last write is no sign of a slow endpoint
    /// ([`outer::Stream::is_gathering`]).
    pub fn is_gathering(&self) -> bool {
        matches!(self, Self::Outer(outer) if outer.stream.is_gathering())
    }

    /// Returns true if the far side has cancelled the tunnel.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Outer(outer) if outer.stream.is_cancelled())
    }

    /// Returns the verified servers at the other end of a tunnel through another gateway.
    pub fn servers(&self) -> Option<outer::Servers> {
        match self {
            Self::Tcp(_) => None,
            Self::Outer(outer) => Some(outer.stream.servers()),
        }
    }

    /// Polls whether a read succeeds. Charges what a tunnel has received. The bytes of a socket are
    /// in the kernel.
    pub fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_read_ready(cx),
            Self::Outer(outer) => Side::poll_read_ready(&mut **outer, cx),
        }
    }

    /// Charges what a tunnel receives while nothing reads it. Completes if it is evicted.
    pub async fn hold_received(&mut self) {
        let Self::Outer(outer) = self else { return pending().await };
        let account = Arc::clone(&outer.account);
        let evicted = poll_fn(|cx| {
            // An error is found by the next read too.
            let _ = Side::poll_read_ready(&mut **outer, cx);
            account.poll_gated(cx, |_| Poll::<()>::Pending)
        });
        let _ = evicted.await;
    }

    /// Polls whether the far side of a tunnel has reset it after its end
    /// ([`outer::Stream::poll_broken`]).
    pub fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        match self {
            Self::Tcp(_) => Poll::Pending,
            Self::Outer(outer) => outer.poll_broken(cx),
        }
    }

    /// Takes the error of a socket that has failed.
    pub fn take_error(&self) -> Option<io::Error> {
        match self {
            Self::Tcp(stream) => stream.take_error().ok().flatten(),
            Self::Outer(_) => None,
        }
    }

    /// Polls whether a write succeeds.
    pub fn poll_write_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Tcp(stream) => stream.poll_write_ready(cx),
            Self::Outer(outer) => outer.stream.poll_write_ready(cx),
        }
    }

    /// Writes. The kernel has a shorter path for one slice.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`], or the stream has failed.
    pub fn try_write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match (self, slices) {
            (Self::Tcp(stream), [slice]) => stream.try_write(slice),
            (Self::Tcp(stream), slices) => stream.try_write_vectored(slices),
            (Self::Outer(outer), slices) => {
                let account = &outer.account;
                outer.stream.try_write(slices, |bytes| account.share(bytes))
            }
        }
    }

    /// Reads; 0 bytes are the end of the stream.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`], or the stream has failed.
    pub fn try_read(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => read_vectored(stream, slices),
            Self::Outer(outer) => outer.stream.try_read(slices),
        }
    }

    /// Writes some of `bytes`, and waits until that is possible.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes).await,
            Self::Outer(outer) => outer.write(bytes).await,
        }
    }

    /// Sends the end of the stream.
    pub fn shut_down(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => SockRef::from(&*stream).shutdown(Shutdown::Write),
            Self::Outer(outer) => outer.stream.shut_down(),
        }
    }

    /// Makes a drop pass on that the peer has cancelled the tunnel.
    pub fn cancel_on_drop(&mut self) {
        if let Self::Outer(outer) = self {
            outer.stream.cancel_on_drop();
        }
    }

    /// Turns keepalive on, where this process owns the socket.
    pub fn keep_alive(&self) {
        if let Self::Tcp(stream) = self {
            keep_alive(stream);
        }
    }

    /// Checks that the endpoint acknowledges what it was sent ([`AckWatch::check`]). PINGs check
    /// the gateway of another network.
    pub fn check_acks(&self, watch: &mut AckWatch) -> Result<bool, String> {
        match self {
            Self::Tcp(stream) => watch.check(stream),
            Self::Outer(_) => Ok(false),
        }
    }

    /// Makes the drop of a stream whose directions have both ended a clean close.
    pub fn announce_close(&self) {
        if let Self::Tcp(stream) = self {
            linger::disable_reset_on_close(stream);
        }
    }

    /// Closes once the other side has everything, at `deadline` by a reset. The end of the stream
    /// was sent.
    pub async fn deliver(self, deadline: Instant) {
        match self {
            Self::Tcp(stream) => linger::deliver(stream, deadline).await,
            Self::Outer(outer) => outer.stream.deliver(deadline).await,
        }
    }
}

impl OuterStream {
    /// Polls whether the far side has reset the tunnel ([`outer::Stream::poll_broken`]).
    pub fn poll_broken(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        self.stream.poll_broken(cx)
    }

    fn charge_received(&mut self) {
        let held = self.stream.held();
        if held != self.received.as_ref().map_or(0, HeldBytes::bytes) {
            self.received = (held > 0).then(|| self.account.hold(held));
        }
    }
}

impl AsyncRead for OuterStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.stream.poll_read_ready(cx))?;
        let mut room = [IoSliceMut::new(buffer.initialize_unfilled())];
        let count = self.stream.try_read(&mut room)?;
        buffer.advance(count);
        self.charge_received();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for OuterStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { stream, account, .. } = &mut *self;
        pin!(stream.write(bytes, |bytes| account.share(bytes))).poll(cx)
    }

    /// Does nothing: a write requests window, so only a write waits for it.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.shut_down())
    }
}

impl Side for OuterStream {
    fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let readable = self.stream.poll_read_ready(cx);
        self.charge_received();
        readable
    }
}
