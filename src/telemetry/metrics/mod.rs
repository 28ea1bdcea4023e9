//! Metrics of the process, in one registry.
//!
//! Label sets from closed lists are created at the start: they are exported as 0, so that an
//! alert on their rate detects the first event. Label sets that depend on peers are bounded.

use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use opentelemetry_sdk::trace::SpanExporter;
use parking_lot::Mutex;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tracing_appender::non_blocking::ErrorCounter;

use super::access::{AccessLog, CREDIT_TIME, lines_per_second};
use super::budgets::Budgets;
use super::collected::{Collected, ListenerUp, Order};
use super::labels::{PeerLabels, RemoteNetwork, Source, TunnelFacts};
use super::process::Process;
use super::refusals::RefusalTable;
use super::sets::{Counters, metric, metrics};
use super::spans::{Sampling, Tracer};
use super::tcp::{Handles, Tcp};
use super::times::Times;
use super::xds::{XdsMetrics, unix_seconds};
use super::{WorkloadLabels, exposition, logging};
use crate::config::Link;
use crate::labels::labelled;
use crate::limits::turns::UsedTime;
use crate::limits::{OwnedPool, Rate};
use crate::reason::{HandshakeRefusal, Reason, RetirementReason};
use crate::status::{GatewayRow, ProbeResult, ReloadSource};
use crate::wire::trace::{BAGGAGE, TRACEPARENT};

/// Limit of log lines about authorization policies per second.
const POLICY_LINES_A_SECOND: u32 = 10;

/// Interval of the removal of expired label sets.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Label set of one or two labels from closed lists.
type Labels<const N: usize> = [(&'static str, &'static str); N];
type OwnedLabels<const N: usize> = [(&'static str, String); N];

labelled! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum AcceptError {
        /// The connection failed while it waited in the accept queue.
        Connection = "connection",
        /// This host is out of descriptors or memory.
        Resource = "resource",
    }
}

labelled! {
    /// Outcome of the rejection of a tunnel by authorization policies. Its label is also the
    /// `outcome` field of the log.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum PolicyOutcome {
        /// The tunnel was rejected, or reset if it was open.
        Refused = "refused",
        /// The tunnel was permitted, because the mode is audit.
        Audited = "audited",
        /// The tunnel was permitted, because only dry-run policies reject it.
        DryRun = "dry_run",
    }
}

/// Limits at which connections are closed; each has a counter from the start.
const SHED_LIMITS: [&str; 6] = ["source", "worker", "not_in_sources", "share", "files", "memory"];

/// Reasons for which a change of trust ends connections; each has a counter from the start. Other
/// roots cause the last five: one of the same name, or one above an intermediate that was a root.
const TRUST_LOSS_REASONS: [HandshakeRefusal; 11] = [
    HandshakeRefusal::UnknownIssuer,
    HandshakeRefusal::UntrustedDomain,
    HandshakeRefusal::UntrustedIssuer,
    HandshakeRefusal::Revoked,
    HandshakeRefusal::StaleCrl,
    HandshakeRefusal::UnknownRevocation,
    HandshakeRefusal::BadSignature,
    HandshakeRefusal::BadEncoding,
    HandshakeRefusal::BadKeyUsage,
    HandshakeRefusal::Expired,
    HandshakeRefusal::NotYetValid,
];

metrics! {
    /// All metrics; share it in an `Arc`.
    pub struct Metrics in r {
        tunnels: Family<PeerLabels, Counter> = "strait_tunnels",
            "Tunnels ended, by reason and by the cluster of the peer";
        tunnels_open: Gauge = "strait_tunnels_open", "Open tunnels";
        pub(crate) handshakes_refused: Counters = "strait_handshakes_refused",
            "Connections refused before they could open a tunnel, by reason",
            by "reason" of HandshakeRefusal::ALL.map(HandshakeRefusal::label);
        connections: Counter = "strait_connections", "Connections accepted";
        connections_open: Gauge = "strait_connections_open", "Open connections";
        pub(crate) accept_errors: Counters = "strait_accept_errors", "Failed accepts, by kind",
            by "kind" of AcceptError::ALL.map(AcceptError::label);
        dials: Counters = "strait_dials", "Dials of one endpoint, by result",
            by "result" of ["ok", "refused", "timeout", "failed", "denied"];
        pub(super) inner_handshakes: Family<Labels<2>, Counter> = "strait_inner_handshakes",
            "Answers to the ClientHello inside a CONNECT, by its first protocol and by version";
        pub(crate) gateway_probes: Counters = "strait_gateway_probes",
            "Probes of gateways of other networks, by result",
            by "result" of ProbeResult::ALL.map(ProbeResult::label);
        pub(crate) ejections: Counter = "strait_endpoint_ejections",
            "Endpoints ejected after failures";
        buffered: Gauge = "strait_buffered_bytes",
            "Bytes buffered for slow readers, of all tunnels";
        buffered_max: Gauge = "strait_buffered_max_bytes",
            "Limit of buffered bytes; above it tunnels are rejected and reset";
        memory_used: Gauge = "strait_memory_used_bytes",
            "Memory in use without the page cache, which admission compares with the limit";
        memory_limit: Gauge = "strait_memory_limit_bytes",
            "Memory limit of this process, from its cgroup or the machine";
        panics: Counter = "strait_panics",
            "Panics, each of which ended a connection or a part of the process";
        pub(crate) worker_stalls: Counter = "strait_worker_stalls",
            "Times at which a worker stood still for a second";
        pub(crate) accept_pauses: Counter = "strait_accept_pauses",
            "Pauses of 100 ms in accepting because no descriptor was free";
        shed: Family<PeerLabels, Counter> = "strait_connections_shed",
            "Connections closed at a limit before they could open a tunnel, by limit and cluster";
        pub(crate) frame_floods: Counter = "strait_connections_exhausted",
            "Connections closed because of excessive frames (ENHANCE_YOUR_CALM)";
        pub(crate) retired: Counters = "strait_connections_retired",
            "Connections of peers that were sent GOAWAY to move elsewhere, by reason",
            by "reason" of RetirementReason::ALL.map(RetirementReason::label);
        pub(crate) policies: Counters = "strait_policy_refusals",
            "Refusals of tunnels by authorization policies, by outcome",
            by "outcome" of PolicyOutcome::ALL.map(PolicyOutcome::label);
        reloads: Family<Labels<2>, Counter> = "strait_reload",
            "Reads of changed sources, by result";
        reload_failing: Family<Labels<1>, Gauge> = "strait_reload_failing",
            "Whether the last read of a source failed, or a part of it is not in use";
        config_reload: Gauge = "strait_config_last_reload_successful",
            "Whether the last read of the configuration succeeded, and all of it is in use";
        config_reload_time: Gauge = "strait_config_last_reload_success_timestamp_seconds",
            "Time of the last read of the configuration that succeeded (Unix time)";
        config_info: Family<OwnedLabels<1>, Gauge> = "strait_config_info",
            "Hash of the configuration in use, the same where it is the same";
        certificate_fetches: Counters = "strait_certificate_fetches",
            "Certificate requests and updates, by result", by "result" of [true, false].map(result);
        certificate_expiry: Family<OwnedLabels<2>, Gauge> =
            "strait_certificate_expiry_timestamp_seconds",
            "Expiry time of the first certificate of each kind (Unix time)";
        pub(crate) certificate_failing: Gauge = "strait_certificate_failing",
            "Whether the last attempt to get or load a new certificate failed";
        pub(crate) renewal_problem: Gauge = "strait_certificate_renewal_problem",
            "Whether the own certificate is unusable, or should have been renewed";
        pub(crate) untrusted: Counters = "strait_connections_untrusted",
            "Open connections whose peer's certificate lost trust, by reason",
            by "reason" of TRUST_LOSS_REASONS.map(HandshakeRefusal::label);
        crls: Family<Labels<1>, Gauge> = "strait_crls",
            "Certificate revocation lists in force, by state";
        baggage_mismatches: Family<OwnedLabels<1>, Counter> = "strait_baggage_cluster_mismatches",
            "CONNECTs whose baggage names another cluster than the peer's, by the peer's cluster";
        pub(crate) validation_skipped: Gauge = "strait_trust_validation_skipped",
            "Whether peers of any trust domain are accepted";
        log_lines_dropped: Counter = "strait_log_lines_dropped",
            "Log lines lost because the writer could not keep up or the disk was full";
        pub(crate) traces_dropped: Counters = "strait_trace_headers_dropped",
            "Malformed or too large headers of traces, not sent to gateways of other networks",
            by "header" of [TRACEPARENT, BAGGAGE];
        spans_dropped: Counter = "strait_spans_dropped",
            "Sampled spans lost: no room, no collector, or too many tunnels that never opened";
        pub(crate) loads_malformed: Counter = "strait_remote_loads_malformed",
            "Malformed values of x-strait-load from gateways of other networks, which were ignored";
    } besides {
        tcp: Tcp = Tcp::register(r);
        pub xds: XdsMetrics = XdsMetrics::register(r);
        pub remote_gateways: Collected<GatewayRow> = Collected::register(r);
        pub pools: Collected<OwnedPool> = Collected::register(r);
        pub worker_time: Collected<UsedTime> = Collected::register(r);
        pub drains: Collected<Order> = Collected::register(r);
        pub listeners: Collected<ListenerUp> = Collected::register(r);
        pub(crate) refusals: RefusalTable = RefusalTable::default();
        pub(crate) access: AccessLog = AccessLog::new(metric(r, "strait_access_log_suppressed",
            "Access log lines about refusals that rate limits suppressed"));
        log_drops: OnceLock<ErrorCounter> = OnceLock::new();
        tracer: OnceLock<Tracer> = OnceLock::new();
        pub(crate) budgets: Budgets = Budgets::register(r);
        policy_lines: Mutex<Rate> = Mutex::new(lines_per_second(POLICY_LINES_A_SECOND));
        registry: Registry = Registry::default();
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        build_info(&mut registry);
        registry.register_collector(Box::new(Process(SystemTime::now())));
        let mut metrics = Self::register(&mut registry);
        metrics.registry = registry;
        metrics.create_fixed_label_sets();
        metrics
    }

    /// Creates the label sets that are known at the start, except those of [`Counters`].
    fn create_fixed_label_sets(&self) {
        self.create_reasons(&Arc::default());
        for limit in SHED_LIMITS {
            drop(self.shed.get_or_create(&PeerLabels::new(("limit", limit), &Arc::default())));
        }
        self.set_crls(0, 0);
        self.config_reloaded(true);
        for what in ReloadSource::ALL {
            drop(self.reloads.get_or_create(&reload_labels(what, true)));
            drop(self.reloads.get_or_create(&reload_labels(what, false)));
            self.reload_failing(what).set(0);
        }
    }

    fn create_reasons(&self, source_cluster: &Arc<str>) {
        for reason in Reason::ALL {
            let labels = PeerLabels::new(("reason", reason.label()), source_cluster);
            drop(self.tunnels.get_or_create(&labels));
        }
    }

    /// Counts an accepted connection, which is open until the guard is dropped.
    pub fn connection_opened(&self) -> ConnectionGuard {
        self.connections.inc();
        self.connections_open.inc();
        ConnectionGuard(self.connections_open.clone())
    }

    /// Counts a CONNECT whose baggage names another cluster than the peer's. Baggage is a hint
    /// and decides nothing.
    pub fn baggage_mismatch(&self, source: &Source) {
        let labels = [("source_cluster", source.counted_cluster.to_string())];
        self.baggage_mismatches.get_or_create(&labels).inc();
    }

    /// Sets the number of revocation lists in use.
    pub fn set_crls(&self, fresh: usize, stale: usize) {
        for (state, count) in [("fresh", fresh), ("stale", stale)] {
            let gauge = self.crls.get_or_create(&[("state", state)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Begins to trace tunnels, once. Up to `capacity` spans wait for the exporter.
    pub fn trace(
        &self,
        sampling: Sampling,
        exporter: impl SpanExporter + 'static,
        capacity: usize,
    ) {
        let tracer = Tracer::new(sampling, exporter, capacity, self.spans_dropped.clone());
        let _ = self.tracer.set(tracer);
    }

    /// Returns the tracer of tunnels, if traces are exported.
    pub fn tracer(&self) -> Option<&Tracer> {
        self.tracer.get()
    }

    pub fn dial_succeeded(&self) {
        self.dials.inc("ok");
    }

    pub fn times(&self) -> &Times {
        &self.tcp.times
    }

    /// Counts a dial that failed.
    pub fn dial_failed(&self, reason: Reason) {
        let result = match reason {
            Reason::DialRefused => "refused",
            Reason::DialTimeout => "timeout",
            Reason::DialDenied => "denied",
            _ => "failed",
        };
        self.dials.inc(result);
    }

    /// Counts a connection from `address` that was closed before its handshake, by the limit that
    /// it exceeded.
    pub fn connection_shed(&self, address: IpAddr, limit: &'static str) {
        self.refusals.add_connection(address, limit, "");
        self.peer_shed(&Arc::default(), limit);
    }

    /// Counts a connection that was closed after its handshake, by the limit that the peer or its
    /// cluster exceeded.
    pub fn peer_shed(&self, counted_cluster: &Arc<str>, limit: &'static str) {
        self.shed.get_or_create(&PeerLabels::new(("limit", limit), counted_cluster)).inc();
    }

    /// Sets the limit of buffered bytes, and returns the gauge of the bytes in use.
    pub fn set_buffer_limit(&self, max: usize) -> Gauge {
        self.buffered_max.set(i64::try_from(max).unwrap_or(i64::MAX));
        self.buffered.clone()
    }

    /// Sets the limit and the use of memory.
    pub fn set_memory(&self, limit: u64, used: u64) {
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.memory_limit.set(signed(limit));
        self.memory_used.set(signed(used));
    }

    /// Returns true if another line about authorization policies may be logged now.
    pub fn admit_policy_line(&self) -> bool {
        self.policy_lines.lock().spend(1, Instant::now())
    }

    pub fn reload(&self, what: ReloadSource, ok: bool) {
        self.reloads.get_or_create(&reload_labels(what, ok)).inc();
        self.reload_failing(what).set((!ok).into());
        if what == ReloadSource::Config {
            self.config_reloaded(ok);
        }
    }

    fn config_reloaded(&self, ok: bool) {
        self.config_reload.set(ok.into());
        if ok {
            self.config_reload_time.set(unix_seconds(SystemTime::now()));
        }
    }

    /// Exports the hash of the configuration in use.
    pub fn set_config_hash(&self, hash: u64) {
        self.config_info.clear();
        self.config_info.get_or_create(&[("hash", format!("{hash:016x}"))]).set(1);
    }

    fn reload_failing(&self, what: ReloadSource) -> Gauge {
        self.reload_failing.get_or_create(&[("what", what.label())]).clone()
    }

    /// Counts a certificate that was requested from an authority or pushed by it.
    pub fn certificate_fetched(&self, ok: bool) {
        self.certificate_fetches.inc(result(ok));
    }

    /// Sets the expiry time of the first certificate of each kind, for this identity only.
    pub fn set_certificate_expiry(&self, identity: &str, ends: &[(&'static str, SystemTime)]) {
        self.certificate_expiry.clear();
        for (kind, end) in ends {
            let labels = [("identity", identity.to_owned()), ("kind", (*kind).to_owned())];
            self.certificate_expiry.get_or_create(&labels).set(unix_seconds(*end));
        }
    }

    /// Exports the number of dropped log lines from now on. Only the first call has an effect.
    pub fn count_log_drops(&self, drops: ErrorCounter) {
        let _ = self.log_drops.set(drops);
    }

    /// Applies `links[].budget`, at the gateway of the cluster `own`.
    pub fn set_link_budgets(&self, links: Option<&[Link]>, own: &str) {
        let links = links.unwrap_or_default();
        self.budgets.set(links, own, Instant::now());
    }

    /// Removes unused label sets and logs the counts of suppressed log lines every few seconds.
    /// Runs until it is dropped.
    pub async fn run(&self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            self.sweep(Instant::now());
        }
    }

    /// Logs the remaining counts of suppressed lines at the end of the process.
    pub fn close(&self) {
        self.access.sweep(Instant::now() + CREDIT_TIME);
    }

    fn sweep(&self, now: Instant) {
        self.access.sweep(now);
        self.budgets.start_periods(now);
        self.tcp.sweep(now, |labels, bytes| {
            let link = (&*labels.source_cluster, &*labels.destination_cluster);
            self.budgets.add(link, bytes);
        });
        self.budgets.report();
    }

    /// Encodes all metrics in the OpenMetrics text format.
    pub fn encode(&self) -> String {
        self.panics.inner().store(logging::panics(), Ordering::Relaxed);
        if let Some(drops) = self.log_drops.get() {
            let drops = u64::try_from(drops.dropped_lines()).unwrap_or(u64::MAX);
            let drops = drops.saturating_add(logging::unwritten_lines());
            self.log_lines_dropped.inner().store(drops, Ordering::Relaxed);
        }
        let mut out = String::new();
        // Writing to a String does not fail. If it did, the EOF mark would be missing for the
        // scraper.
        let _ = text::encode(&mut out, &self.registry);
        out
    }

    /// Encodes all metrics in the Prometheus text format 0.0.4.
    pub fn encode_plain(&self) -> String {
        exposition::plain(&self.encode())
    }

    /// Counts an opened tunnel and returns the handles that its copy counts bytes with.
    pub(super) fn tunnel_opened(
        &self,
        facts: TunnelFacts<'_>,
        workload: &Arc<WorkloadLabels>,
        remote: Option<RemoteNetwork<'_>>,
    ) -> OpenTunnel {
        self.tunnels_open.inc();
        OpenTunnel {
            handles: self.tcp.opened(facts, workload, remote),
            open: self.tunnels_open.clone(),
        }
    }

    /// Counts the end of a tunnel: closed if it was open, failed otherwise.
    pub(super) fn tunnel_ended(
        &self,
        facts: TunnelFacts<'_>,
        open: Option<&OpenTunnel>,
        reason: Reason,
    ) {
        let handles = open.map(|open| &*open.handles);
        self.tcp.ended(facts, handles, reason.response_flags());
        let cluster = &facts.source.counted_cluster;
        let labels = PeerLabels::new(("reason", reason.label()), cluster);
        if let Some(tunnels) = self.tunnels.get(&labels) {
            tunnels.inc();
            return;
        }
        // First tunnel of its cluster.
        self.create_reasons(cluster);
        self.tunnels.get_or_create(&labels).inc();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Open connection; counts its end when dropped.
#[derive(Debug)]
#[must_use = "the connection counts as closed once this is dropped"]
pub struct ConnectionGuard(Gauge);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Handles of an open tunnel; counts its end in the gauge when dropped.
#[derive(Debug)]
pub(super) struct OpenTunnel {
    pub(super) handles: Arc<Handles>,
    open: Gauge,
}

impl Drop for OpenTunnel {
    fn drop(&mut self) {
        self.open.dec();
    }
}

fn build_info(registry: &mut Registry) {
    let build = Family::<Labels<2>, Gauge>::default();
    let labels = [("component", "strait"), ("tag", env!("CARGO_PKG_VERSION"))];
    build.get_or_create(&labels).set(1);
    registry.register("istio_build", "Version of the running gateway", build);
}

fn reload_labels(what: ReloadSource, ok: bool) -> Labels<2> {
    [("what", what.label()), ("result", result(ok))]
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}

#[cfg(test)]
mod tests;
