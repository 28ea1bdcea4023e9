//! Rows of the table: the work, the measurement, and the limit.

use crate::figures::Limit;
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
pub enum Transport {
    Hbone,
    /// TLS passthrough, routed by the server name.
    Sni,
}

pub struct Row {
    pub name: &'static str,
    /// Service behind the gateway: `sink`, `source`, `echo`, or `many` echoes.
    pub endpoint: &'static str,
    pub way: Transport,
    /// Arguments of `strait load`.
    pub load: &'static str,
    pub what: Measurement,
    /// Peers, with the limits relative to them: of issue 4, for SNI of issue 6.
    pub peers: &'static [(Kind, Limit)],
    /// Cost of ztunnel relative to Envoy, measured elsewhere in the same way.
    pub ztunnel: &'static str,
}

/// Kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measurement {
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
const ZTUNNEL_UNSUPPORTED: &str = "–";

const fn hbone(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: Measurement,
    beside: &'static [(Kind, Limit)],
    ztunnel: &'static str,
) -> Row {
    Row {
        name,
        endpoint,
        way: Transport::Hbone,
        load,
        what,
        peers: beside,
        ztunnel,
    }
}

const fn sni(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: Measurement,
    beside: &'static [(Kind, Limit)],
) -> Row {
    Row {
        name,
        endpoint,
        way: Transport::Sni,
        load,
        what,
        peers: beside,
        ztunnel: ZTUNNEL_UNSUPPORTED,
    }
}

/// Passthrough bytes: near a proxy that splices too, far below one that copies.
const SNI_BULK: [(Kind, Limit); 4] = [
    (Kind::Envoy, Limit::Ratio(0.35)),
    (Kind::Haproxy, Limit::None),
    (Kind::HaproxySplice, Limit::Ratio(1.15)),
    (Kind::Nginx, Limit::None),
];
/// A connection costs no more than with the cheapest peer.
const SNI_CONNECTION: [(Kind, Limit); 4] = [
    (Kind::Envoy, Limit::Ratio(1.0)),
    (Kind::Haproxy, Limit::Ratio(1.0)),
    (Kind::HaproxySplice, Limit::Ratio(1.0)),
    (Kind::Nginx, Limit::Ratio(1.0)),
];
const SNI_MEMORY: [(Kind, Limit); 4] = [
    (Kind::Envoy, Limit::None),
    (Kind::Haproxy, Limit::Ratio(1.2)),
    (Kind::HaproxySplice, Limit::Ratio(1.2)),
    (Kind::Nginx, Limit::None),
];

/// Limit relative to another build, instead of a row's own peers: no row may cost 3 % more.
pub const BESIDE_BEFORE: [(Kind, Limit); 1] = [(Kind::Before, Limit::Ratio(1.03))];

const BULK: &str = "0.66 to 0.81";

pub const ROWS: [Row; 17] = [
    hbone(
        ("idle tunnel", "echo", "idle"),
        Measurement::Memory(&IDLE),
        &[(Kind::Envoy, Limit::Absolute(2.6))],
        "5.6 KiB",
    ),
    hbone(
        ("stalled reader, window 64 KiB", "source", "stall"),
        Measurement::Memory(&STALLED),
        &[(Kind::Envoy, Limit::Absolute(200.0))],
        "under 100 KiB",
    ),
    sni(
        ("SNI, idle connection", "echo", "idle"),
        Measurement::Memory(&PASSED),
        &SNI_MEMORY,
    ),
    sni(
        (
            "SNI, idle connection after bursts",
            "echo",
            "idle --burst 1MiB",
        ),
        Measurement::Memory(&PASSED),
        &SNI_MEMORY,
    ),
    hbone(
        ("bulk up, 1 stream", "sink", "up"),
        Measurement::Cpu(Unit::GbSent),
        &[(Kind::Envoy, Limit::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk up, 16 streams", "sink", "up --streams 16"),
        Measurement::Cpu(Unit::GbSent),
        &[(Kind::Envoy, Limit::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk down, 1 stream", "source", "down"),
        Measurement::Cpu(Unit::GbReceived),
        &[(Kind::Envoy, Limit::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("bulk down, 16 streams", "source", "down --streams 16"),
        Measurement::Cpu(Unit::GbReceived),
        &[(Kind::Envoy, Limit::Ratio(0.62))],
        BULK,
    ),
    hbone(
        ("request of 128 B, 1 stream", "echo", "rr"),
        Measurement::Cpu(Unit::Request),
        &[(Kind::Envoy, Limit::Ratio(0.65))],
        "0.65 to 0.71",
    ),
    hbone(
        ("request of 128 B, 64 streams", "echo", "rr --streams 64"),
        Measurement::Cpu(Unit::Request),
        &[(Kind::Envoy, Limit::Ratio(0.52))],
        "0.92",
    ),
    hbone(
        (
            "request of 1 KiB, 90 streams",
            "echo",
            "rr --streams 90 --size 1KiB",
        ),
        Measurement::Cpu(Unit::Request),
        &[(Kind::Envoy, Limit::Ratio(0.65))],
        "0.79 to 0.99",
    ),
    hbone(
        ("tunnel churn, 16 at a time", "many", "churn --streams 16"),
        Measurement::Cpu(Unit::Tunnel),
        &[(Kind::Envoy, Limit::Ratio(0.58))],
        "0.56 to 0.69",
    ),
    hbone(
        (
            "full mTLS handshake and a tunnel",
            "many",
            "handshake --connections 4",
        ),
        Measurement::Cpu(Unit::Connection),
        &[(Kind::Envoy, Limit::Ratio(0.75))],
        "0.75 to 1.0",
    ),
    sni(
        ("SNI, bulk up", "sink", "up"),
        Measurement::Cpu(Unit::GbSent),
        &SNI_BULK,
    ),
    sni(
        ("SNI, bulk down", "source", "down"),
        Measurement::Cpu(Unit::GbReceived),
        &SNI_BULK,
    ),
    sni(
        (
            "SNI, connection, 16 at a time",
            "many",
            "handshake --connections 16",
        ),
        Measurement::Cpu(Unit::Connection),
        &SNI_CONNECTION,
    ),
    hbone(
        (
            "request beside bulk and stalled streams, p99",
            "echo",
            "mixed --streams 8 --rate 200",
        ),
        Measurement::P99,
        &[(Kind::Envoy, Limit::Ratio(P99_MAX))],
        "0.56",
    ),
];

impl Row {
    /// Returns the unit of its costs.
    pub fn unit(&self) -> &'static str {
        match self.what {
            Measurement::Cpu(unit) => unit.cost().0,
            Measurement::P99 => "ms",
            Measurement::Memory(_) => "KiB",
        }
    }
}
