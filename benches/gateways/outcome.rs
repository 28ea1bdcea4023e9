//! Part of the report of `strait load` that a row needs.

use serde::Deserialize;

/// Key exchange of both gateways. They prefer different ones by default, with different costs.
pub const KEY_EXCHANGE: &str = "X25519";

#[derive(Debug, Deserialize)]
pub struct Outcome {
    operations: u64,
    sent_bytes: u64,
    received_bytes: u64,
    failures: u64,
    failures_by_kind: serde_json::Value,
    interrupted: bool,
    server_names: Vec<String>,
    key_exchange: Option<String>,
    cipher_suite: Option<String>,
    latency_us: Option<Latency>,
}

#[derive(Debug, Deserialize)]
struct Latency {
    p99: f64,
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

impl Outcome {
    /// Reads the report of a load that succeeded and used the required key exchange. Bare
    /// connections have none.
    pub fn read(report: &serde_json::Value) -> Result<Self, String> {
        let outcome = Self::deserialize(report).map_err(|error| format!("no report: {error}"))?;
        if outcome.interrupted || outcome.failures > 0 {
            return Err(format!("failures: {}", outcome.failures_by_kind));
        }
        match outcome.key_exchange.as_deref() {
            Some(KEY_EXCHANGE) => Ok(outcome),
            None if !outcome.server_names.is_empty() => Ok(outcome),
            other => Err(format!("the key exchange was {other:?}")),
        }
    }

    /// Returns the negotiated cipher suite, if the gateway terminates TLS.
    pub fn cipher_suite(&self) -> Option<&str> {
        self.cipher_suite.as_deref()
    }

    /// Returns the number of units; none if it is zero.
    pub fn units(&self, unit: Unit) -> Option<f64> {
        let count = match unit {
            Unit::GbSent => self.sent_bytes as f64 / 1e9,
            Unit::GbReceived => self.received_bytes as f64 / 1e9,
            Unit::Request | Unit::Tunnel | Unit::Connection => self.operations as f64,
        };
        (count > 0.0).then_some(count)
    }

    /// Returns the 99th percentile of the latencies, in milliseconds.
    pub fn p99_ms(&self) -> Option<f64> {
        Some(self.latency_us.as_ref()?.p99 / 1000.0)
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
