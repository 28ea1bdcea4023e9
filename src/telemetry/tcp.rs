//! Istio's counters of tunnels, with a cache of recently used label sets.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::labels::{NO_FLAGS, NetworkLabels, RemoteNetwork, TcpLabels, TunnelFacts};
use super::sets::{Count, LabelSets, metric};
use super::times::{ClusterTimes, Times};
use super::{DestinationService, Source, WorkloadLabels};

const OVERFLOW: &str = "Counts attributed to `unknown` because the limit of label sets was reached";

const TO_NETWORKS: &str = "Bytes from peers to gateways of other networks";
const FROM_NETWORKS: &str = "Bytes from gateways of other networks to peers";

/// Number of slots of the cache. With everything that an old connection and an old snapshot leave
/// in them, they hold 256 × under 2 KiB.
const CACHE_SLOTS: usize = 256;

/// Istio's counters.
#[derive(Debug)]
pub(super) struct Tcp {
    opened: LabelSets<TcpLabels>,
    closed: LabelSets<TcpLabels>,
    failed: LabelSets<TcpLabels>,
    received: LabelSets<TcpLabels>,
    sent: LabelSets<TcpLabels>,
    /// Bytes to and from other networks.
    to_networks: LabelSets<NetworkLabels>,
    from_networks: LabelSets<NetworkLabels>,
    cache: Box<[Mutex<Option<CachedHandles>>]>,
    pub(super) times: Times,
}

/// Counters of the label set of an open tunnel.
#[derive(Debug)]
pub(super) struct Handles {
    opened: Count,
    pub(super) received: Count,
    pub(super) sent: Count,
    /// Counters of tunnels to another network. The workload of such a tunnel is one gateway.
    pub(super) network: Option<NetworkHandles>,
    /// Created at the end of the first tunnel.
    closed: OnceLock<Count>,
    pub(super) times: Arc<ClusterTimes>,
}

/// Counters of the bytes of an open tunnel to another network.
#[derive(Debug)]
pub(super) struct NetworkHandles {
    pub(super) received: Count,
    pub(super) sent: Count,
}

/// Cache entry: a source, service and workload, and their counters. A lookup without it hashes a
/// dozen strings four times. A hit compares only pointers, which stay valid because the entry
/// holds them.
#[derive(Debug)]
struct CachedHandles {
    source: Arc<Source>,
    service: DestinationService,
    workload: Arc<WorkloadLabels>,
    handles: Arc<Handles>,
}

impl Tcp {
    pub(super) fn register(r: &mut Registry) -> Self {
        let overflow: Family<[(&str, &str); 1], Counter> =
            metric(r, "strait_metric_overflow", OVERFLOW);
        let overflow = |name: &'static str| overflow.get_or_create_owned(&[("metric", name)]);
        let mut network = |name, help| LabelSets::register(r, name, help, overflow(name));
        let to_networks = network("strait_network_received_bytes", TO_NETWORKS);
        let from_networks = network("strait_network_sent_bytes", FROM_NETWORKS);
        let mut tcp = |name, help| LabelSets::register(r, name, help, overflow(name));
        Self {
            to_networks,
            from_networks,
            opened: tcp("istio_tcp_connections_opened", "Tunnels opened"),
            closed: tcp("istio_tcp_connections_closed", "Tunnels closed"),
            failed: tcp("istio_tcp_connections_failed", "Tunnels that failed before they opened"),
            received: tcp("istio_tcp_received_bytes", "Bytes from the peer to the endpoint"),
            sent: tcp("istio_tcp_sent_bytes", "Bytes from the endpoint to the peer"),
            cache: (0..CACHE_SLOTS).map(|_| Mutex::default()).collect(),
            times: Times::register(r),
        }
    }

    /// Counts an opened tunnel, and returns the counters that it uses until its end.
    pub(super) fn opened(
        &self,
        facts: TunnelFacts<'_>,
        workload: &Arc<WorkloadLabels>,
        remote: Option<RemoteNetwork<'_>>,
    ) -> Arc<Handles> {
        let handles = self.handles(facts, workload, remote);
        handles.opened.inc();
        handles
    }

    /// Counts the end of a tunnel: closed if it was open, failed otherwise.
    pub(super) fn ended(
        &self,
        facts: TunnelFacts<'_>,
        open: Option<&Handles>,
        flags: &'static str,
    ) {
        let labels = || facts.labels(flags);
        match open {
            Some(handles) if flags == NO_FLAGS => {
                let closed = || self.closed.counter(&labels());
                handles.closed.get_or_init(closed).inc();
            }
            Some(_) => {
                self.closed.counter(&labels()).inc();
            }
            None => {
                self.failed.counter(&labels()).inc();
            }
        }
    }

    /// Removes counters that were unused for an hour. Passes the bytes of tunnels to other networks
    /// since the last sweep to `network_bytes`.
    pub(super) fn sweep(&self, now: Instant, mut network_bytes: impl FnMut(&NetworkLabels, u64)) {
        for place in &self.cache {
            let mut lately = place.lock();
            // An entry that only the cache holds counts as unused.
            if lately.as_ref().is_some_and(CachedHandles::is_idle) {
                *lately = None;
            }
        }
        for sets in [&self.opened, &self.closed, &self.failed, &self.received, &self.sent] {
            sets.sweep(now, |_, _| ());
        }
        self.to_networks.sweep(now, &mut network_bytes);
        self.from_networks.sweep(now, &mut network_bytes);
    }

    fn handles(
        &self,
        facts: TunnelFacts<'_>,
        workload: &Arc<WorkloadLabels>,
        remote: Option<RemoteNetwork<'_>>,
    ) -> Arc<Handles> {
        let make = || {
            let labels = facts.labels(NO_FLAGS);
            Arc::new(Handles {
                opened: self.opened.counter(&labels),
                received: self.received.counter(&labels),
                sent: self.sent.counter(&labels),
                network: remote.map(|remote| {
                    let labels = facts.network_labels(remote);
                    let received = self.to_networks.counter(&labels);
                    NetworkHandles { received, sent: self.from_networks.counter(&labels) }
                }),
                closed: OnceLock::new(),
                times: self.times.of_cluster(&facts.source.counted_cluster),
            })
        };
        let Some(place) = self.cache.get(slot_of(facts, workload)) else {
            return make();
        };
        let mut lately = place.lock();
        match &*lately {
            Some(found) if found.matches(facts, workload) => Arc::clone(&found.handles),
            _ => {
                let handles = make();
                *lately = Some(CachedHandles {
                    source: Arc::clone(facts.source),
                    service: facts.service.clone(),
                    workload: Arc::clone(workload),
                    handles: Arc::clone(&handles),
                });
                handles
            }
        }
    }
}

impl CachedHandles {
    /// Returns true if no open tunnel has these counters.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.handles) == 1
    }

    fn matches(&self, facts: TunnelFacts<'_>, workload: &Arc<WorkloadLabels>) -> bool {
        let (own, other) = (&self.service, facts.service);
        // Only the parts of a source that are labels, so that all peers without identity share an
        // entry.
        Arc::ptr_eq(&self.source.principal, &facts.source.principal)
            && Arc::ptr_eq(&self.source.namespace, &facts.source.namespace)
            && Arc::ptr_eq(&self.source.cluster, &facts.source.cluster)
            && Arc::ptr_eq(&self.workload, workload)
            && Arc::ptr_eq(&own.hostname, &other.hostname)
            && Arc::ptr_eq(&own.name, &other.name)
            && Arc::ptr_eq(&own.namespace, &other.namespace)
    }
}

/// Returns the slot, below [`CACHE_SLOTS`], for three addresses.
fn slot_of(facts: TunnelFacts<'_>, workload: &Arc<WorkloadLabels>) -> usize {
    let addresses = [
        Arc::as_ptr(&facts.source.principal).addr(),
        Arc::as_ptr(workload).addr(),
        Arc::as_ptr(&facts.service.hostname).addr(),
    ];
    // Knuth's multiplicative hash. Addresses are multiples of eight, and the low bits mix least.
    let mix =
        |sum: usize, address: usize| (sum ^ address).wrapping_mul(0x9e37_79b9).rotate_left(29);
    addresses.into_iter().fold(0, mix) % CACHE_SLOTS
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::super::sets::{MAX_LABEL_SETS, UNUSED_LIFETIME};
    use super::super::tests::{source, value};
    use super::*;

    fn registered() -> (Tcp, Registry) {
        let mut registry = Registry::default();
        (Tcp::register(&mut registry), registry)
    }

    fn encoded(registry: &Registry) -> String {
        let mut out = String::new();
        text::encode(&mut out, registry).expect("a text");
        out
    }

    #[test]
    fn identities_beyond_the_limit_are_counted_together() {
        let (tcp, registry) = registered();
        let (service, workload) = (DestinationService::default(), Arc::default());
        for i in 0..MAX_LABEL_SETS + 3 {
            let mut source = source();
            source.principal = Arc::from(format!("spiffe://east.local/ns/a/sa/{i}"));
            let source = Arc::new(source);
            let facts = TunnelFacts::new(&source, &service, None);
            tcp.ended(facts, None, NO_FLAGS);
            // Twice: a cached label set is the same one.
            for _ in 0..2 {
                let open = tcp.opened(facts, &workload, None);
                tcp.ended(facts, Some(&open), NO_FLAGS);
            }
        }
        let text = encoded(&registry);
        let others = "source_principal=\"unknown\"";
        for (name, each) in [("failed", 1), ("opened", 2), ("closed", 2)] {
            let name = format!("istio_tcp_connections_{name}_total");
            let sets = text.lines().filter(|l| l.starts_with(&format!("{name}{{")));
            assert_eq!(sets.count(), MAX_LABEL_SETS + 1, "{name}");
            assert_eq!(value(&text, &name, &[others]), 3 * each, "{name}");
        }
    }

    #[test]
    fn the_counters_of_an_open_tunnel_outlast_an_hour_and_others_do_not() {
        let (tcp, registry) = registered();
        let (service, source) = (DestinationService::default(), Arc::new(source()));
        let workloads = ["quiet", "gone"].map(|name| {
            Arc::new(WorkloadLabels { workload: name.to_owned(), ..WorkloadLabels::default() })
        });
        let [quiet, _] = workloads.each_ref().map(|workload| {
            let facts = TunnelFacts::new(&source, &service, Some(workload));
            let open = tcp.opened(facts, workload, None);
            tcp.ended(facts, Some(&open), NO_FLAGS);
            tcp.opened(facts, workload, None)
        });
        let start = Instant::now();
        // The second tunnel was dropped immediately; only the cache still holds its counters.
        for now in [start, start + UNUSED_LIFETIME, start + UNUSED_LIFETIME * 2] {
            tcp.sweep(now, |_, _| ());
        }
        quiet.sent.inc_by(5);
        let text = encoded(&registry);
        assert!(!text.contains("destination_workload=\"gone\""), "{text}");
        let of = ["destination_workload=\"quiet\""];
        assert_eq!(value(&text, "istio_tcp_sent_bytes_total", &of), 5);
        assert_eq!(value(&text, "istio_tcp_connections_opened_total", &of), 2);
        assert_eq!(value(&text, "istio_tcp_connections_closed_total", &of), 1);
    }

    #[test]
    fn peers_without_identity_share_what_was_looked_up() {
        let (tcp, _registry) = registered();
        let (service, workload) = (DestinationService::default(), Arc::default());
        let opened = |port| {
            let mut source = source();
            source.address.set_port(port);
            for text in [&mut source.principal, &mut source.namespace, &mut source.cluster] {
                *text = Arc::default();
            }
            tcp.opened(TunnelFacts::new(&Arc::new(source), &service, None), &workload, None)
        };
        assert!(Arc::ptr_eq(&opened(1), &opened(2)));
    }

    #[test]
    fn whoever_shares_a_place_is_still_counted_apart() {
        let (tcp, registry) = registered();
        let service = DestinationService::default();
        let name = |i: usize| format!("workload-{i}");
        let workload = |i| WorkloadLabels { workload: name(i), ..WorkloadLabels::default() };
        let workloads: Vec<_> = (0..4 * CACHE_SLOTS).map(|i| Arc::new(workload(i))).collect();
        let source = Arc::new(source());
        for round in 0..3 {
            for (i, workload) in workloads.iter().enumerate() {
                let facts = TunnelFacts::new(&source, &service, Some(workload));
                let open = tcp.opened(facts, workload, None);
                open.sent.inc_by(i as u64);
                let flags = if round == 0 { "UF" } else { NO_FLAGS };
                tcp.ended(facts, Some(&open), flags);
            }
        }
        let text = encoded(&registry);
        for i in (0..workloads.len()).step_by(97) {
            let of = format!("destination_workload=\"{}\"", name(i));
            let get = |what: &str, flags: &str| {
                let flags = format!("response_flags=\"{flags}\"");
                value(&text, &format!("istio_tcp_{what}_total"), &[&of, &flags])
            };
            assert_eq!(get("connections_opened", "-"), 3);
            assert_eq!(get("sent_bytes", "-"), 3 * i as u64);
            assert_eq!(get("connections_closed", "-"), 2);
            assert_eq!(get("connections_closed", "UF"), 1);
        }
    }
}
