//! Stage 2: the outer TLS handshake, with one deadline.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::{AlertDescription, ServerConfig};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::limits::Place;
use crate::reason::HandshakeRefusal;
use crate::sock_diag::{TcpCounters, explain_stall};
use crate::telemetry::report_refused_handshake;
use crate::tls::record::RecordLayer;
use crate::tls::{self, ALPN_H2, AcceptError, explain_error};

use super::DataPath;
use super::accept::{AcceptedConnection, ConnectionResources};
use super::io::linger::{self, ALERT_DEADLINE};
use super::io::shared_socket::SharedSocket;
use super::limits::admission::EVICTED_DETAIL;

/// Transport of a connection after its handshake.
#[derive(Debug)]
pub struct Transport<S> {
    pub socket: S,
    pub layer: RecordLayer,
    /// Bytes that were received and not opened.
    pub received: Vec<u8>,
}

/// A TLS connection of an HBONE listener after its handshake. The peer's chain was verified.
#[derive(Debug)]
pub struct Session {
    pub transport: Box<Transport<TcpStream>>,
    pub peer_certificates: Vec<CertificateDer<'static>>,
    /// Resources that the connection holds while it lives.
    pub resources: ConnectionResources,
}

/// Failure of a handshake: the refusal, and details for the operator.
#[derive(Debug)]
pub struct HandshakeError {
    /// Refusal, counted by its label.
    pub refusal: HandshakeRefusal,
    pub detail: String,
    /// Socket to close once the peer has read its alert.
    pub alerted: Option<Box<AlertedSocket>>,
}

/// Socket that an alert may have been sent on, with the resources that it holds.
#[derive(Debug)]
pub struct AlertedSocket {
    pub socket: TcpStream,
    pub slot: Place,
    pub resources: ConnectionResources,
}

impl HandshakeError {
    /// Creates a refusal that the peer receives no alert for.
    pub fn new(refusal: HandshakeRefusal, detail: &dyn ToString) -> Self {
        Self { refusal, detail: detail.to_string(), alerted: None }
    }

    /// Adds what the counters of the socket show, if the deadline has passed. FIN would wait behind
    /// bytes that do not arrive, so that the peer learns of the end by a reset.
    fn with_stall(self, socket: &TcpStream) -> Self {
        if self.refusal != HandshakeRefusal::Timeout {
            return self;
        }
        let counters = TcpCounters::of(socket);
        if counters.as_ref().is_ok_and(|counters| counters.unacknowledged > 0) {
            linger::reset_on_close(socket);
        }
        Self { detail: explain_stall(&self.detail, counters), ..self }
    }

    /// Counts and logs the refusal. Closes the socket once the peer has read its alert.
    pub async fn close(self, data_path: &DataPath, address: SocketAddr) {
        report_refused_handshake(&data_path.metrics, address, self.refusal, &self.detail);
        if let Some(alerted) = self.alerted {
            linger::disable_reset_on_close(&alerted.socket);
            linger::close_gracefully(alerted.socket, linger::PEER_CLOSE_DEADLINE).await;
        }
    }
}

impl From<HandshakeRefusal> for HandshakeError {
    fn from(refusal: HandshakeRefusal) -> Self {
        Self::new(refusal, &refusal)
    }
}

/// Deadline for the whole handshake. A round trip between far regions is under 0.3 s. A peer
/// without identity holds a slot for no longer than this.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

const LATE: &str = "TLS handshake not completed within 5 s";

/// Limit of sealed bytes that wait for the socket of a client of a binding: two full records.
pub const SEND_BUFFER: usize = 32 * 1024;

/// Performs the handshake with the current TLS configuration, for a connection that frames its
/// records itself.
///
/// # Errors
/// Returns the refusal, with the socket if an alert may have been sent.
pub async fn run(
    data_path: &DataPath,
    accepted: AcceptedConnection,
) -> Result<Session, HandshakeError> {
    let mut socket = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let (slot, resources) = (accepted.handshake, accepted.resources);
    let handshake = tls::accept(data_path.tls.config(), &mut socket);
    let done = in_time(&slot, LATE, handshake).await;
    let (refusal, detail) = match done.map_err(|refused| refused.with_stall(&socket))? {
        Ok(session) if session.alpn.as_deref() == Some(ALPN_H2) => {
            return Ok(Session {
                transport: Box::new(Transport {
                    socket,
                    layer: session.layer,
                    received: session.rest,
                }),
                peer_certificates: session.peer_certificates,
                resources,
            });
        }
        Ok(mut session) => {
            // rustls refuses a wrong ALPN offer but accepts a missing one.
            if let Ok(alert) = session.layer.seal_alert(AlertDescription::CloseNotify) {
                let _ = timeout(ALERT_DEADLINE, socket.write_all(&alert)).await;
            }
            let detail = "the peer did not offer ALPN h2".to_owned();
            (HandshakeRefusal::NoAlpn, detail)
        }
        Err(AcceptError::Tls(error)) => (data_path.tls.refusal(&error), explain_error(&error)),
        Err(AcceptError::Io(error)) => (HandshakeRefusal::Other, error.to_string()),
    };
    Err(HandshakeError {
        refusal,
        detail,
        alerted: Some(Box::new(AlertedSocket { socket, slot, resources })),
    })
}

/// Performs the handshake with a client of a binding. No application protocol is negotiated.
pub async fn run_local(
    data_path: &DataPath,
    accepted: AcceptedConnection,
) -> Result<(TlsStream<SharedSocket>, ConnectionResources), HandshakeError> {
    let socket = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let (slot, resources) = (accepted.handshake, accepted.resources);
    let mut config = ServerConfig::clone(&data_path.tls.config());
    config.alpn_protocols.clear();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let socket = SharedSocket::new(socket);
    let handshake = acceptor.accept(socket.clone()).into_fallible();
    let done = in_time(&slot, LATE, handshake).await;
    let done = done.map_err(|refused| refused.with_stall(&socket))?;
    // The last handle closes the socket.
    drop(socket);
    let (error, socket) = match done {
        Ok(mut stream) => {
            stream.get_mut().1.set_buffer_limit(Some(SEND_BUFFER));
            return Ok((stream, resources));
        }
        Err(failed) => failed,
    };
    let cause = error.get_ref().and_then(|error| error.downcast_ref());
    let (refusal, detail) = match cause {
        Some(cause) => (data_path.tls.refusal(cause), explain_error(cause)),
        None => (HandshakeRefusal::Other, error.to_string()),
    };
    let alerted = |socket| AlertedSocket { socket, slot, resources };
    let alerted = socket.into_inner().map(alerted).map(Box::new);
    Err(HandshakeError { refusal, detail, alerted })
}

/// Waits for a handshake, unless its deadline passes or its slot is needed. `late` is the detail of
/// the former.
pub(super) async fn in_time<T>(
    slot: &Place,
    late: &str,
    handshake: impl Future<Output = T>,
) -> Result<T, HandshakeError> {
    tokio::select! {
        done = timeout(HANDSHAKE_DEADLINE, handshake) => {
            done.map_err(|_| HandshakeError::new(HandshakeRefusal::Timeout, &late))
        }
        () = slot.evicted() => {
            Err(HandshakeError::new(HandshakeRefusal::Evicted, &EVICTED_DETAIL))
        }
    }
}
