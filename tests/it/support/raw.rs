//! Hand-written HTTP/2, for frames that no client library sends.

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{CLIENT, GATEWAY, Gateway, identities};

/// Frame types (RFC 9113 section 6).
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

/// Connection preface of a client (RFC 9113 section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Flags (RFC 9113 section 6).
pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;
pub const PRIORITIZED: u8 = 0x20;

/// Returns the bytes of a frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, high, middle, low] = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut frame = vec![high, middle, low, kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns HEADERS with the whole field block of [`block`].
pub fn headers(stream: u32, fields: &[(&str, &[u8])]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &block(fields))
}

/// Returns a field block, each field as a literal without indexing (RFC 7541 section 6.2.2).
pub fn block(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name.as_bytes(), value] {
            length(text.len(), &mut block);
            block.extend(text);
        }
    }
    block
}

/// Writes the length of a string without Huffman coding (RFC 7541 section 5.1).
fn length(length: usize, block: &mut Vec<u8>) {
    let Some(mut rest) = length.checked_sub(127) else {
        block.push(u8::try_from(length).expect("less than 127"));
        return;
    };
    block.push(127);
    while rest >= 128 {
        block.push(u8::try_from(rest % 128).expect("seven bits") | 128);
        rest /= 128;
    }
    block.push(u8::try_from(rest).expect("seven bits"));
}

/// Frame as received.
#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

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

    /// Opens a session, and sends `preface` in place of the preface and SETTINGS.
    pub async fn with_preface(gateway: &Gateway, preface: &[u8]) -> Self {
        let mut peer = Self { stream: session(gateway).await, acknowledges: false };
        peer.try_write(preface).await;
        peer
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
        let [a, b, c, d] = bytes.to_be_bytes();
        // SETTINGS_INITIAL_WINDOW_SIZE is setting 4.
        Self::with_settings(gateway, &[0, 4, a, b, c, d]).await
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

    /// Writes to a connection that the gateway may have ended.
    pub async fn try_write(&mut self, bytes: &[u8]) {
        if self.stream.write_all(bytes).await.is_ok() {
            let _ = self.stream.flush().await;
        }
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
        let mut head = [0; 9];
        self.stream.read_exact(&mut head).await.ok()?;
        let [high, middle, low, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
        self.stream.read_exact(&mut payload).await.ok()?;
        Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
    }
}

/// End of a stream.
#[derive(Debug, PartialEq)]
pub enum Ending {
    Reset(u8),
    Answered,
}
