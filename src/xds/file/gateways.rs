//! Waypoints, network gateways and load balancing of services in the mesh file.

use std::collections::HashSet;

use super::{Located, all, ip, need, or};
use crate::snapshot::builder::HBONE_PORT;
use crate::snapshot::gateway_record;
use crate::snapshot::mesh::{GatewayAddress, Place, Scope, Service, Waypoint, Workload};
use crate::yaml::{Fields, Value};

/// Load balancing settings of a service.
#[derive(Debug, Default)]
pub(super) struct LoadBalancer {
    pub(super) preferences: Vec<Scope>,
    pub(super) strict: bool,
    pub(super) allow_unhealthy: bool,
    pub(super) passthrough: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Standard,
    Strict,
    Failover,
    Passthrough,
}

/// Reads `{routingPreferences, mode, healthPolicy}`.
pub(super) fn balancer(value: Value<'_>) -> Option<LoadBalancer> {
    let mut fields = value.fields("services[].loadBalancer")?;
    let scopes = [
        ("Region", Scope::Region),
        ("Zone", Scope::Zone),
        ("Subzone", Scope::Subzone),
        ("Node", Scope::Node),
        ("Cluster", Scope::Cluster),
        ("Network", Scope::Network),
    ];
    let list = |list| all(list, |v: Value<'_>| v.choice(&scopes));
    let preferences = or(&mut fields, "routingPreferences", Vec::new(), list);
    let modes = [
        ("Standard", Mode::Standard),
        ("Strict", Mode::Strict),
        ("Failover", Mode::Failover),
        ("Passthrough", Mode::Passthrough),
    ];
    let mode = or(&mut fields, "mode", Mode::Standard, |v| v.choice(&modes));
    let policies = [("OnlyHealthy", false), ("AllowAll", true)];
    let allow_unhealthy = or(&mut fields, "healthPolicy", false, |v| v.choice(&policies));
    fields.finish();
    let (mode, mut preferences) = (mode?, preferences?);
    // The other modes rank nothing (docs/wire-contract.md 7).
    if !matches!(mode, Mode::Strict | Mode::Failover) {
        preferences.clear();
    }
    Some(LoadBalancer {
        preferences,
        strict: mode == Mode::Strict,
        allow_unhealthy: allow_unhealthy?,
        passthrough: mode == Mode::Passthrough,
    })
}

/// Reads the waypoints of a service. As in WDS, weighted waypoints override the single one.
pub(super) fn waypoints(fields: &mut Fields<'_>) -> Option<Vec<Waypoint>> {
    let one = or(fields, "waypoint", Vec::new(), |value| {
        let gateway = address(value, "services[].waypoint")?;
        Some(vec![Waypoint { gateway, weight: 1 }])
    });
    let weighted = |list| all(list, weighted_waypoint);
    let weighted = or(fields, "weightedWaypoints", Vec::new(), weighted);
    let (one, weighted) = (one?, weighted?);
    Some(if weighted.is_empty() { one } else { weighted })
}

fn weighted_waypoint(value: Value<'_>) -> Option<Waypoint> {
    let mut fields = value.fields("services[].weightedWaypoints[]")?;
    let gateway = need(
        &mut fields,
        "destination",
        "{destination: app/waypoint}",
        |v| address(v, "services[].weightedWaypoints[].destination"),
    );
    let weight = or(&mut fields, "weight", 1, |v| v.number(0, u32::MAX));
    fields.finish();
    Some(Waypoint {
        gateway: gateway?,
        weight: weight?,
    })
}

/// Reads `{destination: NETWORK/IP or NAMESPACE/HOSTNAME, hboneMtlsPort: PORT}`.
pub(super) fn address(value: Value<'_>, place: &'static str) -> Option<GatewayAddress> {
    let mut fields = value.fields(place)?;
    let wanted = "`NETWORK/IP` or `NAMESPACE/HOSTNAME`";
    let destination = need(&mut fields, "destination", "east/10.0.0.1", |v| {
        v.parsed(wanted, destination)
    });
    let port = or(&mut fields, "hboneMtlsPort", HBONE_PORT, Value::port);
    fields.finish();
    Some(GatewayAddress {
        place: destination?,
        port: port?,
    })
}

fn destination(text: &str) -> Option<Place> {
    let (first, second) = text.split_once('/')?;
    Some(match (ip(second), second.is_empty()) {
        (Some(ip), _) => Place::Address(first.to_owned(), ip),
        (None, false) => Place::Name(text.to_owned()),
        (None, true) => return None,
    })
}

/// Returns the record of the gateway that a workload of another network names by hostname.
pub(super) fn named_gateway(workload: &Workload) -> Option<Workload> {
    let gateway = workload.network_gateway.as_deref()?;
    let Place::Name(name) = &gateway.place else {
        return None;
    };
    let (_, host) = name.split_once('/')?;
    let network = Some(&workload.network).filter(|network| !network.is_empty())?;
    Some(gateway_record(network, &"".into(), host, gateway.port))
}

/// Warns of services whose waypoints are all missing from the file, because their tunnels are
/// refused. `declared` has the names of the file's services.
pub(super) fn warn_of_missing_waypoints(
    services: &[Located<'_, Service>],
    declared: &HashSet<String>,
) {
    let vips = services.iter().flat_map(|(service, _)| &service.vips);
    let vips: HashSet<_> = vips.map(|(_, vip)| *vip).collect();
    let is_known = |waypoint: &Waypoint| match &waypoint.gateway.place {
        Place::Name(name) => declared.contains(name),
        Place::Address(_, ip) => vips.contains(ip),
    };
    for (service, value) in services {
        let waypoints = &service.waypoints;
        if !waypoints.is_empty() && !waypoints.iter().any(is_known) {
            let what = format!(
                "with the hostname `{}` is behind the waypoint `{}`, which is not a service of \
                 this file: its tunnels are refused",
                service.hostname,
                service.waypoint_names()
            );
            value.warning(
                what,
                "a waypoint that `services` has, as `NAMESPACE/HOSTNAME`",
            );
        }
    }
}
