//! HTTP/2 frames of a peer that may be hostile.

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// Initial SETTINGS_MAX_FRAME_SIZE, and window of a connection (RFC 9113 sections 6.5.2, 6.9.2).
pub const DEFAULT_FRAME_BYTES: usize = 16 * 1024;
pub const DEFAULT_WINDOW: u32 = 65_535;

/// Connection preface of a client, with empty SETTINGS.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Authorities with a service, and others without one.
pub const AUTHORITIES: [&[u8]; 8] = [
    b"echo.app:80",
    b"alias.app:80",
    b"denied.app:80",
    b"refused.app:80",
    b"hidden.app:80",
    b"unknown.app:80",
    b"10.0.0.1:80",
    b"not an authority",
];

/// Returns a frame with a correct header.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, high, middle, low] = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    let head = [high, middle, low, kind, flags];
    [&head, &stream.to_be_bytes()[..], payload].concat()
}

/// Returns the fields of a CONNECT as literals.
pub fn connect(authority: &[u8]) -> Vec<u8> {
    let fields = b"\x00\x07:method\x07CONNECT\x00\x0a:authority";
    [fields, &string(authority)[..]].concat()
}

/// Returns a string of a header block, cut off at 126 bytes, whose length takes one byte.
pub fn string(bytes: &[u8]) -> Vec<u8> {
    let bytes = &bytes[..bytes.len().min(126)];
    let length = u8::try_from(bytes.len()).unwrap_or(0);
    [&[length], bytes].concat()
}
