//! Figures that a row can measure, and their units.

/// Kind of figure. Less is better for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measurement {
    /// Processor time of the gateway per unit.
    Cpu(Unit),
    /// Quantile of latencies.
    Latency(Quantile),
    /// Quantile of latencies, less that of a direct connection in the same turn.
    Added(Quantile),
    /// Time per megabyte of one connection: the inverse of its goodput.
    TransferTime(Unit),
    /// Memory that tunnels add to a fresh process: the difference between two loads, divided by the
    /// difference of their numbers of tunnels; for a single load, divided by its number of tunnels.
    Memory(&'static [Held]),
}

/// Unit of work of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    GbSent,
    GbReceived,
    Request,
    Tunnel,
    Connection,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantile {
    P50,
    P99,
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

impl Measurement {
    /// Returns the unit of its costs.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Cpu(unit) => unit.cost().0,
            Self::Latency(_) | Self::Added(_) => "ms",
            Self::TransferTime(_) => "s/MB",
            Self::Memory(_) => "KiB",
        }
    }
}

impl Unit {
    /// Returns the unit of processor time per unit of work: its name, and its number per second.
    pub fn cost(self) -> (&'static str, f64) {
        match self {
            Self::GbSent | Self::GbReceived => ("s/GB", 1.0),
            Self::Request => ("µs/request", 1e6),
            Self::Tunnel => ("µs/tunnel", 1e6),
            Self::Connection => ("µs/connection", 1e6),
        }
    }
}
