//! Stage 2: the outer TLS handshake, with one deadline.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::reason::HandshakeRefusal;
use crate::tls::{ALPN_H2, explanation_of};

use super::Gateway;
use super::accept::{Accepted, Held};
use super::admission::Handshake;
use super::readahead::ReadAhead;

/// A TLS session with a peer whose certificate chain holds.
#[derive(Debug)]
pub struct Session {
    /// The decrypted stream, boxed: it is large, and goes through many hands.
    pub stream: Box<TlsStream<ReadAhead<TcpStream>>>,
    /// What is counted of the connection while it lives.
    pub held: Held,
}

/// Why a handshake failed: the refusal, and what an operator may want to know about it.
#[derive(Debug)]
pub struct Refused {
    /// The refusal, counted by its label.
    pub refusal: HandshakeRefusal,
    /// What is wrong, in words.
    pub detail: String,
    /// The socket, to be closed only when the peer has read its alert, and what is counted of it
    /// until then.
    pub alerted: Option<(TcpStream, Handshake, Held)>,
}

impl Refused {
    /// A refusal of which the peer is not told.
    pub fn new(refusal: HandshakeRefusal, detail: &dyn ToString) -> Self {
        Self {
            refusal,
            detail: detail.to_string(),
            alerted: None,
        }
    }
}

/// The time for the whole handshake. A round trip between far regions is under 0.3 s, and a peer
/// without identity holds a slot for no longer than this.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// The time for an alert to leave.
const ALERT_DEADLINE: Duration = Duration::from_secs(1);
/// Does the handshake under the current TLS configuration.
///
/// # Errors
/// The refusal; the peer has then read an alert, or nothing.
pub async fn run(gateway: &Gateway, accepted: Accepted) -> Result<Session, Refused> {
    let stream = TcpStream::from_std(accepted.stream)
        .map_err(|error| Refused::new(HandshakeRefusal::Other, &error))?;
    let acceptor = TlsAcceptor::from(gateway.tls.config());
    let handshake = acceptor.accept(ReadAhead::new(stream)).into_fallible();
    let (slot, held) = (accepted.handshake, accepted.held);
    let told = |refusal, detail: &dyn ToString, socket, slot, held| Refused {
        alerted: Some((socket, slot, held)),
        ..Refused::new(refusal, detail)
    };
    let done = tokio::select! {
        done = timeout(HANDSHAKE_DEADLINE, handshake) => done,
        () = slot.evicted() => return Err(Refused::new(
            HandshakeRefusal::Evicted,
            &"the oldest handshake of the source with most, while all places were taken",
        )),
    };
    match done {
        Err(_) => Err(Refused::new(
            HandshakeRefusal::Timeout,
            &"no handshake within 5 s",
        )),
        Ok(Err((error, socket))) => {
            let (refusal, detail) = explained(gateway, &error);
            Err(told(refusal, &detail, socket.into_inner(), slot, held))
        }
        Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(ALPN_H2) => {
            let stream = Box::new(stream);
            Ok(Session { stream, held })
        }
        Ok(Ok(mut stream)) => {
            // rustls refuses a wrong ALPN offer but lets a missing one pass.
            let _ = timeout(ALERT_DEADLINE, stream.shutdown()).await;
            let socket = stream.into_inner().0.into_inner();
            Err(told(
                HandshakeRefusal::NoAlpn,
                &"the peer did not offer ALPN h2",
                socket,
                slot,
                held,
            ))
        }
    }
}

fn explained(gateway: &Gateway, error: &io::Error) -> (HandshakeRefusal, String) {
    let tls = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(tls) => (gateway.tls.refusal(tls), explanation_of(tls)),
        None => (HandshakeRefusal::Other, error.to_string()),
    }
}
