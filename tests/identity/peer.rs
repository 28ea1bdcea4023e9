//! Peer that sends its request together with its certificate, without waiting for the server.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig};
use strait::tools::conformance::FixedCertificate;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::pki::Shown;
use crate::support::ECHO;

/// Result of a connection.
#[derive(Debug)]
pub enum Received {
    /// The peer read a byte of HTTP/2.
    Admitted(#[expect(dead_code, reason = "kept open")] Box<TlsStream<TcpStream>>),
    /// The peer read an alert and nothing before that.
    Alert(AlertDescription),
    /// The peer read neither.
    Closed(String),
}

/// Connects to `address` as `shown` and sends a CONNECT at once, before the server has verified the
/// certificate. With TLS 1.3, the client completes its handshake first.
pub async fn connect(
    address: std::net::SocketAddr,
    usual: &Arc<ClientConfig>,
    shown: &Shown,
) -> Received {
    let mut config = ClientConfig::clone(usual);
    config.client_auth_cert_resolver = Arc::new(FixedCertificate(shown.certified()));
    let tcp = TcpStream::connect(address).await.expect("a connection");
    let nobody = std::net::IpAddr::from([0; 4]);
    let connector = TlsConnector::from(Arc::new(config));
    let connected = connector.connect(ServerName::IpAddress(nobody.into()), tcp);
    let mut stream = match connected.await {
        Ok(stream) => stream,
        Err(error) => return refused(&error),
    };
    // The server may have closed already. The read then returns the reason.
    let _ = stream.write_all(&request()).await;
    let _ = stream.flush().await;
    match stream.read_u8().await {
        Ok(_) => Received::Admitted(Box::new(stream)),
        Err(error) => refused(&error),
    }
}

fn refused(error: &std::io::Error) -> Received {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
    match tls {
        Some(rustls::Error::AlertReceived(alert)) => Received::Alert(*alert),
        _ => Received::Closed(error.to_string()),
    }
}

/// Returns the preface, empty SETTINGS, and a CONNECT to the service (RFC 9113, RFC 7541 section
/// 6.2.2).
fn request() -> Vec<u8> {
    let mut block = Vec::new();
    for text in [":method", "CONNECT", ":authority", ECHO] {
        if text.starts_with(':') {
            block.push(0);
        }
        block.push(u8::try_from(text.len()).expect("short"));
        block.extend(text.as_bytes());
    }
    let length = u8::try_from(block.len()).expect("short");
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    bytes.extend([0, 0, length, 1, 4, 0, 0, 0, 1]);
    bytes.extend(block);
    bytes
}
