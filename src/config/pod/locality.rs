//! Locality of a pod, from a variable or from labels in its podinfo.

use super::environment::{Environment, Setting};
use super::{Builder, LABELS};
use crate::yaml::Node;

/// Variable with the whole locality, in the form of the labels.
const VARIABLE: &str = "ISTIO_META_LOCALITY";
/// Istio's labels for the whole locality: `REGION/ZONE/SUBZONE`, with dots in place of slashes, as
/// Kubernetes allows no slash there.
const LABELS_OF_ALL: [&str; 2] = ["topology.istio.io/locality", "istio-locality"];
/// The parts of a locality with their labels. Kubernetes copies the first two from the node (since
/// 1.35, `PodTopologyLabelsAdmission`).
const PARTS: [(&str, &str); 3] = [
    ("region", "topology.kubernetes.io/region"),
    ("zone", "topology.kubernetes.io/zone"),
    ("subzone", "topology.istio.io/subzone"),
];

/// Returns `gateway.locality`, if the pod names any part of it.
pub(super) fn locality(builder: &mut Builder<'_>) -> Option<Node> {
    let parts = parts(builder.environment);
    let by = parts.first()?.1.by.clone();
    let entries: Vec<_> =
        parts.iter().map(|(key, setting)| (*key, builder.text(setting))).collect();
    let map = builder.map(entries);
    Some(builder.node(&by, map.kind))
}

/// Returns the parts that the variable names, else those of a label of all parts, else those with
/// a label each.
fn parts(environment: &Environment) -> Vec<(&'static str, Setting)> {
    let label = |key: &str| {
        let setting = environment.label(LABELS, key)?;
        Some(Setting { by: format!("label {key}"), ..setting })
    };
    let all = environment.first(&[VARIABLE]);
    let Some(all) = all.or_else(|| LABELS_OF_ALL.iter().find_map(|key| label(key))) else {
        let part = |(key, name): (&'static str, &str)| Some((key, label(name)?));
        return PARTS.into_iter().filter_map(part).collect();
    };
    let separator = if all.value.contains('/') { '/' } else { '.' };
    let values = all.value.splitn(PARTS.len(), separator);
    let named = PARTS.iter().zip(values).filter(|(_, value)| !value.is_empty());
    let part = |((key, _), value): (&(&'static str, _), &str)| {
        let (value, by) = (value.to_owned(), all.by.clone());
        (*key, Setting { value, by })
    };
    named.map(part).collect()
}
