//! Victim: a normal client that sends small requests on its own connection, at fixed times rather
//! than after the previous answer.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use strait::tools::hbone::Client;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout_at;

use crate::support::{CLIENT, ECHO, GATEWAY, identities};

pub const REQUESTS_PER_SECOND: u32 = 200;
/// Time for the last requests to be answered.
const GRACE: Duration = Duration::from_secs(2);
const REQUEST: &[u8; 64] = &[b'e'; 64];

/// Way to the endpoint.
pub enum Way {
    /// Tunnels of one HBONE connection.
    Hbone(Client),
    /// TCP connections from this address to a listener of a binding, or to the endpoint itself.
    Tcp { from: IpAddr, to: SocketAddr },
}

/// Byte stream to the endpoint.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Way {
    /// Connects to an HBONE listener.
    pub async fn hbone(address: SocketAddr) -> Self {
        let tls = identities().client(CLIENT, GATEWAY);
        Self::Hbone(Client::connect(address, &tls).await.expect("a victim"))
    }

    /// Opens a stream to the endpoint.
    pub async fn open(&self) -> io::Result<Box<dyn Stream>> {
        match self {
            Self::Hbone(client) => {
                let tunnel = client.tunnel(ECHO).await.map_err(io::Error::other)?;
                Ok(Box::new(tunnel))
            }
            Self::Tcp { from, to } => {
                let socket = TcpSocket::new_v4()?;
                socket.bind((*from, 0).into())?;
                let stream = socket.connect(*to).await?;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream))
            }
        }
    }
}

/// Running victim.
pub struct Victim {
    stop: Sender<()>,
    running: JoinHandle<Vec<Request>>,
}

/// Request of the victim.
#[derive(Clone, Copy, Debug)]
struct Request {
    due: Instant,
    /// Time from its due time to its answer; none without an answer.
    latency: Option<Duration>,
}

/// All requests of the victim, in the order of their due times.
pub struct Requests(Vec<Request>);

/// Latency of the victim in a part of its time.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub requests: usize,
    pub lost: usize,
    /// None if so many requests were lost that the figure does not exist.
    pub p50: Option<Duration>,
    pub p99: Option<Duration>,
}

impl Victim {
    /// Begins. Each request is a separate stream: 64 bytes in both directions, and a clean end.
    pub fn start(way: Way) -> Self {
        let (stop, stopped) = channel();
        // The number of requests that a flood of a minute could delay.
        let (send, dues) = mpsc::channel(usize::try_from(60 * REQUESTS_PER_SECOND).expect("few"));
        // A thread's timer is precise; the runtime's has a resolution of a millisecond.
        std::thread::spawn(move || {
            let mut due = Instant::now();
            let early = |due: Instant| due.saturating_duration_since(Instant::now());
            while stopped.recv_timeout(early(due)) == Err(RecvTimeoutError::Timeout) {
                if send.try_send(due).is_err() {
                    return;
                }
                due += Duration::from_secs(1) / REQUESTS_PER_SECOND;
            }
        });
        let running = tokio::spawn(requests(Arc::new(way), dues));
        Self { stop, running }
    }

    /// Stops, and waits briefly for missing answers.
    pub async fn finish(self) -> Requests {
        drop(self.stop);
        Requests(self.running.await.expect("a victim"))
    }
}

async fn requests(way: Arc<Way>, mut dues: mpsc::Receiver<Instant>) -> Vec<Request> {
    let (mut running, mut all) = (JoinSet::new(), Vec::new());
    while let Some(due) = dues.recv().await {
        let (way, index) = (Arc::clone(&way), all.len());
        all.push(Request { due, latency: None });
        // A request that fails counts as lost, for any reason.
        running.spawn(async move { (index, request(&way, due).await.ok()) });
        while let Some(done) = running.try_join_next() {
            let (index, latency) = done.expect("a request");
            all[index].latency = latency;
        }
    }
    let deadline = tokio::time::Instant::now() + GRACE;
    while let Ok(Some(done)) = timeout_at(deadline, running.join_next()).await {
        let (index, latency) = done.expect("a request");
        all[index].latency = latency;
    }
    all
}

async fn request(way: &Way, due: Instant) -> io::Result<Duration> {
    let mut stream = way.open().await?;
    stream.write_all(REQUEST).await?;
    let mut answer = [0; REQUEST.len()];
    stream.read_exact(&mut answer).await?;
    let latency = due.elapsed();
    stream.shutdown().await?;
    stream.read_to_end(&mut Vec::new()).await?;
    if &answer != REQUEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(latency)
}

impl Requests {
    /// Returns the latency of requests that were due in a period.
    pub fn latency(&self, from: Instant, to: Instant) -> Latency {
        let due = self.0.iter().filter(|request| (from..to).contains(&request.due));
        // A lost request counts as slower than any other.
        let mut all: Vec<Duration> =
            due.map(|request| request.latency.unwrap_or(Duration::MAX)).collect();
        all.sort_unstable();
        let at = |hundredths: usize| {
            let index = (all.len() * hundredths / 100).min(all.len().checked_sub(1)?);
            Some(all[index]).filter(|&latency| latency < Duration::MAX)
        };
        Latency {
            requests: all.len(),
            lost: all.iter().filter(|&&latency| latency == Duration::MAX).count(),
            p50: at(50),
            p99: at(99),
        }
    }
}
