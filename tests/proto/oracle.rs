//! Our messages beside those of the crate `envoy-types`: encoded there and read here, and back.

use std::fmt::Debug;

use envoy_types::pb::envoy::config::core::v3 as their_core;
use envoy_types::pb::envoy::service::discovery::v3 as theirs;
use envoy_types::pb::google;
use prost::Message;
use strait::grpc::{core, discovery, rpc};

/// Reads what they wrote as ours, and what we write of that as theirs.
fn crosses<T: Message + Default + Debug + PartialEq, O: Message + Default>(their: &T) -> O {
    let ours = O::decode(their.encode_to_vec().as_slice()).expect("we read theirs");
    let back = T::decode(ours.encode_to_vec().as_slice()).expect("they read ours");
    assert_eq!(back, *their);
    ours
}

fn any() -> google::protobuf::Any {
    google::protobuf::Any {
        type_url: "type.googleapis.com/istio.workload.Address".into(),
        value: vec![1, 2, 3],
    }
}

fn status() -> google::rpc::Status {
    google::rpc::Status {
        code: 3,
        message: "workload.uid: empty".into(),
        details: vec![any()],
    }
}

fn node() -> their_core::Node {
    use google::protobuf::{Struct, Value, value::Kind};
    let text = Value {
        kind: Some(Kind::StringValue("east".into())),
    };
    their_core::Node {
        id: "waypoint~10.0.0.1~gw.app~app.svc.cluster.local".into(),
        cluster: "gw.app".into(),
        metadata: Some(Struct {
            fields: [("NETWORK".to_owned(), text)].into_iter().collect(),
        }),
        locality: Some(their_core::Locality {
            region: "r".into(),
            zone: "z".into(),
            sub_zone: "s".into(),
        }),
        user_agent_name: "strait".into(),
        user_agent_version_type: Some(their_core::node::UserAgentVersionType::UserAgentVersion(
            "0.1".into(),
        )),
        client_features: vec!["f".into()],
        ..their_core::Node::default()
    }
}

#[test]
fn a_node_is_read_alike() {
    let ours: core::Node = crosses(&node());
    assert_eq!(ours.id, node().id);
    assert_eq!(
        (&*ours.cluster, &*ours.user_agent_name),
        ("gw.app", "strait")
    );
    assert_eq!(
        (&*ours.user_agent_version, &*ours.client_features[0]),
        ("0.1", "f")
    );
    let locality = ours.locality.expect("a locality");
    let parts = (&*locality.region, &*locality.zone, &*locality.sub_zone);
    assert_eq!(parts, ("r", "z", "s"));
    assert!(
        ours.metadata
            .expect("metadata")
            .fields
            .contains_key("NETWORK")
    );
}

#[test]
fn a_status_is_read_alike() {
    let ours: rpc::Status = crosses(&status());
    assert_eq!((ours.code, &*ours.message), (3, "workload.uid: empty"));
    assert_eq!(ours.details[0].value, [1, 2, 3]);
}

#[test]
fn a_delta_request_is_read_alike() {
    let their = theirs::DeltaDiscoveryRequest {
        node: Some(node()),
        type_url: "t".into(),
        resource_names_subscribe: vec!["*".into()],
        resource_names_unsubscribe: vec!["u".into()],
        initial_resource_versions: [("a".to_owned(), "1".to_owned())].into_iter().collect(),
        response_nonce: "n".into(),
        error_detail: Some(status()),
        ..theirs::DeltaDiscoveryRequest::default()
    };
    let ours: discovery::DeltaDiscoveryRequest = crosses(&their);
    assert_eq!((&*ours.type_url, &*ours.response_nonce), ("t", "n"));
    assert_eq!(ours.resource_names_subscribe, ["*"]);
    assert_eq!(ours.resource_names_unsubscribe, ["u"]);
    assert_eq!(ours.initial_resource_versions["a"], "1");
    assert_eq!(ours.error_detail.expect("an error").code, 3);
    assert!(ours.node.is_some());
}

#[test]
fn a_delta_response_is_read_alike() {
    let resource = theirs::Resource {
        name: "app/echo.app".into(),
        aliases: vec!["east/10.0.0.1".into()],
        version: "7".into(),
        resource: Some(any()),
        ttl: Some(google::protobuf::Duration {
            seconds: 5,
            nanos: 6,
        }),
        ..theirs::Resource::default()
    };
    let their = theirs::DeltaDiscoveryResponse {
        system_version_info: "v".into(),
        resources: vec![resource],
        type_url: "t".into(),
        removed_resources: vec!["gone".into()],
        nonce: "n".into(),
        control_plane: Some(their_core::ControlPlane {
            identifier: "istiod".into(),
        }),
        ..theirs::DeltaDiscoveryResponse::default()
    };
    let ours: discovery::DeltaDiscoveryResponse = crosses(&their);
    assert_eq!((&*ours.system_version_info, &*ours.nonce), ("v", "n"));
    assert_eq!(
        (&*ours.type_url, &*ours.removed_resources[0]),
        ("t", "gone")
    );
    assert_eq!(ours.control_plane.expect("a name").identifier, "istiod");
    let resource = &ours.resources[0];
    assert_eq!((&*resource.name, &*resource.version), ("app/echo.app", "7"));
    assert_eq!(resource.aliases, ["east/10.0.0.1"]);
    let body = resource.resource.as_ref().expect("a body");
    assert!(body.type_url.ends_with("Address") && body.value == [1, 2, 3]);
    assert_eq!(
        resource.ttl.map(|ttl| (ttl.seconds, ttl.nanos)),
        Some((5, 6))
    );
}
