//! The rows of the table: what is done, what is measured of it, and the bar.

use crate::figures::Bar;
use crate::outcome::Unit;

pub struct Row {
    pub name: &'static str,
    /// The service behind the gateway: `sink`, `source`, `echo`, or `many` echoes.
    pub endpoint: &'static str,
    /// Arguments of `strait load`.
    pub load: &'static str,
    pub what: What,
    /// By issue 4.
    pub bar: Bar,
    /// What ztunnel cost beside Envoy, measured elsewhere in the same way.
    pub ztunnel: &'static str,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The gateway's processor time for each unit.
    Cpu(Unit),
    /// The 99th percentile of latencies.
    P99,
    /// Memory that tunnels add to a fresh process, divided by how much their number differs
    /// between two loads; or, where there is one load, by the number of its tunnels.
    Memory(&'static [Held]),
}

/// Tunnels that are held, evenly over some connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub connections: u32,
    /// Of each connection.
    pub streams: u32,
}

impl Held {
    pub const fn tunnels(self) -> u32 {
        self.connections * self.streams
    }
}

/// As many connections both times, so that they do not count.
const IDLE: [Held; 2] = [
    Held {
        connections: 50,
        streams: 20,
    },
    Held {
        connections: 50,
        streams: 90,
    },
];
/// Each reader has a connection to itself, which counts.
const STALLED: [Held; 1] = [Held {
    connections: 100,
    streams: 1,
}];

/// ztunnel's 6.3 ms beside Envoy's 11.3 ms of the same run.
const P99_MAX: f64 = 6.3 / 11.3;

const fn cpu(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    unit: Unit,
    bar: f64,
    ztunnel: &'static str,
) -> Row {
    Row {
        name,
        endpoint,
        load,
        what: What::Cpu(unit),
        bar: Bar::Ratio(bar),
        ztunnel,
    }
}

const BULK: &str = "0.66 to 0.81";

pub const ROWS: [Row; 12] = [
    Row {
        name: "idle tunnel",
        endpoint: "echo",
        load: "idle",
        what: What::Memory(&IDLE),
        bar: Bar::Absolute(2.6),
        ztunnel: "5.6 KiB",
    },
    Row {
        name: "stalled reader, window 64 KiB",
        endpoint: "source",
        load: "stall",
        what: What::Memory(&STALLED),
        bar: Bar::Absolute(200.0),
        ztunnel: "under 100 KiB",
    },
    cpu(
        ("bulk up, 1 stream", "sink", "up"),
        Unit::GbSent,
        0.62,
        BULK,
    ),
    cpu(
        ("bulk up, 16 streams", "sink", "up --streams 16"),
        Unit::GbSent,
        0.62,
        BULK,
    ),
    cpu(
        ("bulk down, 1 stream", "source", "down"),
        Unit::GbReceived,
        0.62,
        BULK,
    ),
    cpu(
        ("bulk down, 16 streams", "source", "down --streams 16"),
        Unit::GbReceived,
        0.62,
        BULK,
    ),
    cpu(
        ("request of 128 B, 1 stream", "echo", "rr"),
        Unit::Request,
        0.65,
        "0.65 to 0.71",
    ),
    cpu(
        ("request of 128 B, 64 streams", "echo", "rr --streams 64"),
        Unit::Request,
        0.52,
        "0.92",
    ),
    cpu(
        (
            "request of 1 KiB, 90 streams",
            "echo",
            "rr --streams 90 --size 1KiB",
        ),
        Unit::Request,
        0.65,
        "0.79 to 0.99",
    ),
    cpu(
        ("tunnel churn, 16 at a time", "many", "churn --streams 16"),
        Unit::Tunnel,
        0.58,
        "0.56 to 0.69",
    ),
    cpu(
        (
            "full mTLS handshake and a tunnel",
            "many",
            "handshake --connections 4",
        ),
        Unit::Connection,
        0.75,
        "0.75 to 1.0",
    ),
    Row {
        name: "request beside bulk and stalled streams, p99",
        endpoint: "echo",
        load: "mixed --streams 8 --rate 200",
        what: What::P99,
        bar: Bar::Ratio(P99_MAX),
        ztunnel: "0.56",
    },
];

impl Row {
    /// The unit of its costs.
    pub fn unit(&self) -> &'static str {
        match self.what {
            What::Cpu(unit) => unit.cost().0,
            What::P99 => "ms",
            What::Memory(_) => "KiB",
        }
    }
}
