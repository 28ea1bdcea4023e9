//! The ClientHello of a connection that is passed on unread: what it asks for, and every byte of
//! it, to be replayed.
//!
//! rustls reads it, as a server that has to choose its certificate would. Nothing here does I/O but
//! [`read`], so that every slicing of a hello can be tested.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::reason::HandshakeRefusal;
use crate::wire::sni;

use super::buffer::Buffer;

/// The most that is read of a peer before its hello is whole. Those with post-quantum shares take
/// under 2 KiB, and 12 KiB in records of one byte.
pub const HELLO_BYTES_MAX: usize = 16 * 1024;
/// The time for a hello to arrive, as for a handshake of our own.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// The protocols by which Istio's sidecars say that what they send is for a sidecar (contract 2.6).
const ISTIO_ALPN: [&[u8]; 5] = [
    b"istio",
    b"istio-peer-exchange",
    b"istio-http/1.0",
    b"istio-http/1.1",
    b"istio-h2",
];

/// What a peer has sent up to the end of its hello, and what the hello asks for.
#[derive(Debug, PartialEq, Eq)]
pub struct Hello {
    /// All bytes that were read, which may be more than the hello: early data follows it.
    pub bytes: Vec<u8>,
    /// The server name, normalised; none if there is none or it is no name.
    pub sni: Option<Box<str>>,
    /// Whether one of Istio's protocols is offered.
    pub offers_istio: bool,
}

/// Whether a protocol that a hello offers is one of Istio's.
pub fn is_istios(protocol: &[u8]) -> bool {
    ISTIO_ALPN.contains(&protocol)
}

impl Hello {
    /// The hello of such a server name, without its bytes, for whoever only looks.
    pub fn named(name: Option<&str>, offers_istio: bool) -> Self {
        Self {
            bytes: Vec::new(),
            sni: name.and_then(sni::normalised),
            offers_istio,
        }
    }
}

/// Why there is no hello.
#[derive(Debug, PartialEq, Eq)]
pub struct NoHello {
    /// What it is counted as.
    pub refusal: HandshakeRefusal,
    /// What an operator may want to know.
    pub detail: String,
    /// The TLS alert for the peer, if there is one to be told.
    pub alert: Vec<u8>,
}

impl NoHello {
    /// Of which the peer is not told.
    pub fn new(refusal: HandshakeRefusal, detail: &dyn ToString) -> Self {
        Self {
            refusal,
            detail: detail.to_string(),
            alert: Vec::new(),
        }
    }
}

/// Takes bytes in until they are a hello.
#[derive(Default)]
#[expect(missing_debug_implementations, reason = "rustls' acceptor has none")]
pub struct HelloReader {
    acceptor: Acceptor,
    bytes: Vec<u8>,
}

impl HelloReader {
    /// How much more may be pushed. Never 0 while there is no hello.
    pub fn room(&self) -> usize {
        HELLO_BYTES_MAX - self.bytes.len()
    }

    /// Takes in what the peer has sent next, at most [`HelloReader::room`]; gives the hello when it
    /// is whole. Not to be called again after that.
    ///
    /// # Errors
    /// It can become no hello, or it is too long.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<Hello>, NoHello> {
        self.bytes.extend_from_slice(bytes);
        let mut rest = bytes;
        while !rest.is_empty() {
            let read = self.acceptor.read_tls(&mut rest);
            if !matches!(read, Ok(1..)) {
                let what = "more than a TLS library keeps of a hello";
                return Err(NoHello::new(HandshakeRefusal::Other, &what));
            }
            match self.acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    let hello = accepted.client_hello();
                    return Ok(Some(Hello {
                        sni: hello.server_name().and_then(sni::normalised),
                        offers_istio: hello.alpn().is_some_and(|mut all| all.any(is_istios)),
                        bytes: std::mem::take(&mut self.bytes),
                    }));
                }
                Err((error, mut alert)) => {
                    let mut refused = NoHello::new(HandshakeRefusal::Other, &error);
                    // Into memory, which does not fail.
                    let _ = alert.write_all(&mut refused.alert);
                    return Err(refused);
                }
            }
        }
        if self.room() == 0 {
            let what = "the ClientHello is longer than 16 KiB";
            let mut refused = NoHello::new(HandshakeRefusal::Other, &what);
            refused.alert = alert(HANDSHAKE_FAILURE).into();
            return Err(refused);
        }
        Ok(None)
    }
}

/// Reads a peer's hello, and nothing after it that was not sent together with it.
///
/// # Errors
/// It did not come, not in time, or is none.
pub async fn read(stream: &mut TcpStream) -> Result<Hello, NoHello> {
    let mut reader = HelloReader::default();
    let read = poll_fn(|cx| {
        loop {
            let failed = |error| NoHello::new(HandshakeRefusal::Other, &error);
            // No buffer is touched for a socket that has nothing.
            ready!(stream.poll_read_ready(cx)).map_err(failed)?;
            let mut buffer = Buffer::borrow();
            // By `poll_read`, as it knows from a short read that there is no more for now.
            let mut room = ReadBuf::new(&mut buffer.bytes()[..reader.room()]);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut room)).map_err(failed)?;
            if room.filled().is_empty() {
                return Poll::Ready(Err(failed(io::ErrorKind::UnexpectedEof.into())));
            }
            if let Some(hello) = reader.push(room.filled())? {
                return Poll::Ready(Ok(hello));
            }
        }
    });
    match timeout(HELLO_DEADLINE, read).await {
        Ok(read) => read,
        Err(_) => {
            let what = "no ClientHello within 5 s";
            Err(NoHello::new(HandshakeRefusal::Timeout, &what))
        }
    }
}

/// What a hello that is too long is answered (RFC 8446 section 6.2).
const HANDSHAKE_FAILURE: u8 = 40;

/// The record of a fatal alert: content type, the version that hellos carry, length, level.
pub const fn alert(description: u8) -> [u8; 7] {
    [21, 3, 3, 0, 2, 2, description]
}

#[cfg(test)]
mod tests;
