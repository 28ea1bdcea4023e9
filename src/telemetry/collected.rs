//! Metrics that are collected at each scrape: gateways of other networks, shares of resources,
//! drains, listeners.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::sets::encode_as;
use crate::limits::OwnedPool;
use crate::limits::turns::UsedTime;
use crate::status::GatewayRow;
use crate::wire::DrainTarget;

/// Limit of gateways with metrics. Those with the lowest addresses have them.
const GATEWAYS_MAX: usize = 256;
/// Limit of listeners with metrics.
const LISTENERS_MAX: usize = 256;

type Labels = [(&'static str, String); 2];
type Rows<T> = Box<dyn Fn() -> Vec<T> + Send + Sync>;

/// Metrics of rows that a function returns at each scrape; none until [`Collected::set`].
pub struct Collected<T>(Arc<OnceLock<Rows<T>>>);

impl<T: 'static> Collected<T>
where
    Self: Collector,
{
    pub(super) fn register(registry: &mut Registry) -> Self {
        let rows = Arc::default();
        registry.register_collector(Box::new(Self(Arc::clone(&rows))));
        Self(rows)
    }
}

impl<T> Collected<T> {
    /// Sets the source of the rows, once.
    pub fn set(&self, rows: impl Fn() -> Vec<T> + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(rows));
    }

    fn rows(&self) -> Vec<T> {
        self.0.get().map(|rows| rows()).unwrap_or_default()
    }
}

impl<T> fmt::Debug for Collected<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collected").finish_non_exhaustive()
    }
}

impl Collector for Collected<OwnedPool> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let used = Family::<Labels, Gauge>::default();
        let pools = self.rows();
        for OwnedPool { pool, .. } in &pools {
            for (cluster, held) in pool.held_by_cluster() {
                let resource = pool.resource().label().to_owned();
                used.get_or_create(&[("resource", resource), ("cluster", cluster)]).inc_by(held);
            }
        }
        if pools.is_empty() {
            return Ok(());
        }
        let help = "Amount of a limited resource that the sources of a cluster hold";
        encode_as(&mut encoder, "strait_share_used", help, &used)
    }
}

impl Collector for Collected<UsedTime> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        type Seconds = Family<[(&'static str, String); 1], Counter<f64, AtomicU64>>;
        let [used, waited, paused] = [(); 3].map(|()| Seconds::default());
        let rows = self.rows();
        if rows.is_empty() {
            return Ok(());
        }
        for row in rows {
            let labels = [("cluster", row.cluster)];
            used.get_or_create(&labels).inc_by(row.used.as_secs_f64());
            waited.get_or_create(&labels).inc_by(row.waited.as_secs_f64());
            paused.get_or_create(&labels).inc_by(row.paused.as_secs_f64());
        }
        let help = "Time of workers that the sources of a cluster have used";
        encode_as(&mut encoder, "strait_worker_seconds", help, &used)?;
        let help =
            "Time for which tasks of a cluster were ready while others had their turns, in sum";
        encode_as(&mut encoder, "strait_worker_wait_seconds", help, &waited)?;
        let help = "Time for which connections paused because of the limit of bytes of their \
                    cluster, in sum";
        encode_as(&mut encoder, "strait_paused_seconds", help, &paused)
    }
}

/// Order of `strait drain` in force, and its time.
pub(super) type Order = (DrainTarget, SystemTime);

impl Collector for Collected<Order> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let drained = Family::<[(&str, &str); 1], Gauge>::default();
        for kind in DrainTarget::KINDS {
            let _ = drained.get_or_create(&[("kind", kind)]);
        }
        let orders = self.rows();
        for (target, _) in &orders {
            drained.get_or_create(&[("kind", target.kind())]).inc();
        }
        let oldest = orders.iter().map(|(_, since)| *since).min();
        let oldest = oldest.and_then(|oldest| oldest.duration_since(UNIX_EPOCH).ok());
        let since = Gauge::<i64>::default();
        since.set(oldest.map_or(0, |oldest| i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX)));
        let help = "Parts of the mesh and listeners that an operator has drained (strait drain), \
                    by kind";
        encode_as(&mut encoder, "strait_drained", help, &drained)?;
        let help = "Time of the oldest order of strait drain in force (Unix time), 0 without one";
        encode_as(&mut encoder, "strait_drained_timestamp_seconds", help, &since)
    }
}

/// Name of a listener, and whether it accepts connections.
pub(super) type ListenerUp = (String, bool);

impl Collector for Collected<ListenerUp> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let up = Family::<[(&'static str, String); 1], Gauge>::default();
        for (listener, is_up) in self.rows().into_iter().take(LISTENERS_MAX) {
            let gauge = up.get_or_create(&[("listener", listener)]);
            // One that was replaced may drain beside the new one of its name.
            if is_up {
                gauge.set(1);
            }
        }
        let help = "Whether the listener accepts connections";
        encode_as(&mut encoder, "strait_listener_up", help, &up)
    }
}

impl Collector for Collected<GatewayRow> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let connections = Family::<Labels, Gauge>::default();
        let tunnels = Family::<Labels, Gauge>::default();
        let ejected = Family::<Labels, Gauge>::default();
        let rtt = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        let share = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        let ejections = Family::<Labels, Counter>::default();
        let rows = self.rows();
        if rows.is_empty() {
            return Ok(());
        }
        for row in rows.iter().take(GATEWAYS_MAX) {
            let labels = [("network", row.network.clone()), ("gateway", row.address.to_string())];
            let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
            connections.get_or_create(&labels).set(count(row.connections));
            tunnels.get_or_create(&labels).set(count(row.tunnels));
            let is_ejected = i64::from(row.state == "ejected");
            ejected.get_or_create(&labels).set(is_ejected);
            ejections.get_or_create(&labels).inc_by(row.ejections);
            let factor = f64::from(row.share_percent) / 100.0;
            share.get_or_create(&labels).set(factor);
            if let Some(micros) = row.rtt_microseconds {
                rtt.get_or_create(&labels).set(micros as f64 / 1e6);
            }
        }
        let metrics: [(&str, &str, &dyn EncodeMetric); 6] = [
            ("connections", "HBONE connections", &connections),
            ("tunnels", "Tunnels", &tunnels),
            ("ejected", "Whether the gateway is ejected", &ejected),
            ("rtt_seconds", "Least round trip time of five minutes", &rtt),
            ("share_ratio", "Factor of its weights by its RTT", &share),
            ("ejections", "Ejections", &ejections),
        ];
        for (name, what, metric) in metrics {
            let name = format!("strait_remote_gateway_{name}");
            let help = format!("{what}, by gateway of another network");
            encode_as(&mut encoder, &name, &help, metric)?;
        }
        Ok(())
    }
}
