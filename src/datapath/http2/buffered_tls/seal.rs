//! Streams that buffer written bytes until the next flush.
//!
//! A TLS session seals the bytes into records and keeps the records, so that one system call
//! sends the result of many writes.

use std::io::{self, IoSlice, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

/// Stream that buffers written bytes until the next flush.
pub trait BufferedWrite: AsyncWrite + Unpin {
    /// Buffers all bytes, without a limit.
    ///
    /// # Errors
    /// The session has failed.
    fn write_buffered(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()>;
}

impl<S: AsyncRead + AsyncWrite + Unpin> BufferedWrite for Box<TlsStream<S>> {
    fn write_buffered(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        let (_, session) = self.get_mut();
        // The caller bounds the buffered bytes; rustls' own limit would cause partial writes.
        session.set_buffer_limit(None);
        let count: usize = slices.iter().map(|slice| slice.len()).sum();
        match session.writer().write_vectored(slices)? {
            taken if taken == count => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// Stream without TLS, for tests.
#[derive(Debug)]
pub struct PlainStream<S> {
    stream: S,
    sealed: BytesMut,
}

impl<S> PlainStream<S> {
    /// Wraps a stream, and buffers without encryption.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            sealed: BytesMut::new(),
        }
    }
}

impl<S: AsyncWrite + Unpin> BufferedWrite for PlainStream<S> {
    fn write_buffered(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        for slice in slices {
            self.sealed.extend_from_slice(slice);
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PlainStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PlainStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.sealed.extend_from_slice(data);
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, sealed } = &mut *self;
        while !sealed.is_empty() {
            match ready!(Pin::new(&mut *stream).poll_write(cx, sealed))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => sealed.advance(written),
            }
        }
        Pin::new(stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.as_mut().poll_flush(cx))?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
