//! Spans of tunnels: the decision to sample at the start of a tunnel, the instants on its way, and
//! the bounded queue of the exporter.
//!
//! `opentelemetry_sdk` collects batches and exports them on a thread of its own. A collector that
//! is gone or slow delays no tunnel: spans that it does not take are lost and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Event, SpanContext, SpanId, SpanKind, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SamplingDecision, ShouldSample, SpanData,
    SpanEvents, SpanExporter, SpanLinks, SpanProcessor,
};
use prometheus_client::metrics::counter::Counter;
use tokio::time::Instant;
use tracing::warn;

use super::Source;
use super::access::RefusalCredit;
use super::times::Handshake;
use crate::wire::trace::{TRACEPARENT, is_forwarded};

/// Rule by which tunnels are sampled, as `OTEL_TRACES_SAMPLER` names it.
#[derive(Debug)]
pub struct Sampling {
    /// Sampler by the id of the trace. Gateways with one ratio sample the same traces.
    pub root: Sampler,
    /// True if a set flag of the parent samples too. An unset flag decides nothing: that of a
    /// ztunnel is never set.
    pub is_parent_based: bool,
}

impl Sampling {
    fn samples(&self, trace: TraceId, is_flagged: bool) -> bool {
        let by_id = || self.root.should_sample(None, trace, "", &SpanKind::Server, &[], &[]);
        self.is_parent_based && is_flagged || by_id().decision == SamplingDecision::RecordAndSample
    }
}

/// Instant on the way of a tunnel, an event of its span.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// Start of the first dial: policies have permitted the tunnel, and an endpoint is picked.
    Policy,
    /// End of the dial that has reached the endpoint.
    Dial,
    /// First byte of the endpoint.
    FirstByte,
}

/// Names of the events of [`Step`].
const STEPS: [&str; 3] = ["policy", "dial", "first_byte"];

#[derive(Debug)]
pub(super) struct Trace {
    own: SpanContext,
    parent: SpanId,
    /// Handshake of the connection, if the tunnel is its first.
    handshake: Option<Handshake>,
    steps: [Option<Instant>; STEPS.len()],
}

impl Trace {
    /// Returns the id of the trace, as headers have it.
    pub(super) fn id(&self) -> String {
        self.own.trace_id().to_string()
    }

    /// Returns the `traceparent` of what follows, if the tunnel is sampled.
    pub(super) fn traceparent(&self) -> Option<String> {
        let (trace, span) = (self.own.trace_id(), self.own.span_id());
        self.own.is_sampled().then(|| format!("00-{trace}-{span}-01"))
    }

    /// Records the first instant of a step.
    pub(super) fn mark(&mut self, step: Step, now: Instant) {
        if let Some(at) = self.steps.get_mut(step as usize) {
            at.get_or_insert(now);
        }
    }

    pub(super) fn is_sampled(&self) -> bool {
        self.own.is_sampled()
    }

    /// Returns a span from `start` until now, without its name, attributes and status.
    pub(super) fn span(&self, start: Instant) -> SpanData {
        let (now, end_time) = (Instant::now(), SystemTime::now());
        let time = |at: Instant| {
            end_time.checked_sub(now.saturating_duration_since(at)).unwrap_or(end_time)
        };
        let mut events = SpanEvents::default();
        events.events.extend(self.handshake.map(|handshake| {
            let seconds = handshake.time().as_secs_f64();
            let attributes = vec![KeyValue::new("strait.handshake.duration", seconds)];
            Event::new("handshake", time(handshake.end.into()), attributes, 0)
        }));
        let steps = STEPS.iter().zip(self.steps);
        let steps =
            steps.filter_map(|(name, at)| Some(Event::new(*name, time(at?), Vec::new(), 0)));
        events.events.extend(steps);
        let scope = InstrumentationScope::builder("strait").with_version(env!("CARGO_PKG_VERSION"));
        SpanData {
            span_context: self.own.clone(),
            parent_span_id: self.parent,
            parent_span_is_remote: self.parent != SpanId::INVALID,
            span_kind: SpanKind::Server,
            name: "tunnel".into(),
            start_time: time(start),
            end_time,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events,
            links: SpanLinks::default(),
            status: opentelemetry::trace::Status::Unset,
            instrumentation_scope: scope.build(),
        }
    }
}

/// Sampler of tunnels, and the bounded queue of their spans.
#[derive(Debug)]
pub struct Tracer {
    sampling: Sampling,
    batches: BatchSpanProcessor,
    queue: Arc<Queue>,
    capacity: usize,
    refusals: RefusalCredit,
}

/// Count of the spans that are queued or being exported, and of those that were lost.
#[derive(Debug)]
struct Queue {
    used: AtomicUsize,
    dropped: Counter,
}

impl Tracer {
    /// Creates a tracer whose queue holds `capacity` spans.
    pub(super) fn new(
        sampling: Sampling,
        exporter: impl SpanExporter + 'static,
        capacity: usize,
        dropped: Counter,
    ) -> Self {
        let queue = Arc::new(Queue { used: AtomicUsize::new(0), dropped });
        let exporter =
            CountingExporter { exporter, queue: Arc::clone(&queue), is_failing: false.into() };
        let config = BatchConfigBuilder::default().with_max_queue_size(capacity).build();
        let batches = BatchSpanProcessor::new(exporter, config);
        Self { sampling, batches, queue, capacity, refusals: RefusalCredit::new() }
    }

    /// Begins the trace of a tunnel: a part of the one that a well-formed `traceparent` states, or
    /// one of its own. None if there is no such header and the tunnel is not sampled.
    pub(super) fn begin(
        &self,
        traceparent: Option<&[u8]>,
        handshake: Option<Handshake>,
    ) -> Option<Trace> {
        let parent = traceparent.and_then(parse);
        let new = || (TraceId::from(fastrand::u128(1..)), SpanId::INVALID, false);
        let (id, span, is_flagged) = parent.unwrap_or_else(new);
        let is_sampled = self.sampling.samples(id, is_flagged);
        let (flags, own) = (TraceFlags::default().with_sampled(is_sampled), fastrand::u64(1..));
        (is_sampled || parent.is_some()).then(|| Trace {
            own: SpanContext::new(id, own.into(), flags, false, TraceState::NONE),
            parent: span,
            handshake,
            steps: Default::default(),
        })
    }

    /// Returns whether a tunnel that never opened has a span. It costs its peer nothing, so each
    /// peer has as many of them as lines in the access log. The others are lost.
    pub(super) fn admits_refusal(&self, peer: &Source, first_peer: Option<&str>) -> bool {
        let is_admitted = self.refusals.spend(peer, first_peer).is_some();
        if !is_admitted {
            self.queue.dropped.inc();
        }
        is_admitted
    }

    /// Queues a span, and builds it only if there is room. It is lost if the queue is full.
    pub(super) fn push(&self, span: impl FnOnce() -> SpanData) {
        if self.queue.used.fetch_add(1, Ordering::Relaxed) < self.capacity {
            self.batches.on_end(span());
        } else {
            self.queue.used.fetch_sub(1, Ordering::Relaxed);
            self.queue.dropped.inc();
        }
    }

    /// Exports the queued spans and ends the export. Blocks the thread until then, but no longer
    /// than `deadline`.
    ///
    /// # Errors
    /// The deadline has passed.
    pub fn shut_down(&self, deadline: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(deadline)
    }
}

/// Parses the trace, the parent and the flag `sampled` of a well-formed `traceparent`.
fn parse(value: &[u8]) -> Option<(TraceId, SpanId, bool)> {
    let text = std::str::from_utf8(value).ok().filter(|_| is_forwarded(TRACEPARENT, value))?;
    let mut parts = text.split('-').skip(1);
    let trace = TraceId::from_hex(parts.next()?).ok()?;
    let span = SpanId::from_hex(parts.next()?).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(parts.next()?, 16).ok()?);
    Some((trace, span, flags.is_sampled()))
}

/// Exporter that counts the spans that it has handled, and those that were lost.
#[derive(Debug)]
struct CountingExporter<E> {
    exporter: E,
    queue: Arc<Queue>,
    is_failing: AtomicBool,
}

impl<E: SpanExporter> SpanExporter for CountingExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let exported = self.exporter.export(batch).await;
        self.queue.used.fetch_sub(count, Ordering::Relaxed);
        let was_failing = self.is_failing.swap(exported.is_err(), Ordering::Relaxed);
        if let Err(error) = &exported {
            self.queue.dropped.inc_by(count as u64);
            if !was_failing {
                warn!(%error, "the collector does not take spans; they are lost");
            }
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use opentelemetry_sdk::error::OTelSdkError;
    use parking_lot::Mutex;

    use super::*;

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0";
    const DEADLINE: Duration = Duration::from_secs(60);

    /// Collector that keeps the spans, or takes none.
    #[derive(Clone, Debug, Default)]
    pub(in super::super) struct Collector {
        pub(in super::super) spans: Arc<Mutex<Vec<SpanData>>>,
        is_gone: bool,
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            if self.is_gone {
                return Err(OTelSdkError::InternalFailure("gone".to_owned()));
            }
            self.spans.lock().extend(batch);
            Ok(())
        }
    }

    pub(in super::super) fn sampling(ratio: f64) -> Sampling {
        Sampling { root: Sampler::TraceIdRatioBased(ratio), is_parent_based: true }
    }

    /// Returns a tracer with a queue of four spans.
    fn tracer(ratio: f64, collector: &Collector) -> Tracer {
        Tracer::new(sampling(ratio), collector.clone(), 4, Counter::default())
    }

    fn fill(tracer: &Tracer) {
        let trace = tracer.begin(None, None).expect("a sampled tunnel");
        for _ in 0..10 {
            tracer.push(|| trace.span(Instant::now()));
        }
    }

    #[test]
    fn a_set_flag_or_the_own_ratio_samples_and_an_unset_flag_decides_nothing() {
        for (ratio, is_parent_based, flag, is_sampled) in [
            (0.0, true, '1', true),
            (0.0, true, '0', false),
            (0.0, false, '1', false),
            (1.0, true, '0', true),
            (1.0, false, '0', true),
        ] {
            let mut tracer = tracer(ratio, &Collector::default());
            tracer.sampling.is_parent_based = is_parent_based;
            let traceparent = format!("{TRACE}{flag}");
            let trace = tracer.begin(Some(traceparent.as_bytes()), None).expect("a trace");
            let case = (ratio, is_parent_based, flag);
            assert_eq!(trace.id(), "0af7651916cd43dd8448eb211c80319c");
            let next = format!("00-{}-{}-01", trace.id(), trace.own.span_id());
            assert_eq!(trace.traceparent(), is_sampled.then_some(next), "{case:?}");
            assert_eq!(trace.is_sampled(), is_sampled, "{case:?}");
            let parent = trace.span(Instant::now()).parent_span_id.to_string();
            assert_eq!(parent, "b7ad6b7169203331");
            assert_eq!(tracer.begin(None, None).is_some(), ratio > 0.0, "{case:?}");
            let malformed = tracer.begin(Some(b"00-1-2-01"), None);
            assert_eq!(malformed.is_some(), ratio > 0.0, "{case:?}");
        }
    }

    #[test]
    fn a_ratio_samples_its_share() {
        let tracer = tracer(0.25, &Collector::default());
        let sampled = (0..10_000).filter(|_| tracer.begin(None, None).is_some()).count();
        // Ten standard deviations of a binomial count: 10 × √(10,000 × 0.25 × 0.75).
        assert!((2067..=2933).contains(&sampled), "{sampled}");
    }

    #[test]
    fn spans_beyond_the_queue_are_lost_and_the_others_are_exported() {
        let collector = Collector::default();
        let tracer = tracer(1.0, &collector);
        // No export ends meanwhile.
        let taken = collector.spans.lock();
        fill(&tracer);
        assert_eq!(tracer.queue.dropped.get(), 6);
        drop(taken);
        tracer.shut_down(DEADLINE).expect("an export");
        assert_eq!(collector.spans.lock().len(), 4);
        assert_eq!(tracer.queue.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn spans_that_the_collector_does_not_take_are_lost() {
        let tracer = tracer(1.0, &Collector { is_gone: true, ..Collector::default() });
        fill(&tracer);
        tracer.shut_down(DEADLINE).expect("an end");
        assert_eq!(tracer.queue.dropped.get(), 10);
    }
}
