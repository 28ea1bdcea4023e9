//! Application behind the endpoint, and plain client before Envoy. Neither uses HBONE, and both
//! check every byte.
//!
//! The client sends an [`Order`] and then the bytes of its upload. The application returns the
//! order at once and then the bytes that it requests, while the upload is still running. After the
//! whole upload, it ends its answer with the upload's SHA-256.

use std::io;
use std::net::SocketAddr;

use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::Net;

/// Bytes of a body held at once.
const CHUNK_BYTES: usize = 64 * 1024;
const ORDER_BYTES: usize = 25;

/// Payload of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// Seed of both directions. Connections of different seeds have nothing in common, and neither
    /// have both directions of one.
    pub seed: u64,
    pub up_bytes: u64,
    pub down_bytes: u64,
    /// True if the client ends its direction right after its upload, and the application waits for
    /// that; false if the application ends first.
    pub client_ends_first: bool,
}

impl TransferRequest {
    fn encode(self) -> [u8; ORDER_BYTES] {
        let mut bytes = [0; ORDER_BYTES];
        bytes[..8].copy_from_slice(&self.seed.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.up_bytes.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.down_bytes.to_be_bytes());
        bytes[24] = self.client_ends_first.into();
        bytes
    }

    fn decode(bytes: [u8; ORDER_BYTES]) -> Self {
        let number = |at: usize| {
            let bytes = bytes[at..at + 8].try_into().expect("eight bytes");
            u64::from_be_bytes(bytes)
        };
        Self {
            seed: number(0),
            up_bytes: number(8),
            down_bytes: number(16),
            client_ends_first: bytes[24] != 0,
        }
    }

    fn up_seed(self) -> u64 {
        self.seed * 2
    }

    fn down_seed(self) -> u64 {
        self.seed * 2 + 1
    }
}

/// Number of bytes moved so far, in either direction.
pub type Moved = watch::Sender<u64>;

/// Sends bytes that are derived from the seed. Returns their digest.
async fn send(
    to: &mut (impl AsyncWrite + Unpin),
    seed: u64,
    mut left: u64,
    moved: &Moved,
) -> io::Result<Vec<u8>> {
    let (mut source, mut hash) = (fastrand::Rng::with_seed(seed), Sha256::new());
    let mut chunk = vec![0; CHUNK_BYTES];
    while left > 0 {
        let count = CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES));
        source.fill(&mut chunk[..count]);
        hash.update(&chunk[..count]);
        to.write_all(&chunk[..count]).await?;
        moved.send_modify(|moved| *moved += count as u64);
        left -= count as u64;
    }
    Ok(hash.finalize().to_vec())
}

/// Receives this many bytes. Returns their digest.
async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    mut left: u64,
    moved: &Moved,
) -> io::Result<Vec<u8>> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    while left > 0 {
        let most = CHUNK_BYTES.min(usize::try_from(left).unwrap_or(CHUNK_BYTES));
        let count = from.read(&mut chunk[..most]).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hash.update(&chunk[..count]);
        moved.send_modify(|moved| *moved += count as u64);
        left -= count as u64;
    }
    Ok(hash.finalize().to_vec())
}

/// Asserts that only the end of the stream follows.
async fn end(from: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    match from.read(&mut [0]).await? {
        0 => Ok(()),
        _ => Err(io::Error::other("bytes after the end")),
    }
}

/// Starts the application at host 31. It ends on drop.
pub async fn application(net: Net) -> JoinSet<()> {
    let listener = net.listen(31, 9000).await;
    let mut task = JoinSet::new();
    task.spawn(serve_all(listener));
    task
}

async fn serve_all(listener: TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        // A failure is detected at the client, which gets no digest.
        connections.spawn(serve(stream));
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(mut stream: TcpStream) -> io::Result<()> {
    let mut order = [0; ORDER_BYTES];
    stream.read_exact(&mut order).await?;
    stream.write_all(&order).await?;
    let order = TransferRequest::decode(order);
    let (mut read, mut write) = stream.split();
    let moved = Moved::new(0);
    let up = async {
        let digest = receive(&mut read, order.up_bytes, &moved).await?;
        if order.client_ends_first {
            end(&mut read).await?;
        }
        Ok(digest)
    };
    let down = send(&mut write, order.down_seed(), order.down_bytes, &moved);
    let (digest, _) = tokio::try_join!(up, down)?;
    write.write_all(&digest).await?;
    write.shutdown().await?;
    if !order.client_ends_first {
        end(&mut read).await?;
    }
    Ok(())
}

/// Connection of the client on which the application has accepted the order.
pub struct Started {
    stream: TcpStream,
    order: TransferRequest,
}

/// Sends an order, and waits until the application has it: from here on the tunnel is open.
pub async fn start(client: SocketAddr, order: TransferRequest) -> io::Result<Started> {
    let mut stream = TcpStream::connect(client).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&order.encode()).await?;
    let mut taken = [0; ORDER_BYTES];
    stream.read_exact(&mut taken).await?;
    assert_eq!(TransferRequest::decode(taken), order, "another tunnel's bytes");
    Ok(Started { stream, order })
}

impl Started {
    /// Moves all bytes in both directions concurrently and checks them: the application's digest of
    /// the upload, the client's digest of the answer, and a clean end after that.
    pub async fn finish(self, moved: &Moved) -> io::Result<()> {
        let Self { mut stream, order } = self;
        let (mut read, mut write) = stream.split();
        let up = async {
            let digest = send(&mut write, order.up_seed(), order.up_bytes, moved).await?;
            if order.client_ends_first {
                write.shutdown().await?;
            }
            Ok(digest)
        };
        let down = receive(&mut read, order.down_bytes, moved);
        let (sent, received) = tokio::try_join!(up, down)?;
        let mut arrived = vec![0; sent.len()];
        read.read_exact(&mut arrived).await?;
        assert_eq!(arrived, sent, "SHA-256 of the upload");
        let mut nowhere = tokio::io::sink();
        let (seed, bytes) = (order.down_seed(), order.down_bytes);
        let right = send(&mut nowhere, seed, bytes, &Moved::new(0)).await?;
        assert_eq!(received, right, "SHA-256 of the download");
        end(&mut read).await?;
        if !order.client_ends_first {
            write.shutdown().await?;
        }
        Ok(())
    }
}
