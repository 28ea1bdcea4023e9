//! Resources of Istio's discovery: services, workloads and policies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use strait::grpc::security::Authorization;
use strait::grpc::workload::{Address, address::Type};
use strait::snapshot::Caller;
use strait::snapshot::authorization::Attributes;
use strait::snapshot::builder::{Change, build};
use strait::snapshot::mesh::Mesh;
use strait::snapshot::{Policies, Snapshot};
use strait::xds::client::{Resource, ResourceStore};
use strait::xds::store::{ADDRESS, AUTHORIZATION, Store};
use strait::xds::tables::MeshStore;

/// Reads the type from the first byte, and the message from the rest. An accepted resource yields a
/// snapshot, and disappears when it is removed. A rejected one has a reason.
pub fn wds(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else {
        return;
    };
    let is_policy = kind & 1 == 1;
    let (type_url, name) =
        if is_policy { (AUTHORIZATION, policy_name(body)) } else { (ADDRESS, address_name(body)) };
    let name = name.unwrap_or_else(|| "app/cut-off".to_owned());
    let resource = Resource {
        name: name.as_str().into(),
        body: Some(Bytes::copy_from_slice(body)),
        body_type: type_url.into(),
        ..Resource::default()
    };
    let mut store = Store::default();
    store.set_policies_received();
    assert!(store.take_policies().is_some_and(|none| none.is_empty()));
    let accepted = store.upsert(type_url, &resource);
    if let Err(why) = &accepted {
        assert!(why.contains(": ") && why.len() < 2048, "{why}");
    }
    let (change, policies) = (store.tables.take_change(), store.take_policies());
    assert_eq!(change.is_some(), accepted.is_ok() && !is_policy, "{accepted:?}");
    // A policy that cannot be read is replaced by one that rejects.
    assert_eq!(policies.is_some(), is_policy, "{accepted:?}");
    if let Some(policies) = &policies {
        assert_eq!(policies.iter().any(|one| one.unreadable), accepted.is_err());
        judge(policies);
    }
    if let Some(mesh) = change {
        used(mesh);
    }
    assert_eq!(store.upsert(type_url, &resource), accepted, "twice the same");
    assert!(store.tables.take_change().is_none() && store.take_policies().is_none());
    store.remove(type_url, &name);
    let mesh = store.tables.mesh();
    assert!(mesh.services.is_empty() && mesh.workloads.is_empty() && store.policies().is_empty());
}

/// Names a workload by its uid and a service by namespace and hostname.
fn address_name(body: &[u8]) -> Option<String> {
    Some(match Address::decode(body).ok()?.r#type? {
        Type::Workload(workload) => workload.uid,
        Type::Service(service) => format!("{}/{}", service.namespace, service.hostname),
    })
}

fn policy_name(body: &[u8]) -> Option<String> {
    let policy = Authorization::decode(body).ok()?;
    Some(format!("{}/{}", policy.namespace, policy.name))
}

fn judge(policies: &Policies) {
    let peer = Caller {
        principal: "spiffe://west.local/ns/shop/sa/checkout",
        namespace: "shop",
        service_account: "checkout",
        ..Caller::UNKNOWN
    };
    for policy in policies.iter() {
        for peer in [Some(peer), None] {
            let matches = policy.matches(&Attributes {
                peer,
                source: Some(IpAddr::V6(Ipv6Addr::LOCALHOST)),
                destination: IpAddr::V4(Ipv4Addr::LOCALHOST),
                port: Some(80),
            });
            assert!(matches || !policy.unreadable);
        }
    }
}

fn used(mesh: Mesh) {
    let change = Change { mesh: Some((mesh, Arc::from("east"))), ..Change::default() };
    let snapshot = build(&Snapshot::default(), change);
    assert!(snapshot.services.len() <= 1);
}
