//! The victim: a good client that sends small requests on a connection of its own, when they are
//! due and not when the last one is answered.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use strait::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout_at;

use crate::support::{ECHO, identities};

pub const REQUESTS_PER_SECOND: u32 = 200;
/// The time for the last requests to be answered.
const GRACE: Duration = Duration::from_secs(2);
const REQUEST: &[u8; 64] = &[b'e'; 64];

/// A running victim.
pub struct Victim {
    stop: Sender<()>,
    running: JoinHandle<Vec<Request>>,
}

/// A request of the victim's.
#[derive(Clone, Copy, Debug)]
struct Request {
    due: Instant,
    /// From when it was due to its answer; none where there was none.
    latency: Option<Duration>,
}

/// All requests that the victim made, in the order of their time.
pub struct Requests(Vec<Request>);

/// The victim's latency in a part of its time.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub requests: usize,
    pub lost: usize,
    /// None where so many requests were lost that there is no such figure.
    pub p50: Option<Duration>,
    pub p99: Option<Duration>,
}

impl Victim {
    /// Connects and begins. Each request is a tunnel of its own: CONNECT, 64 bytes there and back,
    /// and a clean end.
    pub async fn start(address: std::net::SocketAddr) -> Self {
        let tls = identities().client(crate::support::CLIENT, crate::support::GATEWAY);
        let client = Client::connect(address, &tls).await.expect("a victim");
        let (stop, stopped) = channel();
        // As many as a flood of a minute could hold up.
        let (send, dues) = mpsc::channel(usize::try_from(60 * REQUESTS_PER_SECOND).expect("few"));
        // A thread's timer is precise; that of the runtime counts in milliseconds.
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
        let running = tokio::spawn(requests(client, dues));
        Self { stop, running }
    }

    /// Stops, and waits a little for the answers that are missing.
    pub async fn finish(self) -> Requests {
        drop(self.stop);
        Requests(self.running.await.expect("a victim"))
    }
}

async fn requests(client: Client, mut dues: mpsc::Receiver<Instant>) -> Vec<Request> {
    let client = Arc::new(client);
    let (mut running, mut all) = (JoinSet::new(), Vec::new());
    while let Some(due) = dues.recv().await {
        let (client, index) = (Arc::clone(&client), all.len());
        all.push(Request { due, latency: None });
        // A request that fails is a lost one, whatever the reason.
        running.spawn(async move { (index, request(&client, due).await.ok()) });
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

async fn request(client: &Client, due: Instant) -> std::io::Result<Duration> {
    let tunnel = client.tunnel(ECHO).await;
    let mut tunnel = tunnel.map_err(std::io::Error::other)?;
    tunnel.write_all(REQUEST).await?;
    let mut answer = [0; REQUEST.len()];
    tunnel.read_exact(&mut answer).await?;
    let latency = due.elapsed();
    tunnel.shutdown().await?;
    tunnel.read_to_end(&mut Vec::new()).await?;
    if &answer != REQUEST {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    Ok(latency)
}

impl Requests {
    /// Of the requests that were due from one time to another.
    pub fn latency(&self, from: Instant, to: Instant) -> Latency {
        let due = self
            .0
            .iter()
            .filter(|request| (from..to).contains(&request.due));
        // A lost request is slower than any other.
        let mut all: Vec<Duration> = due
            .map(|request| request.latency.unwrap_or(Duration::MAX))
            .collect();
        all.sort_unstable();
        let at = |hundredths: usize| {
            let index = (all.len() * hundredths / 100).min(all.len().checked_sub(1)?);
            Some(all[index]).filter(|&latency| latency < Duration::MAX)
        };
        Latency {
            requests: all.len(),
            lost: all
                .iter()
                .filter(|&&latency| latency == Duration::MAX)
                .count(),
            p50: at(50),
            p99: at(99),
        }
    }
}
