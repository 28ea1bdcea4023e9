//! Rows of the table: the work, the measurement, and the limit.

use crate::figures::Bar;
use crate::outcome::Unit;

/// Kind of gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Strait,
    /// Another build, given by `--before`.
    Before,
    Envoy,
    /// Defaults of Debian's package.
    Haproxy,
    /// With splice, and pipes of 1 MiB.
    HaproxySplice,
    Nginx,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::Strait,
        Self::Before,
        Self::Envoy,
        Self::Haproxy,
        Self::HaproxySplice,
        Self::Nginx,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Strait => "Strait",
            Self::Before => "Strait before",
            Self::Envoy => "Envoy",
            Self::Haproxy => "HAProxy",
            Self::HaproxySplice => "HAProxy with splice",
            Self::Nginx => "nginx",
        }
    }
}

/// Transport of a row's bytes through the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Hbone,
    /// TLS passthrough, routed by the server name.
    Sni,
}

pub struct Row {
    pub name: &'static str,
    /// Service behind the gateway: `sink`, `source`, `echo`, or `many` echoes.
    pub endpoint: &'static str,
    pub way: Way,
    /// Arguments of `strait load`.
    pub load: &'static str,
    pub what: What,
    /// Peers, with the limits relative to them: of issue 4, for SNI of issue 6.
    pub beside: &'static [(Kind, Bar)],
    /// Cost of ztunnel relative to Envoy, measured elsewhere in the same way.
    pub ztunnel: &'static str,
}

/// Kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Processor time of the gateway per unit.
    Cpu(Unit),
    /// The 99th percentile of latencies.
    P99,
    /// Memory that tunnels add to a fresh process: the difference between two loads, divided by the
    /// difference of their numbers of tunnels; for a single load, divided by its number of tunnels.
    Memory(&'static [Held]),
}

/// Tunnels held open, evenly over some connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub connections: u32,
    /// Number of streams of each connection.
    pub streams: u32,
}

impl Held {
    pub const fn tunnels(self) -> u32 {
        self.connections * self.streams
    }
}

/// The same number of connections in both loads, so that they cancel out.
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
/// Each reader has its own connection, which counts.
const STALLED: [Held; 1] = [Held {
    connections: 100,
    streams: 1,
}];

/// Passthrough connections. Each is separate and holds two descriptors. An address gets at most
/// half of Strait's pool, which has 16,256 here.
const PASSED: [Held; 2] = [
    Held {
        connections: 1000,
        streams: 1,
    },
    Held {
        connections: 3500,
        streams: 1,
    },
];

/// ztunnel's 6.3 ms relative to Envoy's 11.3 ms in the same run.
const P99_MAX: f64 = 6.3 / 11.3;
/// ztunnel has no TLS passthrough.
const NOT_ZTUNNELS: &str = "–";

const fn hbone(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: What,
    beside: &'static [(Kind, Bar)],
    ztunnel: &'static str,
) -> Row {
    Row {
        name,
        endpoint,
        way: Way::Hbone,
        load,
        what,
        beside,
        ztunnel,
    }
}

const fn sni(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: What,
    beside: &'static [(Kind, Bar)],
) -> Row {
    Row {
        name,
        endpoint,
        way: Way::Sni,
        load,
        what,
        beside,
        ztunnel: NOT_ZTUNNELS,
    }
}

/// Passthrough bytes: near a proxy that splices too, far below one that copies.
const SNI_BULK: [(Kind, Bar); 4] = [
    (Kind::Envoy, Bar::Ratio(0.35)),
    (Kind::Haproxy, Bar::None),
    (Kind::HaproxySplice, Bar::Ratio(1.15)),
    (Kind::Nginx, Bar::None),
];
/// A connection costs no more than with the cheapest peer.
const SNI_CONNECTION: [(Kind, Bar); 4] = [
    (Kind::Envoy, Bar::Ratio(1.0)),
    (Kind::Haproxy, Bar::Ratio(1.0)),
    (Kind::HaproxySplice, Bar::Ratio(1.0)),
    (Kind::Nginx, Bar::Ratio(1.0)),
];
const SNI_MEMORY: [(Kind, Bar); 4] = [
    (Kind::Envoy, Bar::None),
    (Kind::Haproxy, Bar::Ratio(1.2)),
    (Kind::HaproxySplice, Bar::Ratio(1.2)),
    (Kind::Nginx, Bar::None),
];

/// Limit relative to another build, instead of a row's own peers: no row may cost 3 % more.
pub const BESIDE_BEFORE: [(Kind, Bar); 1] = [(Kind::Before, Bar::Ratio(1.03))];

const BULK: &str = "0.66 to 0.81";

pub const ROWS: [Row; 17] = [
    hbone(
        ("idle tunnel", "echo", "idle"),
        What::Memory(&IDLE),
        &[(Kind::Envoy, Bar::Absolute(2.6))],
        "5.6 KiB",
    ),
    hbone(
        ("stalled reader, window 64 KiB", "source", "stall"),
        What::Memory(&STALLED),
        &[(Kind::Envoy, Bar::Absolute(200.0))],
        "under 100 KiB",
    ),
    sni(
        ("SNI, idle connection", "echo", "idle"),
        What::Memory(&PASSED),
        &SNI_MEMORY,
    ),
    sni(
        (
            "SNI, idle connection after bursts",
            "echo",
            "idle --burst 1MiB",
        ),
        What::Memory(&PASSED),
        &SNI_MEMORY,
    ),
    hbone(
        ("bulk up, 1 stream", "sink", "up"),
        What::Cpu(Unit::GbSent),
        &[(Kind::Envoy, Bar::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk up, 16 streams", "sink", "up --streams 16"),
        What::Cpu(Unit::GbSent),
        &[(Kind::Envoy, Bar::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk down, 1 stream", "source", "down"),
        What::Cpu(Unit::GbReceived),
        &[(Kind::Envoy, Bar::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk down, 16 streams", "source", "down --streams 16"),
        What::Cpu(Unit::GbReceived),
        &[(Kind::Envoy, Bar::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("request of 128 B, 1 stream", "echo", "rr"),
        What::Cpu(Unit::Request),
        &[(Kind::Envoy, Bar::Ratio(0.65))],
        "0.65 to 0.71",
    ),
    hbone(
        ("request of 128 B, 64 streams", "echo", "rr --streams 64"),
        What::Cpu(Unit::Request),
        &[(Kind::Envoy, Bar::Ratio(0.52))],
        "0.92",
    ),
    hbone(
        (
            "request of 1 KiB, 90 streams",
            "echo",
            "rr --streams 90 --size 1KiB",
        ),
        What::Cpu(Unit::Request),
        &[(Kind::Envoy, Bar::Ratio(0.65))],
        "0.79 to 0.99",
    ),
    hbone(
        ("tunnel churn, 16 at a time", "many", "churn --streams 16"),
        What::Cpu(Unit::Tunnel),
        &[(Kind::Envoy, Bar::Ratio(0.58))],
        "0.56 to 0.69",
    ),
    hbone(
        (
            "full mTLS handshake and a tunnel",
            "many",
            "handshake --connections 4",
        ),
        What::Cpu(Unit::Connection),
        &[(Kind::Envoy, Bar::Ratio(0.75))],
        "0.75 to 1.0",
    ),
    sni(
        ("SNI, bulk up", "sink", "up"),
        What::Cpu(Unit::GbSent),
        &SNI_BULK,
    ),
    sni(
        ("SNI, bulk down", "source", "down"),
        What::Cpu(Unit::GbReceived),
        &SNI_BULK,
    ),
    sni(
        (
            "SNI, connection, 16 at a time",
            "many",
            "handshake --connections 16",
        ),
        What::Cpu(Unit::Connection),
        &SNI_CONNECTION,
    ),
    hbone(
        (
            "request beside bulk and stalled streams, p99",
            "echo",
            "mixed --streams 8 --rate 200",
        ),
        What::P99,
        &[(Kind::Envoy, Bar::Ratio(P99_MAX))],
        "0.56",
    ),
];

impl Row {
    /// Returns the unit of its costs.
    pub fn unit(&self) -> &'static str {
        match self.what {
            What::Cpu(unit) => unit.cost().0,
            What::P99 => "ms",
            What::Memory(_) => "KiB",
        }
    }
}
