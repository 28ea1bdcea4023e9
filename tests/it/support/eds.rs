//! Messages of an Envoy control plane about one service and its endpoints.

use std::net::SocketAddr;

use strait::grpc::cluster::Cluster;
use strait::grpc::cluster::cluster::common_lb_config::LocalityWeightedLbConfig;
use strait::grpc::cluster::cluster::{
    ClusterDiscoveryType, CommonLbConfig, DiscoveryType, EdsClusterConfig,
};
use strait::grpc::core::address::Address as Form;
use strait::grpc::core::config_source::ConfigSourceSpecifier;
use strait::grpc::core::socket_address::PortSpecifier;
use strait::grpc::core::{
    Address, AggregatedConfigSource, ConfigSource, HealthStatus, Locality, SocketAddress,
};
use strait::grpc::endpoint::lb_endpoint::HostIdentifier;
use strait::grpc::endpoint::{ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints};

/// The cluster of [`ECHO`](super::ECHO), as Istio names it.
pub const CLUSTER_NAME: &str = "outbound|80||echo.app.svc.cluster.local";

/// Returns a cluster with endpoints from EDS, under `service_name` or else its own name.
pub fn cluster(name: &str, service_name: &str) -> Cluster {
    let ads = ConfigSourceSpecifier::Ads(AggregatedConfigSource {});
    Cluster {
        name: name.to_owned(),
        cluster_discovery_type: Some(ClusterDiscoveryType::Type(DiscoveryType::Eds.into())),
        eds_cluster_config: Some(EdsClusterConfig {
            eds_config: Some(ConfigSource { config_source_specifier: Some(ads) }),
            service_name: service_name.to_owned(),
        }),
        ..Cluster::default()
    }
}

/// Adds load balancing by the weights of localities.
pub fn by_locality(cluster: Cluster) -> Cluster {
    Cluster {
        common_lb_config: Some(CommonLbConfig {
            locality_weighted_lb_config: Some(LocalityWeightedLbConfig {}),
        }),
        ..cluster
    }
}

/// Returns an endpoint of weight 1.
pub fn endpoint(at: SocketAddr) -> LbEndpoint {
    let form = Form::SocketAddress(SocketAddress {
        address: at.ip().to_string(),
        port_specifier: Some(PortSpecifier::PortValue(at.port().into())),
        ..SocketAddress::default()
    });
    LbEndpoint {
        host_identifier: Some(HostIdentifier::Endpoint(Endpoint {
            address: Some(Address { address: Some(form) }),
        })),
        ..LbEndpoint::default()
    }
}

/// Returns an endpoint of this weight.
pub fn weighted(at: SocketAddr, weight: u32) -> LbEndpoint {
    LbEndpoint { load_balancing_weight: Some(weight), ..endpoint(at) }
}

/// Returns an unhealthy endpoint.
pub fn unhealthy(at: SocketAddr) -> LbEndpoint {
    LbEndpoint { health_status: HealthStatus::Unhealthy.into(), ..endpoint(at) }
}

/// Returns the endpoints of a zone, with its weight if it has one, at a priority.
pub fn zone(
    zone: &str,
    weight: Option<u32>,
    priority: u32,
    endpoints: Vec<LbEndpoint>,
) -> LocalityLbEndpoints {
    LocalityLbEndpoints {
        locality: Some(Locality {
            region: "r".to_owned(),
            zone: zone.to_owned(),
            ..Locality::default()
        }),
        load_balancing_weight: weight,
        priority,
        lb_endpoints: endpoints,
        ..LocalityLbEndpoints::default()
    }
}

/// Returns an assignment.
pub fn assignment(name: &str, endpoints: Vec<LocalityLbEndpoints>) -> ClusterLoadAssignment {
    ClusterLoadAssignment {
        cluster_name: name.to_owned(),
        endpoints,
        ..ClusterLoadAssignment::default()
    }
}
