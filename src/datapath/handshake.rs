//! Stage 2: the outer TLS handshake, with one deadline.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::reason::HandshakeRefusal;
use crate::tls::{ALPN_H2, explain_error};

use super::DataPath;
use super::accept::{AcceptedConnection, ConnectionResources};
use super::io::readahead::ReadAhead;
use super::limits::admission::HandshakeSlot;

/// A TLS session with a peer whose certificate chain was verified.
#[derive(Debug)]
pub struct Session {
    /// Decrypted stream. Boxed: it is large and moves through many functions.
    pub stream: Box<TlsStream<ReadAhead<TcpStream>>>,
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
    /// Socket that is closed only after the peer has read its alert, and the resources held until
    /// then.
    pub alerted: Option<(TcpStream, HandshakeSlot, ConnectionResources)>,
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
/// Deadline for an alert to be written.
const ALERT_DEADLINE: Duration = Duration::from_secs(1);
/// Performs the handshake with the current TLS configuration.
///
/// # Errors
/// Returns the refusal, with the socket if an alert may have been sent.
pub async fn run(
    gateway: &DataPath,
    accepted: AcceptedConnection,
) -> Result<Session, HandshakeError> {
    let stream = TcpStream::from_std(accepted.stream)
        .map_err(|error| HandshakeError::new(HandshakeRefusal::Other, &error))?;
    let acceptor = TlsAcceptor::from(gateway.tls.config());
    let handshake = acceptor.accept(ReadAhead::new(stream)).into_fallible();
    let (slot, held) = (accepted.handshake, accepted.resources);
    let refused_with_alert = |refusal, detail: &dyn ToString, socket, slot, held| HandshakeError {
        alerted: Some((socket, slot, held)),
        ..HandshakeError::new(refusal, detail)
    };
    let done = tokio::select! {
        done = timeout(HANDSHAKE_DEADLINE, handshake) => done,
        () = slot.evicted() => return Err(HandshakeError::new(
            HandshakeRefusal::Evicted,
            &"handshake evicted: limit of concurrent handshakes reached, oldest of the source with \
              the most",
        )),
    };
    match done {
        Err(_) => Err(HandshakeError::new(
            HandshakeRefusal::Timeout,
            &"TLS handshake not completed within 5 s",
        )),
        Ok(Err((error, socket))) => {
            let (refusal, detail) = explain_failure(gateway, &error);
            Err(refused_with_alert(
                refusal,
                &detail,
                socket.into_inner(),
                slot,
                held,
            ))
        }
        Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(ALPN_H2) => {
            let stream = Box::new(stream);
            Ok(Session {
                stream,
                resources: held,
            })
        }
        Ok(Ok(mut stream)) => {
            // rustls refuses a wrong ALPN offer but accepts a missing one.
            let _ = timeout(ALERT_DEADLINE, stream.shutdown()).await;
            let socket = stream.into_inner().0.into_inner();
            Err(refused_with_alert(
                HandshakeRefusal::NoAlpn,
                &"the peer did not offer ALPN h2",
                socket,
                slot,
                held,
            ))
        }
    }
}

fn explain_failure(gateway: &DataPath, error: &io::Error) -> (HandshakeRefusal, String) {
    let tls = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(tls) => (gateway.tls.refusal(tls), explain_error(tls)),
        None => (HandshakeRefusal::Other, error.to_string()),
    }
}
