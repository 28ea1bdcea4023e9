//! Metadata of an object: name, labels, annotations and cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use crate::yaml::{Fields, Place, Value};

/// Label of a slice that was copied from another cluster: the source cluster (KEP-1645).
const SOURCE_CLUSTER: &str = "multicluster.kubernetes.io/source-cluster";
/// Cluster of an object, if the objects of several clusters are read together.
const CLUSTER: &str = "topology.istio.io/cluster";
/// Network of the endpoints of a slice or, at [`ROOT_NAMESPACE`], of a whole cluster.
const NETWORK: &str = "topology.istio.io/network";
/// Data plane of pods: `ambient` for HBONE.
const DATAPLANE: &str = "istio.io/dataplane-mode";
/// Manager of a gateway. For a waypoint it is [`WAYPOINTS`], and the waypoint uses HBONE
/// regardless of its namespace.
const MANAGED: &str = "gateway.istio.io/managed";
/// Controller of waypoints.
const WAYPOINTS: &str = "istio.io-mesh-controller";
/// Label of a Service that is a waypoint, for messages.
pub(super) const WAYPOINT_LABEL: &str = "gateway.istio.io/managed: istio.io-mesh-controller";
/// Waypoint for the traffic to a Service, or to all Services of a namespace.
const WAYPOINT: &str = "istio.io/use-waypoint";
/// Namespace of the waypoint, if it is another one.
const WAYPOINT_NAMESPACE: &str = "istio.io/use-waypoint-namespace";
/// Namespace with the label for the network of its cluster.
pub(super) const ROOT_NAMESPACE: &str = "istio-system";

/// Labels or annotations.
pub(super) type Labels = BTreeMap<Box<str>, Box<str>>;

#[derive(Clone, Debug)]
pub(super) struct Meta {
    /// Name.
    pub(super) name: Arc<str>,
    /// Namespace; for a Namespace, its own name.
    pub(super) namespace: Arc<str>,
    /// True if the object has a namespace, and not only by default.
    pub(super) has_namespace: bool,
    /// Cluster of the object; ours if absent.
    pub(super) cluster: Option<Arc<str>>,
    /// Labels.
    pub(super) labels: Labels,
    /// Annotations.
    pub(super) annotations: Labels,
    /// Creation timestamp, unparsed.
    pub(super) created: Option<Box<str>>,
    /// Position in its file.
    pub(super) place: Place,
}

impl Meta {
    pub(super) fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(|value| &**value)
    }

    /// Returns the value of a label or, if there is none, of an annotation.
    pub(super) fn label_or_annotation(&self, key: &str) -> Option<&str> {
        let found = self.labels.get(key).or_else(|| self.annotations.get(key));
        found.map(|value| &**value).filter(|value| !value.is_empty())
    }

    /// Returns the network.
    pub(super) fn network(&self) -> Option<&str> {
        self.label_or_annotation(NETWORK)
    }

    /// Returns whether its pods use HBONE; none if unspecified.
    pub(super) fn is_ambient(&self) -> Option<bool> {
        let stated = self.label(DATAPLANE).map(|mode| mode == "ambient");
        if self.is_waypoint() { Some(true) } else { stated }
    }

    pub(super) fn is_waypoint(&self) -> bool {
        self.label(MANAGED) == Some(WAYPOINTS)
    }

    /// Returns the namespace and name of its waypoint. The name `none` is an explicit absence,
    /// which overrides the namespace's waypoint.
    pub(super) fn waypoint(&self) -> Option<Option<(&str, &str)>> {
        let name = self.label(WAYPOINT).filter(|name| !name.is_empty())?;
        let namespace = self.label(WAYPOINT_NAMESPACE).unwrap_or(&self.namespace);
        Some((name != "none").then_some((namespace, name)))
    }

    /// Returns the creation time. Reports an invalid one at the object.
    pub(super) fn creation_time(&self, object: Value<'_>) -> Option<SystemTime> {
        let text = self.created.as_deref()?;
        let time = humantime::parse_rfc3339(text);
        if time.is_err() {
            let what = format!("has `{text}` for its creationTimestamp");
            object.error(what, "a time such as `2026-01-31T12:00:00Z`");
        }
        time.ok()
    }

    /// Returns whether it was copied from another cluster.
    pub(super) fn is_copy(&self) -> bool {
        self.labels.contains_key(SOURCE_CLUSTER)
    }
}

/// Reads `metadata`, with `name` as parser of the name. Returns none without a valid name, or
/// with an invalid namespace. Other invalid fields are left out.
pub(super) fn read<'a>(
    top: &mut Fields<'a>,
    place: Place,
    name: impl Fn(Option<Value<'a>>) -> Option<&'a str>,
) -> Option<Meta> {
    let mut fields = top.need("metadata", "{name: echo}")?.foreign("metadata")?;
    let name = name(fields.need("name", "echo"));
    let namespace = fields.get("namespace");
    let has_namespace = namespace.is_some();
    let namespace = namespace.map(label_name);
    let labels = fields.get("labels").map(labels);
    let annotations = fields.get("annotations").map(self::labels);
    let created = fields.get("creationTimestamp").and_then(Value::text);
    let mut meta = Meta {
        name: name?.into(),
        namespace: namespace.unwrap_or(Some("default"))?.into(),
        has_namespace,
        cluster: None,
        labels: labels.unwrap_or_default(),
        annotations: annotations.unwrap_or_default(),
        created: created.map(Into::into),
        place,
    };
    // A copy has a label. An annotation would change the cluster of an object that is no copy.
    let source = meta.label(SOURCE_CLUSTER).filter(|cluster| !cluster.is_empty());
    meta.cluster = source.or_else(|| meta.label_or_annotation(CLUSTER)).map(Into::into);
    Some(meta)
}

/// Reads a name that is one label of a host name, as namespaces and Services have. A dot in a
/// name could make it look like the name of another service.
pub(super) fn label_name(value: Value<'_>) -> Option<&str> {
    let text = value.text()?;
    let wanted = "a name of at most 63 lower case letters, digits and `-`";
    value.parsed(wanted, |text| is_label_name(text).then_some(()))?;
    Some(text)
}

/// Returns whether [`label_name`] accepts a text.
pub(super) fn is_label_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !text.is_empty() && text.len() <= 63 && text.bytes().all(plain)
}

fn labels(value: Value<'_>) -> Labels {
    let pairs = value.pairs();
    let read = pairs.filter_map(|(entry, value)| {
        let text = value.text_or_empty()?;
        Some((entry.key.clone(), text.into()))
    });
    read.collect()
}

/// Reads a text of at most `max` bytes, as findings and rules repeat it.
pub(super) fn bounded<'a>(value: Value<'a>, max: usize, how: &str) -> Option<&'a str> {
    let text = value.text()?;
    if text.len() > max {
        value.error("is too long", how);
        return None;
    }
    Some(text)
}
