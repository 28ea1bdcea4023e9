//! Metadata of every object: its name, its labels and annotations, and the cluster that it is of.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::yaml::{Fields, Place, Value};

/// Of a slice that another cluster's were copied to: which cluster (KEP-1645).
const SOURCE_CLUSTER: &str = "multicluster.kubernetes.io/source-cluster";
/// The cluster of an object, where several clusters' are read together.
const CLUSTER: &str = "topology.istio.io/cluster";
/// The network of the endpoints of a slice, or, at [`ROOT_NAMESPACE`], of a whole cluster.
const NETWORK: &str = "topology.istio.io/network";
/// Data plane of pods: `ambient` for HBONE.
const DATAPLANE: &str = "istio.io/dataplane-mode";
/// Manager of a gateway; of a waypoint, which speaks HBONE whatever its namespace is, it is
/// [`WAYPOINTS`].
const MANAGED: &str = "gateway.istio.io/managed";
/// The controller of waypoints.
const WAYPOINTS: &str = "istio.io-mesh-controller";
/// Label of a Service that is a waypoint, for messages.
pub(super) const WAYPOINT_LABEL: &str = "gateway.istio.io/managed: istio.io-mesh-controller";
/// The waypoint that traffic to a Service, or to all of a namespace, has to go through.
const WAYPOINT: &str = "istio.io/use-waypoint";
/// Its namespace, where it is another one.
const WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
/// The namespace whose label names the network of its cluster.
pub(super) const ROOT_NAMESPACE: &str = "istio-system";

/// Labels or annotations.
pub(super) type Labels = BTreeMap<Box<str>, Box<str>>;

/// The metadata of an object.
#[derive(Clone, Debug)]
pub(super) struct Meta {
    /// Its name.
    pub(super) name: Arc<str>,
    /// Its namespace; of a Namespace its own name.
    pub(super) namespace: Arc<str>,
    /// The cluster that it is of, if it says one: otherwise ours.
    pub(super) cluster: Option<Arc<str>>,
    /// Its labels.
    pub(super) labels: Labels,
    /// Its annotations.
    pub(super) annotations: Labels,
    /// Its creation timestamp, unparsed.
    pub(super) created: Option<Box<str>>,
    /// Its place.
    pub(super) place: Place,
}

impl Meta {
    /// Returns the value of a label, or of an annotation where there is no such label.
    pub(super) fn says(&self, key: &str) -> Option<&str> {
        let found = self.labels.get(key).or_else(|| self.annotations.get(key));
        found
            .map(|value| &**value)
            .filter(|value| !value.is_empty())
    }

    /// The network that it names.
    pub(super) fn network(&self) -> Option<&str> {
        self.says(NETWORK)
    }

    /// Returns whether its pods speak HBONE; none if it does not say.
    pub(super) fn is_ambient(&self) -> Option<bool> {
        let said = self.labels.get(DATAPLANE).map(|mode| **mode == *"ambient");
        if self.is_waypoint() { Some(true) } else { said }
    }

    /// Returns whether its labels say that it is of a waypoint.
    pub(super) fn is_waypoint(&self) -> bool {
        let managed = self.labels.get(MANAGED);
        managed.is_some_and(|by| **by == *WAYPOINTS)
    }

    /// The namespace and name of the waypoint that it names. `none` is none, and no other is asked.
    pub(super) fn waypoint(&self) -> Option<Option<(&str, &str)>> {
        let label = |key| self.labels.get(key).map(|value| &**value);
        let name = label(WAYPOINT).filter(|name| !name.is_empty())?;
        let namespace = label(WAYPOINT_NAMESPACE).unwrap_or(&self.namespace);
        Some((name != "none").then_some((namespace, name)))
    }

    /// Returns whether it was copied from another cluster.
    pub(super) fn is_copy(&self) -> bool {
        self.labels.contains_key(SOURCE_CLUSTER)
    }
}

/// Reads `metadata`, of which `name` reads the name. Without a name or with a namespace that there
/// cannot be there is none; what else has a mistake is left out.
pub(super) fn read<'a>(
    top: &mut Fields<'a>,
    place: Place,
    name: impl Fn(Value<'a>) -> Option<&'a str>,
) -> Option<Meta> {
    let mut fields = top.need("metadata", "{name: echo}")?.foreign("metadata")?;
    let name = fields.need("name", "echo").and_then(name);
    let namespace = fields.get("namespace").map(label_name);
    let labels = fields.get("labels").map(labels);
    let annotations = fields.get("annotations").map(self::labels);
    let created = fields.get("creationTimestamp").and_then(Value::text);
    fields.finish();
    let mut meta = Meta {
        name: name?.into(),
        namespace: namespace.unwrap_or(Some("default"))?.into(),
        cluster: None,
        labels: labels.unwrap_or_default(),
        annotations: annotations.unwrap_or_default(),
        created: created.map(Into::into),
        place,
    };
    meta.cluster = meta
        .says(SOURCE_CLUSTER)
        .or_else(|| meta.says(CLUSTER))
        .map(Into::into);
    Some(meta)
}

/// A name that is one label of a host name, as those of namespaces and Services are: with a dot in
/// it, one could be made to look like another's.
pub(super) fn label_name(value: Value<'_>) -> Option<&str> {
    let text = value.text()?;
    let wanted = "a name of at most 63 lower case letters, digits and `-`";
    value.parsed(wanted, |text| is_label_name(text).then_some(()))?;
    Some(text)
}

/// Returns whether [`label_name`] would read it.
pub(super) fn is_label_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.len() <= 63 && text.bytes().all(plain)
}

/// Returns those labels that can be read.
fn labels(value: Value<'_>) -> Labels {
    let pairs = value.pairs();
    let read = pairs.filter_map(|(entry, value)| {
        let text = value.text_or_empty()?;
        Some((entry.key.clone(), text.into()))
    });
    read.collect()
}
