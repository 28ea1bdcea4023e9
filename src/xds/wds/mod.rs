//! Conversion of WDS messages to services and workloads, by the ingestion rules of
//! docs/wire-contract.md 3.2.
//!
//! It accepts all that ztunnel accepts, except lists beyond our limits and namespaces with a slash.
//! An invalid field that only dialling or lookup needs makes its endpoint or name unreachable. Any
//! other mistake rejects the whole resource, and the error names the field. An unknown value of an
//! enum is accepted with its safe meaning, because istiod may be newer:
//!
//! | field | meaning of an unknown value |
//! |---|---|
//! | `tunnel_protocol` | not HBONE, as `LEGACY_ISTIO_MTLS` does |
//! | `status` | unhealthy |
//! | `network_mode` | host network: other workloads may share the address |
//! | `workload_type` | no type; it only affects labels |
//! | `visibility` | public (docs/wire-contract.md 3.2) |
//! | `load_balancing.mode` | no ranking |
//! | `load_balancing.routing_preference` | the preferences end before it |
//! | `load_balancing.health_policy` | healthy endpoints only |
//!
//! It ignores `extensions`, `ip_families`, `app_protocol`, `native_tunnel` and
//! `application_tunnel`, which do not concern a gateway. It only validates a workload's `waypoint`.
//! Special records of remote networks are converted like other workloads: the builder recognizes
//! them by uid. The builder also skips endpoints without HBONE if the mesh is HBONE-only.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::convert::{At as _, check_length, each, ip, namespace, normal_hostname, number, shown};
use super::interner::Interner;
use crate::grpc::workload as proto;
use crate::grpc::workload::gateway_address::Destination;
use crate::grpc::workload::load_balancing;
use crate::snapshot::mesh::{
    Derived, GatewayAddress, Place, PodLabels, Protocol, Scope, Service, Services, Template,
    Waypoint, Workload,
};
use crate::wire::HBONE_PORT;

/// Limit of the ports of a service, and of the ports of a workload per service.
const PORTS_MAX: usize = 1024;
const SERVICES_MAX: usize = 1024;
/// Limit of the virtual addresses of a service.
const VIPS_MAX: usize = 1024;
pub(super) const ADDRESSES_MAX: usize = 64;
/// Limit of the policies that select a workload by name.
const POLICIES_MAX: usize = 1024;
/// Limit of the identities to accept at a service's endpoints.
const IDENTITIES_MAX: usize = 1024;
/// Limit of the waypoints that share a service's traffic.
const WAYPOINTS_MAX: usize = 64;

pub fn service(from: proto::Service) -> Result<Service, String> {
    let namespace = namespace(from.namespace).at("service.namespace")?;
    let hostname = hostname(&from.hostname);
    let ports = ports(&from.ports).at("service")?;
    check_length("service.subject_alt_names", from.subject_alt_names.len(), IDENTITIES_MAX)?;
    let balancing = from.load_balancing.unwrap_or_default();
    let health = load_balancing::HealthPolicy::AllowAll;
    let mode = load_balancing::Mode::try_from(balancing.mode);
    let (strict, failover, passthrough) = match mode {
        Ok(load_balancing::Mode::Strict) => (true, false, false),
        Ok(load_balancing::Mode::Failover) => (false, true, false),
        Ok(load_balancing::Mode::Passthrough) => (false, false, true),
        Ok(load_balancing::Mode::UnspecifiedMode) | Err(_) => (false, false, false),
    };
    // WDS cannot state that there are none.
    let preferences = Some(preferences(&balancing.routing_preference));
    let preferences = preferences.filter(|of| (strict || failover) && !of.is_empty());
    Ok(Service {
        name: from.name.into(),
        namespace: namespace.into(),
        hostname: hostname.into(),
        vips: vips(from.addresses)?,
        ports: ports.collect(),
        subject_alt_names: from.subject_alt_names,
        waypoints: waypoints(from.waypoint, from.weighted_waypoints)?,
        ingress_use_waypoint: from.ingress_use_waypoint,
        preferences,
        strict,
        allow_unhealthy: balancing.health_policy == i32::from(health),
        passthrough,
        canonical: from.canonical,
        private: from.visibility == i32::from(proto::Visibility::Namespace),
        assignments: BTreeMap::new(),
    })
}

/// Returns the virtual addresses. Ranges are skipped: lookups are by single address.
fn vips(from: Vec<proto::NetworkAddress>) -> Result<Vec<(String, IpAddr)>, String> {
    check_length("service.addresses", from.len(), VIPS_MAX)?;
    let vips = each("service.addresses", from, |one| {
        let (ip, is_range) = network_address(&one)?;
        Ok((!is_range).then_some((one.network, ip)))
    })?;
    Ok(vips.into_iter().flatten().collect())
}

/// Returns the address, and whether it is a range.
fn network_address(from: &proto::NetworkAddress) -> Result<(IpAddr, bool), String> {
    let ip = ip(&from.address).at(".address")?;
    let bits = from.address.len() * 8;
    let is_range = from.length.is_some_and(|length| length as usize != bits);
    Ok((ip, is_range))
}

/// Returns the waypoints of a service. Weighted waypoints take precedence over the unweighted one.
fn waypoints(
    one: Option<proto::GatewayAddress>,
    weighted: Vec<proto::WeightedWaypoint>,
) -> Result<Vec<Waypoint>, String> {
    let one = one.map(|one| gateway(one).at("service.waypoint"));
    let one = one.transpose()?;
    check_length("service.weighted_waypoints", weighted.len(), WAYPOINTS_MAX)?;
    let mut waypoints = each("service.weighted_waypoints", weighted, |from| {
        let destination = from.destination.ok_or(".destination: missing")?;
        Ok(Waypoint { gateway: gateway(destination).at(".destination")?, weight: from.weight })
    })?;
    if waypoints.is_empty() {
        waypoints.extend(one.map(|gateway| Waypoint { gateway, weight: 1 }));
    }
    Ok(waypoints)
}

fn preferences(from: &[i32]) -> Vec<Scope> {
    let known = |scope: &i32| match load_balancing::Scope::try_from(*scope) {
        Ok(load_balancing::Scope::Region) => Some(Scope::Region),
        Ok(load_balancing::Scope::Zone) => Some(Scope::Zone),
        Ok(load_balancing::Scope::Subzone) => Some(Scope::Subzone),
        Ok(load_balancing::Scope::Node) => Some(Scope::Node),
        Ok(load_balancing::Scope::Cluster) => Some(Scope::Cluster),
        Ok(load_balancing::Scope::Network) => Some(Scope::Network),
        Ok(load_balancing::Scope::UnspecifiedScope) | Err(_) => None,
    };
    from.iter().map_while(known).collect()
}

/// Converts a workload. Parts that it has in common with others are interned.
pub(super) fn workload(
    uid: &Arc<str>,
    from: proto::Workload,
    interner: &mut Interner,
) -> Result<Workload, String> {
    if from.uid.is_empty() {
        return Err("workload.uid: empty".to_owned());
    }
    let namespace = namespace(from.namespace).at("workload.namespace")?;
    check_length("workload.addresses", from.addresses.len(), ADDRESSES_MAX)?;
    let policies = from.authorization_policies.len();
    check_length("workload.authorization_policies", policies, POLICIES_MAX)?;
    let addresses = each("workload.addresses", &from.addresses, |bytes| ip(bytes))?;
    let gateway = |field, from: Option<_>| from.map(|from| gateway(from).at(field)).transpose();
    let has_waypoint = gateway("workload.waypoint", from.waypoint)?.is_some();
    let network_gateway = gateway("workload.network_gateway", from.network_gateway)?;
    let services = services(from.services, interner)?;
    let workload_type = proto::WorkloadType::try_from(from.workload_type);
    let workload_type = workload_type.map_or("", |kind| kind.as_str_name()).to_ascii_lowercase();
    let locality = from.locality.unwrap_or_default();
    let locality = interner.share_locality(&locality.region, &locality.zone, &locality.subzone);
    let node = interner.share(&from.node);
    let mut or = |text: &str, default| interner.share(if text.is_empty() { default } else { text });
    let template = Template {
        namespace: or(&namespace, ""),
        service_account: or(&from.service_account, "default"),
        trust_domain: or(&from.trust_domain, "cluster.local"),
        cluster: or(&from.cluster_id, "Kubernetes"),
        network: or(&from.network, ""),
        hostname: or(&from.hostname, ""),
        protocol: protocol(from.tunnel_protocol),
        workload_name: or(&from.workload_name, ""),
        workload_type: or(&workload_type, ""),
        canonical_name: or(&from.canonical_name, ""),
        canonical_revision: or(&from.canonical_revision, ""),
        has_waypoint,
        host_network: from.network_mode != i32::from(proto::NetworkMode::Standard),
        policies: from.authorization_policies.iter().map(|name| or(name, "")).collect(),
        locality,
        // WDS has no labels.
        pod_labels: PodLabels::default(),
        labels: Derived::default(),
    };
    Ok(Workload {
        own_name: Workload::own_name(uid, &from.name),
        uid: Arc::clone(uid),
        node,
        addresses: addresses[..].into(),
        healthy: from.status == i32::from(proto::WorkloadStatus::Healthy),
        capacity: from.capacity.unwrap_or(1),
        priority: 0,
        degraded: false,
        network_gateway: network_gateway.map(|gateway| interner.share_gateway(gateway)),
        services,
        template: interner.share_template(template),
    })
}

/// Returns the ports of a workload by service. The service may be received later.
fn services(
    from: BTreeMap<String, proto::PortList>,
    interner: &mut Interner,
) -> Result<Services, String> {
    check_length("workload.services", from.len(), SERVICES_MAX)?;
    let mut services = Vec::<(Arc<str>, Vec<_>)>::with_capacity(from.len());
    for (name, list) in from {
        let at = || format!("workload.services[{}]", shown(&name));
        let parts = name.split_once('/').ok_or("want NAMESPACE/HOSTNAME");
        let (namespace, host) = parts.map_err(str::to_owned).at(at())?;
        let key = match hostname(host) {
            Cow::Borrowed(same) if same.len() == host.len() => interner.share(&name),
            host => interner.share(&format!("{namespace}/{host}")),
        };
        let ports = ports(&list.ports).map_err(|why| format!("{}{why}", at()))?;
        services.push((key, ports.collect()));
    }
    // Two names may have the same normal form.
    services.sort_by(|(one, _), (other, _)| one.cmp(other));
    services.dedup_by(|(name, ports), (kept, all)| {
        let is_same = name == kept;
        if is_same {
            all.append(ports);
        }
        is_same
    });
    let services = services.into_iter();
    let services = services.map(|(key, ports)| (key, ports.into_iter().collect()));
    Ok(interner.share_services(services.collect()))
}

/// Returns the target port of each service port. The last of several entries for a service port
/// wins.
///
/// An invalid target, such as the 0 of a named port, becomes 0: only dialling at the target port
/// needs it. An invalid service port is skipped, because no authority can name it.
fn ports(from: &[proto::Port]) -> Result<impl Iterator<Item = (u16, u16)>, String> {
    check_length(".ports", from.len(), PORTS_MAX)?;
    Ok(from.iter().filter_map(|port| {
        let service = number(port.service_port);
        (service != 0).then(|| (service, number(port.target_port)))
    }))
}

/// Converts a gateway or waypoint. An invalid port, such as the 0 that istiod sends for an
/// unspecified one, becomes the HBONE port.
fn gateway(from: proto::GatewayAddress) -> Result<GatewayAddress, String> {
    let place = match from.destination {
        Some(Destination::Hostname(name)) => {
            let namespace = namespace(name.namespace).at(".destination.hostname.namespace")?;
            Place::Name(format!("{namespace}/{}", hostname(&name.hostname)))
        }
        Some(Destination::Address(address)) => {
            let (ip, _) = network_address(&address).at(".destination.address")?;
            Place::Address(address.network, ip)
        }
        None => return Err(".destination: neither hostname nor address".to_owned()),
    };
    let port = match number(from.hbone_mtls_port) {
        0 => HBONE_PORT,
        port => port,
    };
    Ok(GatewayAddress { place, port })
}

fn protocol(from: i32) -> Protocol {
    match proto::TunnelProtocol::try_from(from) {
        Ok(proto::TunnelProtocol::Hbone) => Protocol::Hbone,
        Ok(proto::TunnelProtocol::None | proto::TunnelProtocol::LegacyIstioMtls) | Err(_) => {
            Protocol::Tcp
        }
    }
}

/// Returns the normal form of a hostname. An invalid one is kept, escaped: no authority can match
/// it, but the record stays valid.
fn hostname(text: &str) -> Cow<'_, str> {
    normal_hostname(text).unwrap_or_else(|| text.escape_debug().to_string().into())
}
