//! A toxic link: a TCP relay that delays, slices, slows and cuts what goes through it.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::reset;

/// What is read at once.
const CHUNK: usize = 16 * 1024;
/// Chunks on the way.
const CHUNKS_MAX: usize = 16;

/// What happens to one direction of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Toxic {
    /// Everything comes this much later, and nothing waits for what goes before it.
    pub delay: Duration,
    /// The most bytes of one write.
    pub slice: Option<usize>,
    /// Bytes a second.
    pub limit: Option<u32>,
    /// After how many bytes the direction is cut, and how.
    pub cut: Option<(u64, Cut)>,
}

/// How a link is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// RST to both ends.
    Reset,
    /// FIN to who receives; what is sent after that is taken and lost.
    End,
    /// What is sent after that is taken and lost, and nobody is told.
    Silence,
}

impl Toxic {
    /// Cuts after so many bytes.
    pub fn cut(after: u64, how: Cut) -> Self {
        Self {
            cut: Some((after, how)),
            ..Self::default()
        }
    }

    /// The most bytes of one write: with a limit, those of a twentieth of a second.
    fn write_bytes(&self) -> usize {
        let limited = self.limit.map(|limit| (limit as usize / 20).max(1));
        let sizes = [self.slice, limited].into_iter().flatten();
        sizes.min().unwrap_or(CHUNK)
    }
}

/// A running link, gone with all its connections when it is dropped.
pub struct Link {
    pub address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Link {
    /// Relays every connection to `to`. By its number, `toxics` says what happens to it on the
    /// way there and on the way back.
    pub fn new(
        listener: TcpListener,
        to: SocketAddr,
        toxics: impl Fn(usize) -> [Toxic; 2] + Send + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("an address");
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            let mut number = 0;
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(relay(stream, to, toxics(number)));
                number += 1;
            }
        });
        Self {
            address,
            _tasks: tasks,
        }
    }
}

async fn relay(mut near: TcpStream, to: SocketAddr, [there, back]: [Toxic; 2]) {
    let Ok(mut far) = TcpStream::connect(to).await else {
        return reset(near);
    };
    for stream in [&near, &far] {
        // Slices stay what they are, and only a clean end of both directions looks like one.
        stream.set_nodelay(true).expect("an open connection");
        set_linger(stream, Some(Duration::ZERO));
    }
    let (near_read, near_write) = near.split();
    let (far_read, far_write) = far.split();
    let ended = tokio::try_join!(
        direction(near_read, far_write, there),
        direction(far_read, near_write, back)
    );
    if ended.is_ok() {
        set_linger(&near, None);
        set_linger(&far, None);
    }
}

fn set_linger(stream: &TcpStream, linger: Option<Duration>) {
    // One that is gone needs none.
    let _ = socket2::SockRef::from(stream).set_linger(linger);
}

/// What was read and when it is due; no bytes are the end.
type Chunk = (Instant, io::Result<Vec<u8>>);

/// Relays one direction to its end.
///
/// # Errors
/// It has broken, or is to be cut by a reset.
pub async fn direction(
    read: impl AsyncRead + Unpin,
    write: impl AsyncWrite + Unpin,
    toxic: Toxic,
) -> io::Result<()> {
    let (queue, queued) = channel(CHUNKS_MAX);
    tokio::try_join!(take(read, queue, toxic.delay), give(write, queued, toxic)).map(|_| ())
}

/// Reads until the end. What nobody waits for any more is lost.
async fn take(
    mut read: impl AsyncRead + Unpin,
    queue: Sender<Chunk>,
    delay: Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = read.read(&mut buffer).await;
        let last = !matches!(count, Ok(1..));
        let chunk = count.map(|count| buffer[..count].to_vec());
        let _ = queue.send((Instant::now() + delay, chunk)).await;
        if last {
            return Ok(());
        }
    }
}

async fn give(
    mut write: impl AsyncWrite + Unpin,
    mut queued: Receiver<Chunk>,
    toxic: Toxic,
) -> io::Result<()> {
    let mut left = toxic.cut.map_or(u64::MAX, |(after, _)| after);
    while let Some((due, chunk)) = queued.recv().await {
        sleep_until(due).await;
        let chunk = chunk?;
        if chunk.is_empty() {
            break;
        }
        for slice in chunk.chunks(toxic.write_bytes()) {
            let most = usize::try_from(left).map_or(slice.len(), |left| left.min(slice.len()));
            write.write_all(&slice[..most]).await?;
            left -= most as u64;
            match toxic.cut {
                Some((_, how)) if left == 0 => return cut(write, queued, how).await,
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
    // From here on the reader's bytes are lost.
    drop(queued);
    match how {
        Cut::Reset => Err(io::ErrorKind::ConnectionReset.into()),
        Cut::End => write.shutdown().await,
        Cut::Silence => pending().await,
    }
}
