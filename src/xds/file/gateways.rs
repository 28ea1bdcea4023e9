//! Waypoints, network gateways and load balancing of services in the mesh file.

use std::collections::HashSet;

use crate::snapshot::mesh::{GatewayAddress, Place, Scope, Service, Waypoint};
use crate::wire::HBONE_PORT;
use crate::xds::convert::unicast;
use crate::yaml::{Fields, Value};

/// Reads `{routingPreferences, mode, healthPolicy}` into a service.
pub(super) fn balancer(value: Value<'_>, service: Service) -> Option<Service> {
    let mut fields = value.fields("services[].loadBalancer")?;
    let scopes = [
        ("Region", Scope::Region),
        ("Zone", Scope::Zone),
        ("Subzone", Scope::Subzone),
        ("Node", Scope::Node),
        ("Cluster", Scope::Cluster),
        ("Network", Scope::Network),
    ];
    let scopes = |list: Value<'_>| list.all(|value| value.choice(&scopes));
    let preferences = fields.optional("routingPreferences", Vec::new(), scopes);
    let modes = ["Standard", "Strict", "Failover", "Passthrough"].map(|mode| (mode, mode));
    let mode = fields.optional("mode", "Standard", |v| v.choice(&modes));
    let policies = [("OnlyHealthy", false), ("AllowAll", true)];
    let allow_unhealthy = fields.optional("healthPolicy", false, |v| v.choice(&policies));
    // The other modes rank nothing (docs/wire-contract.md 7).
    let is_ranked = matches!(mode, "Strict" | "Failover");
    fields.complete(Service {
        preferences: Some(preferences).filter(|of| is_ranked && !of.is_empty()),
        strict: mode == "Strict",
        allow_unhealthy,
        passthrough: mode == "Passthrough",
        ..service
    })
}

/// Reads the waypoints of a service. As in WDS, weighted waypoints override the single one.
pub(super) fn waypoints(fields: &mut Fields<'_>) -> Vec<Waypoint> {
    let one = fields.optional("waypoint", Vec::new(), |value| {
        let gateway = address(value, "services[].waypoint")?;
        Some(vec![Waypoint { gateway, weight: 1 }])
    });
    let weighted = |list: Value<'_>| list.all(weighted_waypoint);
    let weighted = fields.optional("weightedWaypoints", Vec::new(), weighted);
    if weighted.is_empty() { one } else { weighted }
}

fn weighted_waypoint(value: Value<'_>) -> Option<Waypoint> {
    let mut fields = value.fields("services[].weightedWaypoints[]")?;
    let gateway = fields.need("destination", "{destination: app/waypoint}");
    let gateway = gateway.and_then(|v| address(v, "services[].weightedWaypoints[].destination"));
    let weight = fields.optional("weight", 1, |v| v.number(0, u32::MAX));
    let gateway = fields.complete(gateway)??;
    Some(Waypoint { gateway, weight })
}

/// Reads `{destination: NETWORK/IP or NAMESPACE/HOSTNAME, hboneMtlsPort: PORT}`.
pub(super) fn address(value: Value<'_>, place: &'static str) -> Option<GatewayAddress> {
    let mut fields = value.fields(place)?;
    let wanted = "`NETWORK/IP` or `NAMESPACE/HOSTNAME`";
    let place = fields.need("destination", "east/10.0.0.1");
    let place = place.and_then(|v| v.parsed(wanted, destination));
    let port = fields.optional("hboneMtlsPort", HBONE_PORT, Value::port);
    let place = fields.complete(place)??;
    Some(GatewayAddress { place, port })
}

fn destination(text: &str) -> Option<Place> {
    let (first, second) = text.split_once('/')?;
    Some(match (unicast(second), second.is_empty()) {
        (Some(ip), _) => Place::Address(first.to_owned(), ip),
        (None, false) => Place::Name(text.to_owned()),
        (None, true) => return None,
    })
}

/// Warns of services whose waypoints are all missing from the file, because their tunnels are
/// refused. `declared` has the names of the file's services.
pub(super) fn warn_of_missing_waypoints(
    services: &[(Service, Value<'_>)],
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
                 this file: its tunnels are rejected",
                service.hostname,
                service.waypoint_names()
            );
            value.warning(what, "a waypoint that `services` has, as `NAMESPACE/HOSTNAME`");
        }
    }
}
