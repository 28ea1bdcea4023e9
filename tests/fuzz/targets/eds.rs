//! Resources of an Envoy control plane: clusters and their endpoints.

use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use strait::grpc::cluster::Cluster;
use strait::grpc::cluster::cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig};
use strait::grpc::endpoint::ClusterLoadAssignment;
use strait::snapshot::Snapshot;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::mesh::Mesh;
use strait::xds::client::{Resource, ResourceStore};
use strait::xds::envoy::{ClusterStore, ENDPOINT};
use strait::xds::store::CLUSTER;
use strait::xds::tables::MeshStore;

/// Cluster of the assignments.
const OWN: &str = "echo.app:80";

/// Reads the type from the first byte, and the message from the rest. An accepted resource yields a
/// snapshot, and disappears when its cluster is removed. A rejected one has a reason.
pub fn eds(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else {
        return;
    };
    let reported = ("legacy".to_owned(), ("old.app".to_owned(), 70));
    let mut clusters = ClusterStore::new([reported]);
    let (type_url, name, cluster) = if kind & 1 == 1 {
        let name = ClusterLoadAssignment::decode(body).map(|of| of.cluster_name);
        let name = name.ok().filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| "cut-off".to_owned());
        put(&mut clusters, CLUSTER, OWN, by_eds(&name)).expect("our own cluster");
        assert_eq!(clusters.take_eds_names(), Some([name.clone()].into()));
        assert!(clusters.tables.take_change().is_some());
        (ENDPOINT, name, OWN.to_owned())
    } else {
        let name = Cluster::decode(body).map(|of| of.name).ok();
        let name = name.filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| "cut.off:80".to_owned());
        (CLUSTER, name.clone(), name)
    };
    let body = Bytes::copy_from_slice(body);
    let accepted = put(&mut clusters, type_url, &name, body.clone());
    if let Err(why) = &accepted {
        assert!(why.len() < 2048 && !why.is_empty(), "{why}");
    }
    let change = clusters.tables.take_change();
    assert!(accepted.is_ok() || change.is_none(), "{accepted:?}");
    if let Some(mesh) = change {
        used(mesh);
    }
    let unused = clusters.unused(type_url);
    assert!(unused.1.len() <= 100 && unused.1.len() <= unused.0);
    let again = put(&mut clusters, type_url, &name, body);
    assert_eq!(again, accepted, "twice the same");
    assert!(clusters.tables.take_change().is_none());
    clusters.remove(ENDPOINT, &name);
    clusters.remove(CLUSTER, &cluster);
    let mesh = clusters.tables.mesh();
    assert!(mesh.services.is_empty() && mesh.workloads.is_empty());
    assert_eq!(clusters.unused(CLUSTER), (0, Vec::new()));
    assert!(clusters.take_eds_names().is_none_or(|wanted| wanted.is_empty()));
}

fn put(
    clusters: &mut ClusterStore,
    type_url: &'static str,
    name: &str,
    body: Bytes,
) -> Result<(), String> {
    let resource = Resource {
        name: name.into(),
        body: Some(body),
        body_type: type_url.into(),
        ..Resource::default()
    };
    clusters.upsert(type_url, &resource)
}

fn by_eds(service_name: &str) -> Bytes {
    let cluster = Cluster {
        name: OWN.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds.into())),
        eds_cluster_config: Some(EdsClusterConfig {
            service_name: service_name.to_owned(),
            ..EdsClusterConfig::default()
        }),
        ..Cluster::default()
    };
    cluster.encode_to_vec().into()
}

fn used(mesh: Mesh) {
    let change = Change { mesh: Some((mesh, Arc::from("east"))), ..Change::default() };
    let snapshot = build(&Snapshot::default(), change);
    assert!(snapshot.services.len() <= 1);
}
