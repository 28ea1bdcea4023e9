//! EndpointSlices: endpoints of a Service in one cluster.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use super::meta::{self, Meta};
use super::ports::{self, Port};
use crate::xds::convert::{normal_hostname, unicast};
use crate::yaml::{Fields, Place, Value};

/// Label of a slice of this cluster: the Service of its endpoints.
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label of a slice that was copied from another cluster: the service there (KEP-1645).
const COPIED_SERVICE_NAME: &str = "multicluster.kubernetes.io/service-name";
/// Label for the controller that keeps a slice up to date.
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
/// Controller of Kubernetes, which updates slices from the selector of their Service.
const CONTROLLER: &str = "endpointslice-controller.k8s.io";
/// Region of the endpoints, which Kubernetes does not set per endpoint.
const REGION: &str = "topology.kubernetes.io/region";

/// EndpointSlice.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub(super) namespace: Arc<str>,
    pub(super) service: Arc<str>,
    /// Cluster of the endpoints; ours if absent.
    pub(super) cluster: Option<Arc<str>>,
    /// True for a copy from another cluster. Only slices of exported services are copied.
    pub(super) is_copy: bool,
    /// True if [`CONTROLLER`] manages it.
    pub(super) is_managed: bool,
    pub(super) network: Option<Arc<str>>,
    pub(super) region: Option<Arc<str>>,
    /// True if its endpoints use HBONE; none if unspecified.
    pub(super) is_ambient: Option<bool>,
    pub(super) ports: Vec<Port>,
    pub(super) endpoints: Vec<SliceEndpoint>,
    pub(super) place: Place,
}

impl Slice {
    /// Returns the number of pairs of an address and a port.
    pub(super) fn pairs(&self) -> usize {
        let addresses = self.endpoints.iter().map(|one| one.addresses.len());
        addresses.sum::<usize>() * self.ports.len()
    }
}

/// Endpoint of a slice.
#[derive(Clone, Debug)]
pub(super) struct SliceEndpoint {
    /// Addresses; empty if it has a host name.
    pub(super) addresses: Vec<IpAddr>,
    /// Host name, or empty. It is never looked up, because the answer to a tenant's host name
    /// could be any address.
    pub(super) host: Arc<str>,
    pub(super) is_ready: bool,
    pub(super) is_serving: bool,
    pub(super) is_terminating: bool,
    /// Namespace, possibly empty, and name of its pod, from `targetRef`.
    pub(super) pod: Option<Pod>,
    pub(super) node: Arc<str>,
    pub(super) zone: Arc<str>,
}

impl SliceEndpoint {
    /// Returns the name of its pod, if that is in the namespace of the slice. A slice is no
    /// authority on the pods of other namespaces.
    pub(super) fn own_pod(&self, namespace: &str) -> Option<&Arc<str>> {
        let (of, name) = self.pod.as_ref()?;
        (of.is_empty() || **of == *namespace).then_some(name)
    }
}

/// Reads the rest of a slice, without its invalid parts.
pub(super) fn read(top: &mut Fields<'_>, value: Value<'_>, meta: &Meta) -> Option<Slice> {
    let kinds = [("IPv4", false), ("IPv6", false), ("FQDN", true)];
    let is_named = top.need("addressType", "IPv4");
    let is_named = is_named.and_then(|kind| kind.choice(&kinds));
    let is_named = is_named.unwrap_or(false);
    let ports = top.get("ports");
    let ports = ports.and_then(|list| ports::read(list, "ports[]"));
    let endpoints = top.get("endpoints").into_iter().flat_map(Value::items);
    let endpoints: Vec<_> = endpoints.filter_map(|item| backend(item, is_named)).collect();
    let key = if meta.is_copy() { COPIED_SERVICE_NAME } else { SERVICE_NAME };
    let Some(service) = meta.label(key).filter(|name| !name.is_empty()) else {
        let what = format!("has no label {key}, and is ignored");
        value.warning(what, "the name of the Service into it");
        return None;
    };
    if !meta::is_label_name(service) {
        value.error(format!("has `{service}` for its {key}"), "the name of a Service");
    }
    Some(Slice {
        namespace: Arc::clone(&meta.namespace),
        service: service.into(),
        cluster: meta.cluster.clone(),
        is_copy: meta.is_copy(),
        is_managed: meta.label(MANAGED_BY) == Some(CONTROLLER),
        network: meta.network().map(Into::into),
        region: meta.label_or_annotation(REGION).map(Into::into),
        is_ambient: meta.is_ambient(),
        ports: ports.unwrap_or_default(),
        endpoints,
        place: meta.place.clone(),
    })
}

fn backend(value: Value<'_>, is_named: bool) -> Option<SliceEndpoint> {
    let mut fields = value.foreign("endpoints[]")?;
    let (mut addresses, mut name) = (Vec::new(), None);
    match fields.need("addresses", "[10.0.0.1]") {
        Some(list) if is_named => name = host(list),
        Some(list) => {
            let wanted = "an IP address that can be dialled, such as `10.0.0.1`";
            let read = list.items().filter_map(|item| item.parsed(wanted, unicast));
            addresses = read.collect();
        }
        None => {}
    }
    let conditions = fields.get("conditions").map_or([None; 3], conditions);
    let pod = fields.get("targetRef").and_then(target);
    let node = fields.get("nodeName").and_then(Value::text_or_empty);
    let zone = fields.get("zone").and_then(Value::text_or_empty);
    let [ready, serving, terminating] = conditions;
    // `ready` defaults to true, and `serving` to `ready`.
    let is_ready = ready.unwrap_or(true);
    Some(SliceEndpoint {
        addresses,
        host: name.unwrap_or_default(),
        is_ready,
        is_serving: serving.unwrap_or(is_ready),
        is_terminating: terminating.unwrap_or(false),
        pod,
        node: node.unwrap_or_default().into(),
        zone: zone.unwrap_or_default().into(),
    })
}

/// Returns the host name of an endpoint. Further addresses are the same endpoint, and
/// Kubernetes permits using any one of them.
fn host(list: Value<'_>) -> Option<Arc<str>> {
    let read: Vec<_> = list
        .items()
        .map(|item| {
            item.parsed("a host name, such as `gw.example`", |text| {
                normal_hostname(text).map(Cow::into_owned)
            })
        })
        .collect();
    if read.is_empty() {
        list.error("is empty", "one host name");
    }
    read.into_iter().flatten().next().map(Into::into)
}

/// Reads `ready`, `serving` and `terminating`.
fn conditions(value: Value<'_>) -> [Option<bool>; 3] {
    let Some(mut fields) = value.foreign("endpoints[].conditions") else {
        return [None; 3];
    };
    let mut flag = |key| fields.get(key).and_then(Value::flag);
    [flag("ready"), flag("serving"), flag("terminating")]
}

/// Namespace and name of a pod.
pub(super) type Pod = (Arc<str>, Arc<str>);

fn target(value: Value<'_>) -> Option<Pod> {
    let mut fields = value.foreign("endpoints[].targetRef")?;
    let mut text = |key| fields.get(key).map_or(Some(""), Value::text_or_empty);
    let (kind, namespace, name) = (text("kind"), text("namespace"), text("name"));
    let pod: Pod = (namespace?.into(), name?.into());
    (kind? == "Pod" && !pod.1.is_empty()).then_some(pod)
}
