//! Stage 2: the outer TLS handshake, with one deadline.

use std::time::Duration;

use rustls::AlertDescription;
use rustls::pki_types::CertificateDer;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::reason::HandshakeRefusal;
use crate::tls::record::RecordLayer;
use crate::tls::{self, ALPN_H2, AcceptError, explain_error};

use super::DataPath;
use super::accept::{AcceptedConnection, ConnectionResources};
use super::io::linger::ALERT_DEADLINE;
use super::limits::admission::{EVICTED_DETAIL, HandshakeSlot};

/// Transport of a connection after its handshake.
#[derive(Debug)]
pub struct Transport<S> {
    /// Socket.
    pub socket: S,
    /// Record protection.
    pub layer: RecordLayer,
    /// Bytes that were received and not opened.
    pub received: Vec<u8>,
}

/// A TLS connection of an HBONE listener after its handshake. The peer's chain was verified.
#[derive(Debug)]
pub struct Session {
    /// Socket with its record protection.
    pub transport: Box<Transport<TcpStream>>,
    /// Chain of the peer.
    pub peer_certificates: Vec<CertificateDer<'static>>,
    /// Resources that the connection holds while it lives.
    pub resources: ConnectionResources,
}

/// Failure of a handshake: the refusal, and details for the operator.
#[derive(Debug)]
pub struct HandshakeError {
    /// Refusal, counted by its label.
    pub refusal: HandshakeRefusal,
    /// Explanation of the failure.
    pub detail: String,
    /// Socket to close once the peer has read its alert.
    pub alerted: Option<AlertedSocket>,
}

/// Socket that an alert may have been sent on, with the resources that it holds.
#[derive(Debug)]
pub struct AlertedSocket {
    /// Socket.
    pub socket: TcpStream,
    /// Slot of the handshake.
    pub slot: HandshakeSlot,
    /// Resources of the connection.
    pub resources: ConnectionResources,
}

impl HandshakeError {
    /// Creates a refusal that the peer receives no alert for.
    pub fn new(refusal: HandshakeRefusal, detail: &dyn ToString) -> Self {
        Self {
            refusal,
            detail: detail.to_string(),
            alerted: None,
        }
    }
}

/// Deadline for the whole handshake. A round trip between far regions is under 0.3 s. A peer
/// without identity holds a slot for no longer than this.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// Performs the handshake with the current TLS configuration, for a connection that frames its
/// records itself.
///
/// # Errors
/// Returns the refusal, with the socket if an alert may have been sent.
pub async fn run(
    gateway: &DataPath,
    accepted: AcceptedConnection,
) -> Result<Session, HandshakeError> {
    let mut socket = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let (slot, resources) = (accepted.handshake, accepted.resources);
    let handshake = tls::accept(gateway.tls.config(), &mut socket);
    let done = tokio::select! {
        done = timeout(HANDSHAKE_DEADLINE, handshake) => done,
        () = slot.evicted() => {
            return Err(HandshakeError::new(HandshakeRefusal::Evicted, &EVICTED_DETAIL));
        }
    };
    let (refusal, detail) = match done {
        Err(_) => {
            return Err(HandshakeError::new(
                HandshakeRefusal::Timeout,
                &"TLS handshake not completed within 5 s",
            ));
        }
        Ok(Ok(session)) if session.alpn.as_deref() == Some(ALPN_H2) => {
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
        Ok(Ok(mut session)) => {
            // rustls refuses a wrong ALPN offer but accepts a missing one.
            if let Ok(alert) = session.layer.seal_alert(AlertDescription::CloseNotify) {
                let _ = timeout(ALERT_DEADLINE, socket.write_all(&alert)).await;
            }
            let detail = "the peer did not offer ALPN h2".to_owned();
            (HandshakeRefusal::NoAlpn, detail)
        }
        Ok(Err(AcceptError::Tls(error))) => (gateway.tls.refusal(&error), explain_error(&error)),
        Ok(Err(AcceptError::Io(error))) => (HandshakeRefusal::Other, error.to_string()),
    };
    Err(HandshakeError {
        refusal,
        detail,
        alerted: Some(AlertedSocket {
            socket,
            slot,
            resources,
        }),
    })
}
