//! Frames of HTTP/2 written by hand, for sequences that no client library sends.

use tokio::io::{AsyncRead, AsyncReadExt};

/// Frame types (RFC 9113 section 6).
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

/// Connection preface of a client (RFC 9113 section 3.4).
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Flags (RFC 9113 section 6).
pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;
pub const PRIORITIZED: u8 = 0x20;

/// Field of a request: name and value.
pub type Field<'a> = (&'a str, &'a [u8]);

/// Returns the bytes of a frame, whose payload has less than 16 MiB.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let [_, high, middle, low] = length.to_be_bytes();
    let mut frame = vec![high, middle, low, kind, flags];
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Returns HEADERS with the whole field block of [`block`].
pub fn headers(stream: u32, fields: &[Field<'_>]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, &block(fields))
}

/// Returns SETTINGS with SETTINGS_INITIAL_WINDOW_SIZE alone, which is setting 4.
pub fn initial_window(bytes: u32) -> Vec<u8> {
    let [a, b, c, d] = bytes.to_be_bytes();
    frame(SETTINGS, 0, 0, &[0, 4, a, b, c, d])
}

/// Returns a field block, each field as a literal without indexing (RFC 7541 section 6.2.2).
pub fn block(fields: &[Field<'_>]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name.as_bytes(), value] {
            push_length(text.len(), &mut block);
            block.extend(text);
        }
    }
    block
}

/// Writes the length of a string without Huffman coding (RFC 7541 section 5.1).
fn push_length(length: usize, block: &mut Vec<u8>) {
    let Some(mut rest) = length.checked_sub(127) else {
        return block.push(length.to_le_bytes()[0]);
    };
    block.push(127);
    while rest >= 128 {
        block.push(rest.to_le_bytes()[0] | 128);
        rest /= 128;
    }
    block.push(rest.to_le_bytes()[0]);
}

#[derive(Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// Reads a frame; none after the end of the connection.
pub async fn read_frame(stream: &mut (impl AsyncRead + Unpin)) -> Option<Frame> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let [high, middle, low, kind, flags, id @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
    stream.read_exact(&mut payload).await.ok()?;
    Some(Frame { kind, flags, stream: u32::from_be_bytes(id), payload })
}
