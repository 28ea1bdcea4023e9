//! A stream of bytes that tells its own name and offset: whatever is lost, doubled or mixed up
//! is seen at the first byte that is wrong.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const CHUNK: usize = 16 * 1024;

fn byte(id: u64, offset: u64) -> u8 {
    let mixed = (offset / 7 + id.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x2545_f491_4f6c_dd1d);
    mixed.to_be_bytes()[3] ^ offset.to_be_bytes()[7]
}

/// The size of the next chunk where `left` bytes are left.
fn chunk(left: u64) -> usize {
    usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK))
}

fn fill(id: u64, offset: u64, buffer: &mut [u8]) {
    for (at, slot) in (offset..).zip(buffer) {
        *slot = byte(id, at);
    }
}

/// Bytes `from..to` of stream `id`.
pub fn of(id: u64, from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|at| byte(id, at)).collect()
}

/// Sends bytes `from..to` of stream `id`.
pub async fn send(
    stream: &mut (impl AsyncWrite + Unpin),
    id: u64,
    from: u64,
    to: u64,
) -> std::io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut at = from;
    while at < to {
        let count = chunk(to - at);
        fill(id, at, &mut buffer[..count]);
        stream.write_all(&buffer[..count]).await?;
        at += count as u64;
    }
    stream.flush().await
}

/// Reads bytes `from..to` of stream `id` and compares each.
pub async fn expect(
    stream: &mut (impl AsyncRead + Unpin),
    id: u64,
    from: u64,
    to: u64,
) -> std::io::Result<()> {
    let mut at = from;
    let (mut buffer, mut wanted) = (vec![0; CHUNK], vec![0; CHUNK]);
    while at < to {
        let most = chunk(to - at);
        let count = stream.read(&mut buffer[..most]).await?;
        if count == 0 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("stream {id} ended cleanly at {at} of {to}"),
            ));
        }
        fill(id, at, &mut wanted[..count]);
        assert!(
            buffer[..count] == wanted[..count],
            "stream {id} is wrong after offset {at}"
        );
        at += count as u64;
    }
    Ok(())
}

/// Reads the clean end of a stream.
pub async fn expect_end(stream: &mut (impl AsyncRead + Unpin)) {
    let mut rest = [0; 64];
    let count = stream.read(&mut rest).await.expect("a clean end");
    assert_eq!(count, 0, "the stream goes on after its end");
}
