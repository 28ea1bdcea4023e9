//! Figures of a run: aligned text, or one JSON object.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::num::NonZeroU64;
use std::process::ExitCode;

use serde::Serialize;

use super::args::Work;
use super::run::{RunCost, RunState};
use super::units::{bytes, three_digits};
use crate::labels::{count, printed};

/// Results of a run. docs/load-testing.md lists the fields; they are stable.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    work: Work,
    to: String,
    authorities: Vec<String>,
    server_names: Vec<String>,
    double: bool,
    connections: usize,
    streams: usize,
    size_bytes: Option<NonZeroU64>,
    rate_per_second: Option<NonZeroU64>,
    window_bytes: u32,
    key_exchange: Option<&'static str>,
    cipher_suite: Option<&'static str>,
    interrupted: bool,
    seconds: f64,
    cpu_seconds: f64,
    operations: u64,
    operations_per_second: f64,
    sent_bytes: u64,
    received_bytes: u64,
    sent_bytes_per_second: f64,
    received_bytes_per_second: f64,
    latency_us: Option<Latency>,
    opened_connections: u64,
    opened_tunnels: u64,
    opened_outer_tunnels: u64,
    held_tunnels: u64,
    failures: u64,
    failures_by_kind: BTreeMap<String, u64>,
}

/// Latency quantiles, in microseconds.
#[derive(Debug, Serialize)]
struct Latency {
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    p99_9: f64,
    max: f64,
}

impl Report {
    pub(super) fn new(run: &RunState, took: &RunCost) -> Self {
        let (plan, tally) = (&run.plan, &run.tally);
        let counts = &run.target.counts;
        let seconds = took.time.as_secs_f64();
        let per_second = |count: u64| match seconds {
            0.0 => 0.0,
            seconds => count as f64 / seconds,
        };
        let (operations, sent) = (tally.operations.get(), tally.sent.get());
        let received = tally.received.get();
        let agreed = counts.negotiated.get();
        Self {
            work: plan.work,
            to: plan.to.clone(),
            authorities: plan.authority.clone(),
            server_names: plan.sni.clone(),
            double: plan.double,
            connections: plan.connections.get(),
            streams: plan.streams,
            size_bytes: plan.size,
            rate_per_second: plan.rate,
            window_bytes: plan.stream_window(),
            key_exchange: agreed.and_then(|(group, _)| group.as_str()),
            cipher_suite: agreed.and_then(|(_, suite)| suite.as_str()),
            interrupted: took.interrupted,
            seconds,
            cpu_seconds: took.cpu.as_secs_f64(),
            operations,
            operations_per_second: per_second(operations),
            sent_bytes: sent,
            received_bytes: received,
            sent_bytes_per_second: per_second(sent),
            received_bytes_per_second: per_second(received),
            latency_us: Latency::new(run),
            opened_connections: counts.connections.get(),
            opened_tunnels: counts.tunnels.get(),
            opened_outer_tunnels: counts.outer_tunnels.get(),
            held_tunnels: match plan.work {
                Work::Idle | Work::Stall => tally.held.get(),
                _ => 0,
            },
            failures: tally.failures.get(),
            failures_by_kind: tally.kinds(),
        }
    }

    /// Returns a summary with the most frequent failure, or none if nothing failed.
    pub(super) fn failure_summary(&self) -> Option<String> {
        let (kind, _) = self.failures_by_kind.iter().max_by_key(|&(_, count)| count)?;
        Some(format!("{} failed, most often: {kind}", self.failures))
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        match self.failures {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }

    /// Prints the report.
    pub(super) fn print(&self, json: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let written = if json {
            serde_json::to_writer(&mut out, self)
                .map_err(io::Error::from)
                .and_then(|()| writeln!(out))
        } else {
            self.write(&mut out)
        };
        printed(written)
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        write!(
            out,
            "{} to {}, {}{} of {}",
            self.work,
            self.to,
            count(self.connections, "connection"),
            if self.double { " by double HBONE" } else { "" },
            count(self.streams, "stream"),
        )?;
        if let Some(size) = self.size_bytes {
            write!(out, ", {size} bytes")?;
        }
        match self.rate_per_second {
            Some(rate) => writeln!(out, ", {rate} due each second")?,
            None => writeln!(out)?,
        }
        let interrupted = if self.interrupted { ", interrupted" } else { "" };
        let (seconds, cpu) = (self.seconds, self.cpu_seconds);
        writeln!(
            out,
            "  time        {seconds:.2} s{interrupted}; {cpu:.2} s of processor time used here"
        )?;
        if self.size_bytes.is_some() {
            let rate = three_digits(self.operations_per_second);
            writeln!(out, "  operations  {}, {rate}/s", self.operations)?;
        }
        for (name, count, rate) in [
            ("sent", self.sent_bytes, self.sent_bytes_per_second),
            ("received", self.received_bytes, self.received_bytes_per_second),
        ] {
            if count > 0 {
                let (count, rate) = (bytes(count as f64), bytes(rate));
                writeln!(out, "  {name:<10}  {count}, {rate}/s")?;
            }
        }
        self.write_latency_and_failures(out)
    }

    fn write_latency_and_failures(&self, out: &mut impl Write) -> io::Result<()> {
        if let Some(latency) = &self.latency_us {
            let ms = |us: f64| format!("{} ms", three_digits(us / 1000.0));
            writeln!(
                out,
                "  latency     p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
                ms(latency.p50),
                ms(latency.p90),
                ms(latency.p99),
                ms(latency.p99_9),
                ms(latency.max),
            )?;
        }
        let connections = count(self.opened_connections, "connection");
        let tunnels = count(self.opened_tunnels, "tunnel");
        write!(out, "  opened      {connections}, {tunnels}")?;
        match self.held_tunnels {
            0 => writeln!(out)?,
            held => writeln!(out, ", of which {held} stayed open")?,
        }
        if self.failures == 0 {
            return writeln!(out, "  failures    none");
        }
        writeln!(out, "  failures    {}", self.failures)?;
        for (kind, count) in &self.failures_by_kind {
            writeln!(out, "  {count:>10}  {kind}")?;
        }
        Ok(())
    }
}

impl Latency {
    /// Returns none if there were no operations.
    fn new(run: &RunState) -> Option<Self> {
        let nanos = run.tally.latency();
        let us = |nanos: f64| (nanos / 100.0).round() / 10.0;
        let quantile = |quantile: f64| us(nanos.value_at_quantile(quantile) as f64);
        (!nanos.is_empty()).then(|| Self {
            mean: us(nanos.mean()),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p99_9: quantile(0.999),
            max: us(nanos.max() as f64),
        })
    }
}
