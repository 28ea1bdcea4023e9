//! ClientHello of a connection that is passed through: its server name and ALPN, and all its
//! bytes for the replay.
//!
//! The parser is in [`crate::wire::client_hello`], and rustls judges the name. Only
//! [`read_client_hello`] does I/O, so that tests can cover every segmentation of a ClientHello.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::reason::HandshakeRefusal;
use crate::sock_diag::{TcpCounters, explain_stall};
use crate::wire::client_hello::{self, ClientHelloFields, ClientHelloScanner, ClientRandom};
use crate::wire::sni;

use super::io::buffer::Buffer;

/// Limit of bytes read before the ClientHello is complete. With post-quantum key shares it takes
/// under 2 KiB, and 12 KiB in records of one byte.
pub const CLIENT_HELLO_BYTES_MAX: usize = 16 * 1024;
/// Deadline for a ClientHello, the same as for a handshake that the gateway terminates.
pub const CLIENT_HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// ALPN protocols by which Istio's sidecars mark traffic for another sidecar
/// (docs/wire-contract.md 1.9).
const ISTIO_ALPN: [&[u8]; 5] =
    [b"istio", b"istio-peer-exchange", b"istio-http/1.0", b"istio-http/1.1", b"istio-h2"];

/// Bytes of a peer up to the end of its ClientHello, with the parsed fields.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// All bytes that were read. Early data may follow the ClientHello.
    pub bytes: Vec<u8>,
    /// Server name, normalised; none if it is absent or not a valid name.
    pub sni: Option<Box<str>>,
    /// True if one of Istio's protocols is offered.
    pub offers_istio: bool,
    pub random: ClientRandom,
}

/// Returns whether an offered ALPN protocol is one of Istio's.
pub fn is_istio_alpn(protocol: &[u8]) -> bool {
    ISTIO_ALPN.contains(&protocol)
}

impl ClientHello {
    /// Returns a ClientHello with this server name and without bytes, for explanations.
    pub fn without_bytes(name: Option<&str>, offers_istio: bool) -> Self {
        let sni = name.and_then(sni::normalise);
        Self { bytes: Vec::new(), sni, offers_istio, random: ClientRandom::default() }
    }
}

/// Reason for which no ClientHello was read.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientHelloError {
    /// Reason for counters and log.
    pub refusal: HandshakeRefusal,
    pub detail: String,
    /// TLS alert for the peer; empty if none is sent.
    pub alert: Vec<u8>,
}

impl ClientHelloError {
    /// Returns a refusal without an alert.
    pub fn new(refusal: HandshakeRefusal, detail: &dyn ToString) -> Self {
        Self { refusal, detail: detail.to_string(), alert: Vec::new() }
    }

    fn with_alert(description: u8, detail: &str) -> Self {
        let alert = alert(description).into();
        Self { alert, ..Self::new(HandshakeRefusal::Other, &detail) }
    }
}

/// Incremental parser of a ClientHello.
#[derive(Debug, Default)]
pub struct ClientHelloReader {
    scanner: ClientHelloScanner,
    bytes: Vec<u8>,
}

impl ClientHelloReader {
    /// Returns the number of bytes that may still be pushed. Never 0 while the ClientHello is
    /// incomplete.
    pub fn remaining(&self) -> usize {
        CLIENT_HELLO_BYTES_MAX - self.bytes.len()
    }

    /// Appends the next bytes of the peer, at most [`ClientHelloReader::remaining`]. Returns the
    /// ClientHello once it is complete; must not be called again after that.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Option<ClientHello>, ClientHelloError> {
        self.bytes.extend_from_slice(bytes);
        self.scanner.push(bytes).ok_or_else(malformed)?;
        if let Some(end) = self.scanner.end() {
            let mut hello = self.parse(end)?;
            hello.bytes = std::mem::take(&mut self.bytes);
            return Ok(Some(hello));
        }
        if self.remaining() == 0 {
            let what = "the ClientHello is longer than 16 KiB";
            return Err(ClientHelloError::with_alert(HANDSHAKE_FAILURE, what));
        }
        Ok(None)
    }

    /// Parses the ClientHello that ends at `end`, without its bytes.
    fn parse(&self, end: usize) -> Result<ClientHello, ClientHelloError> {
        let whole = self.bytes.get(..end).filter(|_| self.scanner.is_at_end_of_record());
        let whole = whole.and_then(client_hello::message);
        let fields = whole.as_deref().and_then(|it| ClientHelloFields::read(it, is_istio_alpn));
        let (fields, random) = fields.zip(self.scanner.random()).ok_or_else(malformed)?;
        if fields.is_compressed {
            let what = "the ClientHello offers nothing but compression";
            return Err(ClientHelloError::with_alert(ILLEGAL_PARAMETER, what));
        }
        let sni = fields.server_name.map(normalise).transpose()?.flatten();
        Ok(ClientHello { sni, offers_istio: fields.is_offered, bytes: Vec::new(), random })
    }
}

fn malformed() -> ClientHelloError {
    ClientHelloError::with_alert(DECODE_ERROR, "the bytes are no valid ClientHello")
}

/// Normalises a server name. An address is as no name.
fn normalise(name: &[u8]) -> Result<Option<Box<str>>, ClientHelloError> {
    match ServerName::try_from(name) {
        Ok(ServerName::DnsName(name)) => Ok(sni::normalise(name.as_ref())),
        Ok(ServerName::IpAddress(_)) => Ok(None),
        _ => Err(ClientHelloError::with_alert(ILLEGAL_PARAMETER, "the server name is invalid")),
    }
}

/// Reads a peer's ClientHello, and later bytes only if they arrived together with it.
pub async fn read_client_hello(stream: &mut TcpStream) -> Result<ClientHello, ClientHelloError> {
    let mut reader = ClientHelloReader::default();
    let read = poll_fn(|cx| {
        loop {
            let failed = |error| ClientHelloError::new(HandshakeRefusal::Other, &error);
            // Avoids borrowing a buffer for a socket without data.
            ready!(stream.poll_read_ready(cx)).map_err(failed)?;
            let mut buffer = Buffer::borrow();
            // `poll_read` clears readiness after a short read, which saves a read that would
            // block.
            let mut room = ReadBuf::new(&mut buffer.bytes()[..reader.remaining()]);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut room)).map_err(failed)?;
            if room.filled().is_empty() {
                return Poll::Ready(Err(failed(io::ErrorKind::UnexpectedEof.into())));
            }
            if let Some(hello) = reader.push(room.filled())? {
                return Poll::Ready(Ok(hello));
            }
        }
    });
    match timeout(CLIENT_HELLO_DEADLINE, read).await {
        Ok(read) => read,
        Err(_) => {
            let what = explain_stall("no ClientHello within 5 s", TcpCounters::of(stream));
            Err(ClientHelloError::new(HandshakeRefusal::Timeout, &what))
        }
    }
}

/// Alerts for a ClientHello that is too long, has a forbidden value, or is none (RFC 8446 6.2).
const HANDSHAKE_FAILURE: u8 = 40;
const ILLEGAL_PARAMETER: u8 = 47;
const DECODE_ERROR: u8 = 50;

/// Returns a fatal alert record: content type, the record version of ClientHellos, length,
/// level.
pub const fn alert(description: u8) -> [u8; 7] {
    [21, 3, 3, 0, 2, 2, description]
}

#[cfg(test)]
mod tests;
