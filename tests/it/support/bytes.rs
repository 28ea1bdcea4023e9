//! Byte streams that encode their name and offset, so that a lost, doubled or misplaced byte fails
//! at the first wrong offset.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const CHUNK: usize = 16 * 1024;

/// Eight bytes of stream `id`: splitmix64, with a separate sequence for each stream.
fn word(id: u64, number: u64) -> [u8; 8] {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let start = mixed(id.wrapping_add(1).wrapping_mul(STEP));
    mixed(start.wrapping_add(number.wrapping_mul(STEP))).to_le_bytes()
}

fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns the size of the next chunk if `left` bytes are left.
fn chunk(left: u64) -> usize {
    usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK))
}

/// Writes the bytes of stream `id` from `offset` into `buffer`. It works on words, because tests
/// are not optimised and move gigabytes.
pub fn fill(id: u64, offset: u64, mut buffer: &mut [u8]) {
    let (mut number, mut skip) = (offset / 8, (offset % 8) as usize);
    while !buffer.is_empty() {
        let (now, rest) = buffer.split_at_mut(buffer.len().min(8 - skip));
        now.copy_from_slice(&word(id, number)[skip..skip + now.len()]);
        (number, skip, buffer) = (number + 1, 0, rest);
    }
}

/// Returns bytes `from..to` of stream `id`.
pub fn range(id: u64, from: u64, to: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(to - from).expect("short")];
    fill(id, from, &mut bytes);
    bytes
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
        assert!(buffer[..count] == wanted[..count], "stream {id} is wrong after offset {at}");
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
