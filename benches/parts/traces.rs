//! Processor time that traces of 1 % of the tunnels add to each tunnel.

use std::sync::Arc;
use std::time::Duration;

use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Sampler, SpanData, SpanExporter};
use strait::telemetry::{Metrics, Sampling, Source};
use strait::tools::samples;

use crate::allocations::Usage;
use crate::pieces::recorder;

const ROUNDS: u32 = 20;
const TUNNELS: u32 = 10_000;
/// Queue for the spans of all rounds.
const CAPACITY: usize = (ROUNDS * TUNNELS) as usize;

/// Exporter that takes all spans.
#[derive(Debug)]
struct Taken;

impl SpanExporter for Taken {
    async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
        Ok(())
    }
}

/// Returns the time of the tunnel's thread that is added to a tunnel whose peer has begun a trace
/// without the flag `sampled`, as a ztunnel does. Excludes the export, on a thread of its own.
pub fn added_time() -> Duration {
    let (off, on) = (Arc::new(Metrics::new()), Arc::new(Metrics::new()));
    let root = Sampler::TraceIdRatioBased(0.01);
    on.trace(Sampling { root, is_parent_based: true }, Taken, CAPACITY);
    let (off, on, source) = (recorder(off), recorder(on), Arc::new(samples::source()));
    // The fastest of rounds that take turns: others have met interrupts.
    let rounds: Vec<_> = (0..ROUNDS).map(|_| (time(&off, &source), time(&on, &source))).collect();
    let off = rounds.iter().map(|(off, _)| *off).min().unwrap_or_default();
    let on = rounds.iter().map(|(_, on)| *on).min().unwrap_or_default();
    on.saturating_sub(off) / TUNNELS
}

fn time(tunnel: &impl Fn(Arc<Source>, Option<&[u8]>), source: &Arc<Source>) -> Duration {
    let begun = Usage::of_this_thread();
    for trace in 1..=TUNNELS {
        // The lower half decides about the sample.
        let id = fastrand::u64(1..);
        let traceparent = format!("00-{trace:016x}{id:016x}-{id:016x}-00");
        tunnel(Arc::clone(source), Some(traceparent.as_bytes()));
    }
    (Usage::of_this_thread() - begun).time
}
