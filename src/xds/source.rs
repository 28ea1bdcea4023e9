//! Kinds of xDS control planes and the stores of their resources: Istio's mesh, or that of any
//! Envoy control plane.

use std::collections::BTreeSet;

use super::client::{Client, Mode, Resource, ResourceStore, Response, Subscription};
use super::envoy::{ClusterStore, ENDPOINT};
use super::node;
use super::store::{ADDRESS, AUTHORIZATION, CLUSTER, Store};
use crate::config::pod::Pod;
use crate::config::{Locality, NamedCluster, NodeNames};
use crate::grpc::core::Node;
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{ExportSet, Policies};
use crate::status::Unused;

/// Known types and their display names.
const TYPE_NAMES: [(&str, &str); 4] = [
    (ADDRESS, "addresses"),
    (AUTHORIZATION, "authorizations"),
    (CLUSTER, "clusters"),
    (ENDPOINT, "endpoints"),
];

/// Kind of control plane of a stream.
#[derive(Debug)]
pub enum ControlPlaneKind {
    /// Istio: addresses, policies and the names of clusters.
    Istio,
    /// Envoy: clusters and their endpoints.
    Envoy {
        /// Configured names of this node.
        node: NodeNames,
        /// Locality of this gateway.
        locality: Locality,
        /// Services of the clusters that do not follow a naming scheme.
        clusters: Vec<NamedCluster>,
    },
}

impl ControlPlaneKind {
    /// Returns a client without resources, and the store for its resources.
    pub(super) fn new_client_and_store(&self) -> (Client, Source) {
        let (types, source) = match self {
            Self::Istio => {
                let types = [ADDRESS, AUTHORIZATION, CLUSTER].map(|url| (url, Mode::Wildcard));
                (types.to_vec(), Source::default())
            }
            Self::Envoy { clusters, .. } => {
                let configured_targets =
                    clusters
                        .iter()
                        .filter_map(|NamedCluster { cluster, service }| {
                            Some((cluster.clone(), (service.host.clone(), service.port?)))
                        });
                let types = vec![(CLUSTER, Mode::Wildcard), (ENDPOINT, Mode::OnDemand)];
                (
                    types,
                    Source::Envoy(Box::new(ClusterStore::new(configured_targets))),
                )
            }
        };
        let types = types.into_iter();
        let types = types.map(|(type_url, mode)| Subscription { type_url, mode });
        (Client::new(types.collect()), source)
    }

    /// Returns the node for the first requests of a stream.
    pub(super) fn node(&self, pod: &Pod) -> Node {
        match self {
            Self::Istio => node::istio_node(pod),
            Self::Envoy { node, locality, .. } => node::envoy_node(node, locality, pod),
        }
    }
}

/// Returns the display name of a type.
pub(super) fn display_name(type_url: &str) -> &'static str {
    let known = TYPE_NAMES.iter().find(|(known, _)| *known == type_url);
    known.map_or("others", |(_, name)| name)
}

/// Returns the metric label of a type. All types without a subscription share one label.
pub(super) fn metric_label(type_url: &str) -> &'static str {
    let known = TYPE_NAMES.iter().find(|(known, _)| *known == type_url);
    known.map_or("other", |(known, _)| known)
}

/// Store of accepted resources, which builds the mesh from them.
#[derive(Debug)]
pub enum Source {
    /// Services, workloads, policies and the names of clusters.
    Istio(Box<Store>),
    /// Clusters and their endpoints.
    Envoy(Box<ClusterStore>),
}

impl Source {
    /// Returns the mesh, if it has changed since the last call.
    pub fn take_change(&mut self) -> Option<Mesh> {
        match self {
            Self::Istio(store) => store.take_change(),
            Self::Envoy(clusters) => clusters.take_change(),
        }
    }

    /// Returns the export set, if it has changed since the last call.
    pub fn take_exports(&mut self) -> Option<ExportSet> {
        match self {
            Self::Istio(store) => store.take_exports(),
            Self::Envoy(clusters) => clusters.take_exports(),
        }
    }

    /// Returns the policies, if they were received and have changed since the last call.
    pub fn take_policies(&mut self) -> Option<Policies> {
        match self {
            Self::Istio(store) => store.take_policies(),
            Self::Envoy(_) => None,
        }
    }

    /// Notes that the control plane has sent all of its policies. No effect for an Envoy
    /// control plane.
    pub fn set_policies_received(&mut self) {
        if let Self::Istio(store) = self {
            store.told_policies();
        }
    }

    /// Returns the names to subscribe to in EDS, if they may have changed since the last call.
    pub(super) fn take_eds_names(&mut self) -> Option<BTreeSet<String>> {
        match self {
            Self::Istio(_) => None,
            Self::Envoy(clusters) => clusters.take_wanted(),
        }
    }

    /// Returns the mesh.
    pub fn mesh(&self) -> Mesh {
        match self {
            Self::Istio(store) => store.mesh(),
            Self::Envoy(clusters) => clusters.mesh(),
        }
    }

    /// Returns whether the resource of this name is a placeholder for an unreadable policy.
    pub fn has_placeholder(&self, type_url: &str, name: &str) -> bool {
        match self {
            Self::Istio(store) => store.has_stand_in(type_url, name),
            Self::Envoy(_) => false,
        }
    }

    /// Returns the number of unused resources of a type, and the first of them.
    pub(super) fn unused(&self, type_url: &str) -> (usize, Vec<Unused>) {
        match self {
            Self::Istio(_) => (0, Vec::new()),
            Self::Envoy(clusters) => clusters.unused(type_url),
        }
    }

    fn resources(&self) -> &dyn ResourceStore {
        match self {
            Self::Istio(store) => &**store,
            Self::Envoy(clusters) => &**clusters,
        }
    }

    fn resources_mut(&mut self) -> &mut dyn ResourceStore {
        match self {
            Self::Istio(store) => &mut **store,
            Self::Envoy(clusters) => &mut **clusters,
        }
    }
}

impl Default for Source {
    fn default() -> Self {
        Self::Istio(Box::default())
    }
}

impl ResourceStore for Source {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        self.resources_mut().upsert(type_url, resource)
    }

    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        self.resources_mut().handle_rejection(type_url, name)
    }

    fn uses_bodies(&self, type_url: &str) -> bool {
        self.resources().uses_bodies(type_url)
    }

    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        self.resources().is_complete_state(type_url, response)
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        self.resources_mut().remove(type_url, name);
    }
}
