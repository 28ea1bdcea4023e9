//! Load: clients that connect at a fixed rate, and tunnels that stay open.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use crate::support::{CLIENT, ECHO, GATEWAY, bytes, identities};

/// Number of tunnels that stay open.
pub const LONG: u64 = 16;
/// Bytes of one part of such a tunnel, and the pause after it.
const PART: u64 = 16 * 1024;
const PAUSE: Duration = Duration::from_millis(50);
/// Time after which a connection counts as lost.
const DEADLINE: Duration = Duration::from_secs(10);

/// Outcome of the connections.
#[derive(Default)]
pub struct Outcome {
    pub latencies: Vec<Duration>,
    /// Numbers of lost connections by their error.
    pub lost: BTreeMap<String, usize>,
}

/// Connects `rate` times a second until `stop`. Each connection opens one tunnel and uses it.
pub async fn connect(gateway: SocketAddr, rate: u32, stop: Arc<AtomicBool>) -> Outcome {
    let mut ticks = interval(Duration::from_secs(1) / rate);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (mut running, mut outcome) = (JoinSet::new(), Outcome::default());
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        running.spawn(async move {
            let done = timeout(DEADLINE, use_connection(gateway)).await;
            done.unwrap_or_else(|_| Err("no end in time".to_owned()))
        });
        while let Some(done) = running.try_join_next() {
            outcome.add(done.expect("a connection"));
        }
    }
    while let Some(done) = running.join_next().await {
        outcome.add(done.expect("a connection"));
    }
    outcome
}

async fn use_connection(gateway: SocketAddr) -> Result<Duration, String> {
    let begun = Instant::now();
    let tls = identities().client(CLIENT, GATEWAY);
    let at = |stage: &'static str| move |error: String| format!("{stage}: {error}");
    let client = Client::connect(gateway, &tls).await;
    let client = client.map_err(|error| at("connection")(error.to_string()))?;
    let tunnel = client.tunnel(ECHO).await;
    let mut tunnel = tunnel.map_err(|error| at("tunnel")(error.to_string()))?;
    let used = async {
        tunnel.write_all(b"hello").await?;
        tunnel.read_exact(&mut [0; 5]).await?;
        tunnel.shutdown().await?;
        tunnel.read_to_end(&mut Vec::new()).await
    };
    used.await.map_err(|error: io::Error| at("bytes")(error.to_string()))?;
    Ok(begun.elapsed())
}

impl Outcome {
    fn add(&mut self, done: Result<Duration, String>) {
        match done {
            Ok(latency) => self.latencies.push(latency),
            Err(error) => *self.lost.entry(error).or_default() += 1,
        }
    }

    /// Returns a quantile of the latency.
    pub fn quantile(&mut self, hundredths: usize) -> Duration {
        self.latencies.sort_unstable();
        let last = self.latencies.len().saturating_sub(1);
        let at = (self.latencies.len() * hundredths / 100).min(last);
        self.latencies.get(at).copied().unwrap_or_default()
    }
}

/// Opens tunnels of one connection, each of which echoes and compares bytes until `stop`. Returns
/// the number of bytes, or the error of the first that breaks.
pub async fn hold(gateway: SocketAddr, stop: Arc<AtomicBool>) -> JoinHandle<io::Result<u64>> {
    let tls = identities().client(CLIENT, GATEWAY);
    let client = Client::connect(gateway, &tls).await.expect("a connection");
    let mut tunnels = Vec::new();
    for _ in 0..LONG {
        tunnels.push(client.tunnel(ECHO).await.expect("a tunnel"));
    }
    tokio::spawn(async move {
        let mut running = JoinSet::new();
        for (id, tunnel) in (0..).zip(tunnels) {
            running.spawn(echo(tunnel, id, Arc::clone(&stop)));
        }
        let mut all = 0;
        while let Some(done) = running.join_next().await {
            all += done.expect("a tunnel")?;
        }
        drop(client);
        Ok(all)
    })
}

async fn echo(mut tunnel: Tunnel, id: u64, stop: Arc<AtomicBool>) -> io::Result<u64> {
    let mut at = 0;
    while !stop.load(Ordering::Relaxed) {
        let (mut read, mut write) = tokio::io::split(&mut tunnel);
        let send = bytes::send(&mut write, id, at, at + PART);
        let expect = bytes::expect(&mut read, id, at, at + PART);
        tokio::try_join!(send, expect)?;
        at += PART;
        sleep(PAUSE).await;
    }
    tunnel.shutdown().await?;
    bytes::expect_end(&mut tunnel).await;
    Ok(at)
}
