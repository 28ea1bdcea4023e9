//! TCP relay that delays, slices, slows and cuts its streams.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::reset;

/// Bytes of one read.
const CHUNK: usize = 16 * 1024;
/// Limit of chunks in transit.
const CHUNKS_MAX: usize = 16;

/// Faults of one direction of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Delay of every chunk. Chunks do not wait for earlier ones.
    pub delay: Duration,
    /// Limit of one write, in bytes.
    pub slice: Option<usize>,
    /// Rate limit, in bytes per second.
    pub limit: Option<u32>,
    /// Number of bytes after which the direction is cut, and the kind of cut.
    pub cut: Option<(u64, Cut)>,
}

/// Kind of cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// RST to both ends.
    Reset,
    /// FIN to the receiver; later bytes are accepted and lost.
    End,
    /// Later bytes are accepted and lost, without a signal to either end.
    Silence,
}

impl Faults {
    /// Cuts the direction after this number of bytes.
    pub fn cut(after: u64, how: Cut) -> Self {
        Self { cut: Some((after, how)), ..Self::default() }
    }

    /// Returns the limit of one write: with a rate limit, the bytes of a twentieth of a second.
    fn write_bytes(&self) -> usize {
        let limited = self.limit.map(|limit| (limit as usize / 20).max(1));
        let sizes = [self.slice, limited].into_iter().flatten();
        sizes.min().unwrap_or(CHUNK)
    }
}

/// Running relay. It ends on drop, with all its connections.
pub struct FaultyRelay {
    pub address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl FaultyRelay {
    /// Relays every connection to `to`. `toxics` maps the number of a connection to the faults of
    /// both directions, and is called again for each chunk.
    pub fn new(
        listener: TcpListener,
        to: SocketAddr,
        toxics: impl Fn(usize) -> [Faults; 2] + Send + Sync + 'static,
    ) -> Self {
        let (address, toxics) = (listener.local_addr().expect("an address"), Arc::new(toxics));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            let mut number = 0;
            while let Ok((stream, _)) = listener.accept().await {
                let toxics = Arc::clone(&toxics);
                connections.spawn(relay(stream, to, move || toxics(number)));
                number += 1;
            }
        });
        Self { address, _tasks: tasks }
    }
}

async fn relay(mut near: TcpStream, to: SocketAddr, toxics: impl Fn() -> [Faults; 2]) {
    let Ok(mut far) = TcpStream::connect(to).await else {
        return reset(near);
    };
    for stream in [&near, &far] {
        // Slices stay separate segments, and only a clean end of both directions looks clean.
        stream.set_nodelay(true).expect("an open connection");
        set_linger(stream, Some(Duration::ZERO));
    }
    let (near_read, near_write) = near.split();
    let (far_read, far_write) = far.split();
    let ended = tokio::try_join!(
        direction(near_read, far_write, || toxics()[0]),
        direction(far_read, near_write, || toxics()[1])
    );
    if ended.is_ok() {
        set_linger(&near, None);
        set_linger(&far, None);
    }
}

fn set_linger(stream: &TcpStream, linger: Option<Duration>) {
    // A closed connection needs no linger.
    let _ = socket2::SockRef::from(stream).set_linger(linger);
}

/// Bytes read and the time at which they are due; empty at the end.
type Chunk = (Instant, io::Result<Vec<u8>>);

/// Relays one direction to its end, with the faults of each time.
///
/// # Errors
/// The connection broke, or the direction is to be cut by a reset.
pub async fn direction(
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
    toxic: impl Fn() -> Faults,
) -> io::Result<()> {
    let (queue, queued) = channel(CHUNKS_MAX);
    tokio::try_join!(take(read, queue, &toxic), give(write, queued, &toxic)).map(|_| ())
}

/// Reads until the end. Bytes without a receiver are lost.
async fn take(
    mut read: impl AsyncRead + Unpin,
    queue: Sender<Chunk>,
    toxic: impl Fn() -> Faults,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = read.read(&mut buffer).await;
        let last = !matches!(count, Ok(1..));
        let chunk = count.map(|count| buffer[..count].to_vec());
        let _ = queue.send((Instant::now() + toxic().delay, chunk)).await;
        if last {
            return Ok(());
        }
    }
}

async fn give(
    mut write: impl AsyncWrite + Unpin,
    mut queued: Receiver<Chunk>,
    toxic: impl Fn() -> Faults,
) -> io::Result<()> {
    let mut sent = 0;
    while let Some((due, chunk)) = queued.recv().await {
        sleep_until(due).await;
        let chunk = chunk?;
        if chunk.is_empty() {
            break;
        }
        let toxic = toxic();
        for slice in chunk.chunks(toxic.write_bytes()) {
            let left = toxic.cut.map_or(u64::MAX, |(after, _)| after.saturating_sub(sent));
            let most = usize::try_from(left).map_or(slice.len(), |left| left.min(slice.len()));
            write.write_all(&slice[..most]).await?;
            sent += most as u64;
            match toxic.cut {
                Some((after, how)) if sent >= after => return cut(write, queued, how).await,
                _ => {}
            }
            if let Some(limit) = toxic.limit {
                let time = Duration::from_secs(most as u64) / limit;
                // deadline: the limit is a matter of time.
                tokio::time::sleep(time).await;
            }
        }
    }
    write.shutdown().await
}

async fn cut(
    mut write: impl AsyncWrite + Unpin,
    queued: Receiver<Chunk>,
    how: Cut,
) -> io::Result<()> {
    // Further bytes of the reader are lost.
    drop(queued);
    match how {
        Cut::Reset => Err(io::ErrorKind::ConnectionReset.into()),
        Cut::End => write.shutdown().await,
        Cut::Silence => pending().await,
    }
}
