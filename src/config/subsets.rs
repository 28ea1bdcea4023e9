//! Subsets of exposed services.

use std::collections::{HashMap, HashSet};

use serde_json::{Value as Json, json};

use super::define::{Positive, Shape, TEXT, Type, form, section};
use crate::wire::label::is_label;
use crate::yaml::Value;

section! {
    /// A subset of the endpoints of a service. `labels` or `split` is given.
    pub struct ServiceSubset at "exposure.services[].subsets[]", check(check_subset) {
        /// Name of the subset.
        name: String as SubsetName = required("v1");
        /// Labels that its workloads have: labels of the mesh file or of an Envoy control plane;
        /// `version` and `app`, else the canonical revision and name of Istio, also under their own
        /// keys; `topology.istio.io/cluster`, `topology.kubernetes.io/region` and
        /// `topology.kubernetes.io/zone`, which alone select other networks.
        labels: Vec<(String, String)> as SubsetLabels = default(Vec::new(), "none");
        /// Shares of other subsets, which have `labels`.
        split: Vec<SubsetShare> = default(Vec::new(), "none");
    }
}

section! {
    /// Share of a subset. It falls with the part of its endpoints that is not ready.
    pub struct SubsetShare at "exposure.services[].subsets[].split[]" {
        /// Name of the subset.
        subset: String as SubsetName = required("v1");
        /// Weight among the shares; percentages if their sum is 100.
        weight: u32 as Positive = required("90");
    }
}

form! {
    /// Name of a subset: server names are compared in lower case.
    SubsetName => String, "lower-case letters, digits and `-`, such as `v1`",
        json!({"type": TEXT, "pattern": "^[a-z0-9-]+$"}),
        |value, wanted| value.parsed(wanted, |text| {
            let is_plain = |byte: u8| {
                byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'
            };
            (!text.is_empty() && text.bytes().all(is_plain)).then(|| text.to_owned())
        }),
        |name| json!(name);
}

/// Labels with their values.
pub(in crate::config) enum SubsetLabels {}

impl Type for SubsetLabels {
    type Out = Vec<(String, String)>;

    fn read(value: Value<'_>) -> Option<Self::Out> {
        if !value.is_map() {
            value.error("is not a map", "`{version: v1}`");
            return None;
        }
        let read = value.pairs().map(|(entry, value)| {
            let (key, text) = (&*entry.key, value.text()?);
            if !is_label(key, text) {
                let what = format!("is the label `{key}: {text}`");
                let how = "a key and a value of at most 63 characters, as in Kubernetes";
                value.error(what, how);
                return None;
            }
            Some((key.to_owned(), text.to_owned()))
        });
        read.collect::<Vec<_>>().into_iter().collect()
    }

    fn show(out: &Self::Out) -> Json {
        let pairs = out.iter().map(|(key, value)| (key.clone(), json!(value)));
        Json::Object(pairs.collect())
    }

    fn shape() -> Shape {
        Shape::Pairs(Box::new(String::shape()))
    }
}

fn check_subset(subset: ServiceSubset, value: Value<'_>) -> Option<ServiceSubset> {
    if subset.labels.is_empty() == subset.split.is_empty() {
        let how = "`labels: {version: v1}`, or `split: [{subset: v1, weight: 90}]`";
        value.error("needs exactly one of `labels` and `split`", how);
        return None;
    }
    Some(subset)
}

/// Reports subsets of a service with two definitions, and shares of those without labels. Each
/// entry has a host, its subsets, and their values.
pub(super) fn are_unambiguous<'a>(
    entries: impl Iterator<Item = (&'a str, &'a [ServiceSubset], Vec<Value<'a>>)>,
) {
    let entries: Vec<_> = entries.collect();
    let mut defined: HashMap<(&str, &str), bool> = HashMap::new();
    for (host, subsets, _) in &entries {
        defined.extend(subsets.iter().map(|of| ((*host, &*of.name), of.split.is_empty())));
    }
    let mut seen = HashSet::new();
    for (host, subsets, items) in &entries {
        for (subset, item) in subsets.iter().zip(items) {
            let name = &*subset.name;
            if !seen.insert((*host, name)) {
                let what = format!("defines `{name}` of `{host}` twice");
                item.error(what, "each subset of a service once");
            }
            let has_labels =
                |share: &&SubsetShare| defined.get(&(*host, &*share.subset)) == Some(&true);
            if let Some(share) = subset.split.iter().find(|share| !has_labels(share)) {
                let what = format!("has a share of `{}`, which has no `labels`", share.subset);
                item.error(what, "the name of a subset of this service with `labels`");
            }
        }
    }
}
