//! Actions of a scripted peer, read from the bytes of the fuzzer.

use std::time::Duration;

use strait::tls::record::PLAINTEXT_MAX;

use super::frames::{
    self, AUTHORITIES, CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, PING, PRIORITY,
    RST_STREAM, SETTINGS, WINDOW_UPDATE, frame,
};

/// Action of the peer.
#[derive(Debug)]
pub enum Step {
    /// Sends bytes as application data.
    Send(Vec<u8>),
    /// Sends a record with this content type and payload.
    Record(u8, Vec<u8>),
    /// Waits while the clock advances.
    Wait(Duration),
    /// Starts the drain of the listener.
    Drain,
    /// Ends the drain of the listener.
    Close,
    /// Revokes all exposure.
    Revoke,
}

/// General behaviour of the peer: the bits of the first byte.
#[derive(Clone, Copy, Debug)]
pub struct PeerFlags(u8);

impl PeerFlags {
    /// Returns true if the rest are steps, rather than raw bytes.
    fn is_structured(self) -> bool {
        self.0 & 1 == 0
    }

    /// Returns true if the peer reads.
    pub fn reads(self) -> bool {
        self.0 & 2 == 0
    }

    /// Returns true if the peer leaves after its last step, rather than staying silent.
    pub fn leaves(self) -> bool {
        self.0 & 4 != 0
    }

    /// Returns the size of the peer's records.
    pub fn record_bytes(self) -> usize {
        match self.0 & (8 | 64) {
            0 => PLAINTEXT_MAX,
            8 => 1,
            64 => 100,
            _ => 10,
        }
    }

    /// Returns the size of the peer's segments.
    pub fn segment_bytes(self) -> usize {
        if self.0 & 32 == 0 { usize::MAX } else { 7 }
    }

    /// Returns true if the peer sends all that it can before the gateway reads.
    pub fn hurries(self) -> bool {
        self.0 & 128 != 0
    }

    /// Returns true if the peer's certificate has expired.
    pub fn has_expired(self) -> bool {
        self.0 & 16 != 0
    }
}

/// Bit of an indexed field (RFC 7541 section 6.1).
const INDEXED: u8 = 0x80;
/// `:method: GET`, `:path: /` and `:scheme: https`, indexed.
const GET: [u8; 3] = [INDEXED | 2, INDEXED | 4, INDEXED | 7];
/// Fields with a meaning, forbidden ones, and long ones.
const FIELDS: [(&[u8], &[u8]); 10] = [
    (b"x-istio-source", b"waypoint"),
    (b"x-istio-source", b"gateway"),
    (b"baggage", b"k8s.cluster.name=west"),
    (b"te", b"trailers"),
    (b"content-length", b"5"),
    (b"connection", b"close"),
    (b"Upper", b"case"),
    (b":authority", b"echo.app:80"),
    (b"a", b"b"),
    (b"long", &[b'v'; 120]),
];

/// Limit of all bytes that one script may send.
const BYTES_MAX: usize = 256 * 1024;
/// Limit of all waits and events of one script.
const WAITS_MAX: usize = 64;
/// Unit of waits. The longest wait, 255 units, exceeds every deadline of a connection.
const WAIT: Duration = Duration::from_millis(200);

/// Returns the peer that `data` encodes.
pub fn read(data: &[u8]) -> (PeerFlags, Vec<Step>) {
    let Some((&mode, rest)) = data.split_first() else {
        return (PeerFlags(0), Vec::new());
    };
    let mode = PeerFlags(mode);
    if !mode.is_structured() {
        return (mode, vec![Step::Send(rest.to_vec())]);
    }
    let mut script = Script { rest, opened: 0, last: Vec::new() };
    let (mut steps, mut bytes, mut waits) = (Vec::new(), 0, 0);
    while let Some(step) = script.step() {
        match &step {
            Step::Send(sent) | Step::Record(_, sent) => bytes += sent.len(),
            _ => waits += 1,
        }
        if bytes > BYTES_MAX || waits > WAITS_MAX {
            break;
        }
        steps.push(step);
    }
    (mode, steps)
}

struct Script<'a> {
    rest: &'a [u8],
    /// Number of streams opened by a CONNECT.
    opened: u32,
    /// Last frame.
    last: Vec<u8>,
}

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// Returns as many bytes as the next byte specifies, or all that are left.
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.byte()?).min(self.rest.len());
        let (bytes, rest) = self.rest.split_at(length);
        self.rest = rest;
        Some(bytes)
    }

    /// Returns one of the last streams, a future one, or the connection.
    fn stream(&mut self) -> Option<u32> {
        let back = u32::from(self.byte()? % 16);
        Some(match back {
            14 => 0,
            15 => 2 * self.opened + 1,
            back => (2 * self.opened).saturating_sub(2 * back + 1),
        })
    }

    /// Returns a power of two or a neighbour of one, as limits are there.
    fn number(&mut self) -> Option<u32> {
        let byte = self.byte()?;
        let power = 1_u32 << (byte % 32);
        Some(match byte / 32 {
            0 => power,
            1 => power.wrapping_sub(1),
            2 => power.wrapping_add(1),
            _ => u32::from(byte),
        })
    }

    fn step(&mut self) -> Option<Step> {
        let kind = self.byte()? % 16;
        let sent = match kind {
            0 => self.connect()?,
            1 => {
                let (stream, flags) = (self.stream()?, self.byte()?);
                let length = usize::from(self.byte()?).pow(2);
                let length = if flags & 4 == 0 { length / 4 } else { length };
                // The first byte selects the behaviour of the endpoint.
                let byte = b'a' + (flags >> 4);
                frame(DATA, flags & 9, stream, &vec![byte; length])
            }
            2 => frame(RST_STREAM, 0, self.stream()?, &self.number()?.to_be_bytes()),
            3 => frame(WINDOW_UPDATE, 0, self.stream()?, &self.number()?.to_be_bytes()),
            4 => frame(PING, self.byte()? & 1, 0, b"pingpong"),
            5 => self.settings()?,
            6 => self.block(HEADERS)?,
            7 => self.block(CONTINUATION)?,
            8 => {
                let (kind, flags) = (self.byte()?, self.byte()?);
                frame(kind, flags, self.stream()?, self.bytes()?)
            }
            9 => return Some(Step::Wait(WAIT * u32::from(self.byte()?))),
            10 => {
                let fields = [&self.number()?.to_be_bytes()[..], &[16]].concat();
                frame(PRIORITY, 0, self.stream()?, &fields)
            }
            11 => {
                let fields = [self.stream()?.to_be_bytes(), self.number()?.to_be_bytes()];
                frame(GOAWAY, 0, 0, &fields.concat())
            }
            14 => return Some(Step::Record(self.byte()?, self.bytes()?.to_vec())),
            13 => {
                return Some(match self.byte()? % 3 {
                    0 => Step::Drain,
                    1 => Step::Close,
                    _ => Step::Revoke,
                });
            }
            12 => {
                let times = usize::from(self.byte()?);
                return Some(Step::Send(self.last.repeat(times)));
            }
            _ => self.request()?,
        };
        self.last.clone_from(&sent);
        Some(Step::Send(sent))
    }

    fn connect(&mut self) -> Option<Vec<u8>> {
        let choice = self.byte()?;
        let authority = match AUTHORITIES.get(usize::from(choice % 16)) {
            Some(authority) => authority,
            None => self.bytes()?,
        };
        self.opened += 1;
        let flags = END_HEADERS | choice >> 7;
        let stream = 2 * self.opened - 1;
        Some(frame(HEADERS, flags, stream, &frames::connect(authority)))
    }

    /// Returns a request with up to 255 fields, of which some enter the dynamic table.
    fn request(&mut self) -> Option<Vec<u8>> {
        let (choice, fields) = (self.byte()?, self.bytes()?);
        let mut block =
            if choice & 1 == 0 { frames::connect(AUTHORITIES[0]) } else { GET.to_vec() };
        for field in fields {
            match FIELDS.get(usize::from(field % 16)) {
                Some((name, value)) => {
                    // Literal without or with indexing (RFC 7541 section 6.2).
                    block.push((field & 16) << 2);
                    block.extend(frames::string(name));
                    block.extend(frames::string(value));
                }
                // The last field of the dynamic table.
                None => block.push(INDEXED | 62),
            }
        }
        self.opened += 1;
        let flags = END_HEADERS | choice >> 7;
        Some(frame(HEADERS, flags, 2 * self.opened - 1, &block))
    }

    fn settings(&mut self) -> Option<Vec<u8>> {
        let choice = self.byte()?;
        let mut fields = Vec::new();
        for _ in 0..choice % 8 {
            let id = u16::from(self.byte()? % 10);
            fields.extend(id.to_be_bytes());
            fields.extend(self.number()?.to_be_bytes());
        }
        Some(frame(SETTINGS, choice >> 7, 0, &fields))
    }

    /// Returns a header block of any bytes, on a new stream or an existing one.
    fn block(&mut self, kind: u8) -> Option<Vec<u8>> {
        let (flags, stream) = (self.byte()?, self.stream()?);
        let block = self.bytes()?;
        self.opened += u32::from(stream == 2 * self.opened + 1);
        Some(frame(kind, flags, stream, block))
    }
}
