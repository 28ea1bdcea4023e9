//! Tests of CDS and EDS: errors, notes, and the resulting mesh.

mod networks;
mod reading;

use bytes::Bytes;
use prost_types::value::Kind;
use prost_types::{Any, Struct, Value};

use super::*;
use crate::grpc::cluster::cluster::common_lb_config::LocalityWeightedLbConfig;
use crate::grpc::cluster::cluster::{
    ClusterDiscoveryType, CommonLbConfig, CustomClusterType, DiscoveryType, EdsClusterConfig,
};
use crate::grpc::cluster::{Cluster, LoadBalancingPolicy, load_balancing_policy};
use crate::grpc::core::address::Address as Form;
use crate::grpc::core::config_source::ConfigSourceSpecifier;
use crate::grpc::core::socket_address::PortSpecifier;
use crate::grpc::core::{
    Address, ApiConfigSource, ConfigSource, EnvoyInternalAddress, HealthStatus, Locality, Metadata,
    PathConfigSource, Pipe, SelfConfigSource, SocketAddress, TransportSocket, TypedExtensionConfig,
};
use crate::grpc::endpoint::cluster_load_assignment::Policy;
use crate::grpc::endpoint::cluster_load_assignment::policy::DropOverload;
use crate::grpc::endpoint::lb_endpoint::HostIdentifier;
use crate::grpc::endpoint::locality_lb_endpoints::{LbConfig, LbEndpointList};
use crate::grpc::endpoint::{
    ClusterLoadAssignment, Endpoint, LbEndpoint, LedsClusterLocalityConfig, LocalityLbEndpoints,
};
use crate::grpc::number::FractionalPercent;
use crate::snapshot::ExportSet;
use crate::snapshot::mesh::Protocol;
use crate::xds::client::{Client, Mode, Subscription};

const ECHO: &str = "outbound|80||echo.app.svc.cluster.local";
const KEY: &str = "app/echo.app.svc.cluster.local";

fn socket(address: &str, port: u32) -> Form {
    Form::SocketAddress(SocketAddress {
        address: address.to_owned(),
        port_specifier: Some(PortSpecifier::PortValue(port)),
        ..SocketAddress::default()
    })
}

fn at(form: Form) -> LbEndpoint {
    LbEndpoint {
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
            address: Some(Address { address: Some(form) }),
        })),
        ..LbEndpoint::default()
    }
}

fn metadata(filter: &str, key: &str, text: &str) -> Metadata {
    let value = Value { kind: Some(Kind::StringValue(text.to_owned())) };
    let of = Struct { fields: [(key.to_owned(), value)].into() };
    Metadata { filter_metadata: [(filter.to_owned(), of)].into() }
}

/// Returns an assignment of one locality with these endpoints.
fn assignment(name: &str, endpoints: Vec<LbEndpoint>) -> ClusterLoadAssignment {
    ClusterLoadAssignment {
        cluster_name: name.to_owned(),
        endpoints: vec![LocalityLbEndpoints {
            lb_endpoints: endpoints,
            ..LocalityLbEndpoints::default()
        }],
        ..ClusterLoadAssignment::default()
    }
}

fn of_type(name: &str, kind: DiscoveryType) -> Cluster {
    Cluster {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(kind.into())),
        ..Cluster::default()
    }
}

fn named_by_eds(name: &str, service: &str) -> Cluster {
    Cluster {
        eds_cluster_config: Some(EdsClusterConfig {
            service_name: service.to_owned(),
            ..EdsClusterConfig::default()
        }),
        ..of_type(name, DiscoveryType::Eds)
    }
}

fn put(
    clusters: &mut ClusterStore,
    of: &'static str,
    name: &str,
    body: &impl Message,
) -> Result<(), String> {
    let resource = Resource {
        name: name.into(),
        body: Some(Bytes::from(body.encode_to_vec())),
        body_type: of.into(),
        ..Resource::default()
    };
    clusters.upsert(of, &resource)
}

/// Returns the addresses or hostnames of the mesh's workloads, with their weights and target
/// ports.
fn served(clusters: &ClusterStore, port: u16) -> Vec<(String, u32, u16)> {
    let mesh = clusters.tables.mesh();
    let workloads = mesh.workloads.sorted().into_iter();
    let served = workloads.filter_map(|one| {
        let target = one.services.values().next()?.get(&port)?;
        let address = one.addresses.first().map(ToString::to_string);
        let address = address.unwrap_or_else(|| one.hostname.to_string());
        Some((address, one.capacity, *target))
    });
    served.collect()
}

#[test]
fn a_mistake_in_a_cluster_is_named() {
    let from = |source| {
        let mut cluster = named_by_eds(ECHO, "");
        let config = cluster.eds_cluster_config.get_or_insert_default();
        config.eds_config = Some(ConfigSource { config_source_specifier: Some(source) });
        cluster
    };
    let static_with = |endpoints| Cluster {
        load_assignment: Some(assignment("", endpoints)),
        ..of_type(ECHO, DiscoveryType::Static)
    };
    for (cluster, want) in [
        (
            from(ConfigSourceSpecifier::ApiConfigSource(ApiConfigSource {})),
            "cluster.eds_cluster_config.eds_config: api_config_source, want `ads` or `self`",
        ),
        (
            from(ConfigSourceSpecifier::PathConfigSource(PathConfigSource {})),
            "cluster.eds_cluster_config.eds_config: a file, want `ads` or `self`",
        ),
        (
            static_with(vec![LbEndpoint::default()]),
            "cluster.load_assignment.endpoints[0].lb_endpoints[0].endpoint: missing",
        ),
        (
            named_by_eds("other:80", ""),
            "cluster.name: `other:80` is named `outbound|80||echo.app.svc.cluster.local`",
        ),
        (
            Cluster {
                cluster_discovery_type: Some(ClusterDiscoveryType::Type(9)),
                ..of_type(ECHO, DiscoveryType::Static)
            },
            "cluster.type: 9 is unknown",
        ),
    ] {
        let mut clusters = ClusterStore::default();
        assert_eq!(put(&mut clusters, CLUSTER, ECHO, &cluster).expect_err(want), want);
        assert!(clusters.tables.mesh().services.is_empty());
    }
    let mut clusters = ClusterStore::default();
    let own = from(ConfigSourceSpecifier::Self_(SelfConfigSource {}));
    put(&mut clusters, CLUSTER, ECHO, &own).expect("the same stream");
    let misnamed = put(&mut clusters, ENDPOINT, "a", &assignment("b", Vec::new()));
    assert_eq!(misnamed, Err("cluster_name: `b` is named `a`".to_owned()));
    let cut_off = Resource {
        name: ECHO.into(),
        body: Some(Bytes::from_static(&[0x0a, 0x7f])),
        ..Resource::default()
    };
    for of in [CLUSTER, ENDPOINT] {
        assert_eq!(clusters.upsert(of, &cut_off), Err("truncated field".to_owned()));
    }
}

#[test]
fn more_localities_and_endpoints_than_are_taken_are_not_decoded() {
    let mut clusters = ClusterStore::default();
    let many = assignment("x", vec![LbEndpoint::default(); ENDPOINTS_MAX + 1]);
    let reported = put(&mut clusters, ENDPOINT, "x", &many).expect_err("too many");
    assert_eq!(reported, "endpoints: too many, want at most 100000");
    let own = Cluster { load_assignment: Some(many), ..of_type(ECHO, DiscoveryType::Static) };
    let reported = put(&mut clusters, CLUSTER, ECHO, &own).expect_err("too many");
    assert_eq!(reported, "endpoints: too many, want at most 100000");
    let many = ClusterLoadAssignment {
        endpoints: vec![LocalityLbEndpoints::default(); LOCALITIES_MAX + 1],
        ..ClusterLoadAssignment::default()
    };
    let reported = put(&mut clusters, ENDPOINT, "x", &many).expect_err("too many");
    assert_eq!(reported, "endpoints: too many localities, want at most 10000");
    clusters.endpoints = ALL_ENDPOINTS_MAX;
    let one = Cluster {
        load_assignment: Some(assignment("", vec![at(socket("10.0.0.1", 80))])),
        ..of_type(ECHO, DiscoveryType::Static)
    };
    let reported = put(&mut clusters, CLUSTER, ECHO, &one).expect_err("too many");
    assert_eq!(reported, "endpoints: 1000001 in all clusters, want at most 1000000");
}

#[test]
fn endpoints_come_with_eds_and_stay_until_others_come_or_the_cluster_goes() {
    let mut clusters = ClusterStore::new([]);
    assert_eq!(clusters.take_eds_names(), Some([].into()));
    put(&mut clusters, CLUSTER, ECHO, &named_by_eds(ECHO, "first")).expect("a cluster");
    assert_eq!(clusters.take_eds_names(), Some(["first".to_owned()].into()));
    let mesh = clusters.tables.take_change().expect("a service");
    assert_eq!(mesh.services.get(KEY).expect("a service").ports, [(80, 0)].into());
    assert_eq!(mesh.workloads.len(), 0, "and no endpoint yet");

    let first = assignment("first", vec![at(socket("10.0.0.1", 8080)), at(socket("10.0.0.2", 81))]);
    put(&mut clusters, ENDPOINT, "first", &first).expect("endpoints");
    let before = [("10.0.0.1".to_owned(), 1, 8080), ("10.0.0.2".to_owned(), 1, 81)];
    assert_eq!(served(&clusters, 80), before);
    assert!(clusters.tables.take_change().is_some());
    put(&mut clusters, ENDPOINT, "first", &first).expect("the same");
    assert!(clusters.tables.take_change().is_none(), "nothing has changed");

    // Neither a removed assignment nor a new EDS name means that there are no endpoints.
    clusters.remove(ENDPOINT, "first");
    assert_eq!(served(&clusters, 80), before);
    put(&mut clusters, CLUSTER, ECHO, &named_by_eds(ECHO, "second")).expect("a cluster");
    assert_eq!(clusters.take_eds_names(), Some(["second".to_owned()].into()));
    assert_eq!(served(&clusters, 80), before);
    let second = assignment("second", vec![at(socket("10.0.0.3", 82))]);
    put(&mut clusters, ENDPOINT, "second", &second).expect("endpoints");
    assert_eq!(served(&clusters, 80), [("10.0.0.3".to_owned(), 1, 82)]);
    put(&mut clusters, ENDPOINT, "second", &assignment("second", Vec::new())).expect("none");
    assert_eq!(served(&clusters, 80), []);
    assert_eq!(clusters.tables.mesh().services.len(), 1);

    clusters.remove(CLUSTER, ECHO);
    assert_eq!(clusters.take_eds_names(), Some([].into()));
    assert!(clusters.tables.mesh().services.is_empty());
    assert_eq!(clusters.endpoints, 0);
}

#[test]
fn clusters_of_one_host_are_ports_of_one_service_and_of_one_port_the_first_serves() {
    let other = "inbound-vip|80|tcp|echo.app.svc.cluster.local";
    let second_port = "echo.app.svc.cluster.local:81";
    let reported = ("legacy".to_owned(), ("echo.app.svc.cluster.local".to_owned(), 80));
    let mut clusters = ClusterStore::new([reported]);
    let own = |name: &str, address: &str| Cluster {
        load_assignment: Some(assignment("", vec![at(socket(address, 80))])),
        ..of_type(name, DiscoveryType::Static)
    };
    let serves = |clusters: &ClusterStore, port| {
        let served = served(clusters, port).into_iter();
        served.map(|(address, ..)| address).collect::<Vec<_>>()
    };
    for (name, address) in [(ECHO, "10.0.0.1"), (second_port, "10.0.0.2")] {
        put(&mut clusters, CLUSTER, name, &own(name, address)).expect("a cluster");
    }
    let ports = |clusters: &ClusterStore| {
        let mesh = clusters.tables.mesh();
        mesh.services.get(KEY).map(|of| of.ports.keys().copied().collect::<Vec<_>>())
    };
    assert_eq!(ports(&clusters), Some(vec![80, 81]));
    assert_eq!(
        (serves(&clusters, 80), serves(&clusters, 81)),
        (vec!["10.0.0.1".into()], vec!["10.0.0.2".into()])
    );
    assert_eq!(clusters.tables.take_exports(), None);

    // Istio's name for an export precedes the others alphabetically, and a configured cluster
    // precedes all.
    put(&mut clusters, CLUSTER, other, &own(other, "10.0.0.3")).expect("a cluster");
    assert_eq!(serves(&clusters, 80), ["10.0.0.3"]);
    let exports = clusters.tables.take_exports().expect("an export");
    assert_eq!(exports, ExportSet::from_iter([("echo.app.svc.cluster.local", 80)]));
    put(&mut clusters, CLUSTER, "legacy", &own("legacy", "10.0.0.4")).expect("a cluster");
    assert_eq!(serves(&clusters, 80), ["10.0.0.4"]);
    let (count, first) = clusters.unused(CLUSTER);
    assert_eq!(count, 2);
    assert_eq!(first[0].why, "`legacy` serves this port");

    clusters.remove(CLUSTER, "legacy");
    clusters.remove(CLUSTER, other);
    assert_eq!(serves(&clusters, 80), ["10.0.0.1"]);
    clusters.remove(CLUSTER, ECHO);
    assert_eq!(ports(&clusters), Some(vec![81]));
    assert_eq!(clusters.unused(CLUSTER), (0, Vec::new()));
}

#[test]
fn hostnames_are_kept_for_the_resolver() {
    let mut clusters = ClusterStore::default();
    for (index, kind) in
        [DiscoveryType::StrictDns, DiscoveryType::LogicalDns].into_iter().enumerate()
    {
        let name = format!("echo.app:{}", index + 80);
        let cluster = Cluster {
            load_assignment: Some(assignment("", vec![at(socket("LB-1.example.com", 443))])),
            ..of_type(&name, kind)
        };
        put(&mut clusters, CLUSTER, &name, &cluster).expect("a cluster");
        let port = u16::try_from(index + 80).expect("a port");
        assert_eq!(served(&clusters, port), [("lb-1.example.com".to_owned(), 1, 443)]);
    }
}

#[test]
fn what_is_not_used_of_clusters_is_counted_and_reported() {
    let mut clusters = ClusterStore::default();
    let tls = Cluster {
        transport_socket: Some(TransportSocket { name: "envoy.transport_sockets.tls".into() }),
        ..named_by_eds("a:1", "")
    };
    let raw = Cluster {
        transport_socket: Some(TransportSocket {
            name: "envoy.transport_sockets.raw_buffer".into(),
        }),
        ..named_by_eds("b:1", "")
    };
    let custom = Cluster {
        cluster_discovery_type: Some(ClusterDiscoveryType::ClusterType(CustomClusterType {
            name: "envoy.clusters.redis".into(),
            ..CustomClusterType::default()
        })),
        ..named_by_eds("c:1", "")
    };
    let original = of_type("d:1", DiscoveryType::OriginalDst);
    for cluster in [tls, raw, custom, original] {
        put(&mut clusters, CLUSTER, &cluster.name, &cluster).expect("a cluster");
    }
    for name in ["PassthroughCluster", "outbound|80|v1|echo.app"] {
        // The body is not read.
        put(&mut clusters, CLUSTER, name, &named_by_eds("another", "")).expect("a cluster");
    }
    let (count, first) = clusters.unused(CLUSTER);
    let reported: Vec<_> = first.iter().map(|one| (&*one.name, &*one.why)).collect();
    assert_eq!(
        reported,
        [
            (
                "a:1",
                "transport_socket `envoy.transport_sockets.tls`: ignored, bytes are forwarded \
                 unchanged"
            ),
            ("c:1", "cluster_type `envoy.clusters.redis`: unknown, the cluster has no endpoints"),
            ("d:1", "type ORIGINAL_DST: not supported, the cluster has no endpoints"),
            ("PassthroughCluster", NO_SERVICE_REASON),
        ]
    );
    assert_eq!(count, 4);
    let pipe = at(Form::Pipe(Pipe::default()));
    put(&mut clusters, ENDPOINT, "a:1", &assignment("a:1", vec![pipe])).expect("endpoints");
    assert_eq!(clusters.unused(ENDPOINT).0, 1);
    clusters.remove(CLUSTER, "PassthroughCluster");
    assert_eq!(clusters.unused(CLUSTER).0, 3);
}

#[test]
fn ports_of_a_service_and_clusters_of_a_port_are_bounded() {
    let mut clusters = ClusterStore::new([]);
    let mut add = |name: &str| put(&mut clusters, CLUSTER, name, &named_by_eds(name, "one"));
    for port in 1..=PORTS_MAX {
        assert_eq!(add(&format!("echo.app:{port}")), Ok(()));
    }
    let why = add("echo.app:60000").expect_err("one port more");
    assert_eq!(why, "cluster.name: `echo.app` has 1024 ports, which is the limit");
    assert_eq!(add("other.app:60000"), Ok(()), "of another service");
    // Host names are case-insensitive, so one port may have any number of clusters.
    let cases = |bits: usize| {
        let letter = |(at, letter): (usize, char)| match bits >> at & 1 {
            1 => letter.to_ascii_uppercase(),
            _ => letter,
        };
        let host: String = "abcdefgh".chars().enumerate().map(letter).collect();
        format!("{host}.app:80")
    };
    for bits in 0..RANKS_MAX {
        assert_eq!(add(&cases(bits)), Ok(()));
    }
    let why = add(&cases(RANKS_MAX)).expect_err("one cluster more");
    assert!(why.starts_with("cluster.name: 64 clusters serve this port"));
    assert_eq!(add(&cases(0)), Ok(()), "one of them again");
}

#[test]
fn a_whole_push_of_istiod_takes_the_other_clusters_away() {
    let mut clusters = ClusterStore::default();
    let types = [Subscription { type_url: CLUSTER, mode: Mode::Wildcard }];
    let mut client = Client::new(types.into());
    client.connected();
    let mut send = |names: &[&str]| {
        let resources = names.iter().map(|name| Resource {
            name: (*name).into(),
            body: Some(named_by_eds(name, "").encode_to_vec().into()),
            body_type: CLUSTER.into(),
            ..Resource::default()
        });
        let push = Response {
            type_url: CLUSTER.to_owned(),
            resources: resources.collect(),
            ..Response::default()
        };
        client.received(push, &mut clusters);
        clusters.tables.mesh().services.len()
    };
    assert_eq!(send(&["main_internal", "encap", ECHO]), 1);
    assert_eq!(send(&["main_internal"]), 1);
    assert_eq!(send(&["main_internal", "encap"]), 0);
}
