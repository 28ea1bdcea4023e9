//! TLS of an attacker that makes its own records: rustls performs the handshake and derives the
//! keys, and records are sealed and opened here.

use std::io::{self, ErrorKind};
use std::mem::take;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use aws_lc_rs::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey,
};
use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::ServerName;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{ClientConfig, ConnectionTrafficSecrets};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::support::{CLIENT, GATEWAY, identities};

/// Content types (RFC 8446 5.1).
pub const ALERT: u8 = 21;
pub const HANDSHAKE: u8 = 22;
pub const APPLICATION_DATA: u8 = 23;
/// KeyUpdate that requests another one (RFC 8446 4.6.3).
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 1];

const HEADER_BYTES: usize = 5;
/// Limit of the payload of a record.
const PLAINTEXT_MAX: usize = 16 * 1024;
const READ_BYTES: usize = 64 * 1024;

type Kernel = Arc<Mutex<KernelConnection<ClientConnectionData>>>;
type Secrets = (u64, ConnectionTrafficSecrets);

/// Sending half.
pub struct RecordWriter {
    socket: OwnedWriteHalf,
    key: Key,
    kernel: Kernel,
    /// Records that are not sent yet.
    sealed: Vec<u8>,
}

/// Receiving half.
pub struct RecordReader {
    socket: OwnedReadHalf,
    key: Key,
    kernel: Kernel,
    received: Vec<u8>,
    plaintext: Vec<u8>,
}

/// Connects with a valid certificate, and completes the handshake.
pub async fn connect(address: SocketAddr) -> io::Result<(RecordWriter, RecordReader)> {
    let mut config = ClientConfig::clone(&identities().client(CLIENT, GATEWAY));
    config.enable_secret_extraction = true;
    let nobody = ServerName::IpAddress(IpAddr::from([0; 4]).into());
    let connection = UnbufferedClientConnection::new(Arc::new(config), nobody);
    let mut connection = connection.map_err(io::Error::other)?;
    let mut socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let received = handshake(&mut connection, &mut socket).await?;
    let taken = connection.dangerous_into_kernel_connection();
    let (secrets, kernel) = taken.map_err(io::Error::other)?;
    let kernel = Arc::new(Mutex::new(kernel));
    let (read, write) = socket.into_split();
    let writer = RecordWriter {
        socket: write,
        key: Key::new(secrets.tx),
        kernel: Arc::clone(&kernel),
        sealed: Vec::new(),
    };
    let reader = RecordReader {
        socket: read,
        key: Key::new(secrets.rx),
        kernel,
        received,
        plaintext: Vec::new(),
    };
    Ok((writer, reader))
}

/// Performs the handshake. Returns what was received after it.
async fn handshake(
    connection: &mut UnbufferedClientConnection,
    socket: &mut TcpStream,
) -> io::Result<Vec<u8>> {
    let (mut incoming, mut outgoing) = (Vec::new(), Vec::new());
    loop {
        let UnbufferedStatus { discard, state, .. } = connection.process_tls_records(&mut incoming);
        let (mut is_complete, mut is_blocked, mut must_send) = (false, false, false);
        match state.map_err(io::Error::other)? {
            ConnectionState::EncodeTlsData(mut data) => {
                let size = match data.encode(&mut []) {
                    Err(EncodeError::InsufficientSize(size)) => size.required_size,
                    _ => 0,
                };
                let start = outgoing.len();
                outgoing.resize(start + size, 0);
                data.encode(&mut outgoing[start..]).map_err(io::Error::other)?;
            }
            ConnectionState::TransmitTlsData(data) => {
                must_send = true;
                data.done();
            }
            ConnectionState::BlockedHandshake => is_blocked = true,
            ConnectionState::WriteTraffic(_) => is_complete = true,
            _ => return Err(ErrorKind::ConnectionAborted.into()),
        }
        incoming.drain(..discard);
        if must_send {
            socket.write_all(&take(&mut outgoing)).await?;
        }
        if is_complete {
            return Ok(incoming);
        }
        if is_blocked && socket.read_buf(&mut incoming).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
}

impl RecordWriter {
    /// Seals a record, which [`RecordWriter::flush`] sends.
    pub fn push(&mut self, kind: u8, payload: &[u8]) {
        self.key.seal(kind, payload, &mut self.sealed);
    }

    /// Seals a KeyUpdate that requests another one, and switches the key.
    pub fn push_key_update(&mut self) {
        self.push(HANDSHAKE, &KEY_UPDATE);
        let mut kernel = self.kernel.lock().expect("no panic before");
        self.key = Key::new(kernel.update_tx_secret().expect("a key"));
    }

    /// Returns the number of bytes that are not sent yet.
    pub fn unsent(&self) -> usize {
        self.sealed.len()
    }

    /// Sends all records.
    pub async fn flush(&mut self) -> io::Result<()> {
        self.socket.write_all(&self.sealed).await?;
        self.sealed.clear();
        Ok(())
    }

    /// Sends application data in full records.
    pub async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(PLAINTEXT_MAX) {
            self.push(APPLICATION_DATA, part);
        }
        self.flush().await
    }
}

impl RecordReader {
    /// Reads application data.
    pub async fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        while self.plaintext.len() < bytes.len() {
            self.read_record().await?;
        }
        bytes.copy_from_slice(&self.plaintext[..bytes.len()]);
        self.plaintext.drain(..bytes.len());
        Ok(())
    }

    async fn read_record(&mut self) -> io::Result<()> {
        let end = loop {
            if let Some(&[_, _, _, high, low]) = self.received.first_chunk::<HEADER_BYTES>() {
                let end = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
                if end <= self.received.len() {
                    break end;
                }
            }
            self.received.reserve(READ_BYTES);
            if self.socket.read_buf(&mut self.received).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        };
        let mut record: Vec<u8> = self.received.drain(..end).collect();
        match self.key.open(&mut record) {
            Some((APPLICATION_DATA, payload)) => self.plaintext.extend(payload),
            Some((HANDSHAKE, [24, ..])) => {
                let mut kernel = self.kernel.lock().expect("no panic before");
                self.key = Key::new(kernel.update_rx_secret().expect("a key"));
            }
            Some((ALERT, _)) => return Err(ErrorKind::ConnectionAborted.into()),
            // A session ticket.
            Some(_) => {}
            None => return Err(ErrorKind::InvalidData.into()),
        }
        Ok(())
    }
}

/// Traffic key of one direction.
struct Key {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
}

impl Key {
    fn new((sequence, secrets): Secrets) -> Self {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (&CHACHA20_POLY1305, key, iv),
            _ => panic!("a cipher suite without a name here"),
        };
        let key = UnboundKey::new(algorithm, key.as_ref()).expect("a key of this suite");
        Self {
            key: LessSafeKey::new(key),
            iv: iv.as_ref().try_into().expect("an IV of this suite"),
            sequence,
        }
    }

    /// Returns the nonce of the next record (RFC 8446 5.3).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, of_sequence) in nonce.iter_mut().rev().zip(self.sequence.to_le_bytes()) {
            *byte ^= of_sequence;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Appends a sealed record.
    fn seal(&mut self, kind: u8, payload: &[u8], out: &mut Vec<u8>) {
        let protected = payload.len() + 1 + self.key.algorithm().tag_len();
        let [high, low] = u16::try_from(protected).expect("a record").to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        out.extend(header);
        let start = out.len();
        out.extend(payload);
        out.push(kind);
        let (nonce, aad) = (self.nonce(), Aad::from(header));
        let sealed = self.key.seal_in_place_separate_tag(nonce, aad, &mut out[start..]);
        out.extend(sealed.expect("a sealed record").as_ref());
    }

    /// Opens a record without padding in place. Returns its type and payload.
    fn open<'a>(&mut self, record: &'a mut [u8]) -> Option<(u8, &'a [u8])> {
        let nonce = self.nonce();
        let (header, protected) = record.split_first_chunk_mut::<HEADER_BYTES>()?;
        let opened = self.key.open_in_place(nonce, Aad::from(*header), protected);
        let (kind, payload) = opened.ok()?.split_last()?;
        Some((*kind, payload))
    }
}
