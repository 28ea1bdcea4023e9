//! Record of one tunnel. It counts bytes; its drop updates the metrics and writes the access log
//! line, however the tunnel ended.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{Level, field};

use super::labels::TunnelFacts;
use super::metrics::OpenTunnel;
use super::{Destination, DestinationService, Metrics, Source, WorkloadLabels};
use crate::reason::{HandshakeRefusal, Reason};

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
    open: Option<OpenTunnel>,
    received: u64,
    sent: u64,
    start: Instant,
    reason: Option<Reason>,
    /// Boxed twice: few tunnels have a detail, and a `Box<str>` would add its length to each
    /// record.
    detail: Option<Box<Box<str>>>,
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
            "dst.addr" = $record.destination.as_ref().map(|it| field::display(it.address)),
            "dst.hbone_addr" = $record.authority(),
            "dst.sni" = $record.sni(),
            "dst.service" = non_empty(&$record.service.hostname),
            "dst.workload" = $record.pod_name(),
            "dst.namespace" = non_empty($record.destination_namespace()),
            "dst.identity" = $record.workload.as_ref().and_then(|it| non_empty(&it.principal)),
            "dst.cluster" = $record.workload.as_ref().and_then(|it| non_empty(&it.cluster)),
            direction = "inbound",
            $($($extra)+,)?
            $message
        )
    };
}

/// Writes the line at the end of a tunnel. A macro, because tracing needs constants.
macro_rules! ended {
    ($record:expr, $reason:expr, $suppressed:expr, $message:literal) => {
        match $reason.level() {
            Level::ERROR => ended!(Level::ERROR, $record, $reason, $suppressed, $message),
            Level::WARN => ended!(Level::WARN, $record, $reason, $suppressed, $message),
            _ => ended!(Level::INFO, $record, $reason, $suppressed, $message),
        }
    };
    ($level:expr, $record:expr, $reason:expr, $suppressed:expr, $message:literal) => {
        access!(
            $level,
            $record,
            $message,
            bytes_sent = $record.sent,
            bytes_recv = $record.received,
            duration = %format_args!("{}ms", $record.age().as_millis()),
            reason = $reason.label(),
            error = $record.error($reason),
            suppressed = $suppressed
        )
    };
}

impl Record {
    /// Creates the record of a tunnel that CONNECT requested.
    pub fn new(metrics: &Arc<Metrics>, source: &Arc<Source>, authority: &str) -> Self {
        Self::with_name(
            metrics,
            source,
            RequestedName::Authority(truncated(authority).into()),
        )
    }

    /// Creates the record of a tunnel that a ClientHello requested.
    pub fn for_client_hello(
        metrics: &Arc<Metrics>,
        source: &Arc<Source>,
        sni: Option<Arc<str>>,
    ) -> Self {
        Self::with_name(metrics, source, RequestedName::Sni(sni.unwrap_or_default()))
    }

    fn with_name(metrics: &Arc<Metrics>, source: &Arc<Source>, asked: RequestedName) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            source: Arc::clone(source),
            requested: asked,
            service: DestinationService::default(),
            workload: None,
            destination: None,
            open: None,
            received: 0,
            sent: 0,
            start: Instant::now(),
            reason: None,
            detail: None,
        }
    }

    /// Records the server name of the TLS inside a tunnel.
    pub fn set_inner_sni(&mut self, sni: Option<&str>) {
        if let (RequestedName::Authority(authority), Some(sni)) = (&mut self.requested, sni) {
            let both = (std::mem::take(authority), truncated(sni).into());
            self.requested = RequestedName::AuthorityAndSni(Box::new(both));
        }
    }

    /// Records the service that the tunnel was resolved to.
    pub fn set_service(&mut self, service: DestinationService) {
        self.service = service;
    }

    /// Records that the endpoint was dialled and the peer was answered: the tunnel is open.
    pub fn set_open(&mut self, destination: Destination, workload: &Arc<WorkloadLabels>) {
        self.destination = Some(destination);
        self.workload = Some(Arc::clone(workload));
        // Details of failed dials do not explain a later end.
        self.detail = None;
        self.open = Some(self.metrics.tunnel_opened(self.facts(), workload));
        if self.metrics.access.is_all() {
            access!(Level::DEBUG, self, "connection opened");
        }
    }

    /// Counts bytes from the peer to the endpoint.
    pub fn add_received(&mut self, bytes: u64) {
        self.received = self.received.saturating_add(bytes);
        if let Some(open) = &self.open {
            open.handles.received.inc_by(bytes);
        }
    }

    /// Counts bytes from the endpoint to the peer.
    pub fn add_sent(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes);
        if let Some(open) = &self.open {
            open.handles.sent.inc_by(bytes);
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
        self.detail = Some(Box::new(text.into()));
    }

    /// Returns the `error` field, if there is a detail and the reason is not logged at INFO.
    fn error(&self, reason: Reason) -> Option<&str> {
        let detail = self.detail.as_deref()?;
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

    fn log(&self, reason: Reason) {
        let (access, identity) = (&self.metrics.access, &self.source.principal);
        let admitted = access.admit(identity, self.open.is_some(), reason.level());
        let Some(suppressed) = admitted else {
            return;
        };
        let left_out = (suppressed > 0).then_some(suppressed);
        if self.open.is_some() {
            ended!(self, reason, left_out, "connection complete");
        } else {
            ended!(self, reason, left_out, "connection failed");
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // Without a reason, the tunnel's future was dropped before it could set one. Either our
        // code panicked, or the peer's connection ended with all its tunnels.
        let reason = self.reason.unwrap_or_else(|| {
            if std::thread::panicking() {
                Reason::Panic
            } else {
                Reason::DownstreamLost
            }
        });
        self.metrics
            .tunnel_ended(self.facts(), self.open.as_ref(), reason);
        self.log(reason);
    }
}

/// Counts and logs a connection that was refused before a byte of HTTP/2 was read from it.
///
/// Anyone who reaches the port can cause this: every refusal is counted, but log lines are
/// limited.
pub fn handshake_refused(
    metrics: &Metrics,
    address: SocketAddr,
    refusal: HandshakeRefusal,
    detail: &str,
) {
    metrics.handshake_refused(refusal);
    if let Some(suppressed) = metrics.access.admit_handshake() {
        tracing::event!(
            target: "access",
            parent: None,
            Level::WARN,
            "src.addr" = %address,
            direction = "inbound",
            reason = refusal.label(),
            error = non_empty(truncated(detail)),
            suppressed = (suppressed > 0).then_some(suppressed),
            "handshake refused"
        );
    }
}

/// Logs a connection that was closed before its handshake, because of a limit. Log lines are
/// limited as in [`handshake_refused`].
pub fn connection_refused(
    metrics: &Metrics,
    address: SocketAddr,
    limit: &str,
    why: &dyn fmt::Display,
) {
    if let Some(suppressed) = metrics.access.admit_handshake() {
        tracing::event!(
            target: "access",
            parent: None,
            Level::WARN,
            "src.addr" = %address,
            direction = "inbound",
            limit,
            error = %why,
            suppressed = (suppressed > 0).then_some(suppressed),
            "connection refused by limit"
        );
    }
}

/// Returns the text, or none if it is empty.
fn non_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

/// Returns at most the first [`MAX_TEXT`] bytes of the text, cut at a character boundary.
fn truncated(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_TEXT))
        .rev()
        .find(|&end| text.is_char_boundary(end));
    end.and_then(|end| text.get(..end)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::logging;
    use super::super::support::{Captured, source, value};
    use super::*;
    use crate::config::{Log, LogFormat};

    const LABELS: &str = "reporter=\"destination\",source_workload=\"unknown\",\
        source_canonical_service=\"unknown\",source_canonical_revision=\"unknown\",\
        source_workload_namespace=\"shop\",\
        source_principal=\"spiffe://west.local/ns/shop/sa/checkout\",source_app=\"unknown\",\
        source_version=\"unknown\",source_cluster=\"west\",\
        destination_service=\"echo.app.mesh.internal\",destination_service_namespace=\"app\",\
        destination_service_name=\"echo\",destination_workload=\"echo-v1\",\
        destination_canonical_service=\"echo\",destination_canonical_revision=\"v1\",\
        destination_workload_namespace=\"app\",\
        destination_principal=\"spiffe://east.local/ns/app/sa/echo\",destination_app=\"echo\",\
        destination_version=\"v1\",destination_cluster=\"east\",request_protocol=\"tcp\",\
        response_flags=\"-\",connection_security_policy=\"mutual_tls\",\
        source_region=\"unknown\",source_zone=\"unknown\",destination_region=\"us-east-2\",\
        destination_zone=\"unknown\"";

    fn service() -> DestinationService {
        DestinationService {
            hostname: "echo.app.mesh.internal".into(),
            name: "echo".into(),
            namespace: "app".into(),
        }
    }

    fn connect(record: &mut Record) {
        let destination = Destination {
            address: ([10, 0, 0, 1], 15008).into(),
            pod: Arc::new("echo-v1-abcde".to_owned()),
        };
        let workload = WorkloadLabels {
            workload: "echo-v1".into(),
            namespace: "app".into(),
            principal: "spiffe://east.local/ns/app/sa/echo".into(),
            cluster: "east".into(),
            canonical_name: "echo".into(),
            canonical_revision: "v1".into(),
            region: "us-east-2".into(),
            zone: String::new(),
        };
        record.set_open(destination, &Arc::new(workload));
    }

    fn record(metrics: &Arc<Metrics>, authority: &str) -> Record {
        Record::new(metrics, &Arc::new(source()), authority)
    }

    /// Runs `work` with a JSON log and returns its events without their timestamps.
    fn logged(level: &str, work: impl FnOnce()) -> Vec<Value> {
        let lines = Captured::default();
        let log = Log {
            level: level.into(),
            format: LogFormat::Json,
            ..Log::default()
        };
        let (subscriber, _handle) =
            logging::build(&log, lines.clone(), false, None).expect("a log");
        tracing::subscriber::with_default(subscriber, work);
        let event = |line: &str| {
            let mut event: Value = serde_json::from_str(line).expect("a JSON line");
            event
                .as_object_mut()
                .and_then(|event| event.remove("timestamp"))
                .expect("a time");
            event
        };
        lines.text().lines().map(event).collect()
    }

    #[test]
    fn a_tunnel_counts_its_bytes_while_open_and_its_end_once() {
        let metrics = Arc::new(Metrics::new());
        let mut record = record(&metrics, "echo.app.mesh.internal:80");
        record.set_service(service());
        connect(&mut record);
        record.add_received(5);
        record.add_sent(6);
        record.add_sent(7);
        let open = metrics.encode();
        for (name, count) in [
            ("istio_tcp_connections_opened_total", 1),
            ("istio_tcp_received_bytes_total", 5),
            ("istio_tcp_sent_bytes_total", 13),
        ] {
            let line = format!("{name}{{{LABELS}}} {count}\n");
            assert!(open.contains(&line), "{line} in\n{open}");
        }
        assert!(open.contains("strait_tunnels_open 1\n"));
        assert!(!open.contains("istio_tcp_connections_closed_total{"));
        record.finish(Reason::Completed);
        record.finish(Reason::DrainDeadline);
        drop(record);
        let closed = metrics.encode();
        assert!(closed.contains(&format!(
            "istio_tcp_connections_closed_total{{{LABELS}}} 1\n"
        )));
        assert!(
            closed
                .contains("strait_tunnels_total{reason=\"completed\",source_cluster=\"west\"} 1\n")
        );
        assert!(closed.contains(
            "strait_tunnels_total{reason=\"drain_deadline\",source_cluster=\"west\"} 0\n"
        ));
        assert!(closed.contains("strait_tunnels_open 0\n"));
    }

    #[test]
    fn a_refusal_counts_as_failed_with_its_response_flags() {
        let metrics = Arc::new(Metrics::new());
        let mut record = record(&metrics, "echo.app.mesh.internal:80");
        record.set_service(service());
        record.finish(Reason::NotForPeer);
        drop(record);
        let text = metrics.encode();
        let labels = [
            "response_flags=\"DENY\"",
            "destination_workload=\"unknown\"",
        ];
        assert_eq!(
            value(&text, "istio_tcp_connections_failed_total", &labels),
            1
        );
        assert!(!text.contains("istio_tcp_connections_opened_total{"));
    }

    #[test]
    fn a_record_that_nobody_finished_tells_a_panic_from_a_lost_peer() {
        let metrics = Arc::new(Metrics::new());
        drop(record(&metrics, "a:1"));
        let moved = record(&metrics, "a:1");
        let panicked = std::thread::spawn(move || {
            let _record = moved;
            panic!("on purpose");
        });
        assert!(panicked.join().is_err());
        let text = metrics.encode();
        assert!(text.contains(
            "strait_tunnels_total{reason=\"downstream_lost\",source_cluster=\"west\"} 1\n"
        ));
        assert!(
            text.contains("strait_tunnels_total{reason=\"panic\",source_cluster=\"west\"} 1\n")
        );
    }

    #[test]
    fn an_open_tunnel_logs_its_opening_and_its_completion() {
        let metrics = Arc::new(Metrics::new());
        let mut events = logged("debug", || {
            let mut record = record(&metrics, "echo.app.mesh.internal:80");
            record.set_service(service());
            connect(&mut record);
            record.add_received(5);
            record.add_sent(6);
            record.finish(Reason::Completed);
        });
        let duration = events[1]
            .as_object_mut()
            .and_then(|event| event.remove("duration"));
        let duration = duration
            .as_ref()
            .and_then(Value::as_str)
            .expect("a duration");
        assert!(
            duration
                .strip_suffix("ms")
                .is_some_and(|ms| ms.parse::<u64>().is_ok())
        );
        let opened = json!({
            "level": "DEBUG",
            "target": "access",
            "message": "connection opened",
            "src.addr": "192.0.2.7:40001",
            "src.namespace": "shop",
            "src.identity": "spiffe://west.local/ns/shop/sa/checkout",
            "src.cluster": "west",
            "dst.addr": "10.0.0.1:15008",
            "dst.hbone_addr": "echo.app.mesh.internal:80",
            "dst.service": "echo.app.mesh.internal",
            "dst.workload": "echo-v1-abcde",
            "dst.namespace": "app",
            "dst.identity": "spiffe://east.local/ns/app/sa/echo",
            "dst.cluster": "east",
            "direction": "inbound",
        });
        let mut complete = opened.clone();
        complete["level"] = "INFO".into();
        complete["message"] = "connection complete".into();
        complete["bytes_sent"] = 6.into();
        complete["bytes_recv"] = 5.into();
        complete["reason"] = "completed".into();
        assert_eq!(events, [opened, complete]);
    }

    #[test]
    fn a_refusal_logs_what_is_known_and_why() {
        let metrics = Arc::new(Metrics::new());
        let events = logged("info", || {
            let mut first = record(&metrics, "evil\n:80");
            first.finish(Reason::BadAuthority);
            drop(first);
            let mut second = record(&metrics, &"é".repeat(1000));
            second.set_service(service());
            second.finish(Reason::DialRefused);
            second.set_detail("10.0.0.1:80 and 1 other refused".into());
        });
        assert_eq!(events[0]["message"], "connection failed");
        assert_eq!(events[0]["level"], "WARN");
        assert_eq!(events[0]["dst.hbone_addr"], "evil\n:80");
        assert_eq!(events[0].get("error"), None);
        assert_eq!(events[0].get("dst.service"), None);
        assert_eq!(events[0].get("dst.addr"), None);
        assert_eq!(
            events[1]["dst.hbone_addr"].as_str().map(str::len),
            Some(MAX_TEXT)
        );
        assert_eq!(events[1]["reason"], "dial_refused");
        assert_eq!(events[1]["error"], "10.0.0.1:80 and 1 other refused");
        assert_eq!(events[1]["dst.namespace"], "app");
    }

    #[test]
    fn an_endpoint_that_was_tried_in_vain_does_not_explain_a_later_end() {
        let metrics = Arc::new(Metrics::new());
        let events = logged("info", || {
            let mut record = record(&metrics, "echo.app.mesh.internal:80");
            record.set_detail("another endpoint refused".into());
            connect(&mut record);
            record.finish(Reason::UpstreamReset);
        });
        assert_eq!(events[0]["message"], "connection complete");
        assert_eq!(events[0].get("error"), None);
    }

    #[test]
    fn a_flood_of_refused_handshakes_is_counted_whole_and_logged_in_part() {
        let metrics = Metrics::new();
        let events = logged("info", || {
            for _ in 0..500 {
                let address = ([192, 0, 2, 9], 1).into();
                handshake_refused(&metrics, address, HandshakeRefusal::Expired, "old");
            }
        });
        // The loop can take two or three windows, but not ten.
        assert!((10..100).contains(&events.len()), "{}", events.len());
        assert_eq!(events[0]["message"], "handshake refused");
        assert_eq!(events[0]["reason"], "expired");
        assert_eq!(events[0]["error"], "old");
        let text = metrics.encode();
        assert!(text.contains("strait_handshakes_refused_total{reason=\"expired\"} 500\n"));
    }
}
