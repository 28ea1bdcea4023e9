//! HTTP/2 frames (RFC 9113 sections 4.1 and 6): headers, types, flags and settings.

use h2::Reason as ErrorCode;

pub const HEADER_BYTES: usize = 9;
/// Client connection preface (RFC 9113 section 3.4).
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Largest frame payload that every peer accepts (RFC 9113 section 4.2).
pub const DEFAULT_FRAME_BYTES: usize = 16 * 1024;
/// Largest flow-control window (RFC 9113 section 6.9.1).
pub const WINDOW_MAX: i64 = (1 << 31) - 1;
/// Initial flow-control window of connections, and of streams unless a setting changes it.
pub const DEFAULT_WINDOW: i64 = 65_535;

/// Frame types (RFC 9113 section 6).
pub mod kind {
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
}

/// Frame flags (RFC 9113 section 6).
pub mod flag {
    pub const ACK: u8 = 0x1;
    pub const END_STREAM: u8 = 0x1;
    pub const END_HEADERS: u8 = 0x4;
    pub const PADDED: u8 = 0x8;
    pub const PRIORITY: u8 = 0x20;
}

/// Settings (RFC 9113 section 6.5.2).
pub mod setting {
    pub const HEADER_TABLE_SIZE: u16 = 1;
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    pub length: usize,
    /// Type, see [`kind`].
    pub kind: u8,
    pub flags: u8,
    /// Stream, 0 for the connection.
    pub stream: u32,
}

impl FrameHeader {
    /// Parses a header. The reserved bit is ignored (RFC 9113 section 4.1).
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Self {
        let [a, b, c, kind, flags, s0, s1, s2, s3] = bytes;
        Self {
            length: usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c),
            kind,
            flags,
            stream: u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]),
        }
    }

    /// Encodes the header. Lengths above 2^24 − 1 are never sent.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let [.., a, b, c] = self.length.to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        [a, b, c, self.kind, self.flags, s0, s1, s2, s3]
    }

    /// Returns true if all bits of `flag` are set.
    pub fn has(self, flag: u8) -> bool {
        self.flags & flag == flag
    }
}

/// Appends a RST_STREAM frame.
pub fn push_reset(out: &mut Vec<u8>, stream: u32, code: ErrorCode) {
    let code = u32::from(code).to_be_bytes();
    push(out, kind::RST_STREAM, 0, stream, &code);
}

pub fn push_window_update(out: &mut Vec<u8>, stream: u32, increment: u32) {
    let increment = increment.to_be_bytes();
    push(out, kind::WINDOW_UPDATE, 0, stream, &increment);
}

/// Appends a GOAWAY frame without debug data.
pub fn push_goaway(out: &mut Vec<u8>, last: u32, code: ErrorCode) {
    let mut payload = [0; 8];
    payload[..4].copy_from_slice(&last.to_be_bytes());
    payload[4..].copy_from_slice(&u32::from(code).to_be_bytes());
    push(out, kind::GOAWAY, 0, 0, &payload);
}

pub fn push_settings(out: &mut Vec<u8>, settings: &[(u16, u32)]) {
    let header =
        FrameHeader { length: 6 * settings.len(), kind: kind::SETTINGS, flags: 0, stream: 0 };
    out.extend_from_slice(&header.encode());
    for (name, value) in settings {
        out.extend_from_slice(&name.to_be_bytes());
        out.extend_from_slice(&value.to_be_bytes());
    }
}

pub fn push(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let header = FrameHeader { length: payload.len(), kind, flags, stream };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_a_round_trip_without_the_reserved_bit() {
        let header = FrameHeader {
            length: 0x01_0203,
            kind: kind::DATA,
            flags: flag::END_STREAM,
            stream: 0x7fff_fffe,
        };
        let mut bytes = header.encode();
        assert_eq!(FrameHeader::parse(bytes), header);
        bytes[5] |= 0x80;
        assert_eq!(FrameHeader::parse(bytes), header);
        assert!(header.has(flag::ACK) && !header.has(flag::PADDED));
    }
}
