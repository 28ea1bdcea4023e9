//! Endpoint of the cases.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::sleep;

/// First byte after which the endpoint ends its direction, and drops what it receives.
pub(super) const END: u8 = b'E';
/// First byte after which the endpoint does not end when its client does.
pub(super) const KEEP: u8 = b'K';
/// Time for which it then stays, longer than any case.
const KEPT: Duration = Duration::from_secs(60);
const BUFFER_BYTES: usize = 64 * 1024;

/// Returns all bytes, and ends when its client does, unless the first byte is `E` or `K`.
pub async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    let (mut buffer, mut script) = (vec![0; BUFFER_BYTES], None);
    loop {
        let length = stream.read(&mut buffer).await?;
        let Some(bytes @ &[first, ..]) = buffer.get(..length) else { break };
        match *script.get_or_insert(first) {
            END => stream.shutdown().await?,
            _ => stream.write_all(bytes).await?,
        }
    }
    if script == Some(KEEP) {
        sleep(KEPT).await;
    }
    stream.shutdown().await
}
