//! Kinds of xDS control planes: their resource types, stores and node.

use std::collections::BTreeMap;

use prost_types::value::Kind;
use prost_types::{Struct, Value};

use super::client::{Client, Mode, Subscription};
use super::envoy::{ClusterStore, ENDPOINT};
use super::store::{ADDRESS, AUTHORIZATION, CLUSTER, Store};
use super::tables::MeshStore;
use crate::config::pod::Pod;
use crate::config::{self, NamedCluster, NodeNames};
use crate::grpc::core::{Locality, Node};

/// Known types and their display names.
const TYPE_NAMES: [(&str, &str); 4] = [
    (ADDRESS, "addresses"),
    (AUTHORIZATION, "authorizations"),
    (CLUSTER, "clusters"),
    (ENDPOINT, "endpoints"),
];

#[derive(Debug)]
pub enum ControlPlaneKind {
    /// Istio: addresses, policies and the names of clusters.
    Istio,
    /// Envoy: clusters and their endpoints.
    Envoy {
        node: NodeNames,
        locality: config::Locality,
        /// Services of the clusters that do not follow a naming scheme.
        clusters: Vec<NamedCluster>,
    },
}

impl ControlPlaneKind {
    /// Returns a client without resources, and the store for its resources.
    pub(super) fn new_client_and_store(&self) -> (Client, Box<dyn MeshStore>) {
        let (types, store): (&[_], Box<dyn MeshStore>) = match self {
            Self::Istio => {
                let types = &[
                    (ADDRESS, Mode::Wildcard),
                    (AUTHORIZATION, Mode::Wildcard),
                    (CLUSTER, Mode::Wildcard),
                ];
                (types, Box::<Store>::default())
            }
            Self::Envoy { clusters, .. } => {
                let targets = clusters.iter().filter_map(|named| {
                    let service = &named.service;
                    Some((named.cluster.clone(), (service.host.clone(), service.port?)))
                });
                let types = &[(CLUSTER, Mode::Wildcard), (ENDPOINT, Mode::OnDemand)];
                (types, Box::new(ClusterStore::new(targets)))
            }
        };
        let types = types.iter().map(|&(type_url, mode)| Subscription { type_url, mode });
        (Client::new(types.collect()), store)
    }

    /// Returns the node for the first requests of a stream.
    pub(super) fn node(&self, pod: &Pod) -> Node {
        let node = match self {
            Self::Istio => istio_node(pod),
            Self::Envoy { node, locality, .. } => envoy_node(node, locality, pod),
        };
        Node {
            user_agent_name: "strait".to_owned(),
            user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..node
        }
    }
}

pub(super) fn display_name(type_url: &str) -> &'static str {
    let known = TYPE_NAMES.iter().find(|(known, _)| *known == type_url);
    known.map_or("others", |(_, name)| name)
}

/// Returns the metric label of a type. All types without a subscription share one label.
pub(super) fn metric_label(type_url: &str) -> &'static str {
    let known = TYPE_NAMES.iter().find(|(known, _)| *known == type_url);
    known.map_or("other", |(known, _)| known)
}

/// Returns the node for istiod. To istiod an `istio-east-west` gateway is a waypoint with the label
/// of the controller that manages it (docs/wire-contract.md 2.1).
fn istio_node(pod: &Pod) -> Node {
    let Pod { name, namespace, ip, .. } = pod;
    let labels = [
        ("gateway.istio.io/managed", "istio.io-eastwest-controller"),
        ("topology.istio.io/network", &*pod.network),
        ("gateway.networking.k8s.io/gateway-name", &*pod.gateway),
    ];
    let labels = texts(labels.into_iter().filter(|(_, value)| !value.is_empty()));
    let fields = [
        ("NAME", name),
        ("NAMESPACE", namespace),
        ("CLUSTER_ID", &pod.cluster),
        ("NETWORK", &pod.network),
        ("REQUESTED_NETWORK_VIEW", &pod.network),
        ("INSTANCE_IPS", ip),
        ("ISTIO_VERSION", &pod.istio_version),
    ];
    // If set, `SERVICE_ACCOUNT` has to equal the service account of the token.
    let account = pod.service_account.iter();
    let account = account.map(|account| ("SERVICE_ACCOUNT", account));
    let fields = fields.into_iter().chain(account);
    let mut metadata = texts(fields.map(|(key, value)| (key, value.as_str())));
    let labels = Kind::StructValue(Struct { fields: labels });
    metadata.insert("LABELS".to_owned(), Value { kind: Some(labels) });
    Node {
        id: format!("waypoint~{ip}~{name}.{namespace}~{namespace}.svc.cluster.local"),
        metadata: Some(Struct { fields: metadata }),
        ..Node::default()
    }
}

fn texts<'a>(fields: impl Iterator<Item = (&'a str, &'a str)>) -> BTreeMap<String, Value> {
    let fields = fields.map(|(key, value)| {
        let kind = Some(Kind::StringValue(value.to_owned()));
        (key.to_owned(), Value { kind })
    });
    fields.collect()
}

/// Returns the node for another control plane. Names that the configuration leaves out default to
/// the pod and its cluster.
fn envoy_node(names: &NodeNames, locality: &config::Locality, pod: &Pod) -> Node {
    let NodeNames { id, cluster } = names.clone();
    Node {
        id: id.unwrap_or_else(|| format!("{}.{}", pod.name, pod.namespace)),
        cluster: cluster.unwrap_or_else(|| pod.cluster.clone()),
        locality: Some(Locality {
            region: locality.region.to_string(),
            zone: locality.zone.to_string(),
            sub_zone: locality.subzone.to_string(),
        }),
        ..Node::default()
    }
}
