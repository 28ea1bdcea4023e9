//! Allocations of the gateway's thread for a connection, a tunnel and a mebibyte.
//!
//! They include TLS and HTTP/2. They exclude the peer and the endpoint, which have separate
//! threads, and the log, which is off.

use std::sync::Arc;

use bytes::Bytes;
use rustls::ClientConfig;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::allocations::Usage;
use crate::gateway::{Endpoint, Running, runtime};
use crate::handshake::Identities;

const CONNECTIONS: u32 = 300;
const TUNNELS: u32 = 3_000;
const MIB: u32 = 512;

/// Prints the table.
#[expect(clippy::print_stdout, reason = "this is what it is run for")]
pub fn print() {
    let rows = runtime().block_on(rows());
    println!("the gateway's thread, for each       allocations      bytes   µs");
    for (what, count, usage) in rows {
        let each = |sum: f64| sum / f64::from(count);
        println!(
            "{what:<36} {:>11.1} {:>10.0} {:>7.1}",
            each(usage.count as f64),
            each(usage.bytes as f64),
            each(usage.time.as_secs_f64() * 1e6),
        );
    }
}

type Row = (&'static str, u32, Usage);

async fn rows() -> Vec<Row> {
    let identities = Identities::new();
    let (gateway, client) = (Running::start(identities.server()), identities.client());
    // One unmeasured pass fills caches and initialises lazy values.
    connections(&gateway, &client, 10, || ()).await;
    let new = || gateway.reload(identities.server());
    let unknown = connections(&gateway, &client, CONNECTIONS, new).await;
    let known = connections(&gateway, &client, CONNECTIONS, || ()).await;
    let connection = connect(&gateway, &client).await;
    churn(&gateway, &connection, 100).await;
    let churned = churn(&gateway, &connection, TUNNELS).await;
    vec![
        ("connection with a new chain", CONNECTIONS, unknown),
        ("connection with a known chain", CONNECTIONS, known),
        ("tunnel of 128 bytes each way", TUNNELS, churned),
        ("MiB up", MIB, up(&gateway, &connection).await),
        ("MiB down", MIB, down(&gateway, &connection).await),
    ]
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
async fn connections(
    gateway: &Running,
    client: &Arc<ClientConfig>,
    count: u32,
    before: impl Fn(),
) -> Usage {
    let begun = gateway.usage().await;
    for _ in 0..count {
        before();
        let connection = connect(gateway, client).await;
        exchange(&connection).await;
        // The result of the close is not measured.
        drop(connection.close().await);
    }
    gateway.usage().await - begun
}

async fn churn(gateway: &Running, connection: &Client, count: u32) -> Usage {
    let begun = gateway.usage().await;
    for _ in 0..count {
        exchange(connection).await;
    }
    gateway.usage().await - begun
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

async fn up(gateway: &Running, connection: &Client) -> Usage {
    let mut tunnel = open(connection, Endpoint::Sink).await;
    let begun = gateway.usage().await;
    let part = Bytes::from(vec![7; 1 << 20]);
    for _ in 0..MIB {
        tunnel.send(part.clone()).await.expect("a tunnel");
    }
    tunnel.shutdown().await.expect("a tunnel");
    // The sink closes once it has received everything.
    let left = tunnel.read_to_end(&mut Vec::new()).await;
    assert_eq!(left.expect("a clean end"), 0);
    gateway.usage().await - begun
}

async fn down(gateway: &Running, connection: &Client) -> Usage {
    let mut tunnel = open(connection, Endpoint::Source).await;
    let begun = gateway.usage().await;
    let mut left = MIB as usize * (1 << 20);
    while left > 0 {
        let bytes = tunnel.chunk().await.expect("a tunnel");
        left = left.saturating_sub(bytes.expect("a source").len());
    }
    gateway.usage().await - begun
}
