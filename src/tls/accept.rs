//! TLS handshake of a server, after which [`RecordLayer`] takes the connection over.
//!
//! rustls receives one record at a time. Records behind the client's Finished therefore remain
//! sealed, and are left to the record layer.

use std::io;
use std::mem::{MaybeUninit, take};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::pki_types::CertificateDer;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{InvalidMessage, ServerConfig};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::record::{HEADER_BYTES, RecordLayer};

/// Limit of received bytes that wait for the rest of their message: the largest message that
/// rustls accepts, 64 KiB, in full records.
pub const INCOMING_BYTES_MAX: usize = 72 * 1024;
/// Limit of one read. The flight of a client, with its first request, has about 4 KiB.
const READ_BYTES_MAX: usize = 8 * 1024;

/// Connection whose handshake has completed.
#[derive(Debug)]
pub struct Accepted {
    pub layer: RecordLayer,
    /// Sealed bytes received after the handshake.
    pub rest: Vec<u8>,
    /// Chain of the client: its leaf, then the intermediates. Empty without client authentication.
    pub peer_certificates: Vec<CertificateDer<'static>>,
    /// Negotiated application protocol.
    pub alpn: Option<Vec<u8>>,
}

/// Failure of a handshake. The alert, if any, was sent.
#[derive(Debug, Error)]
pub enum AcceptError {
    #[error(transparent)]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Result of processing the received bytes.
enum Progress {
    Incomplete,
    Closed,
    Complete,
}

/// Received bytes that rustls has not consumed.
#[derive(Default)]
struct Incoming {
    bytes: Vec<u8>,
    /// Size of the complete records that rustls has seen. It keeps those of an incomplete message.
    seen: usize,
}

/// Performs the handshake. The caller sets the deadline. A silent client costs no buffer.
pub async fn accept<S>(config: Arc<ServerConfig>, socket: &mut S) -> Result<Accepted, AcceptError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut connection = UnbufferedServerConnection::new(config)?;
    let (mut incoming, mut outgoing) = (Incoming::default(), Vec::new());
    loop {
        let progress = process(&mut connection, &mut incoming, &mut outgoing);
        if !outgoing.is_empty() {
            let written = socket.write_all(&take(&mut outgoing)).await;
            // The cause of a failed handshake matters more than its alert.
            if progress.is_ok() {
                written?;
            }
        }
        match progress? {
            Progress::Complete => break,
            Progress::Closed => return Err(end_of_file()),
            Progress::Incomplete if incoming.bytes.len() >= INCOMING_BYTES_MAX => {
                let too_large = InvalidMessage::HandshakePayloadTooLarge;
                return Err(AcceptError::Tls(too_large.into()));
            }
            Progress::Incomplete => {}
        }
        let bytes = &mut incoming.bytes;
        let read = std::future::poll_fn(|cx| poll_read(socket, cx, bytes)).await?;
        if read == 0 {
            return Err(end_of_file());
        }
    }
    let peer_certificates = connection.peer_certificates().unwrap_or_default();
    let peer_certificates = peer_certificates.iter().map(|one| one.clone().into_owned()).collect();
    let alpn = connection.alpn_protocol().map(<[u8]>::to_vec);
    let (secrets, kernel) = connection.dangerous_into_kernel_connection()?;
    Ok(Accepted {
        layer: RecordLayer::new(secrets, kernel)?,
        rest: incoming.bytes,
        peer_certificates,
        alpn,
    })
}

/// Returns the error that tokio-rustls returns in this case.
fn end_of_file() -> AcceptError {
    AcceptError::Io(io::Error::new(io::ErrorKind::UnexpectedEof, "tls handshake eof"))
}

/// Reads through the stack, so that nothing is allocated before the bytes have arrived.
fn poll_read<S: AsyncRead + Unpin>(
    socket: &mut S,
    cx: &mut Context<'_>,
    bytes: &mut Vec<u8>,
) -> Poll<io::Result<usize>> {
    let mut buffer = [MaybeUninit::uninit(); READ_BYTES_MAX];
    let mut read = ReadBuf::uninit(&mut buffer);
    ready!(Pin::new(socket).poll_read(cx, &mut read))?;
    bytes.extend_from_slice(read.filled());
    Poll::Ready(Ok(read.filled().len()))
}

/// Passes the received records to rustls, one by one, until it needs more or has completed.
/// Appends what has to be sent to `outgoing`, with the alert in case of an error.
fn process(
    connection: &mut UnbufferedServerConnection,
    incoming: &mut Incoming,
    outgoing: &mut Vec<u8>,
) -> Result<Progress, rustls::Error> {
    let mut next = incoming.next_record();
    loop {
        // rustls rejects some records by their header, so it sees incomplete ones too.
        let end = next.unwrap_or(incoming.bytes.len());
        let given = incoming.bytes.get_mut(..end).unwrap_or_default();
        let UnbufferedStatus { discard, state } = connection.process_tls_records(given);
        let mut is_blocked = false;
        match state {
            Ok(ConnectionState::EncodeTlsData(data)) => encode(data, outgoing)?,
            Ok(ConnectionState::TransmitTlsData(data)) => data.done(),
            Ok(ConnectionState::WriteTraffic(_)) => {
                incoming.discard(discard);
                return Ok(Progress::Complete);
            }
            Ok(ConnectionState::BlockedHandshake) => is_blocked = true,
            Ok(_) => return Ok(Progress::Closed),
            Err(error) => {
                // rustls must not see the bytes again, or it fails a second time.
                while connection.wants_write()
                    && let Ok(ConnectionState::EncodeTlsData(alert)) =
                        connection.process_tls_records(&mut []).state
                {
                    encode(alert, outgoing)?;
                }
                return Err(error);
            }
        }
        incoming.discard(discard);
        next = next.map(|end| end.saturating_sub(discard));
        if is_blocked {
            let Some(end) = next else {
                return Ok(Progress::Incomplete);
            };
            incoming.seen = end;
            next = incoming.next_record();
        }
    }
}

/// Appends a record of rustls to `outgoing`.
fn encode(
    mut data: EncodeTlsData<'_, ServerConnectionData>,
    outgoing: &mut Vec<u8>,
) -> Result<(), rustls::Error> {
    let start = outgoing.len();
    let size = match data.encode(&mut []) {
        Err(EncodeError::InsufficientSize(size)) => size.required_size,
        _ => 0,
    };
    outgoing.resize(start + size, 0);
    let space = outgoing.get_mut(start..).unwrap_or_default();
    let encoded = data.encode(space);
    encoded.map_err(|error| rustls::Error::General(error.to_string()))?;
    Ok(())
}

impl Incoming {
    /// Returns the end of the first record that rustls has not seen, if it is complete.
    fn next_record(&self) -> Option<usize> {
        let next = self.bytes.get(self.seen..)?;
        let &[_, _, _, high, low] = next.first_chunk::<HEADER_BYTES>()?;
        let size = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
        (size <= next.len()).then_some(self.seen + size)
    }

    fn discard(&mut self, count: usize) {
        self.bytes.drain(..count.min(self.bytes.len()));
        self.seen = self.seen.saturating_sub(count);
    }
}
