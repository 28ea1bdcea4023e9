//! What work is done on: a tunnel of HBONE, or a bare connection through a TLS listener.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;

use crate::hbone::Tunnel;

/// What is read from a bare connection at once.
const READ_BYTES: usize = 256 * 1024;

/// A stream of bytes in both directions, each of which ends by itself.
pub(super) enum Flow {
    Tunnel(Tunnel),
    Bare(TcpStream),
}

impl Flow {
    /// Sends `bytes` as there is room; ready once none is left.
    ///
    /// # Errors
    /// It is broken.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &mut Bytes,
    ) -> Poll<io::Result<()>> {
        let stream = match self {
            Self::Tunnel(tunnel) => return tunnel.poll_send(cx, bytes),
            Self::Bare(stream) => stream,
        };
        while !bytes.is_empty() {
            ready!(stream.poll_write_ready(cx))?;
            match stream.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                written => bytes.advance(written?),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// The next bytes as they came; none at the end. One that waits holds no buffer.
    ///
    /// # Errors
    /// As [`Flow::poll_send`].
    pub(super) fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let stream = match self {
            Self::Tunnel(tunnel) => return tunnel.poll_chunk(cx),
            Self::Bare(stream) => stream,
        };
        loop {
            ready!(stream.poll_read_ready(cx))?;
            let mut buffer = BytesMut::with_capacity(READ_BYTES);
            match stream.try_read_buf(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(0) => return Poll::Ready(Ok(None)),
                read => return Poll::Ready(read.map(|_| Some(buffer.freeze()))),
            }
        }
    }

    /// [`Flow::poll_send`] as a future.
    ///
    /// # Errors
    /// As [`Flow::poll_send`].
    pub(super) async fn send(&mut self, mut bytes: Bytes) -> io::Result<()> {
        poll_fn(|cx| self.poll_send(cx, &mut bytes)).await
    }

    /// [`Flow::poll_chunk`] as a future.
    ///
    /// # Errors
    /// As [`Flow::poll_send`].
    pub(super) async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    /// Ends our direction.
    ///
    /// # Errors
    /// As [`Flow::poll_send`].
    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Tunnel(tunnel) => tunnel.shutdown().await,
            Self::Bare(stream) => stream.shutdown().await,
        }
    }

    /// Waits until it is broken, while nobody reads.
    pub(super) async fn broken(&mut self) -> io::Error {
        match self {
            Self::Tunnel(tunnel) => tunnel.broken().await,
            Self::Bare(stream) => match stream.ready(Interest::ERROR).await {
                Ok(_) => ErrorKind::ConnectionReset.into(),
                Err(error) => error,
            },
        }
    }
}
