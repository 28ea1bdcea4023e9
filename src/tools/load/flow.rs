//! Streams that carry the load: an HBONE tunnel, or a bare connection through a TLS listener.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::TcpStream;

use crate::tools::hbone::Tunnel;

use super::alert::{ALERT_BYTES, FirstBytes, HELLO_RESPONSE};

/// Limit of one read from a bare connection, in bytes.
const READ_BYTES: usize = 256 * 1024;

thread_local! {
    /// Memory for the next read, so that a waiting connection holds none.
    static SPARE: RefCell<BytesMut> = RefCell::default();
}

/// Bidirectional byte stream. Each direction ends by itself.
pub(super) enum LoadStream {
    Tunnel(Tunnel),
    Bare(PassthroughStream),
}

/// Bare connection. A TLS alert in its first bytes is an error, and the endpoint's answer to the
/// ClientHello is not payload.
pub(super) struct PassthroughStream {
    stream: TcpStream,
    /// First bytes, until they are returned.
    head: BytesMut,
    /// True if the first bytes are payload. False while they may still be an alert or
    /// [`HELLO_RESPONSE`].
    is_payload: bool,
}

impl LoadStream {
    /// Sends `bytes` as the peer takes them; ready once none are left.
    pub(super) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &mut Bytes,
    ) -> Poll<io::Result<()>> {
        match self {
            Self::Tunnel(tunnel) => tunnel.poll_send(cx, bytes),
            Self::Bare(bare) => bare.poll_send(cx, bytes),
        }
    }

    /// Returns the next bytes as they arrive, or none at the end. A pending stream holds no buffer.
    pub(super) fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        match self {
            Self::Tunnel(tunnel) => tunnel.poll_chunk(cx),
            Self::Bare(bare) => bare.poll_chunk(cx),
        }
    }

    /// [`LoadStream::poll_send`] as a future.
    pub(super) async fn send(&mut self, mut bytes: Bytes) -> io::Result<()> {
        poll_fn(|cx| self.poll_send(cx, &mut bytes)).await
    }

    /// [`LoadStream::poll_chunk`] as a future.
    pub(super) async fn chunk(&mut self) -> io::Result<Option<Bytes>> {
        poll_fn(|cx| self.poll_chunk(cx)).await
    }

    pub(super) async fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Tunnel(tunnel) => tunnel.shutdown().await,
            Self::Bare(bare) => bare.stream.shutdown().await,
        }
    }

    /// Waits until the stream is broken, without reading.
    pub(super) async fn wait_for_failure(&mut self) -> io::Error {
        match self {
            Self::Tunnel(tunnel) => tunnel.wait_broken().await,
            Self::Bare(bare) => match bare.broken().await {
                Ok(()) => ErrorKind::ConnectionReset.into(),
                Err(error) => error,
            },
        }
    }
}

impl PassthroughStream {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, head: BytesMut::new(), is_payload: false }
    }

    /// Creates the side of a server, which receives payload alone.
    pub(super) fn of_server(stream: TcpStream) -> Self {
        Self { is_payload: true, ..Self::new(stream) }
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, bytes: &mut Bytes) -> Poll<io::Result<()>> {
        while !bytes.is_empty() {
            ready!(self.stream.poll_write_ready(cx))?;
            match self.stream.try_write(bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(self.alert_or(error))),
                Ok(written) => bytes.advance(written),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        loop {
            if self.is_payload && !self.head.is_empty() {
                return Poll::Ready(Ok(Some(self.head.split().freeze())));
            }
            ready!(self.stream.poll_read_ready(cx))?;
            let read = SPARE.with_borrow_mut(|spare| {
                spare.reserve(READ_BYTES);
                self.stream.try_read_buf(spare).map(|_| spare.split())
            });
            match read {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(bytes) if !bytes.is_empty() && self.is_payload => {
                    return Poll::Ready(Ok(Some(bytes.freeze())));
                }
                Ok(bytes) if !bytes.is_empty() => self.process_first_bytes(&bytes)?,
                Ok(_) if self.head.is_empty() => return Poll::Ready(Ok(None)),
                Ok(_) => self.is_payload = true,
            }
        }
    }

    /// Processes a part of the first bytes.
    ///
    /// # Errors
    /// They are a TLS alert.
    fn process_first_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.head.extend_from_slice(bytes);
        match FirstBytes::classify(&self.head) {
            FirstBytes::Alert(alert) => return Err(io::Error::other(alert)),
            FirstBytes::Answer => {
                self.head.advance(HELLO_RESPONSE.len());
                self.is_payload = true;
            }
            FirstBytes::Payload => self.is_payload = true,
            FirstBytes::Incomplete => {}
        }
        Ok(())
    }

    /// Returns the alert that arrived before a write failed, else the write's own error.
    fn alert_or(&mut self, error: io::Error) -> io::Error {
        while !self.is_payload {
            let mut bytes = [0; ALERT_BYTES];
            let received = recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT);
            let came = received.ok().and_then(|(count, _)| bytes.get(..count));
            match came.filter(|came| !came.is_empty()) {
                Some(came) => {
                    if let Err(alert) = self.process_first_bytes(came) {
                        return alert;
                    }
                }
                None => break,
            }
        }
        error
    }

    /// Waits until the connection is broken, and reads only its first bytes.
    ///
    /// # Errors
    /// They are a TLS alert, or the wait failed.
    async fn broken(&mut self) -> io::Result<()> {
        while !self.is_payload {
            self.stream.readable().await?;
            let mut bytes = [0; ALERT_BYTES];
            match self.stream.try_read(&mut bytes) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(0) => break,
                Ok(count) => self.process_first_bytes(bytes.get(..count).unwrap_or_default())?,
                Err(error) => return Err(error),
            }
        }
        self.stream.ready(Interest::ERROR).await.map(drop)
    }
}
