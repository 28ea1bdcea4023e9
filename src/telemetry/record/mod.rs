//! Record of one tunnel. It counts bytes; its drop updates the metrics and writes the access log
//! line, however the tunnel ended.

mod span;

use std::fmt;
use std::mem::replace;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{Level, field};

use crate::reason::{HandshakeRefusal, Reason};
use crate::telemetry::labels::TunnelFacts;
use crate::telemetry::metrics::OpenTunnel;
use crate::telemetry::refusals::Refused;
use crate::telemetry::spans::{Step, Trace};
use crate::telemetry::times::{Stage, micros};
use crate::telemetry::{
    Destination, DestinationService, Handshake, Metrics, Proximity, RemoteNetwork, Source,
    WorkloadLabels,
};
use crate::wire::ServerAnswer;
use crate::wire::client_hello::OfferedProtocol;

/// Bytes of a text from a peer that are logged. A valid authority is never longer.
const MAX_TEXT: usize = 260;

/// Facts about one tunnel so far.
#[derive(Debug)]
pub struct Record {
    metrics: Arc<Metrics>,
    source: Arc<Source>,
    requested: RequestedName,
    service: DestinationService,
    workload: Option<Arc<WorkloadLabels>>,
    destination: Option<Destination>,
    progress: Progress,
    received: u64,
    sent: u64,
    start: Instant,
    /// Microseconds from `start` to the end of the dial. A number, as the record has little room.
    dialled_micros: u32,
    proximity: Proximity,
    reason: Option<Reason>,
    /// Boxed, because few tunnels have any.
    details: Option<Box<Details>>,
}

/// Progress of a tunnel. Both variants take the same room.
#[derive(Debug)]
enum Progress {
    Dialling(Dials),
    Open(OpenTunnel),
}

/// Times of the dials of a tunnel, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Dials {
    /// Time to the first dial, 0 before it.
    picked: u32,
    /// Duration of the last dial.
    last: u32,
}

/// Facts that few records have.
#[derive(Debug, Default)]
struct Details {
    detail: Option<Box<str>>,
    /// Trace that the tunnel is a part of, if traces are exported.
    trace: Option<Box<Trace>>,
    /// Identity of the first peer of a tunnel through a trusted gateway.
    first_peer: Option<Box<str>>,
}

/// Name that the peer requested, as received.
#[derive(Debug)]
enum RequestedName {
    Authority(Box<str>),
    /// Shared with the peer.
    Sni(Arc<str>),
    /// Authority and server name of the TLS inside. Boxed: few tunnels have both.
    AuthorityAndSni(Box<(Box<str>, Box<str>)>),
}

/// Writes one event of the access log. Unknown fields are omitted.
///
/// Text is recorded as a string, not by `Display`: both formatters then escape control
/// characters, so that a peer can neither forge a line nor control the operator's terminal.
/// `parent: None` keeps spans out of the line, whose fields are a contract.
macro_rules! access {
    ($level:expr, $record:expr, $message:literal $(, $($extra:tt)+)?) => {
        tracing::event!(
            target: "access",
            parent: None,
            $level,
            "src.addr" = %$record.source.address,
            "src.namespace" = non_empty(&$record.source.namespace),
            "src.identity" = non_empty(&$record.source.principal),
            "src.cluster" = non_empty(&$record.source.cluster),
            "src.first_peer" = $record.first_peer(),
            "dst.addr" = $record.destination.as_ref().map(|it| field::display(it.address)),
            "dst.hbone_addr" = $record.authority(),
            "dst.sni" = $record.sni(),
            "dst.service" = non_empty(&$record.service.hostname),
            "dst.workload" = $record.pod_name(),
            "dst.namespace" = non_empty($record.destination_namespace()),
            "dst.identity" = $record.workload.as_ref().and_then(|it| non_empty(&it.principal)),
            "dst.cluster" = $record.workload.as_ref().and_then(|it| non_empty(&it.cluster)),
            listener = non_empty(&$record.source.listener),
            trace_id = $record.trace().map(Trace::id).as_deref(),
            direction = "inbound",
            $($($extra)+,)?
            $message
        )
    };
}

/// Writes the line at the end of a tunnel. A macro, because tracing needs constants.
macro_rules! ended {
    ($record:expr, $age:expr, $reason:expr, $suppressed:expr, $message:literal) => {
        match $reason.level() {
            Level::ERROR => ended!(Level::ERROR, $record, $age, $reason, $suppressed, $message),
            Level::WARN => ended!(Level::WARN, $record, $age, $reason, $suppressed, $message),
            _ => ended!(Level::INFO, $record, $age, $reason, $suppressed, $message),
        }
    };
    ($level:expr, $record:expr, $age:expr, $reason:expr, $suppressed:expr, $message:literal) => {
        access!(
            $level,
            $record,
            $message,
            bytes_sent = $record.sent,
            bytes_recv = $record.received,
            duration = %format_args!("{}ms", $age.as_millis()),
            reason = $reason.label(),
            error = $record.error($reason),
            suppressed = $suppressed
        )
    };
}

impl Record {
    /// Creates the record of a tunnel that CONNECT requested.
    pub fn new(metrics: &Arc<Metrics>, source: &Arc<Source>, authority: &str) -> Self {
        Self::with_name(metrics, source, RequestedName::Authority(truncated(authority).into()))
    }

    pub fn for_client_hello(
        metrics: &Arc<Metrics>,
        source: &Arc<Source>,
        sni: Option<Arc<str>>,
    ) -> Self {
        Self::with_name(metrics, source, RequestedName::Sni(sni.unwrap_or_default()))
    }

    fn with_name(metrics: &Arc<Metrics>, source: &Arc<Source>, requested: RequestedName) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            source: Arc::clone(source),
            requested,
            service: DestinationService::default(),
            workload: None,
            destination: None,
            progress: Progress::Dialling(Dials::default()),
            received: 0,
            sent: 0,
            start: Instant::now(),
            dialled_micros: 0,
            proximity: Proximity::Network,
            reason: None,
            details: None,
        }
    }

    /// Begins the trace of the tunnel, if traces are exported: a part of the trace that a
    /// `traceparent` states, or one of its own. The first tunnel of a connection shows the
    /// handshake.
    pub fn begin_trace(&mut self, traceparent: Option<&[u8]>, handshake: Option<Handshake>) {
        let tracer = self.metrics.tracer();
        if let Some(trace) = tracer.and_then(|tracer| tracer.begin(traceparent, handshake)) {
            self.details().trace = Some(Box::new(trace));
        }
    }

    /// Returns the `traceparent` of the tunnel through the next gateway, if this one is sampled.
    pub fn traceparent(&self) -> Option<String> {
        self.trace()?.traceparent()
    }

    fn trace(&self) -> Option<&Trace> {
        self.details.as_ref()?.trace.as_deref()
    }

    /// Records the instant of a step in the trace.
    fn mark(&mut self, step: Step, now: Instant) {
        if let Some(trace) = self.details.as_mut().and_then(|details| details.trace.as_mut()) {
            trace.mark(step, now);
        }
    }

    /// Records the server name of the TLS inside a tunnel.
    pub fn set_inner_sni(&mut self, sni: Option<&str>) {
        if let (RequestedName::Authority(authority), Some(sni)) = (&mut self.requested, sni) {
            let both = (std::mem::take(authority), truncated(sni).into());
            self.requested = RequestedName::AuthorityAndSni(Box::new(both));
        }
    }

    /// Records the service that the tunnel was resolved to, and the first peer behind a gateway.
    pub fn set_service(&mut self, service: DestinationService, first_peer: Option<&str>) {
        self.service = service;
        if first_peer.is_some() {
            self.details().first_peer = first_peer.map(Into::into);
        }
    }

    /// Records the start of a dial. The first one ends the choice of an endpoint.
    pub fn begin_dial(&mut self, now: Instant) {
        let picked = to_micros(now.saturating_duration_since(self.start)).max(1);
        if let Progress::Dialling(dials) = &mut self.progress
            && dials.picked == 0
        {
            dials.picked = picked;
        }
        self.mark(Step::Policy, now);
    }

    /// Records the end of a dial that took `time`.
    pub fn end_dial(&mut self, now: Instant, time: Duration) {
        self.dialled_micros = to_micros(now.saturating_duration_since(self.start));
        if let Progress::Dialling(dials) = &mut self.progress {
            dials.last = to_micros(time);
        }
        self.mark(Step::Dial, now);
    }

    /// Records that the endpoint was dialled and the peer was answered: the tunnel is open.
    pub fn set_open(
        &mut self,
        destination: Destination,
        workload: &Arc<WorkloadLabels>,
        remote: Option<RemoteNetwork<'_>>,
        proximity: Proximity,
    ) {
        self.destination = Some(destination);
        self.workload = Some(Arc::clone(workload));
        // Details of failed dials do not explain a later end.
        if let Some(details) = &mut self.details {
            details.detail = None;
        }
        self.proximity = proximity;
        let open = self.metrics.tunnel_opened(self.facts(), workload, remote);
        if let Progress::Dialling(Dials { picked, last }) =
            replace(&mut self.progress, Progress::Open(open))
            && picked > 0
        {
            self.took(Stage::Pick, picked.into());
            self.took(Stage::Dial, last.into());
        }
        if self.metrics.access.is_all() {
            access!(Level::DEBUG, self, "connection opened");
        }
    }

    pub fn add_received(&mut self, bytes: u64) {
        self.received = self.received.saturating_add(bytes);
        if let Progress::Open(open) = &self.progress {
            open.handles.received.inc_by(bytes);
            if let Some(network) = &open.handles.network {
                network.received.inc_by(bytes);
            }
        }
    }

    pub fn add_sent(&mut self, bytes: u64) {
        if self.sent == 0 && bytes > 0 {
            let now = Instant::now();
            let age = to_micros(now.saturating_duration_since(self.start));
            self.took(Stage::FirstByte, age.saturating_sub(self.dialled_micros).into());
            self.mark(Step::FirstByte, now);
        }
        self.sent = self.sent.saturating_add(bytes);
        if let Progress::Open(open) = &self.progress {
            open.handles.sent.inc_by(bytes);
            if let Some(network) = &open.handles.network {
                network.sent.inc_by(bytes);
            }
        }
    }

    /// Records the answer to the ClientHello inside the tunnel, and the time for which it waited.
    pub fn inner_hello_answered(
        &self,
        time: Duration,
        offered: OfferedProtocol,
        answer: ServerAnswer,
    ) {
        self.took(Stage::InnerHello, to_micros(time).into());
        let labels = [("alpn", offered.label()), ("version", answer.label())];
        self.metrics.inner_handshakes.get_or_create(&labels).inc();
    }

    fn open(&self) -> Option<&OpenTunnel> {
        match &self.progress {
            Progress::Open(open) => Some(open),
            Progress::Dialling(_) => None,
        }
    }

    /// Records the time of a stage of an open tunnel, in microseconds.
    fn took(&self, stage: Stage, micros: u64) {
        if let Progress::Open(open) = &self.progress {
            open.handles.times.of(self.proximity, stage).observe_micros(micros);
        }
    }

    /// Returns the bytes from the endpoint to the peer so far.
    pub fn sent_bytes(&self) -> u64 {
        self.sent
    }

    /// Returns the bytes from the peer to the endpoint so far.
    pub fn received_bytes(&self) -> u64 {
        self.received
    }

    /// Returns the time since the request for the tunnel.
    pub fn age(&self) -> Duration {
        self.start.elapsed()
    }

    /// Records the reason for the end. The first reason is kept: later ones follow from it.
    pub fn finish(&mut self, reason: Reason) {
        self.reason.get_or_insert(reason);
    }

    /// Sets the log's `error` field, which explains the end to the operator.
    pub fn set_detail(&mut self, text: String) {
        self.details().detail = Some(text.into());
    }

    fn details(&mut self) -> &mut Details {
        self.details.get_or_insert_default()
    }

    fn first_peer(&self) -> Option<&str> {
        self.details.as_ref()?.first_peer.as_deref()
    }

    /// Returns the `error` field, if there is a detail and the reason is not logged at INFO.
    fn error(&self, reason: Reason) -> Option<&str> {
        let detail = self.details.as_ref()?.detail.as_deref()?;
        (reason.level() != Level::INFO).then(|| truncated(detail))
    }

    fn authority(&self) -> Option<&str> {
        match &self.requested {
            RequestedName::Authority(authority) => non_empty(authority),
            RequestedName::AuthorityAndSni(both) => non_empty(&both.0),
            RequestedName::Sni(_) => None,
        }
    }

    fn sni(&self) -> Option<&str> {
        match &self.requested {
            RequestedName::Sni(sni) => non_empty(sni),
            RequestedName::AuthorityAndSni(both) => non_empty(&both.1),
            RequestedName::Authority(_) => None,
        }
    }

    /// Returns the name of the pod that was reached, if it is known.
    fn pod_name(&self) -> Option<&str> {
        let destination = self.destination.as_ref()?;
        non_empty(destination.pod.pod_name())
    }

    /// Returns the namespace of the workload, or of the service if no workload was reached.
    fn destination_namespace(&self) -> &str {
        match &self.workload {
            Some(workload) => &workload.namespace,
            None => &self.service.namespace,
        }
    }

    fn facts(&self) -> TunnelFacts<'_> {
        TunnelFacts::new(&self.source, &self.service, self.workload.as_ref())
    }

    fn refused(&self, reason: Reason) -> Refused {
        Refused {
            reason: reason.label(),
            listener: Arc::clone(&self.source.listener),
            first_peer: self.first_peer().unwrap_or_default().into(),
            authority: self.authority().unwrap_or_default().into(),
            sni: self.sni().unwrap_or_default().into(),
        }
    }

    fn log(&self, age: Duration, reason: Reason) {
        let access = &self.metrics.access;
        let from = (&*self.source, self.first_peer());
        let admitted = access.admit(from, self.open().is_some(), reason.level());
        let Some(suppressed) = admitted else {
            return;
        };
        let left_out = (suppressed > 0).then_some(suppressed);
        if self.open().is_some() {
            ended!(self, age, reason, left_out, "connection complete");
        } else {
            ended!(self, age, reason, left_out, "connection failed");
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // Without a reason, the tunnel's future was dropped before it could set one. Either our
        // code panicked, or the peer's connection ended with all its tunnels.
        let reason = self.reason.unwrap_or_else(|| {
            if std::thread::panicking() { Reason::Panic } else { Reason::DownstreamLost }
        });
        let age = self.age();
        self.took(Stage::Tunnel, micros(age));
        self.metrics.tunnel_ended(self.facts(), self.open(), reason);
        if self.open().is_none() && reason.level() != Level::INFO {
            self.metrics.refusals.add(&self.source, self.refused(reason), self.error(reason));
        }
        self.export_span(reason);
        self.log(age, reason);
    }
}

/// Writes the line about a connection without a tunnel, if the limit of such lines permits it.
macro_rules! refused {
    ($metrics:expr, $address:expr, $message:literal, $($extra:tt)+) => {
        if let Some(suppressed) = $metrics.access.admit_handshake($address.ip()) {
            tracing::event!(
                target: "access",
                parent: None,
                Level::WARN,
                "src.addr" = %$address,
                direction = "inbound",
                $($extra)+,
                suppressed = (suppressed > 0).then_some(suppressed),
                $message
            );
        }
    };
}

/// Counts and logs a connection that was refused before it could open a tunnel.
///
/// Anyone who reaches the port can cause this: every refusal is counted, but log lines are
/// limited.
pub fn report_refused_handshake(
    metrics: &Metrics,
    address: SocketAddr,
    refusal: HandshakeRefusal,
    detail: &str,
) {
    metrics.handshakes_refused.inc(refusal.label());
    let detail = truncated(detail);
    metrics.refusals.add_connection(address.ip(), refusal.label(), detail);
    let error = non_empty(detail);
    refused!(metrics, address, "handshake refused", reason = refusal.label(), error = error);
}

/// Logs a connection that was closed before its handshake, because of a limit. Log lines are
/// limited as in [`report_refused_handshake`].
pub fn connection_refused(
    metrics: &Metrics,
    address: SocketAddr,
    limit: &str,
    why: &dyn fmt::Display,
) {
    refused!(metrics, address, "connection refused by limit", limit, error = %why);
}

/// Returns a time in microseconds, at most 71 minutes, which fit into 32 bits.
fn to_micros(time: Duration) -> u32 {
    u32::try_from(micros(time)).unwrap_or(u32::MAX)
}

/// Returns the text, or none if it is empty.
fn non_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Returns at most the first [`MAX_TEXT`] bytes of the text, cut at a character boundary.
fn truncated(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&end| text.is_char_boundary(end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

#[cfg(test)]
mod tests;
