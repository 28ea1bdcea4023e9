//! Stage 2: the outer TLS handshake, with one deadline.

use std::io;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::reason::HandshakeRefusal;
use crate::tls::{ALPN_H2, refusal_of};

use super::accept::{Accepted, LoadGuard};
use super::{Gateway, linger};

/// A TLS session with a peer whose certificate chain holds.
#[derive(Debug)]
pub struct Session {
    /// The decrypted stream.
    pub stream: TlsStream<TcpStream>,
    /// The connection's part of its worker's load.
    pub load: LoadGuard,
}

/// Why a handshake failed: the refusal, and what an operator may want to know about it.
#[derive(Debug)]
pub struct Refused {
    /// The refusal, counted by its label.
    pub refusal: HandshakeRefusal,
    /// The TLS library's own words.
    pub detail: String,
}

/// The time for the whole handshake. A round trip between far regions is under 0.3 s, and a peer
/// without identity holds a slot for no longer than this.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);
/// Does the handshake under the current TLS configuration.
///
/// # Errors
/// The refusal; the peer has then read an alert, or nothing.
pub async fn run(gateway: &Gateway, accepted: Accepted) -> Result<Session, Refused> {
    let refused = |refusal, detail: &dyn ToString| Refused {
        refusal,
        detail: detail.to_string(),
    };
    let stream = TcpStream::from_std(accepted.stream)
        .map_err(|error| refused(HandshakeRefusal::Other, &error))?;
    let acceptor = TlsAcceptor::from(gateway.tls.load_full());
    let handshake = acceptor.accept(stream).into_fallible();
    match timeout(HANDSHAKE_DEADLINE, handshake).await {
        Err(_) => Err(refused(
            HandshakeRefusal::Timeout,
            &"no handshake within 5 s",
        )),
        Ok(Err((error, stream))) => {
            let refusal = refusal(&error);
            linger::close(stream).await;
            Err(refused(refusal, &error))
        }
        Ok(Ok(mut stream)) => {
            if stream.get_ref().1.alpn_protocol() == Some(ALPN_H2) {
                return Ok(Session {
                    stream,
                    load: accepted.load,
                });
            }
            // rustls refuses a wrong ALPN offer but lets a missing one pass.
            let _ = timeout(HANDSHAKE_DEADLINE, stream.shutdown()).await;
            linger::close(stream.into_inner().0).await;
            Err(refused(
                HandshakeRefusal::NoAlpn,
                &"the peer did not offer ALPN h2",
            ))
        }
    }
}

fn refusal(error: &io::Error) -> HandshakeRefusal {
    let tls = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    tls.map_or(HandshakeRefusal::Other, refusal_of)
}
