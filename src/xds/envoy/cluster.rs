//! Conversion of CDS clusters: the source of their endpoints and their load balancing.
//!
//! Settings of Envoy's connections are ignored (timeouts, circuit breakers, its own health
//! checks, outlier detection). So are settings of its picks (`lb_policy`, subsets, hashing),
//! because the gateway picks by weight and load. Transport sockets are ignored with a note,
//! because the gateway forwards bytes unchanged.

use prost_types::Any;

use super::endpoints::{self, Endpoints};
use crate::grpc::cluster as proto;
use crate::grpc::cluster::cluster::{ClusterDiscoveryType, DiscoveryType, EdsClusterConfig};
use crate::grpc::core::config_source::ConfigSourceSpecifier;
use crate::xds::convert::shown;
use crate::xds::interner::Interner;
use crate::xds::unknown::for_each_field;

/// Transport socket that leaves bytes unchanged.
const RAW_BUFFER: &str = "envoy.transport_sockets.raw_buffer";
/// Load balancing policies with locality settings: the type, and the field number of those
/// settings.
const LOCALITIES: [(&str, u32); 3] = [
    ("round_robin.v3.RoundRobin", 2),
    ("least_request.v3.LeastRequest", 4),
    ("random.v3.Random", 1),
];
const LOCALITIES_PREFIX: &str = "type.googleapis.com/envoy.extensions.load_balancing_policies.";
const WEIGHTED: u32 = 2;
/// Policy that always uses locality weights, whatever policy it wraps.
const WRR_LOCALITY: &str = "wrr_locality.v3.WrrLocality";

#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) source: EndpointSource,
    /// True if locality weights count.
    pub(super) by_locality: bool,
    /// Settings without effect, for the status.
    pub(super) notes: Vec<String>,
}

#[derive(Debug)]
pub(super) enum EndpointSource {
    Eds(String),
    Inline(Endpoints),
    /// No supported source.
    Unknown,
}

pub(super) fn cluster(from: proto::Cluster, interner: &mut Interner) -> Result<Cluster, String> {
    let mut notes = Vec::new();
    let sockets = from.transport_socket_matches.into_iter().filter_map(|one| one.transport_socket);
    let mut sockets = from.transport_socket.into_iter().chain(sockets);
    if let Some(socket) = sockets.find(|socket| socket.name != RAW_BUFFER) {
        let name = shown(&socket.name);
        notes.push(format!("transport_socket {name}: ignored, bytes are forwarded unchanged"));
    }
    let by_locality = match from.load_balancing_policy {
        Some(policies) => locality_weights_of(&policies).unwrap_or_else(|| {
            notes.push(
                "load_balancing_policy: no known policy, endpoints are picked by weight and load \
                 without locality weights"
                    .to_owned(),
            );
            false
        }),
        None => {
            from.common_lb_config.is_some_and(|common| common.locality_weighted_lb_config.is_some())
        }
    };
    let own = |interner| {
        let of = from.load_assignment.unwrap_or_default();
        endpoints::endpoints(of, interner).map_err(|why| format!("cluster.load_assignment.{why}"))
    };
    let source = match from.cluster_discovery_type {
        Some(ClusterDiscoveryType::ClusterType(custom)) => {
            let name = shown(&custom.name);
            notes.push(format!("cluster_type {name}: unknown, the cluster has no endpoints"));
            EndpointSource::Unknown
        }
        Some(ClusterDiscoveryType::Type(of)) => match DiscoveryType::try_from(of) {
            Ok(DiscoveryType::Eds) => {
                EndpointSource::Eds(eds_name(&from.name, from.eds_cluster_config)?)
            }
            Ok(DiscoveryType::Static | DiscoveryType::StrictDns | DiscoveryType::LogicalDns) => {
                EndpointSource::Inline(own(interner)?)
            }
            Ok(DiscoveryType::OriginalDst) => {
                notes.push(
                    "type ORIGINAL_DST: not supported, the cluster has no endpoints".to_owned(),
                );
                EndpointSource::Unknown
            }
            Err(_) => return Err(format!("cluster.type: {of} is unknown")),
        },
        // STATIC is the default.
        None => EndpointSource::Inline(own(interner)?),
    };
    Ok(Cluster { source, by_locality, notes })
}

/// Returns the EDS name of a cluster. Config sources other than `ads` and `self` are rejected.
fn eds_name(cluster: &str, from: Option<EdsClusterConfig>) -> Result<String, String> {
    let EdsClusterConfig { eds_config, service_name } = from.unwrap_or_default();
    let source = eds_config.and_then(|config| config.config_source_specifier);
    let other = match source {
        None | Some(ConfigSourceSpecifier::Ads(_) | ConfigSourceSpecifier::Self_(_)) => None,
        Some(ConfigSourceSpecifier::ApiConfigSource(_)) => Some("api_config_source"),
        Some(ConfigSourceSpecifier::Path(_) | ConfigSourceSpecifier::PathConfigSource(_)) => {
            Some("a file")
        }
    };
    if let Some(other) = other {
        return Err(format!(
            "cluster.eds_cluster_config.eds_config: {other}, want `ads` or `self`"
        ));
    }
    Ok(if service_name.is_empty() { cluster.to_owned() } else { service_name })
}

/// Returns whether the first known policy uses locality weights; none if no policy is known.
fn locality_weights_of(from: &proto::LoadBalancingPolicy) -> Option<bool> {
    let configs = from.policies.iter().filter_map(|one| one.typed_extension_config.as_ref());
    configs.filter_map(|one| one.typed_config.as_ref()).find_map(has_weights)
}

fn has_weights(Any { type_url, value }: &Any) -> Option<bool> {
    let kind = type_url.strip_prefix(LOCALITIES_PREFIX)?;
    if kind == WRR_LOCALITY {
        return Some(true);
    }
    let (_, own) = LOCALITIES.into_iter().find(|(known, _)| *known == kind)?;
    let mut weighted = false;
    // Bytes that are not a valid message set no field.
    let _ = for_each_field(value, |number, _, inner| {
        if number == own {
            for_each_field(inner, |number, _, _| {
                weighted |= number == WEIGHTED;
                Ok(())
            })
        } else {
            Ok(())
        }
    });
    Some(weighted)
}
