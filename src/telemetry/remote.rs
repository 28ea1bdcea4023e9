//! Metrics of the gateways of other networks, collected at each scrape.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, counter::Counter};
use prometheus_client::registry::Registry;

use crate::status::RemoteGatewayStatus;

/// Limit of gateways with metrics. Those with the lowest addresses have them.
const GATEWAYS_MAX: usize = 256;

type Labels = [(&'static str, String); 2];
type Rows = Box<dyn Fn() -> Vec<RemoteGatewayStatus> + Send + Sync>;

/// Collector, without gateways until [`RemoteGateways::set`].
#[derive(Clone, Default)]
pub(super) struct RemoteGateways(Arc<OnceLock<Rows>>);

impl RemoteGateways {
    /// Registers a collector.
    pub(super) fn register(registry: &mut Registry) -> Self {
        let gateways = Self::default();
        registry.register_collector(Box::new(gateways.clone()));
        gateways
    }

    /// Sets the source of the gateways, once.
    pub(super) fn set(&self, rows: Rows) {
        let _ = self.0.set(rows);
    }
}

impl fmt::Debug for RemoteGateways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteGateways").finish_non_exhaustive()
    }
}

impl Collector for RemoteGateways {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let connections = Family::<Labels, Gauge>::default();
        let tunnels = Family::<Labels, Gauge>::default();
        let ejected = Family::<Labels, Gauge>::default();
        let rtt = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        let share = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        let ejections = Family::<Labels, Counter>::default();
        let rows = self.0.get().map(|rows| rows()).unwrap_or_default();
        if rows.is_empty() {
            return Ok(());
        }
        for row in rows.iter().take(GATEWAYS_MAX) {
            let labels =
                [("network", row.network.to_string()), ("gateway", row.address.to_string())];
            let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
            connections.get_or_create(&labels).set(count(row.connections));
            tunnels.get_or_create(&labels).set(count(row.streams));
            let is_ejected = i64::from(row.state == "ejected");
            ejected.get_or_create(&labels).set(is_ejected);
            ejections.get_or_create(&labels).inc_by(row.ejections);
            let factor = f64::from(row.share_percent) / 100.0;
            share.get_or_create(&labels).set(factor);
            if let Some(time) = row.rtt {
                rtt.get_or_create(&labels).set(time.as_secs_f64());
            }
        }
        let gauge = MetricType::Gauge;
        let metrics: [(&str, &str, MetricType, &dyn EncodeMetric); 6] = [
            ("connections", "HBONE connections", gauge, &connections),
            ("tunnels", "Tunnels", gauge, &tunnels),
            ("ejected", "Whether the gateway is ejected", gauge, &ejected),
            ("rtt_seconds", "Least round trip time of five minutes", gauge, &rtt),
            ("share", "Factor of its weights by its RTT", gauge, &share),
            ("ejections", "Ejections", MetricType::Counter, &ejections),
        ];
        for (name, what, kind, metric) in metrics {
            let name = format!("strait_remote_gateway_{name}");
            let help = format!("{what}, by gateway of another network.");
            let described = encoder.encode_descriptor(&name, &help, None, kind)?;
            metric.encode(described)?;
        }
        Ok(())
    }
}
