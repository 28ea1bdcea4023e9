//! Closing a socket without losing what we sent last.
//!
//! TCP answers data that nobody reads by a reset, and a reset makes the peer's kernel drop what
//! it has not delivered yet: an alert, a GOAWAY, the last bytes of a tunnel.

use std::io;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long, and for how many bytes, the other side's end is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    time: Duration,
    bytes_max: u64,
}

/// For peers: a few round trips between far regions, and what they may still have sent, which is
/// a certificate chain or window updates for all their tunnels.
pub const PEER: Patience = Patience {
    time: Duration::from_secs(1),
    bytes_max: 16 * 1024,
};

/// For endpoints that have yet to read what their peer sent before it went away, and may be
/// sending meanwhile.
pub const ENDPOINT: Patience = Patience {
    time: Duration::from_secs(30),
    bytes_max: 64 * 1024 * 1024,
};

/// Lets a socket that was to close by RST close by FIN, and deliver what was written before.
pub fn gently(stream: &TcpStream) {
    // It fails only for a socket that is gone.
    let _: io::Result<()> = SockRef::from(stream).set_linger(None);
}

/// Sends FIN, then reads and drops what the other side sends until it closes too, or patience ends.
pub async fn close(mut stream: TcpStream, patience: Patience) {
    let drain = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(patience.bytes_max), &mut tokio::io::sink()).await
    };
    // Another side that does not close in time, or has gone, changes nothing for us.
    let _ = timeout(patience.time, drain).await;
}
