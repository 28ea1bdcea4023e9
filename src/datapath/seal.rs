//! Streams that take bytes now and send them at the next flush.
//!
//! A TLS session makes records of what it takes and keeps them, so that one system call can send
//! what many writes have made.

use std::io::{self, IoSlice, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

/// A stream that takes bytes now and sends them at the next flush.
pub trait Seal: AsyncWrite + Unpin {
    /// Takes all the bytes, however many they are.
    ///
    /// # Errors
    /// The session has failed.
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()>;
}

impl<S: AsyncRead + AsyncWrite + Unpin> Seal for Box<TlsStream<S>> {
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        let (_, session) = self.get_mut();
        // Who seals bounds what waits; rustls' own bound would take a part.
        session.set_buffer_limit(None);
        let count: usize = slices.iter().map(|slice| slice.len()).sum();
        match session.writer().write_vectored(slices)? {
            taken if taken == count => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// A stream without TLS, as tests have it.
#[derive(Debug)]
pub struct Plain<S> {
    stream: S,
    sealed: BytesMut,
}

impl<S> Plain<S> {
    /// Seals nothing, and keeps what it is to send all the same.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            sealed: BytesMut::new(),
        }
    }
}

impl<S: AsyncWrite + Unpin> Seal for Plain<S> {
    fn seal(&mut self, slices: &[IoSlice<'_>]) -> io::Result<()> {
        for slice in slices {
            self.sealed.extend_from_slice(slice);
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Plain<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Plain<S> {
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
