//! Our messages compared with those of the crate `envoy-types`, encoded by either and decoded by
//! the other.

use std::fmt::Debug;

use envoy_types::pb::envoy::config::cluster::v3 as their_cluster;
use envoy_types::pb::envoy::config::core::v3 as their_core;
use envoy_types::pb::envoy::config::endpoint::v3 as their_endpoint;
use envoy_types::pb::envoy::service::discovery::v3 as theirs;
use envoy_types::pb::envoy::r#type::v3 as their_number;
use envoy_types::pb::google;
use prost::Message;
use strait::grpc::{cluster, core, discovery, endpoint, number, rpc};

/// Decodes their encoding as ours, and our encoding of that as theirs.
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
    google::rpc::Status { code: 3, message: "workload.uid: empty".into(), details: vec![any()] }
}

fn node() -> their_core::Node {
    use google::protobuf::{Struct, Value, value::Kind};
    let text = Value { kind: Some(Kind::StringValue("east".into())) };
    their_core::Node {
        id: "waypoint~10.0.0.1~gw.app~app.svc.cluster.local".into(),
        cluster: "gw.app".into(),
        metadata: Some(Struct { fields: [("NETWORK".to_owned(), text)].into_iter().collect() }),
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
    assert_eq!((&*ours.cluster, &*ours.user_agent_name), ("gw.app", "strait"));
    assert_eq!((&*ours.user_agent_version, &*ours.client_features[0]), ("0.1", "f"));
    let locality = ours.locality.expect("a locality");
    let parts = (&*locality.region, &*locality.zone, &*locality.sub_zone);
    assert_eq!(parts, ("r", "z", "s"));
    assert!(ours.metadata.expect("metadata").fields.contains_key("NETWORK"));
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
        ttl: Some(google::protobuf::Duration { seconds: 5, nanos: 6 }),
        ..theirs::Resource::default()
    };
    let their = theirs::DeltaDiscoveryResponse {
        system_version_info: "v".into(),
        resources: vec![resource],
        type_url: "t".into(),
        removed_resources: vec!["gone".into()],
        nonce: "n".into(),
        control_plane: Some(their_core::ControlPlane { identifier: "istiod".into() }),
        ..theirs::DeltaDiscoveryResponse::default()
    };
    let ours: discovery::DeltaDiscoveryResponse = crosses(&their);
    assert_eq!((&*ours.system_version_info, &*ours.nonce), ("v", "n"));
    assert_eq!((&*ours.type_url, &*ours.removed_resources[0]), ("t", "gone"));
    assert_eq!(ours.control_plane.expect("a name").identifier, "istiod");
    let resource = &ours.resources[0];
    assert_eq!((&*resource.name, &*resource.version), ("app/echo.app", "7"));
    assert_eq!(resource.aliases, ["east/10.0.0.1"]);
    let body = resource.resource.as_ref().expect("a body");
    assert!(body.type_url.ends_with("Address") && body.value == [1, 2, 3]);
    assert_eq!(resource.ttl.map(|ttl| (ttl.seconds, ttl.nanos)), Some((5, 6)));
}

fn their_address(form: their_core::address::Address) -> their_core::Address {
    their_core::Address { address: Some(form) }
}

fn their_socket(port: their_core::socket_address::PortSpecifier) -> their_core::SocketAddress {
    their_core::SocketAddress {
        protocol: their_core::socket_address::Protocol::Udp.into(),
        address: "10.0.0.1".into(),
        port_specifier: Some(port),
        resolver_name: "r".into(),
        ..their_core::SocketAddress::default()
    }
}

#[test]
fn addresses_are_read_alike() {
    use core::address::Address as Ours;
    use their_core::address::Address as Theirs;
    use their_core::socket_address::PortSpecifier;
    for port in [PortSpecifier::PortValue(80), PortSpecifier::NamedPort("http".into())] {
        let their = their_address(Theirs::SocketAddress(their_socket(port)));
        let ours: core::Address = crosses(&their);
        let Some(Ours::SocketAddress(ours)) = ours.address else {
            panic!("another form");
        };
        assert_eq!((ours.protocol, &*ours.address), (1, "10.0.0.1"));
        assert_eq!(&*ours.resolver_name, "r");
        assert!(ours.port_specifier.is_some());
    }
    let pipe = their_address(Theirs::Pipe(their_core::Pipe { path: "/x".into(), mode: 0 }));
    let ours: core::Address = crosses(&pipe);
    assert!(matches!(ours.address, Some(Ours::Pipe(pipe)) if pipe.path == "/x"));
    let inside = their_address(Theirs::EnvoyInternalAddress(their_core::EnvoyInternalAddress {
        endpoint_id: "id".into(),
        address_name_specifier: Some(
            their_core::envoy_internal_address::AddressNameSpecifier::ServerListenerName(
                "l".into(),
            ),
        ),
    }));
    let ours: core::Address = crosses(&inside);
    let Some(Ours::EnvoyInternalAddress(ours)) = ours.address else {
        panic!("another form");
    };
    assert!(ours.endpoint_id == "id" && ours.address_name_specifier.is_some());
}

fn their_assignment() -> their_endpoint::ClusterLoadAssignment {
    use google::protobuf::{Struct, UInt32Value, Value, value::Kind};
    use their_core::socket_address::PortSpecifier;
    let socket = their_socket(PortSpecifier::PortValue(80));
    let address = their_address(their_core::address::Address::SocketAddress(socket));
    let text = Value { kind: Some(Kind::StringValue("http".into())) };
    let fields = Struct { fields: [("tunnel".to_owned(), text)].into_iter().collect() };
    let host =
        their_endpoint::Endpoint { address: Some(address), ..their_endpoint::Endpoint::default() };
    let one = their_endpoint::LbEndpoint {
        health_status: their_core::HealthStatus::Degraded.into(),
        metadata: Some(their_core::Metadata {
            filter_metadata: [("m".to_owned(), fields)].into_iter().collect(),
            ..their_core::Metadata::default()
        }),
        load_balancing_weight: Some(UInt32Value { value: 3 }),
        host_identifier: Some(their_endpoint::lb_endpoint::HostIdentifier::Endpoint(host)),
    };
    let named = their_endpoint::LbEndpoint {
        host_identifier: Some(their_endpoint::lb_endpoint::HostIdentifier::EndpointName(
            "n".into(),
        )),
        ..their_endpoint::LbEndpoint::default()
    };
    let locality = their_endpoint::LocalityLbEndpoints {
        locality: node().locality,
        lb_endpoints: vec![one, named],
        load_balancing_weight: Some(UInt32Value { value: 7 }),
        priority: 2,
        ..their_endpoint::LocalityLbEndpoints::default()
    };
    let overload = their_endpoint::cluster_load_assignment::policy::DropOverload {
        category: "lb".into(),
        drop_percentage: Some(their_number::FractionalPercent {
            numerator: 5,
            denominator: their_number::fractional_percent::DenominatorType::Million.into(),
        }),
    };
    their_endpoint::ClusterLoadAssignment {
        cluster_name: "c".into(),
        endpoints: vec![locality],
        policy: Some(their_endpoint::cluster_load_assignment::Policy {
            drop_overloads: vec![overload],
            overprovisioning_factor: Some(UInt32Value { value: 200 }),
            weighted_priority_health: true,
            ..their_endpoint::cluster_load_assignment::Policy::default()
        }),
        ..their_endpoint::ClusterLoadAssignment::default()
    }
}

#[test]
fn an_assignment_is_read_alike() {
    let ours: endpoint::ClusterLoadAssignment = crosses(&their_assignment());
    assert_eq!(ours.cluster_name, "c");
    let locality = &ours.endpoints[0];
    assert_eq!((locality.load_balancing_weight, locality.priority), (Some(7), 2));
    let [one, named] = &locality.lb_endpoints[..] else {
        panic!("two endpoints");
    };
    assert_eq!(one.health_status, i32::from(core::HealthStatus::Degraded));
    assert_eq!(one.load_balancing_weight, Some(3));
    let metadata = one.metadata.as_ref().expect("metadata");
    assert!(metadata.filter_metadata["m"].fields.contains_key("tunnel"));
    use endpoint::lb_endpoint::HostIdentifier;
    assert!(
        matches!(&one.host_identifier, Some(HostIdentifier::Endpoint(one)) if one.address.is_some())
    );
    assert!(
        matches!(&named.host_identifier, Some(HostIdentifier::EndpointName(name)) if name == "n")
    );
    let policy = ours.policy.expect("a policy");
    assert_eq!(policy.overprovisioning_factor, Some(200));
    assert!(policy.weighted_priority_health);
    let overload = &policy.drop_overloads[0];
    let part = overload.drop_percentage.expect("a part");
    let million = number::fractional_percent::DenominatorType::Million.into();
    assert_eq!((&*overload.category, part.numerator, part.denominator), ("lb", 5, million));
}

#[test]
#[expect(deprecated, reason = "what is old is told from what is not there, too")]
fn other_places_for_endpoints_are_distinguished_from_none() {
    use endpoint::locality_lb_endpoints::LbConfig as Ours;
    use their_endpoint::locality_lb_endpoints::{LbConfig as Theirs, LbEndpointList};
    let of = |config| their_endpoint::LocalityLbEndpoints {
        lb_config: Some(config),
        ..their_endpoint::LocalityLbEndpoints::default()
    };
    let list = of(Theirs::LoadBalancerEndpoints(LbEndpointList::default()));
    let ours: endpoint::LocalityLbEndpoints = crosses(&list);
    assert!(matches!(ours.lb_config, Some(Ours::LoadBalancerEndpoints(_))));
    let leds = of(Theirs::LedsClusterLocalityConfig(their_endpoint::LedsClusterLocalityConfig {
        leds_collection_name: "n".into(),
        ..their_endpoint::LedsClusterLocalityConfig::default()
    }));
    let ours: endpoint::LocalityLbEndpoints = crosses(&leds);
    assert!(matches!(ours.lb_config, Some(Ours::LedsClusterLocalityConfig(_))));
}

#[test]
fn a_cluster_is_read_alike() {
    use cluster::cluster::ClusterDiscoveryType as Ours;
    use their_cluster::cluster as theirs;
    let socket = || their_core::TransportSocket {
        name: "tls".into(),
        ..their_core::TransportSocket::default()
    };
    let extension =
        their_core::TypedExtensionConfig { name: "e".into(), typed_config: Some(any()) };
    let base = their_cluster::Cluster {
        name: "c".into(),
        cluster_discovery_type: Some(theirs::ClusterDiscoveryType::Type(
            theirs::DiscoveryType::Eds.into(),
        )),
        transport_socket: Some(socket()),
        common_lb_config: Some(theirs::CommonLbConfig {
            locality_config_specifier: Some(
                theirs::common_lb_config::LocalityConfigSpecifier::LocalityWeightedLbConfig(
                    theirs::common_lb_config::LocalityWeightedLbConfig {},
                ),
            ),
            ..theirs::CommonLbConfig::default()
        }),
        load_assignment: Some(their_assignment()),
        load_balancing_policy: Some(their_cluster::LoadBalancingPolicy {
            policies: vec![their_cluster::load_balancing_policy::Policy {
                typed_extension_config: Some(extension),
            }],
        }),
        transport_socket_matches: vec![theirs::TransportSocketMatch {
            name: "m".into(),
            transport_socket: Some(socket()),
            ..theirs::TransportSocketMatch::default()
        }],
        ..their_cluster::Cluster::default()
    };
    let ours: cluster::Cluster = crosses(&base);
    assert!(ours.name == "c" && ours.load_assignment.is_some());
    let eds = i32::from(cluster::cluster::DiscoveryType::Eds);
    assert!(matches!(ours.cluster_discovery_type, Some(Ours::Type(of)) if of == eds));
    let common = ours.common_lb_config.expect("balancing");
    assert!(common.locality_weighted_lb_config.is_some());
    assert_eq!(ours.transport_socket.expect("a socket").name, "tls");
    let matches = ours.transport_socket_matches[0].transport_socket.clone();
    assert_eq!(matches.expect("a socket").name, "tls");
    let policies = ours.load_balancing_policy.expect("policies").policies;
    let extension = policies[0].typed_extension_config.clone().expect("an extension");
    assert_eq!((&*extension.name, extension.typed_config.is_some()), ("e", true));

    let custom = their_cluster::Cluster {
        cluster_discovery_type: Some(theirs::ClusterDiscoveryType::ClusterType(
            theirs::CustomClusterType { name: "x".into(), ..theirs::CustomClusterType::default() },
        )),
        ..their_cluster::Cluster::default()
    };
    let ours: cluster::Cluster = crosses(&custom);
    assert!(matches!(ours.cluster_discovery_type, Some(Ours::ClusterType(of)) if of.name == "x"));
}

#[test]
#[expect(deprecated, reason = "what is old is told from what is not there, too")]
fn where_endpoints_come_from_is_read_alike() {
    use core::config_source::ConfigSourceSpecifier as OurSource;
    use their_cluster::cluster as theirs;
    use their_core::config_source::ConfigSourceSpecifier as TheirSource;
    type Is = fn(&OurSource) -> bool;
    let sources: [(TheirSource, Is); 5] = [
        (TheirSource::Path("p".into()), |ours| matches!(ours, OurSource::Path(_))),
        (TheirSource::ApiConfigSource(Default::default()), |ours| {
            matches!(ours, OurSource::ApiConfigSource(_))
        }),
        (TheirSource::Ads(Default::default()), |ours| matches!(ours, OurSource::Ads(_))),
        (TheirSource::Self_(Default::default()), |ours| matches!(ours, OurSource::Self_(_))),
        (TheirSource::PathConfigSource(Default::default()), |ours| {
            matches!(ours, OurSource::PathConfigSource(_))
        }),
    ];
    for (source, is) in sources {
        let their = their_cluster::Cluster {
            eds_cluster_config: Some(theirs::EdsClusterConfig {
                eds_config: Some(their_core::ConfigSource {
                    config_source_specifier: Some(source),
                    ..their_core::ConfigSource::default()
                }),
                service_name: "s".into(),
            }),
            ..their_cluster::Cluster::default()
        };
        let ours: cluster::Cluster = crosses(&their);
        let eds = ours.eds_cluster_config.expect("EDS");
        assert_eq!(eds.service_name, "s");
        let source = eds.eds_config.and_then(|config| config.config_source_specifier);
        assert!(source.is_some_and(|source| is(&source)));
    }
}
