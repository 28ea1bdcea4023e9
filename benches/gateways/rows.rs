//! Rows of the table: the work, the measurement, and the limit.

use crate::figures::Limit;
use crate::measurement::{Held, Measurement, Quantile, Unit};

/// Kind of gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Strait,
    /// Strait with two workers, on the same processor.
    TwoWorkers,
    FourWorkers,
    /// Another build, given by `--before`.
    Before,
    Envoy,
    /// Two gateways in a row: the first one forwards all tunnels to the second.
    TwoStraits,
    TwoEnvoys,
    /// Defaults of Debian's package.
    Haproxy,
    /// With splice, and pipes of 1 MiB.
    HaproxySplice,
    Nginx,
    /// Plain copy loop, the floor of processor time.
    CopyLoop,
    /// No gateway: the load connects to the endpoint, the floor of latency.
    Direct,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Strait,
        Self::TwoWorkers,
        Self::FourWorkers,
        Self::Before,
        Self::Envoy,
        Self::TwoStraits,
        Self::TwoEnvoys,
        Self::Haproxy,
        Self::HaproxySplice,
        Self::Nginx,
        Self::CopyLoop,
        Self::Direct,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Strait => "Strait",
            Self::TwoWorkers => "Strait with two workers",
            Self::FourWorkers => "Strait with four workers",
            Self::Before => "Strait before",
            Self::Envoy => "Envoy",
            Self::TwoStraits => "two Straits",
            Self::TwoEnvoys => "two Envoys",
            Self::Haproxy => "HAProxy",
            Self::HaproxySplice => "HAProxy with splice",
            Self::Nginx => "nginx",
            Self::CopyLoop => "copy loop",
            Self::Direct => "direct connection",
        }
    }

    /// Returns true for the column of floors: no peer, but the least that is possible.
    pub fn is_floor(self) -> bool {
        matches!(self, Self::CopyLoop | Self::Direct)
    }
}

/// Transport of a row's bytes through the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Hbone,
    /// HBONE over a long link with loss.
    LossyLink,
    /// TLS passthrough, routed by the server name.
    Sni,
}

pub struct Row {
    pub name: &'static str,
    /// Gateway that is measured: Strait, or a variant of it.
    pub subject: Kind,
    /// Service behind the gateway: `sink`, `source`, `echo`, or `many` echoes.
    pub endpoint: &'static str,
    pub way: Transport,
    /// Arguments of `strait load`.
    pub load: &'static str,
    pub what: Measurement,
    /// Peers, with the limits relative to them: of issue 16.
    pub peers: &'static [(Kind, Limit)],
    /// Cost of ztunnel relative to Envoy, measured elsewhere in the same way.
    pub ztunnel: &'static str,
}

/// The same number of connections in both loads, so that they cancel out.
const IDLE: [Held; 2] =
    [Held { connections: 50, streams: 20 }, Held { connections: 50, streams: 90 }];
/// Each reader has its own connection, which counts.
const STALLED: [Held; 1] = [Held { connections: 100, streams: 1 }];

/// Tunnels to a network of 512 gateways. As the less loaded one of two is chosen, at least nine in
/// ten of the additional tunnels open a connection of their own.
const APART: [Held; 2] =
    [Held { connections: 4, streams: 25 }, Held { connections: 4, streams: 50 }];

/// Passthrough connections. Each is separate and holds two descriptors. An address gets at most
/// half of Strait's pool, which has 16,256 here.
const PASSED: [Held; 2] =
    [Held { connections: 1000, streams: 1 }, Held { connections: 3500, streams: 1 }];

/// Connections to a binding. Fewer than may wait for a pooled connection at once.
const BOUND: [Held; 2] =
    [Held { connections: 100, streams: 1 }, Held { connections: 900, streams: 1 }];

/// ztunnel has no TLS passthrough, and was not measured in some rows.
const ZTUNNEL_UNKNOWN: &str = "–";

const fn hbone(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: Measurement,
    beside: &'static [(Kind, Limit)],
    ztunnel: &'static str,
) -> Row {
    Row {
        name,
        subject: Kind::Strait,
        endpoint,
        way: Transport::Hbone,
        load,
        what,
        peers: beside,
        ztunnel,
    }
}

/// Row of Strait with several workers beside Strait with one.
const fn workers(
    subject: Kind,
    row: (&'static str, &'static str, &'static str),
    what: Measurement,
) -> Row {
    Row { subject, ..hbone(row, what, &[(Kind::Strait, Limit::Ratio(1.05))], ZTUNNEL_UNKNOWN) }
}

/// Row of two gateways in a row. The processor time is that of both, the memory that of the first.
const fn two_hops(
    row: (&'static str, &'static str, &'static str),
    what: Measurement,
    beside: &'static [(Kind, Limit)],
) -> Row {
    Row { subject: Kind::TwoStraits, ..hbone(row, what, beside, ZTUNNEL_UNKNOWN) }
}

const fn lossy_link(row: (&'static str, &'static str, &'static str), what: Measurement) -> Row {
    Row {
        way: Transport::LossyLink,
        ..hbone(row, what, &[(Kind::Envoy, Limit::None)], ZTUNNEL_UNKNOWN)
    }
}

const fn sni(
    (name, endpoint, load): (&'static str, &'static str, &'static str),
    what: Measurement,
    beside: &'static [(Kind, Limit)],
) -> Row {
    Row { way: Transport::Sni, ..hbone((name, endpoint, load), what, beside, ZTUNNEL_UNKNOWN) }
}

/// Limit of two gateways beside two Envoys: of issue 17.
const TWO_ENVOYS: [(Kind, Limit); 1] = [(Kind::TwoEnvoys, Limit::Ratio(0.60))];

/// Passthrough bytes: near a proxy that splices too.
const SNI_BULK: [(Kind, Limit); 4] = [
    (Kind::Envoy, Limit::None),
    (Kind::Haproxy, Limit::None),
    (Kind::HaproxySplice, Limit::Ratio(1.08)),
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

/// Envoy with a limit, and the floor. Rows that open tunnels have none: the copy loop accepts a
/// connection for each.
const fn envoy_and_floor(ratio: f64) -> [(Kind, Limit); 2] {
    [(Kind::Envoy, Limit::Ratio(ratio)), (Kind::CopyLoop, Limit::None)]
}
/// Latency that is added, beside Envoy's; the direct connection is subtracted from both.
const ADDED: [(Kind, Limit); 2] = [(Kind::Envoy, Limit::None), (Kind::Direct, Limit::None)];

const BULK: &str = "0.66 to 0.81";
const MIXED: &str = "mixed --streams 8 --rate 200";

/// Rows of the README, by the names of `ROWS`. docs/performance.md has all with a limit.
pub const README_ROWS: [&str; 6] = [
    "idle tunnel",
    "bulk up, 16 streams",
    "bulk down, 16 streams",
    "request of 128 B, 64 streams",
    "full mTLS handshake and a tunnel",
    "SNI, connection, 16 at a time",
];

pub const ROWS: [Row; 35] = [
    hbone(
        ("idle tunnel", "echo", "idle"),
        Measurement::Memory(&IDLE),
        &[(Kind::Envoy, Limit::Absolute(1.9))],
        "5.6 KiB",
    ),
    hbone(
        ("stalled reader, window 64 KiB", "source", "stall"),
        Measurement::Memory(&STALLED),
        &[(Kind::Envoy, Limit::Absolute(200.0))],
        "under 100 KiB",
    ),
    sni(("SNI, idle connection", "echo", "idle"), Measurement::Memory(&PASSED), &SNI_MEMORY),
    sni(
        ("SNI, idle connection after bursts", "echo", "idle --burst 1MiB"),
        Measurement::Memory(&PASSED),
        &SNI_MEMORY,
    ),
    hbone(
        ("bulk up, 1 stream", "sink", "up"),
        Measurement::Cpu(Unit::GbSent),
        &envoy_and_floor(0.44),
        BULK,
    ),
    hbone(
        ("bulk up, 16 streams", "sink", "up --streams 16"),
        Measurement::Cpu(Unit::GbSent),
        &envoy_and_floor(0.52),
        BULK,
    ),
    hbone(
        ("bulk down, 1 stream", "source", "down"),
        Measurement::Cpu(Unit::GbReceived),
        &envoy_and_floor(0.68),
        BULK,
    ),
    hbone(
        ("bulk down, 16 streams", "source", "down --streams 16"),
        Measurement::Cpu(Unit::GbReceived),
        &envoy_and_floor(0.74),
        BULK,
    ),
    hbone(
        ("request of 128 B, 1 stream", "echo", "rr"),
        Measurement::Cpu(Unit::Request),
        &envoy_and_floor(0.80),
        "0.65 to 0.71",
    ),
    hbone(
        ("request of 128 B, 64 streams", "echo", "rr --streams 64"),
        Measurement::Cpu(Unit::Request),
        &envoy_and_floor(0.76),
        "0.92",
    ),
    hbone(
        ("request of 1 KiB, 90 streams", "echo", "rr --streams 90 --size 1KiB"),
        Measurement::Cpu(Unit::Request),
        &envoy_and_floor(0.76),
        "0.79 to 0.99",
    ),
    hbone(
        ("tunnel churn, 16 at a time", "many", "churn --streams 16"),
        Measurement::Cpu(Unit::Tunnel),
        &[(Kind::Envoy, Limit::Ratio(0.50))],
        "0.56 to 0.69",
    ),
    hbone(
        ("full mTLS handshake and a tunnel", "many", "handshake --connections 4"),
        Measurement::Cpu(Unit::Connection),
        &[(Kind::Envoy, Limit::Ratio(0.55))],
        "0.75 to 1.0",
    ),
    workers(
        Kind::TwoWorkers,
        ("two workers, bulk up", "sink", "up --connections 4"),
        Measurement::Cpu(Unit::GbSent),
    ),
    workers(
        Kind::TwoWorkers,
        ("two workers, bulk down", "source", "down --connections 4"),
        Measurement::Cpu(Unit::GbReceived),
    ),
    workers(
        Kind::TwoWorkers,
        ("two workers, request of 128 B", "echo", "rr --connections 4 --streams 16"),
        Measurement::Cpu(Unit::Request),
    ),
    workers(
        Kind::FourWorkers,
        ("four workers, bulk up", "sink", "up --connections 4"),
        Measurement::Cpu(Unit::GbSent),
    ),
    workers(
        Kind::FourWorkers,
        ("four workers, bulk down", "source", "down --connections 4"),
        Measurement::Cpu(Unit::GbReceived),
    ),
    workers(
        Kind::FourWorkers,
        ("four workers, request of 128 B", "echo", "rr --connections 4 --streams 16"),
        Measurement::Cpu(Unit::Request),
    ),
    two_hops(
        ("two hops, idle tunnel", "echo", "idle"),
        Measurement::Memory(&IDLE),
        &[(Kind::TwoEnvoys, Limit::None)],
    ),
    two_hops(
        ("two hops, idle tunnel with its pooled connection", "apart", "idle"),
        Measurement::Memory(&APART),
        &[(Kind::Strait, Limit::None)],
    ),
    // A hundredth of a pooled connection to the second gateway is part of it.
    Row {
        way: Transport::Sni,
        ..two_hops(
            ("binding, idle connection", "echo", "idle"),
            Measurement::Memory(&BOUND),
            &[(Kind::Strait, Limit::None)],
        )
    },
    two_hops(("two hops, bulk up", "sink", "up"), Measurement::Cpu(Unit::GbSent), &TWO_ENVOYS),
    two_hops(
        ("two hops, bulk down", "source", "down"),
        Measurement::Cpu(Unit::GbReceived),
        &TWO_ENVOYS,
    ),
    two_hops(
        ("two hops, request of 128 B, 64 streams", "echo", "rr --streams 64"),
        Measurement::Cpu(Unit::Request),
        &TWO_ENVOYS,
    ),
    sni(("SNI, bulk up", "sink", "up"), Measurement::Cpu(Unit::GbSent), &SNI_BULK),
    sni(("SNI, bulk down", "source", "down"), Measurement::Cpu(Unit::GbReceived), &SNI_BULK),
    sni(
        ("SNI, connection, 16 at a time", "many", "handshake --connections 16"),
        Measurement::Cpu(Unit::Connection),
        &SNI_CONNECTION,
    ),
    // The processor time is nearly all for the bulk stream, whose bytes return to the load.
    hbone(
        ("request beside bulk and stalled streams, CPU", "echo", MIXED),
        Measurement::Cpu(Unit::GbReceived),
        &[(Kind::Envoy, Limit::Ratio(0.33))],
        ZTUNNEL_UNKNOWN,
    ),
    hbone(
        ("request beside bulk and stalled streams, p50", "echo", MIXED),
        Measurement::Latency(Quantile::P50),
        &[(Kind::Envoy, Limit::Ratio(0.25))],
        ZTUNNEL_UNKNOWN,
    ),
    hbone(
        ("request beside bulk and stalled streams, p99", "echo", MIXED),
        Measurement::Latency(Quantile::P99),
        &[(Kind::Envoy, Limit::Ratio(0.20))],
        "0.56",
    ),
    hbone(
        ("latency added at 10 % of capacity, p50", "echo", "rr --streams 64"),
        Measurement::Added(Quantile::P50),
        &ADDED,
        ZTUNNEL_UNKNOWN,
    ),
    hbone(
        ("latency added at 10 % of capacity, p99", "echo", "rr --streams 64"),
        Measurement::Added(Quantile::P99),
        &ADDED,
        ZTUNNEL_UNKNOWN,
    ),
    lossy_link(("80 ms and 1 % loss, up", "sink", "up"), Measurement::TransferTime(Unit::GbSent)),
    lossy_link(
        ("80 ms and 1 % loss, down", "source", "down"),
        Measurement::TransferTime(Unit::GbReceived),
    ),
];

impl Row {
    /// Returns true if one load gives the figures of both rows. They follow each other.
    pub fn shares_load(&self, other: &Self) -> bool {
        let of = |row: &Self| (row.endpoint, row.load, row.way, row.subject, row.is_paced());
        of(self) == of(other)
    }

    /// Returns true if operations are due at a fixed rate, for their latencies.
    pub fn is_paced(&self) -> bool {
        self.adds_latency() || self.load.contains("--rate")
    }

    /// Returns true if the rate follows from the capacity of the gateways.
    pub fn adds_latency(&self) -> bool {
        matches!(self.what, Measurement::Added(_))
    }

    /// Returns true if another build can be compared in this row. The others have a subject or a
    /// baseline of their own.
    pub fn compares_builds(&self) -> bool {
        self.subject == Kind::Strait && !self.adds_latency()
    }
}
