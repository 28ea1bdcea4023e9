//! Tunnel as a byte stream.

use std::future::poll_fn;
use std::io;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// CONNECT stream that was answered with 200.
///
/// Only the peer's END_STREAM reads as end of file. A reset is an error; [`Tunnel::reset_code`]
/// returns its code. Shutdown sends END_STREAM. A drop before shutdown resets the stream with
/// CANCEL, like a client that abandons the request. A drop after shutdown still waits for the
/// peer's END_STREAM, as a kernel does for a closed socket.
#[derive(Debug)]
pub struct Tunnel {
    send: SendStream<Bytes>,
    recv: Option<RecvStream>,
    unread: Bytes,
    write_closed: bool,
}

/// Limits of the wait for the peer's END_STREAM after a drop: time and bytes.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES_MAX: usize = 64 * 1024;
/// Limit of the bytes that are passed to h2 at once.
const WRITE_BYTES_MAX: usize = 64 * 1024;

impl Tunnel {
    pub(super) fn new(send: SendStream<Bytes>, receive: RecvStream) -> Self {
        Self { send, recv: Some(receive), unread: Bytes::new(), write_closed: false }
    }

    /// Returns the RST_STREAM code behind an error of a tunnel, if a reset caused the error.
    pub fn reset_code(error: &io::Error) -> Option<Reason> {
        let error = error.get_ref()?.downcast_ref::<h2::Error>()?;
        error.reason().filter(|_| error.is_reset())
    }

    /// Sends `bytes` without copying them, as the flow-control window allows. Ready once `bytes`
    /// is empty.
    pub fn poll_send(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        while !bytes.is_empty() {
            let count = ready!(self.poll_capacity(cx, bytes.len()))?;
            let part = bytes.split_to(count);
            self.send.send_data(part, false).map_err(into_io_error)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Returns the next bytes as received, without copying them, or `None` at END_STREAM.
    /// Releases their flow-control window at once.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        ready!(self.poll_fill(cx))?;
        let bytes = mem::take(&mut self.unread);
        self.release_window(bytes.len())?;
        Poll::Ready(Ok(Some(bytes).filter(|bytes| !bytes.is_empty())))
    }

    /// Sends `bytes` like [`Tunnel::poll_send`].
    pub async fn send(&mut self, mut bytes: Bytes) -> io::Result<()> {
        poll_fn(|cx| self.poll_send(cx, &mut bytes)).await
    }

    /// Receives the next bytes like [`Tunnel::poll_chunk`].
    pub async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// Waits for a reset by the peer or the end of the connection, without reading.
    pub async fn wait_broken(&mut self) -> io::Error {
        match poll_fn(|cx| self.send.poll_reset(cx)).await {
            Ok(code) => io::Error::new(io::ErrorKind::ConnectionReset, h2::Error::from(code)),
            Err(error) => into_io_error(error),
        }
    }

    /// Waits until the window has room, and returns how many of the `wanted` bytes fit.
    fn poll_capacity(&mut self, cx: &mut Context<'_>, wanted: usize) -> Poll<io::Result<usize>> {
        let wanted = wanted.min(WRITE_BYTES_MAX);
        self.send.reserve_capacity(wanted);
        let mut capacity = self.send.capacity();
        while capacity == 0 {
            capacity = match ready!(self.send.poll_capacity(cx)) {
                Some(granted) => granted.map_err(into_io_error)?,
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            };
        }
        Poll::Ready(Ok(capacity.min(wanted)))
    }

    /// Waits until `unread` has bytes, or END_STREAM has been received.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // After END_STREAM, `receive` is `None`: a reader may poll again after the end of file.
        while let (true, Some(stream)) = (self.unread.is_empty(), &mut self.recv) {
            match ready!(stream.poll_data(cx)) {
                Some(bytes) => self.unread = bytes.map_err(into_io_error)?,
                None => self.recv = None,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns `count` bytes to the peer's flow-control window.
    fn release_window(&mut self, count: usize) -> io::Result<()> {
        match &mut self.recv {
            Some(stream) => {
                let window = stream.flow_control();
                window.release_capacity(count).map_err(into_io_error)
            }
            None => Ok(()),
        }
    }

    pub fn reset(mut self, code: Reason) {
        self.write_closed = true;
        self.recv = None;
        self.send.send_reset(code);
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if !self.write_closed {
            return self.send.send_reset(Reason::CANCEL);
        }
        if let (Some(receive), Ok(runtime)) = (self.recv.take(), Handle::try_current()) {
            runtime.spawn(timeout(LINGER, linger(receive)));
        }
    }
}

/// Reads until the peer's END_STREAM, its reset, or the limit of bytes.
async fn linger(mut receive: RecvStream) {
    let mut left = LINGER_BYTES_MAX;
    while let Some(Ok(bytes)) = receive.data().await {
        let Some(rest) = left.checked_sub(bytes.len()) else {
            return;
        };
        left = rest;
        let _ = receive.flow_control().release_capacity(bytes.len());
    }
}

fn into_io_error(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}

impl AsyncRead for Tunnel {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_fill(cx))?;
        let count = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread[..count]);
        self.unread.advance(count);
        Poll::Ready(self.release_window(count))
    }
}

impl AsyncWrite for Tunnel {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let count = ready!(self.poll_capacity(cx, data.len()))?;
        self.send
            .send_data(Bytes::copy_from_slice(&data[..count]), false)
            .map_err(into_io_error)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.write_closed {
            self.write_closed = true;
            self.send.reserve_capacity(0);
            self.send.send_data(Bytes::new(), true).map_err(into_io_error)?;
        }
        Poll::Ready(Ok(()))
    }
}
