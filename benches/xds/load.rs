//! Latency of the data path while the mesh changes, and while it does not.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::gateway::Running;
use crate::support::{ECHO, Endpoint, identities};

/// Number of tunnels with one request under way each.
const TUNNELS: usize = 8;
/// Bytes of a request and of its answer.
const BYTES: usize = 128;
/// Interval of changes.
const APART: Duration = Duration::from_millis(1);

/// The 99th percentile at rest and under 1,000 changes a second.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    pub rest: Duration,
    pub changes: Duration,
}

impl Pair {
    pub fn ratio(self) -> f64 {
        self.changes.as_secs_f64() / self.rest.as_secs_f64().max(1e-9)
    }
}

/// Measures `pairs` pairs, in alternating order.
pub async fn run(running: &Running, pairs: usize, each: Duration) -> Vec<Pair> {
    let listener = TcpListener::bind(running.endpoint()).await.expect("an endpoint's address");
    let _endpoint = Endpoint::echo(listener);
    let mut found = Vec::new();
    for index in 0..pairs {
        let (rest, changes) = match index % 2 {
            0 => {
                let rest = p99(running, each).await;
                (rest, changing(running, each).await)
            }
            _ => {
                let changes = changing(running, each).await;
                (p99(running, each).await, changes)
            }
        };
        found.push(Pair { rest, changes });
    }
    found
}

async fn changing(running: &Running, each: Duration) -> Duration {
    let (stop, stopped) = mpsc::channel::<()>();
    let changes = running.control.changes.clone();
    let changes = std::thread::spawn(move || {
        let (began, mut sent) = (Instant::now(), 0);
        let due = |sent: u32| (APART * sent).saturating_sub(began.elapsed());
        while stopped.recv_timeout(due(sent)) == Err(RecvTimeoutError::Timeout) {
            changes.make();
            sent += 1;
        }
        f64::from(sent) / began.elapsed().as_secs_f64()
    });
    let took = p99(running, each).await;
    drop(stop);
    let rate = changes.join().expect("changes");
    assert!(rate > 900.0, "only {rate:.0} changes a second");
    took
}

async fn p99(running: &Running, each: Duration) -> Duration {
    let client = Arc::new(running.gateway.client(identities()).await);
    let ends = Instant::now() + each;
    let mut tunnels = tokio::task::JoinSet::new();
    for _ in 0..TUNNELS {
        let client = Arc::clone(&client);
        tunnels.spawn(async move {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            let (mut took, mut answer) = (Vec::new(), [0; BYTES]);
            while Instant::now() < ends {
                let began = Instant::now();
                tunnel.write_all(&[1; BYTES]).await.expect("a request");
                tunnel.read_exact(&mut answer).await.expect("an answer");
                took.push(began.elapsed());
            }
            took
        });
    }
    let mut all: Vec<_> = tunnels.join_all().await.into_iter().flatten().collect();
    percentile(&mut all, 99)
}

/// Returns a percentile of the durations.
pub fn percentile(all: &mut [Duration], percent: usize) -> Duration {
    all.sort_unstable();
    all[(all.len() * percent / 100).min(all.len() - 1)]
}
