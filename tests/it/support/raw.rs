//! Peer of a gateway of the tests that sends frames which no client library sends.

use rustls::pki_types::ServerName;
pub use strait::tools::conformance::raw::*;
use tokio::io::{AsyncRead, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{CLIENT, GATEWAY, Gateway, identities};

/// Peer with a valid certificate, after its TLS handshake, preface and SETTINGS.
pub struct RawPeer<S = TlsStream<TcpStream>> {
    stream: S,
    /// True if the peer acknowledges SETTINGS, as RFC 9113 requires.
    acknowledges: bool,
}

/// Opens a TLS session with a valid certificate, before the first byte of HTTP/2.
pub async fn session(gateway: &Gateway) -> TlsStream<TcpStream> {
    let tls = TlsConnector::from(identities().client(CLIENT, GATEWAY));
    let tcp = TcpStream::connect(gateway.address).await.expect("a connection");
    // The receive buffer holds all answers to a flood. Otherwise the gateway's last frames would
    // wait until the test reads, and a reset could overtake them.
    let socket = socket2::SockRef::from(&tcp);
    socket.set_recv_buffer_size(1 << 20).expect("a buffer");
    let nobody = std::net::IpAddr::from([0; 4]);
    let stream = tls.connect(ServerName::IpAddress(nobody.into()), tcp).await;
    stream.expect("a handshake")
}

impl RawPeer {
    pub async fn connect(gateway: &Gateway) -> Self {
        Self::with_settings(gateway, &[]).await
    }

    /// Connects a peer with this SETTINGS payload.
    pub async fn with_settings(gateway: &Gateway, settings: &[u8]) -> Self {
        let mut peer = Self { stream: session(gateway).await, acknowledges: true };
        peer.write(PREFACE).await;
        peer.write(&frame(SETTINGS, 0, 0, settings)).await;
        peer
    }

    /// Connects a peer with this initial window of its streams.
    pub async fn with_window(gateway: &Gateway, bytes: u32) -> Self {
        Self::with_settings(gateway, &initial_window(bytes)[9..]).await
    }

    /// Opens a tunnel to `authority`.
    pub async fn tunnel(&mut self, stream: u32, authority: &str) {
        let fields: [(&str, &[u8]); 2] =
            [(":method", b"CONNECT"), (":authority", authority.as_bytes())];
        self.headers(stream, &fields).await;
        assert_eq!(self.ending(stream).await, Ending::Answered);
    }

    /// Splits the peer into one that reads frames and a plain writer.
    pub fn split(
        self,
    ) -> (RawPeer<ReadHalf<TlsStream<TcpStream>>>, WriteHalf<TlsStream<TcpStream>>) {
        let (stream, write) = tokio::io::split(self.stream);
        (RawPeer { stream, acknowledges: false }, write)
    }

    /// Ends the connection by FIN, without close_notify. A socket that is closed with unread bytes
    /// would end by RST, and the kernel would drop unsent bytes.
    pub async fn close_with_fin(mut self) {
        let socket = socket2::SockRef::from(self.stream.get_ref().0);
        socket.shutdown(std::net::Shutdown::Write).expect("an open connection");
        while self.next().await.is_some() {}
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("an open connection");
        self.stream.flush().await.expect("an open connection");
    }

    pub async fn headers(&mut self, stream: u32, fields: &[(&str, &[u8])]) {
        self.write(&headers(stream, fields)).await;
    }

    /// Returns the end of `stream`: the code of the gateway's reset, or an answer.
    pub async fn ending(&mut self, stream: u32) -> Ending {
        loop {
            let frame = self.next().await.expect("an open connection");
            assert_ne!(frame.kind, GOAWAY, "{frame:?}");
            if self.acknowledges && frame.kind == SETTINGS && !frame.payload.is_empty() {
                self.write(&self::frame(SETTINGS, ACK, 0, &[])).await;
            }
            if frame.stream != stream {
                continue;
            }
            match (frame.kind, frame.payload.as_slice()) {
                (RST_STREAM, &[.., code]) => return Ending::Reset(code),
                (HEADERS, _) => return Ending::Answered,
                _ => {}
            }
        }
    }
}

impl<S: AsyncRead + Unpin> RawPeer<S> {
    /// Returns the next frame; none after the end of the connection.
    pub async fn next(&mut self) -> Option<Frame> {
        read_frame(&mut self.stream).await
    }
}

/// End of a stream.
#[derive(Debug, PartialEq)]
pub enum Ending {
    Reset(u8),
    Answered,
}
