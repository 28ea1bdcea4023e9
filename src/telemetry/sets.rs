//! Counters with labels that peers influence: at most [`MAX_LABEL_SETS`] label sets each, which
//! expire.
//!
//! An issuer of identities in a trusted domain must neither exhaust the memory nor fill the table
//! permanently. A counter that was unused for [`UNUSED_LIFETIME`] is removed, unless an open tunnel
//! holds it. A new one starts at 0, which Prometheus' `rate()` treats as a reset.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry};

use super::labels::Labels;

/// Limit of label sets of one counter. Further ones share those of [`Labels::overflow`]. A label
/// set takes about 1 KiB: 7 counters × 4,096 × 1 KiB = 28 MiB.
pub(super) const MAX_LABEL_SETS: usize = 4096;

/// Limit of label sets that others share beyond [`MAX_LABEL_SETS`]. Of bytes to other networks,
/// each pair of a source and a destination cluster has one: 32 sources × 32 destinations = 1,024.
/// Further pairs share one of `unknown`.
const MAX_SHARED_SETS: usize = 1024;

/// Lifetime of an unused label set: longer than any scrape interval, and usually longer than the
/// range of a Prometheus alert.
pub(super) const UNUSED_LIFETIME: Duration = Duration::from_secs(60 * 60);

/// Counter of one label set. It does not expire while a clone exists.
#[derive(Clone, Debug, Default)]
pub(super) struct Count(Arc<AtomicU64>);

impl Count {
    pub(super) fn inc(&self) {
        self.inc_by(1);
    }

    pub(super) fn inc_by(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Debug)]
pub(super) struct LabelSets<L>(Arc<Inner<L>>);

#[derive(Debug)]
struct Inner<L> {
    name: &'static str,
    sets: RwLock<HashMap<L, LabelSet>>,
    /// True if a count went to `unknown` since the table last had space.
    is_full: AtomicBool,
    overflow: Counter,
}

#[derive(Debug)]
struct LabelSet {
    count: Count,
    count_at_sweep: u64,
    /// Time of the last sweep that found the counter in use.
    last_used: Instant,
}

impl<L: Labels> LabelSets<L> {
    /// Registers the counters under a name. `overflow` counts the lookups that exceed the limit.
    pub(super) fn register(
        registry: &mut Registry,
        name: &'static str,
        help: &str,
        overflow: Counter,
    ) -> Self {
        let sets = Self(Arc::new(Inner {
            name,
            sets: RwLock::default(),
            is_full: AtomicBool::new(false),
            overflow,
        }));
        registry.register(name, help, sets.clone());
        sets
    }

    /// Returns the counter of a label set, or the one of `unknown` if the table is full.
    pub(super) fn counter(&self, labels: &L) -> Count {
        if let Some(set) = self.0.sets.read().get(labels) {
            return set.count.clone();
        }
        let mut sets = self.0.sets.write();
        if sets.len() < MAX_LABEL_SETS {
            return counter(&mut sets, labels.clone());
        }
        // Another thread may have created it after the read above.
        if let Some(set) = sets.get(labels) {
            return set.count.clone();
        }
        let mut shared = labels.overflow();
        if sets.len() >= MAX_LABEL_SETS + MAX_SHARED_SETS && !sets.contains_key(&shared) {
            shared = shared.overflow();
        }
        let others = counter(&mut sets, shared);
        drop(sets);
        self.0.overflow.inc();
        if !self.0.is_full.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                metric = self.0.name,
                limit = MAX_LABEL_SETS,
                "limit of label sets reached; further ones share label sets"
            );
        }
        others
    }

    /// Removes counters that no tunnel holds and that were unused for [`UNUSED_LIFETIME`]. Passes
    /// the increase of each counter since the last sweep to `increased`.
    pub(super) fn sweep(&self, now: Instant, mut increased: impl FnMut(&L, u64)) {
        let mut sets = self.0.sets.write();
        sets.retain(|labels, set| {
            let count = set.count.get();
            if count > set.count_at_sweep {
                increased(labels, count - set.count_at_sweep);
            }
            if count != set.count_at_sweep || Arc::strong_count(&set.count.0) > 1 {
                (set.count_at_sweep, set.last_used) = (count, now);
            }
            now.saturating_duration_since(set.last_used) < UNUSED_LIFETIME
        });
        if sets.len() < MAX_LABEL_SETS {
            self.0.is_full.store(false, Ordering::Relaxed);
        }
    }
}

/// New and old names of the metrics that were renamed in this release. They have both names for
/// one release.
pub const OLD_NAMES: [(&str, &str); 4] = [
    ("strait_buffered_max_bytes", "strait_buffered_bytes_max"),
    ("strait_certificate_expiry_timestamp_seconds", "strait_certificate_expiry_seconds"),
    ("strait_drained_timestamp_seconds", "strait_drained_since_seconds"),
    ("strait_remote_gateway_share_ratio", "strait_remote_gateway_share"),
];

/// Returns the old name of a metric, and its description, if it has been renamed.
fn old_name(name: &str) -> Option<(&'static str, String)> {
    let (new, old) = OLD_NAMES.into_iter().find(|(new, _)| *new == name)?;
    Some((old, format!("Old name of {new}")))
}

/// Registers a metric without values and returns its handle.
pub(super) fn metric<M: Metric + Clone + Default>(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> M {
    let metric = M::default();
    if let Some((old, help)) = old_name(name) {
        registry.register(old, help, metric.clone());
    }
    registry.register(name, help, metric.clone());
    metric
}

pub(super) fn encode_as(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metric: &dyn EncodeMetric,
) -> fmt::Result {
    if let Some((old, help)) = old_name(name) {
        metric.encode(describe(encoder, old, &help, metric.metric_type())?)?;
    }
    metric.encode(describe(encoder, name, help, metric.metric_type())?)
}

/// Describes a metric of a collector, whose samples follow.
pub(super) fn describe<'a>(
    encoder: &'a mut DescriptorEncoder<'_>,
    name: &'a str,
    help: &str,
    kind: MetricType,
) -> Result<MetricEncoder<'a>, fmt::Error> {
    encoder.encode_descriptor(name, &format!("{help}."), None, kind)
}

/// Counters of one name, by a label whose values are known at the start. All are exported as 0 from
/// then on, so that an alert on their rate detects the first event.
#[derive(Clone, Debug)]
pub(crate) struct Counters(Arc<[(&'static str, Counter)]>);

impl Counters {
    pub(super) fn register(
        registry: &mut Registry,
        (name, help): (&str, &str),
        label: &'static str,
        values: impl IntoIterator<Item = &'static str>,
    ) -> Self {
        let family: Family<[(&str, &str); 1], Counter> = metric(registry, name, help);
        let counter = |value| (value, family.get_or_create(&[(label, value)]).clone());
        Self(values.into_iter().map(counter).collect())
    }

    /// Counts an event. The value is one of those known at the start.
    pub(crate) fn inc(&self, value: &'static str) {
        let known = self.0.iter().find(|(known, _)| *known == value);
        debug_assert!(known.is_some(), "{value} has no counter");
        if let Some((_, counter)) = known {
            counter.inc();
        }
    }
}

/// Defines a struct of metrics, each with its type, its name, and its description in scrapes, and
/// [`Counters`] with their label and its values. The fields after `besides` are no such metrics,
/// and have a value each, which may use the registry.
macro_rules! metrics {
    (@register $registry:ident, $metric:literal, $help:literal) => {
        metric($registry, $metric, $help)
    };
    (@register $registry:ident, $metric:literal, $help:literal, $label:literal, $values:expr) => {
        Counters::register($registry, ($metric, $help), $label, $values)
    };
    (
        $(#[$about:meta])*
        $vis:vis struct $name:ident in $registry:ident {
            $(
                $field_vis:vis $field:ident: $type:ty =
                    $metric:literal, $help:literal $(, by $label:literal of $values:expr)?;
            )*
        } besides {
            $( $own_vis:vis $own:ident: $own_type:ty = $value:expr; )*
        }
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        $vis struct $name {
            $( $field_vis $field: $type, )*
            $( $own_vis $own: $own_type, )*
        }

        impl $name {
            /// Registers the metrics, without values.
            pub(super) fn register($registry: &mut Registry) -> Self {
                Self {
                    $( $own: $value, )*
                    $( $field: metrics!(
                        @register $registry, $metric, $help $(, $label, $values)?
                    ), )*
                }
            }
        }
    };
}

pub(super) use metrics;

fn counter<L: Labels>(sets: &mut HashMap<L, LabelSet>, labels: L) -> Count {
    let set = sets.entry(labels).or_insert_with(|| LabelSet {
        count: Count::default(),
        count_at_sweep: 0,
        last_used: Instant::now(),
    });
    set.count.clone()
}

impl<L: Labels> EncodeMetric for LabelSets<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        // Copied first: formatting megabytes under the lock would block the data path.
        let sets = self.0.sets.read();
        let sets = sets.iter().map(|(labels, set)| (labels.clone(), set.count.get()));
        let sets: Vec<_> = sets.collect();
        for (labels, count) in &sets {
            let mut encoder = encoder.encode_family(labels)?;
            encoder.encode_counter::<NoLabelSet, u64, u64>(count, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::super::DestinationService;
    use super::super::labels::{NO_FLAGS, NetworkLabels, TcpLabels, TunnelFacts};
    use super::super::tests::source;
    use super::*;

    fn labels(account: usize) -> TcpLabels {
        let mut source = source();
        source.principal = Arc::from(format!("spiffe://east.local/ns/a/sa/{account}"));
        TunnelFacts::new(&Arc::new(source), &DestinationService::default(), None).labels(NO_FLAGS)
    }

    struct Counted {
        sets: LabelSets<TcpLabels>,
        overflow: Counter,
        registry: Registry,
    }

    fn counted() -> Counted {
        let (mut registry, overflow) = (Registry::default(), Counter::default());
        let sets = LabelSets::register(&mut registry, "x", "Things", overflow.clone());
        Counted { sets, overflow, registry }
    }

    impl Counted {
        fn samples(&self) -> Vec<String> {
            let mut out = String::new();
            text::encode(&mut out, &self.registry).expect("a text");
            let samples = out.lines().filter(|line| line.starts_with("x_total{"));
            samples.map(str::to_owned).collect()
        }
    }

    #[test]
    fn an_unused_label_set_expires_after_an_hour_and_a_held_one_does_not() {
        let counted = counted();
        let held = counted.sets.counter(&labels(0));
        counted.sets.counter(&labels(1)).inc();
        let start = Instant::now();
        counted.sets.sweep(start, |_, _| ());
        assert_eq!(counted.samples().len(), 2);
        // Used again half an hour later, which restarts its hour.
        counted.sets.counter(&labels(1)).inc();
        counted.sets.sweep(start + UNUSED_LIFETIME / 2, |_, _| ());
        counted.sets.sweep(start + UNUSED_LIFETIME, |_, _| ());
        assert_eq!(counted.samples().len(), 2);
        counted.sets.sweep(start + UNUSED_LIFETIME * 3 / 2, |_, _| ());
        assert_eq!(counted.samples().len(), 1);
        held.inc_by(7);
        counted.sets.sweep(start + UNUSED_LIFETIME * 9, |_, _| ());
        assert!(counted.samples()[0].contains("/sa/0\""));
        assert!(counted.samples()[0].ends_with(" 7"));
        drop(held);
        // The hour of a held counter starts when its last handle is dropped.
        counted.sets.sweep(start + UNUSED_LIFETIME * 10 - Duration::from_secs(1), |_, _| ());
        assert_eq!(counted.samples().len(), 1);
        counted.sets.sweep(start + UNUSED_LIFETIME * 10, |_, _| ());
        assert_eq!(counted.samples().len(), 0);
        counted.sets.counter(&labels(0)).inc();
        assert!(counted.samples()[0].ends_with(" 1"), "it starts anew");
    }

    #[test]
    fn bytes_beyond_the_limit_of_services_keep_their_clusters_and_are_bounded() {
        let (mut registry, overflow) = (Registry::default(), Counter::default());
        let sets = LabelSets::register(&mut registry, "x", "Things", overflow);
        let labels = |source: &str, service: usize| NetworkLabels {
            source_cluster: source.into(),
            destination_cluster: "west".into(),
            destination_network: "far".into(),
            destination_service: format!("{service}.app").into(),
        };
        for service in 0..MAX_LABEL_SETS + 3 {
            sets.counter(&labels("east", service)).inc();
        }
        let of_cluster = |source: &str| {
            let labels = labels(source, 0).overflow();
            sets.0.sets.read().get(&labels).map(|set| set.count.get())
        };
        assert_eq!(of_cluster("east"), Some(3));
        for source in 0..MAX_SHARED_SETS + 3 {
            sets.counter(&labels(&source.to_string(), MAX_LABEL_SETS)).inc();
        }
        assert_eq!(of_cluster("0"), Some(1));
        assert_eq!(of_cluster(&(MAX_SHARED_SETS + 2).to_string()), None);
        let count = sets.0.sets.read().len();
        assert_eq!(count, MAX_LABEL_SETS + MAX_SHARED_SETS + 1);
    }

    #[test]
    fn a_full_table_reports_the_overflow_and_has_room_again_after_an_hour() {
        let counted = counted();
        for account in 0..MAX_LABEL_SETS + 3 {
            counted.sets.counter(&labels(account)).inc();
        }
        assert_eq!(counted.overflow.get(), 3);
        assert_eq!(counted.samples().len(), MAX_LABEL_SETS + 1);
        let others = |line: &String| line.contains("source_principal=\"unknown\"");
        assert!(
            counted
                .samples()
                .iter()
                .find(|line| others(line))
                .is_some_and(|line| line.ends_with(" 3"))
        );
        let start = Instant::now();
        counted.sets.sweep(start, |_, _| ());
        assert!(counted.sets.0.is_full.load(Ordering::Relaxed));
        counted.sets.sweep(start + UNUSED_LIFETIME, |_, _| ());
        assert!(!counted.sets.0.is_full.load(Ordering::Relaxed));
        counted.sets.counter(&labels(MAX_LABEL_SETS + 1)).inc();
        assert_eq!(counted.overflow.get(), 3);
        assert_eq!(counted.samples().len(), 1);
        assert!(!counted.samples().iter().any(others));
    }
}
