//! Identity of this gateway in requests to a control plane.

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use crate::config::pod::Pod;
use crate::config::{self, NodeNames};
use crate::grpc::core::{Locality, Node};

/// Returns the node of the first requests to istiod. To istiod an `istio-east-west` gateway is a
/// waypoint with the label of the controller that manages it (docs/wire-contract.md 2.1).
pub(super) fn istio_node(pod: &Pod) -> Node {
    let Pod {
        name,
        namespace,
        ip,
        ..
    } = pod;
    let labels = [
        ("gateway.istio.io/managed", "istio.io-eastwest-controller"),
        ("topology.istio.io/network", &*pod.network),
        ("gateway.networking.k8s.io/gateway-name", &*pod.gateway),
    ];
    let labels = labels.into_iter().filter(|(_, value)| !value.is_empty());
    let labels = labels.map(|(key, value)| (key.to_owned(), text(value)));
    let fields = [
        ("NAME", text(name)),
        ("NAMESPACE", text(namespace)),
        ("CLUSTER_ID", text(&pod.cluster)),
        ("NETWORK", text(&pod.network)),
        ("REQUESTED_NETWORK_VIEW", text(&pod.network)),
        ("INSTANCE_IPS", text(ip)),
        ("ISTIO_VERSION", text(&pod.istio_version)),
        ("LABELS", value(Kind::StructValue(fields_of(labels)))),
    ];
    // If set, `SERVICE_ACCOUNT` has to equal the service account of the token.
    let account = pod.service_account.as_deref();
    let account = account.map(|account| ("SERVICE_ACCOUNT", text(account)));
    let fields = fields.into_iter().chain(account);
    Node {
        id: format!("waypoint~{ip}~{name}.{namespace}~{namespace}.svc.cluster.local"),
        metadata: Some(fields_of(
            fields.map(|(key, value)| (key.to_owned(), value)),
        )),
        user_agent_name: "strait".to_owned(),
        user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Node::default()
    }
}

/// Returns the node of the first requests to another control plane. Names that the
/// configuration leaves out default to the pod and its cluster.
pub(super) fn envoy_node(names: &NodeNames, locality: &config::Locality, pod: &Pod) -> Node {
    let NodeNames { id, cluster } = names.clone();
    Node {
        id: id.unwrap_or_else(|| format!("{}.{}", pod.name, pod.namespace)),
        cluster: cluster.unwrap_or_else(|| pod.cluster.clone()),
        locality: Some(Locality {
            region: locality.region.clone(),
            zone: locality.zone.clone(),
            sub_zone: locality.subzone.clone(),
        }),
        user_agent_name: "strait".to_owned(),
        user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Node::default()
    }
}

fn fields_of(fields: impl IntoIterator<Item = (String, Value)>) -> Struct {
    Struct {
        fields: fields.into_iter().collect(),
    }
}

fn text(text: &str) -> Value {
    value(Kind::StringValue(text.to_owned()))
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}
