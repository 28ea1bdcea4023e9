//! Socket whose errors are observed while a stream above it is in use.

use std::io::{self, IoSliceMut};
use std::net::Shutdown;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// Handle or reference of a socket. A flush waits until the kernel takes bytes again.
#[derive(Clone, Debug)]
pub struct SharedSocket<T = Arc<TcpStream>>(T);

impl SharedSocket {
    pub fn new(socket: TcpStream) -> Self {
        Self(Arc::new(socket))
    }

    /// Returns the socket, if this is its last handle.
    pub fn into_inner(self) -> Option<TcpStream> {
        Arc::into_inner(self.0)
    }
}

impl<'a> From<&'a TcpStream> for SharedSocket<&'a TcpStream> {
    fn from(socket: &'a TcpStream) -> Self {
        Self(socket)
    }
}

impl<T: Deref<Target = TcpStream>> Deref for SharedSocket<T> {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.0
    }
}

impl<T: Deref<Target = TcpStream> + Unpin> AsyncRead for SharedSocket<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            let mut room = [IoSliceMut::new(buffer.initialize_unfilled())];
            match read_vectored(&self.0, &mut room) {
                Ok(count) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl<T: Deref<Target = TcpStream> + Unpin> AsyncWrite for SharedSocket<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match self.0.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_write_ready(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.0).shutdown(Shutdown::Write))
    }
}

/// Reads from a socket. After a short read the readiness is cleared, which saves the system
/// call that would find nothing: with edge-triggered epoll, later bytes are a new event.
pub(super) fn read_vectored(
    stream: &TcpStream,
    slices: &mut [IoSliceMut<'_>],
) -> io::Result<usize> {
    let room: usize = slices.iter().map(|slice| slice.len()).sum();
    let mut short = None;
    let read = stream.try_io(Interest::READABLE, || {
        let count = match slices {
            [slice] => rustix::io::read(stream, &mut **slice)?,
            slices => rustix::io::readv(stream, slices)?,
        };
        if count == 0 || count == room {
            return Ok(count);
        }
        short = Some(count);
        Err(io::ErrorKind::WouldBlock.into())
    });
    short.map_or(read, Ok)
}
