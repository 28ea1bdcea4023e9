//! Part of the report of `strait load` that a row needs, and the costs that follow from it.

use std::time::Duration;

use serde::Deserialize;

use crate::measurement::{Measurement, Quantile, Unit};

/// Key exchange of both gateways. They prefer different ones by default, with different costs.
pub const KEY_EXCHANGE: &str = "X25519";

#[derive(Debug, Deserialize)]
pub struct Outcome {
    seconds: f64,
    operations: u64,
    operations_per_second: f64,
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
    p50: f64,
    p99: f64,
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

    /// Returns the number of operations per second.
    pub fn rate(&self) -> f64 {
        self.operations_per_second
    }

    /// Returns the cost for a gateway that used `cpu` of processor time; none if nothing was done,
    /// and for memory.
    pub fn cost(&self, what: Measurement, cpu: Duration) -> Option<f64> {
        match what {
            Measurement::Cpu(unit) => Some(cpu.as_secs_f64() * unit.cost().1 / self.units(unit)?),
            Measurement::Latency(quantile) | Measurement::Added(quantile) => {
                let latency = self.latency_us.as_ref()?;
                let micros = match quantile {
                    Quantile::P50 => latency.p50,
                    Quantile::P99 => latency.p99,
                };
                Some(micros / 1000.0)
            }
            Measurement::TransferTime(unit) => Some(self.seconds / (1000.0 * self.units(unit)?)),
            Measurement::Memory(_) => None,
        }
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
}
