//! Stage 5: resolves a target against the snapshot.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::mesh;
use crate::snapshot::{
    EndpointSet, LookupResult, MatchedBy, Requested, Service, ServicePort, Snapshot,
};
use crate::wire::{Authority, Host, Transit};

use super::binding::Binding;
use super::first_peer::FirstPeer;
use super::http2::tunnel::{Forwarded, Origin, Target};
use super::identity::Peer;
use super::listener::{ListenerTarget, reason_if_unknown};

/// Service port with the endpoints for its tunnels: the service's own, or those of one of its
/// waypoints.
#[derive(Debug)]
pub struct Route {
    pub(crate) authority: Authority,
    pub(crate) service: Arc<Service>,
    pub(crate) port: u16,
    pub(crate) matched_by: MatchedBy,
    pub(crate) endpoints: Arc<EndpointSet>,
    /// True if the service requires its waypoint for this tunnel.
    pub(crate) by_waypoint: bool,
    /// True if the tunnel belongs to a TLS listener.
    pub(crate) passthrough: bool,
    /// True if the configuration opens the service to the clients of the listener: by a route of a
    /// TLS listener, or by its binding, whose clients were checked before.
    pub(crate) granted_by_listener: bool,
    pub(crate) origin: Origin,
    pub(super) forwarded: Option<Box<Forwarded>>,
    /// Permission to leave the network; `Off` before policy evaluation.
    pub(crate) transit: Transit,
    /// First peer of a tunnel that a trusted gateway has forwarded.
    pub(super) first_peer: Option<Box<FirstPeer>>,
    pub(crate) binding: Option<Arc<Binding>>,
}

impl Route {
    /// Creates a route without endpoints.
    fn new(found: LookupResult<'_>, target: Target) -> Self {
        Self {
            authority: target.authority,
            service: Arc::clone(found.service),
            port: found.port,
            matched_by: found.matched_by,
            endpoints: Arc::default(),
            by_waypoint: false,
            passthrough: false,
            granted_by_listener: false,
            origin: target.origin,
            forwarded: target.forwarded,
            transit: Transit::Off,
            first_peer: None,
            binding: None,
        }
    }

    /// Creates the route of a binding, through gateways of its clusters.
    pub fn of_binding(snapshot: &Snapshot, binding: Arc<Binding>) -> Self {
        let (service, port) = (&binding.service, binding.port);
        let found = LookupResult { service, port, matched_by: MatchedBy::Service };
        let host = Host::Name((*service.hostname).into());
        let authority = Authority { host, port };
        let target = Target { authority, origin: Origin::Workload, forwarded: None };
        let endpoints = binding.endpoints.load(snapshot);
        let route = Self::new(found, target);
        Self { endpoints, binding: Some(binding), granted_by_listener: true, ..route }
    }

    pub fn requested(&self) -> Requested<'_> {
        let to = ServicePort { host: &self.service.hostname, port: self.port };
        Requested { authority: &self.authority, to, matched_by: &self.matched_by }
    }

    /// Returns the drop categories of the service port with their rates in parts per million, in
    /// order.
    pub fn drops(&self) -> &[(Arc<str>, u32)] {
        let assignments = &self.service.definition.assignments;
        assignments.get(&self.port).map_or(&[], |one| &one.drops)
    }

    /// Returns whether the endpoint gets a PROXY header before the bytes of the peer.
    pub fn sends_proxy_header(&self, snapshot: &Snapshot) -> bool {
        let definition = &self.service.definition;
        let host = match &self.matched_by {
            // The service is derived from the alias.
            MatchedBy::Alias(alias) if alias.label == definition.hostname => &*alias.name.host,
            _ => &*definition.hostname,
        };
        self.passthrough && snapshot.balancing.sends_proxy_header(host, &definition.namespace)
    }

    /// Returns whether the tunnel bypasses the waypoints of its service, because the peer's
    /// `x-istio-source` is trusted.
    pub fn bypasses_waypoints(&self) -> bool {
        !self.by_waypoint && !self.service.definition.waypoints.is_empty()
    }

    /// Returns the endpoints in the own network, or those of a waypoint. A TLS listener has none
    /// for a service with waypoints.
    pub(super) fn own_endpoints(&self, snapshot: &Snapshot) -> Arc<EndpointSet> {
        let (service, port) = (&self.service, self.port);
        if !self.by_waypoint {
            let found = LookupResult { service, port, matched_by: self.matched_by.clone() };
            return snapshot.endpoints(&found, self.passthrough);
        }
        let is_used = service.drained.is_none() && !self.passthrough;
        is_used.then(|| pick_waypoint(snapshot, service)).flatten().cloned().unwrap_or_default()
    }

    /// Returns the reason for a tunnel without an endpoint.
    pub fn reason_without_endpoint(&self) -> Reason {
        if self.service.drained.is_some() {
            Reason::NoEndpoint
        } else if self.by_waypoint {
            Reason::NoWaypoint
        } else if self.is_at_hop_limit() {
            Reason::GatewayLoop
        } else {
            Reason::NoEndpoint
        }
    }
}

/// Resolves the target. The route gets its endpoints when policy permits it, so that nobody else
/// has them built.
///
/// # Errors
/// [`Reason::UnknownService`], [`Reason::UnknownSni`] for a subset, or [`Reason::BadSource`] if a
/// trusted gateway has sent a malformed first peer.
pub fn resolve(snapshot: &Snapshot, peer: &Peer, target: Target) -> Result<Route, Reason> {
    let first_peer = FirstPeer::read(snapshot, peer, target.forwarded())?;
    let found = snapshot.find(peer.policy_source(), &target.authority);
    let found = found.ok_or_else(|| reason_if_unknown(&target.authority))?;
    let service = found.service;
    let by_waypoint = uses_waypoint(snapshot, peer, service, &found.matched_by, target.origin);
    Ok(Route { by_waypoint, first_peer, ..Route::new(found, target) })
}

/// Resolves the target of a TLS listener.
pub fn resolve_passthrough(
    snapshot: &Snapshot,
    peer: &Peer,
    target: ListenerTarget,
) -> Result<Route, Reason> {
    let ListenerTarget { authority, granted_by_listener } = target;
    let target = Target { authority, origin: Origin::Workload, forwarded: None };
    let found = snapshot.find(peer.policy_source(), &target.authority);
    let found = found.ok_or_else(|| reason_if_unknown(&target.authority))?;
    let by_waypoint = !found.service.definition.waypoints.is_empty();
    Ok(Route { by_waypoint, passthrough: true, granted_by_listener, ..Route::new(found, target) })
}

/// Returns whether a tunnel that bypassed the waypoints of the service could still do so.
pub fn may_bypass_waypoints(
    snapshot: &Snapshot,
    peer: &Peer,
    of: Requested<'_>,
    origin: Origin,
) -> bool {
    let service = snapshot.service_or_derived(of.to.host);
    service.is_none_or(|service| !uses_waypoint(snapshot, peer, service, of.matched_by, origin))
}

/// Returns whether a tunnel goes to a waypoint of the service instead of its endpoints
/// (docs/wire-contract.md 2.3).
///
/// Any client can send the header. It is trusted from two kinds of peers:
/// - identities in `trust.waypoints`;
/// - workloads of this cluster that implement a waypoint of the service; for an alias, a
///   waypoint of each service behind it that has one.
///
/// The cluster has to be this one: in a mesh with one trust domain, a waypoint of the same name
/// in another cluster has the same identity, but has applied other policies. The current
/// configuration determines the cluster. Without `trust.clusters` and with one cluster in
/// `trust.domains`, clusters cannot be distinguished, and only identities in `trust.waypoints`
/// are trusted.
fn uses_waypoint(
    snapshot: &Snapshot,
    peer: &Peer,
    service: &Service,
    matched_by: &MatchedBy,
    origin: Origin,
) -> bool {
    let definition = &service.definition;
    let claims_bypass = match origin {
        Origin::Workload => false,
        Origin::Waypoint => true,
        Origin::Gateway => !definition.ingress_use_waypoint,
    };
    if definition.waypoints.is_empty() || !claims_bypass {
        return !definition.waypoints.is_empty();
    }
    let principal = &*peer.source.principal;
    let is_waypoint_of =
        |of: &mesh::Service| of.waypoints.is_empty() || snapshot.is_waypoint_of(principal, of);
    let is_here = || {
        let cluster = snapshot.trust.cluster(peer.policy_source());
        let is_own = cluster == Some(&*snapshot.balancing.position.cluster);
        is_own && snapshot.trust.distinguishes_clusters()
    };
    let is_trusted_waypoint = || match matched_by {
        MatchedBy::Alias(alias) => {
            let mut behind = alias.to.iter().filter_map(|to| snapshot.service_by_name(&to.host));
            behind.all(|service| is_waypoint_of(&service.definition))
        }
        _ => is_waypoint_of(definition),
    };
    !(snapshot.trust.is_waypoint(principal) || is_here() && is_trusted_waypoint())
}

/// Returns the endpoints of one of the service's waypoints, chosen by weight among those with
/// endpoints.
fn pick_waypoint<'a>(snapshot: &'a Snapshot, service: &'a Service) -> Option<&'a Arc<EndpointSet>> {
    let (mut sum, mut picked) = (0, None);
    // Weighted reservoir sampling: one pass, no allocation.
    for (waypoint, endpoints) in snapshot.usable_waypoints(&service.definition) {
        let weight = u64::from(waypoint.weight);
        sum += weight;
        if fastrand::u64(..sum) < weight {
            picked = Some(endpoints);
        }
    }
    picked
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::tests::peer_of;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{GatewayAddress, Place};
    use crate::snapshot::tests::samples;
    use crate::snapshot::traffic::Position;
    use crate::snapshot::{Protocol, TrustSet};
    use crate::wire::Transit;

    const WAYPOINT: &str = "spiffe://east.local/ns/app/sa/waypoint";

    fn service(name: &str, waypoint: Option<&str>) -> mesh::Service {
        let waypoint = waypoint.map(|name| mesh::Waypoint {
            gateway: GatewayAddress { place: Place::Name(format!("app/{name}.app")), port: 15008 },
            weight: 1,
        });
        mesh::Service { waypoints: waypoint.into_iter().collect(), ..samples::service(name) }
    }

    fn workload(service: &str, account: &str, last: u8) -> mesh::Workload {
        let template = mesh::Template {
            namespace: "app".into(),
            trust_domain: "east.local".into(),
            service_account: account.into(),
            protocol: Protocol::Hbone,
            ..mesh::Template::default()
        };
        let addresses = [[10, 0, 0, last].into()].into();
        let uid = format!("{service}-{last}");
        mesh::Workload { addresses, ..samples::workload(&uid, service, template) }
    }

    fn snapshot(services: Vec<mesh::Service>, workloads: Vec<mesh::Workload>) -> Snapshot {
        let mesh = mesh::Mesh::new(services, workloads);
        let trust = TrustSet::new([("east.local", "east"), ("west.local", "west")]);
        let change = Change {
            mesh: Some((mesh, "east".into())),
            trust: Some(trust.with_waypoints(["spiffe://west.local/ns/edge/sa/ingress"])),
            position: Some(Position { cluster: "east".into(), ..Position::default() }),
            ..Change::default()
        };
        build(&Snapshot::default(), change)
    }

    #[test]
    fn a_gateway_of_ingress_passes_the_waypoint_of_a_service_only_if_the_service_permits_it() {
        let by_ingress =
            mesh::Service { ingress_use_waypoint: true, ..service("shown", Some("waypoint")) };
        let workloads = vec![workload("waypoint", "waypoint", 2)];
        let snapshot = snapshot(vec![by_ingress, service("waypoint", None)], workloads);
        // Whether a tunnel goes to the waypoint if the peer sends no header, claims to be a
        // waypoint, or claims to be an ingress gateway.
        for (principal, want) in [
            (WAYPOINT, [true, false, true]),
            ("spiffe://west.local/ns/edge/sa/ingress", [true, false, true]),
            ("spiffe://west.local/ns/shop/sa/checkout", [true, true, true]),
        ] {
            let service = snapshot.services.get("shown.app").expect("a service");
            let origins = [Origin::Workload, Origin::Waypoint, Origin::Gateway];
            let peer = peer_of(&snapshot, principal, Transit::Always);
            let matched_by = &MatchedBy::Service;
            let got =
                origins.map(|origin| uses_waypoint(&snapshot, &peer, service, matched_by, origin));
            assert_eq!(got, want, "{principal}");
        }
    }

    #[test]
    fn a_peer_that_moves_to_another_cluster_goes_past_no_waypoint_any_more() {
        let services = vec![service("echo", Some("waypoint")), service("waypoint", None)];
        let before = snapshot(services, vec![workload("waypoint", "waypoint", 2)]);
        let opened = peer_of(&before, WAYPOINT, Transit::Always);
        let may_bypass = |snapshot: &Snapshot| {
            let authority = Authority::parse("echo.app:80").expect("an authority");
            let to = ServicePort { host: "echo.app", port: 80 };
            let of = Requested { authority: &authority, to, matched_by: &MatchedBy::Service };
            may_bypass_waypoints(snapshot, &opened, of, Origin::Waypoint)
        };
        assert!(may_bypass(&before));
        let change = Change {
            trust: Some(TrustSet::new([("east.local", "north"), ("west.local", "east")])),
            ..Change::default()
        };
        let now = build(&before, change);
        assert!(!may_bypass(&now));
    }
}
