//! Allocations, system calls and copied bytes of the gateway's thread: for a connection and a
//! tunnel, and in the steady state for a mebibyte and a request.
//!
//! They include TLS and HTTP/2. They exclude the peer and the endpoint, which have separate
//! threads, and the log, which is off. Rows of [`CALLS_MAX`] fail above their limit, and the part
//! of traces above [`TRACES_MAX`].

use std::process::ExitCode;
use std::sync::Arc;

use bytes::Bytes;
use rustls::ClientConfig;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::alike;
use crate::allocations::Usage;
use crate::gateway::{Endpoint, Running, THREAD, runtime};
use crate::handshake::Identities;
use crate::syscalls::{self, Counter, Counts};
use crate::traces;

const CONNECTIONS: u32 = 300;
const TUNNELS: u32 = 3_000;
const REQUESTS: u32 = 20_000;
const MIB: u32 = 512;
/// Work before the steady state: windows have grown, and buffers are lent.
const REQUESTS_OF_WARM_UP: u32 = 2_000;
const MIB_OF_WARM_UP: u32 = 64;
/// Number of system calls whose names are printed.
const NAMED: usize = 5;

const TUNNEL: &str = "tunnel of 128 bytes each way";
const SNI: &str = "SNI connection";
const REQUEST: &str = "request of 128 bytes";
/// Limits of system calls besides [`WAIT`], whose number depends on how soon peers answer. They are
/// 17, 22 and 4, and few of the allocator.
const CALLS_MAX: [(&str, f64); 3] = [(TUNNEL, 17.2), (SNI, 22.2), (REQUEST, 4.1)];
const WAIT: &str = "epoll_wait";
/// Limit of the part of the time of a tunnel that traces of 1 % of the tunnels add.
const TRACES_MAX: f64 = 0.01;

/// Row of the table.
struct Row {
    what: &'static str,
    /// Number of units that the figures are divided by.
    count: u32,
    usage: Usage,
    /// None without perf.
    calls: Option<Counts>,
}

/// Prints the table. Fails if a row has more system calls than its limit, or traces add more time
/// than theirs.
#[expect(clippy::print_stdout, reason = "this is what it is run for")]
pub fn print() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    let rows = runtime().block_on(rows());
    println!("the gateway's thread, for each   allocations     bytes      µs   copied  calls");
    for row in &rows {
        let each = |sum: f64| sum / f64::from(row.count);
        let all = row.calls_except("").map(each);
        println!(
            "{:<32} {:>11.3} {:>9.0} {:>7.1} {:>8} {:>6}  {}",
            row.what,
            each(row.usage.count as f64),
            each(row.usage.bytes as f64),
            each(row.usage.time.as_secs_f64() * 1e6),
            or_dash(row.usage.copied.map(|bytes| format!("{:.0}", each(bytes as f64)))),
            or_dash(all.map(|count| format!("{count:.1}"))),
            row.named_calls(),
        );
        let limit = CALLS_MAX.iter().find(|(what, _)| *what == row.what);
        let active = row.calls_except(WAIT).map(each);
        if let (Some((what, limit)), Some(active)) = (limit, active)
            && active > *limit
        {
            println!("MISS {what}: {active:.1} system calls besides {WAIT}, more than {limit}");
            code = ExitCode::FAILURE;
        }
    }
    if let Some(row) = rows.iter().find(|row| row.what == TUNNEL) {
        let (added, tunnel) = (traces::added_time(), row.usage.time / row.count);
        let part = added.as_secs_f64() / tunnel.as_secs_f64();
        println!("traces of 1 % add {added:?} to a {TUNNEL}, {:.2} %", part * 100.0);
        if part > TRACES_MAX {
            println!("MISS traces: more than {:.0} %", TRACES_MAX * 100.0);
            code = ExitCode::FAILURE;
        }
    }
    if rows.iter().any(|row| row.calls.is_none()) {
        println!("SKIPPED system calls: they need perf and access to the kernel's tracepoints");
    }
    if rows.iter().any(|row| row.usage.copied.is_none()) {
        println!("SKIPPED copied bytes: they need `--features count-copies`, as in `make parts`");
    }
    code
}

fn or_dash(figure: Option<String>) -> String {
    figure.unwrap_or_else(|| "–".to_owned())
}

impl Row {
    /// Returns the number of system calls with other names.
    fn calls_except(&self, name: &str) -> Option<f64> {
        let others = self.calls.as_ref()?.iter().filter(|(other, _)| other != name);
        Some(others.map(|(_, count)| *count).sum::<u64>() as f64)
    }

    /// Lists the most frequent system calls.
    fn named_calls(&self) -> String {
        let calls = self.calls.iter().flatten().take(NAMED);
        let each = |count: u64| count as f64 / f64::from(self.count);
        let named = calls.map(|(name, count)| format!("{name} {:.2}", each(*count)));
        named.collect::<Vec<_>>().join(", ")
    }
}

async fn rows() -> Vec<Row> {
    let identities = Identities::new();
    let (gateway, client) = (Running::start(identities.server()), identities.client());
    // One unmeasured pass fills caches and initialises lazy values.
    connections(&gateway, &client, 10, || ()).await;
    passthrough(&gateway, 10).await;
    let new = || gateway.reload(identities.server());
    let unknown = async || connections(&gateway, &client, CONNECTIONS, new).await;
    let unknown = measure(&gateway, "connection with a new chain", CONNECTIONS, unknown).await;
    let known = async || connections(&gateway, &client, CONNECTIONS, || ()).await;
    let known = measure(&gateway, "connection with a known chain", CONNECTIONS, known).await;
    let connection = connect(&gateway, &client).await;
    churn(&connection, 100).await;
    let churned = async || churn(&connection, TUNNELS).await;
    let churned = measure(&gateway, TUNNEL, TUNNELS, churned).await;
    let passed = async || passthrough(&gateway, TUNNELS).await;
    let passed = measure(&gateway, SNI, TUNNELS, passed).await;
    vec![
        unknown,
        known,
        churned,
        passed,
        requests(&gateway, &connection).await,
        up(&gateway, &connection).await,
        down(&gateway, &connection).await,
    ]
}

/// Measures the gateway's thread while `work` runs.
async fn measure(
    gateway: &Running,
    what: &'static str,
    count: u32,
    work: impl AsyncFnOnce(),
) -> Row {
    let counter = syscalls::thread(THREAD).and_then(Counter::start);
    let begun = gateway.usage().await;
    work().await;
    let usage = gateway.usage().await - begun;
    Row { what, count, usage, calls: counter.map(Counter::stop) }
}

async fn connect(gateway: &Running, client: &Arc<ClientConfig>) -> Client {
    let connected = Client::connect(gateway.addresses[0], client).await;
    connected.expect("a connection")
}

async fn open(connection: &Client, endpoint: Endpoint) -> Tunnel {
    let opened = connection.tunnel(&endpoint.authority()).await;
    opened.expect("a tunnel")
}

/// Opens connections, each with one tunnel, and closes them.
async fn connections(gateway: &Running, client: &Arc<ClientConfig>, count: u32, before: impl Fn()) {
    for _ in 0..count {
        before();
        let connection = connect(gateway, client).await;
        exchange(&connection).await;
        // The result of the close is not measured.
        drop(connection.close().await);
    }
}

async fn churn(connection: &Client, count: u32) {
    for _ in 0..count {
        exchange(connection).await;
    }
}

/// Opens connections that are routed by their server name, and ends them after the answer.
async fn passthrough(gateway: &Running, count: u32) {
    let hello = alike::hello("outbound_.80_._.endpoint.app");
    for _ in 0..count {
        let stream = TcpStream::connect(gateway.addresses[1]).await;
        let (mut stream, mut answer) = (stream.expect("a connection"), vec![0; hello.len()]);
        stream.write_all(&hello).await.expect("a connection");
        stream.read_exact(&mut answer).await.expect("an echo");
        stream.shutdown().await.expect("a connection");
        assert_eq!(stream.read(&mut answer).await.expect("an end"), 0);
    }
}

/// Opens a tunnel with one request and its answer.
async fn exchange(connection: &Client) {
    let mut tunnel = open(connection, Endpoint::Echo).await;
    let mut answer = Vec::new();
    tunnel.write_all(&[7; 128]).await.expect("a tunnel");
    tunnel.shutdown().await.expect("a tunnel");
    tunnel.read_to_end(&mut answer).await.expect("an echo");
    assert_eq!(answer.len(), 128);
}

/// Measures requests on one open tunnel.
async fn requests(gateway: &Running, connection: &Client) -> Row {
    let mut tunnel = open(connection, Endpoint::Echo).await;
    let mut requests = async |count| {
        for _ in 0..count {
            let mut answer = [0; 128];
            tunnel.write_all(&[7; 128]).await.expect("a tunnel");
            tunnel.read_exact(&mut answer).await.expect("an echo");
        }
    };
    requests(REQUESTS_OF_WARM_UP).await;
    let work = async || requests(REQUESTS).await;
    measure(gateway, REQUEST, REQUESTS, work).await
}

async fn up(gateway: &Running, connection: &Client) -> Row {
    let mut tunnel = open(connection, Endpoint::Sink).await;
    let part = Bytes::from(vec![7; 1 << 20]);
    let mut send = async |count| {
        for _ in 0..count {
            tunnel.send(part.clone()).await.expect("a tunnel");
        }
    };
    send(MIB_OF_WARM_UP).await;
    measure(gateway, "MiB up", MIB, async || send(MIB).await).await
}

async fn down(gateway: &Running, connection: &Client) -> Row {
    let mut tunnel = open(connection, Endpoint::Source).await;
    let mut receive = async |mib: u32| {
        let mut left = mib as usize * (1 << 20);
        while left > 0 {
            let bytes = tunnel.chunk().await.expect("a tunnel");
            left = left.saturating_sub(bytes.expect("a source").len());
        }
    };
    receive(MIB_OF_WARM_UP).await;
    measure(gateway, "MiB down", MIB, async || receive(MIB).await).await
}
