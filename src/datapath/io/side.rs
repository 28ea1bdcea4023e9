//! Side of a tunnel that is copied: a socket, TLS above one, or a tunnel through a gateway.

use std::io;
use std::ops::Deref;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::shared_socket::SharedSocket;

/// Side of a tunnel. A flush waits until the socket below takes bytes again.
pub trait Side: AsyncRead + AsyncWrite + Unpin {
    /// Polls whether a read may find something. A tunnel takes over and charges what has arrived.
    fn poll_read_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Returns the socket that the bytes of the tunnel pass as they are.
    fn socket(&self) -> Option<&TcpStream> {
        None
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Side for TlsStream<S> {}

impl<T: Deref<Target = TcpStream> + Unpin> Side for SharedSocket<T> {
    fn poll_read_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        TcpStream::poll_read_ready(self, cx)
    }

    fn socket(&self) -> Option<&TcpStream> {
        Some(self)
    }
}
