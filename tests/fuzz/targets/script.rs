//! What a scripted peer does, read from the bytes of the fuzzer.

use std::time::Duration;

use super::frames::{
    self, AUTHORITIES, CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, PING, PRIORITY,
    RST_STREAM, SETTINGS, WINDOW_UPDATE, frame,
};

/// One thing that the peer does.
#[derive(Debug)]
pub enum Step {
    /// It sends.
    Send(Vec<u8>),
    /// It waits while the clock runs.
    Wait(Duration),
}

/// How the peer behaves as a whole: the bits of the first byte.
#[derive(Clone, Copy, Debug)]
pub struct Mode(u8);

impl Mode {
    /// The rest are steps, and not the bytes themselves.
    fn is_structured(self) -> bool {
        self.0 & 1 == 0
    }

    /// It reads what it is sent.
    pub fn reads(self) -> bool {
        self.0 & 2 == 0
    }

    /// It leaves after its last step, instead of staying silent.
    pub fn leaves(self) -> bool {
        self.0 & 4 != 0
    }

    /// Its bytes come one by one.
    pub fn trickles(self) -> bool {
        self.0 & 8 != 0
    }

    /// Its certificate has expired.
    pub fn has_expired(self) -> bool {
        self.0 & 16 != 0
    }
}

/// All that one script may send.
const BYTES_MAX: usize = 256 * 1024;
/// All waits of one script.
const WAITS_MAX: usize = 64;
/// A unit of waiting; the longest wait, 255 units, is past every deadline of a connection.
const WAIT: Duration = Duration::from_millis(200);

/// The peer that `data` stands for.
pub fn read(data: &[u8]) -> (Mode, Vec<Step>) {
    let Some((&mode, rest)) = data.split_first() else {
        return (Mode(0), Vec::new());
    };
    let mode = Mode(mode);
    if !mode.is_structured() {
        return (mode, vec![Step::Send(rest.to_vec())]);
    }
    let mut script = Script {
        rest,
        opened: 0,
        last: Vec::new(),
    };
    let (mut steps, mut bytes, mut waits) = (Vec::new(), 0, 0);
    while let Some(step) = script.step() {
        match &step {
            Step::Send(sent) => bytes += sent.len(),
            Step::Wait(_) => waits += 1,
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
    /// Streams that were opened by a CONNECT.
    opened: u32,
    /// The last frame.
    last: Vec<u8>,
}

impl<'a> Script<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// As many bytes as the next one says, or as there are.
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.byte()?).min(self.rest.len());
        let (bytes, rest) = self.rest.split_at(length);
        self.rest = rest;
        Some(bytes)
    }

    /// One of the last streams, one that is yet to come, or the connection.
    fn stream(&mut self) -> Option<u32> {
        let back = u32::from(self.byte()? % 16);
        Some(match back {
            14 => 0,
            15 => 2 * self.opened + 1,
            back => (2 * self.opened).saturating_sub(2 * back + 1),
        })
    }

    /// A power of two and its neighbours: limits are found there.
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
        let kind = self.byte()? % 13;
        let sent = match kind {
            0 => self.connect()?,
            1 => {
                let (stream, flags) = (self.stream()?, self.byte()? & 9);
                let length = usize::from(self.byte()?);
                frame(DATA, flags, stream, &vec![b'a'; length * length / 4])
            }
            2 => frame(RST_STREAM, 0, self.stream()?, &self.number()?.to_be_bytes()),
            3 => frame(
                WINDOW_UPDATE,
                0,
                self.stream()?,
                &self.number()?.to_be_bytes(),
            ),
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
            _ => {
                let times = usize::from(self.byte()?);
                return Some(Step::Send(self.last.repeat(times)));
            }
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

    /// A header block of any bytes, on a stream of its own or on one that there is.
    fn block(&mut self, kind: u8) -> Option<Vec<u8>> {
        let (flags, stream) = (self.byte()?, self.stream()?);
        let block = self.bytes()?;
        self.opened += u32::from(stream == 2 * self.opened + 1);
        Some(frame(kind, flags, stream, block))
    }
}
