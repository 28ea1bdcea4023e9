//! Kubernetes Services: their declared scope, ports, addresses and endpoint preferences.

use std::net::IpAddr;

use super::meta::Meta;
use super::ports::{self, Port};
use crate::snapshot::mesh::Scope;
use crate::xds::convert::unicast;
use crate::yaml::{Fields, Value};

/// Solo's label: `global` or `global-only`, or `cluster`, which is neither.
const SERVICE_SCOPE: &str = "solo.io/service-scope";
/// Istio's label: `true`, or `false` for a service that stays in its cluster.
const GLOBAL: &str = "istio.io/global";
/// Istio's annotation: `.` and `~` hide the service from other namespaces.
const EXPORT_TO: &str = "networking.istio.io/exportTo";
/// Istio's annotation, used if `spec.trafficDistribution` is not set.
const DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) meta: Meta,
    pub(super) declared: DeclaredScope,
    pub(super) ports: Vec<Port>,
    pub(super) ips: Vec<IpAddr>,
    /// True if it has a selector, by which Kubernetes finds its pods.
    pub(super) has_selector: bool,
    /// Scopes within which its endpoints are preferred; empty for `Any`, none if unspecified.
    pub(super) preferences: Option<Vec<Scope>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeclaredScope {
    /// No declaration.
    Nothing,
    /// Exported. Its own name refers to its cluster's endpoints only.
    Global,
    /// Exported. Its own name refers to the endpoints of all clusters.
    GlobalOnly,
    Local,
}

impl Service {
    /// Returns whether two copies of a Service have the same declared scope, ports, addresses,
    /// preferences and labels.
    pub(super) fn agrees(&self, other: &Self) -> bool {
        (self.declared, &self.ports, &self.ips, &self.preferences)
            == (other.declared, &other.ports, &other.ips, &other.preferences)
            && self.meta.labels == other.meta.labels
    }
}

/// Reads the rest of a Service, without its invalid parts.
pub(super) fn read(top: &mut Fields<'_>, value: Value<'_>, meta: Meta) -> Option<Service> {
    let spec = top.need("spec", "{ports: [{port: 80}]}");
    let Some(mut spec) = spec.and_then(|spec| spec.foreign("spec")) else {
        return Some(Service {
            meta,
            declared: DeclaredScope::Local,
            ports: Vec::new(),
            ips: Vec::new(),
            has_selector: false,
            preferences: None,
        });
    };
    let ports = spec.get("ports");
    let ports = ports.and_then(|list| ports::read(list, "spec.ports[]"));
    let one = spec.get("clusterIP").and_then(cluster_ip);
    let all = spec.get("clusterIPs").into_iter().flat_map(Value::items);
    let all: Vec<_> = all.filter_map(cluster_ip).collect();
    let selector = spec.get("selector");
    let stated = spec.get("trafficDistribution");
    let kind = spec.get("type").and_then(Value::text);
    if kind == Some("ExternalName") {
        let what = "is a Service of type ExternalName, which is ignored";
        value.warning(what, "a Service with endpoints");
        return None;
    }
    Some(Service {
        declared: declared(&meta, value),
        preferences: preferences(&meta, stated, value),
        ports: ports.unwrap_or_default(),
        ips: if all.is_empty() { one.into_iter().collect() } else { all },
        has_selector: selector.is_some_and(|labels| labels.pairs().next().is_some()),
        meta,
    })
}

/// Reads an address of a Service. `None` and an empty text mean no address.
fn cluster_ip(value: Value<'_>) -> Option<IpAddr> {
    match value.text_or_empty()? {
        "" | "None" => None,
        _ => value.parsed("an IP address, or `None`", unicast),
    }
}

fn declared(meta: &Meta, value: Value<'_>) -> DeclaredScope {
    let scopes = [
        ("global", DeclaredScope::Global),
        ("global-only", DeclaredScope::GlobalOnly),
        ("cluster", DeclaredScope::Local),
    ];
    let exported = [("true", DeclaredScope::Global), ("false", DeclaredScope::Local)];
    let by_label = |key, meanings: &[(&str, DeclaredScope)], how: &str| {
        let text = meta.label(key).filter(|text| !text.is_empty());
        let known = meanings.iter().find(|(known, _)| Some(*known) == text);
        if let (Some(other), None) = (text, known) {
            value
                .warning(format!("has the label {key} `{other}`, which is not a known value"), how);
        }
        known.map_or(DeclaredScope::Nothing, |(_, meaning)| *meaning)
    };
    let how = "`global`, `global-only` or `cluster`";
    let scope = by_label(SERVICE_SCOPE, &scopes, how);
    let global = by_label(GLOBAL, &exported, "`\"true\"` or `\"false\"`");
    let export_to = meta.annotations.get(EXPORT_TO).map(|value| &**value);
    let is_kept = matches!(export_to, Some("." | "~"));
    let says = [scope, global];
    let exported =
        |one: &DeclaredScope| matches!(one, DeclaredScope::Global | DeclaredScope::GlobalOnly);
    if says.contains(&DeclaredScope::Local) || is_kept {
        if says.iter().any(exported) {
            let what = "is both exported and local; it stays local";
            value.warning(what, "one of the labels");
        }
        return DeclaredScope::Local;
    }
    match says {
        [DeclaredScope::Nothing, global] => global,
        [scope, _] => scope,
    }
}

/// Returns the scopes within which endpoints are preferred, by the names of Kubernetes, Istio
/// and Solo. As in Istio, the field of the Service precedes its annotation. Node preferences
/// have no meaning at a gateway and count as zone preferences.
fn preferences(meta: &Meta, stated: Option<Value<'_>>, value: Value<'_>) -> Option<Vec<Scope>> {
    let field = stated.and_then(Value::text);
    let annotation = meta.annotations.get(DISTRIBUTION).map(|value| &**value);
    let word = field.or_else(|| annotation.filter(|word| !word.is_empty()))?;
    let scopes: &[Scope] = match &*word.to_ascii_lowercase() {
        "preferclose" | "prefersamezone" | "prefersamenode" => {
            &[Scope::Network, Scope::Region, Scope::Zone]
        }
        "preferregion" => &[Scope::Network, Scope::Region],
        "prefernetwork" => &[Scope::Network],
        "any" => &[],
        _ => {
            let what = format!("has the traffic distribution `{word}`, which is ignored");
            let how = "`PreferClose`, `PreferRegion`, `PreferNetwork` or `Any`";
            value.warning(what, how);
            return None;
        }
    };
    Some(scopes.to_vec())
}
