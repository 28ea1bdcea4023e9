//! Closing a socket without losing what we sent last.
//!
//! TCP answers data that nobody reads by a reset, and a reset makes the peer's kernel drop what
//! it has not delivered yet: an alert, a GOAWAY, the last bytes of a tunnel.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A few round trips between far regions.
const LINGER: Duration = Duration::from_secs(1);
/// What a peer may still have sent: a certificate chain, or window updates for all its tunnels.
const BYTES_MAX: u64 = 16 * 1024;

/// Sends FIN, then reads and drops what the peer sends until it closes too, or for a second.
pub async fn close(mut stream: TcpStream) {
    let drain = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(BYTES_MAX), &mut tokio::io::sink()).await
    };
    // A peer that does not close in time, or has gone, changes nothing for us.
    let _ = timeout(LINGER, drain).await;
}
