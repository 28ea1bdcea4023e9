//! The floods and bombs of a hostile client with a valid certificate.

use std::sync::LazyLock;

use strait::tools::conformance::Names;
use strait::tools::conformance::floods::{FLOODS, Flood, stream};

use crate::records::{ALERT, APPLICATION_DATA, RecordWriter};
use crate::support::ECHO;
use crate::support::raw::headers;

/// Repeated part of a flood of TLS records.
pub type RecordRound = fn(&mut RecordWriter, u32);

/// Flood, or a way of holding resources.
pub struct Attack {
    pub name: &'static str,
    /// Window that the client gives to streams. With 0, answers cannot be sent.
    pub window: u32,
    pub what: AttackKind,
}

pub enum AttackKind {
    /// CONNECT on stream 1, bytes once, then rounds without a pause.
    Flood(Flood),
    /// CONNECT on stream 1, then rounds of TLS records without a pause.
    Records(RecordRound),
    /// As many CONNECTs as a connection allows streams, and then nothing.
    Leave,
    /// The preface and SETTINGS, and then nothing.
    Silence,
}

/// Number of streams opened and left on each connection: the limit that Strait gives a client.
pub const STREAMS: u32 = 256;
/// Default window of RFC 9113.
const WINDOW: u32 = 65_535;

/// Returns all CONNECTs of [`AttackKind::Leave`], except for stream 1.
pub fn left_streams() -> Vec<u8> {
    (0..STREAMS - 1).flat_map(|round| headers(stream(round), &NAMES.connect())).collect()
}

const fn records(name: &'static str, round: RecordRound) -> Attack {
    Attack { name, window: WINDOW, what: AttackKind::Records(round) }
}

/// Size of the frames that arrive in one-byte records.
const LARGE: u32 = 16 * 1024;
/// The warning `user_canceled`, which ends nothing (RFC 8446 6.1).
const USER_CANCELED: [u8; 2] = [1, 90];

/// Returns a byte of a sequence of large frames of an unknown type, which need no window.
fn byte_of_frames(index: u32) -> u8 {
    let header = [0, 0x40, 0, 0xbe, 0, 0, 0, 0, 0];
    let at = index % (LARGE + 9);
    header.get(at as usize).copied().unwrap_or_default()
}

const RECORDS: [Attack; 4] = [
    records("empty records", |write, _| {
        write.push(APPLICATION_DATA, &[]);
    }),
    records("one-byte records", |write, index| {
        write.push(APPLICATION_DATA, &[byte_of_frames(index)]);
    }),
    records("KeyUpdate", |write, _| write.push_key_update()),
    records("alerts", |write, _| write.push(ALERT, &USER_CANCELED)),
];

const HELD: [Attack; 2] = [
    Attack { name: "streams opened and left", window: WINDOW, what: AttackKind::Leave },
    Attack { name: "silence after TLS and SETTINGS", window: WINDOW, what: AttackKind::Silence },
];

/// All attacks: those of `strait conformance`, and those that need records by hand.
pub static ATTACKS: LazyLock<Vec<Attack>> = LazyLock::new(|| {
    let flood = |flood: Flood| Attack {
        name: flood.name,
        window: flood.window,
        what: AttackKind::Flood(flood),
    };
    FLOODS.map(flood).into_iter().chain(RECORDS).chain(HELD).collect()
});

pub static NAMES: LazyLock<Names> =
    LazyLock::new(|| Names { echo: ECHO.into(), unknown: "nothing.here:80".into() });

/// Returns the number of frames in `bytes`, which are whole frames of ours.
pub fn frames(mut bytes: &[u8]) -> u64 {
    let mut count = 0;
    while let [high, middle, low, rest @ ..] = bytes {
        let length = u32::from_be_bytes([0, *high, *middle, *low]) as usize;
        bytes = rest.get(6 + length..).unwrap_or_default();
        count += 1;
    }
    count
}
