//! Stage 6: exposure policy, which decides whether a peer may use a route. Denies by default.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::{Endpoint, ExposureVerdict, MatchedBy, ServicePort, Snapshot, mesh};
use crate::wire::{Authority, sni};

use super::http2::tunnel::Origin;
use super::identity::Peer;
use super::route::{self, Route};

/// Permit for a peer to use a route. Only [`run`] and [`permit_listener_route`] create one, and
/// only a permit can be dialled.
#[derive(Debug)]
pub struct Permit {
    route: Route,
    granted_by_listener: bool,
}

impl Permit {
    /// Returns the permitted route.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Converts the permit into the grant by which an open tunnel to `endpoint` is evaluated
    /// again.
    pub fn into_grant(self, endpoint: Arc<Endpoint>) -> Grant {
        let route = &self.route;
        let waypoint = match (route.is_by_waypoint(), route.bypasses_waypoints()) {
            (true, _) => Waypoint::Endpoint,
            (false, true) => Waypoint::Bypassed(route.origin()),
            (false, false) => Waypoint::None,
        };
        let (service, port) = (Arc::clone(&route.service().definition), route.port());
        let (asked, means) = self.route.into_match();
        Grant {
            endpoint,
            waypoint,
            service,
            port,
            authority: asked,
            matched_by: means,
            granted: self.granted_by_listener,
        }
    }
}

/// Grant of an open tunnel, with the input to evaluate it again.
#[derive(Clone, Debug)]
pub struct Grant {
    authority: Authority,
    matched_by: MatchedBy,
    service: Arc<mesh::Service>,
    port: u16,
    granted: bool,
    endpoint: Arc<Endpoint>,
    waypoint: Waypoint,
}

/// Role of the service's waypoints in an open tunnel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waypoint {
    /// The service had no waypoint.
    None,
    /// The endpoint belongs to a waypoint.
    Endpoint,
    /// The tunnel bypassed the waypoints, as the peer's `x-istio-source` requested.
    Bypassed(Origin),
}

impl Grant {
    /// Returns the endpoint of the tunnel.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Returns whether the endpoint belongs to a waypoint.
    pub fn is_by_waypoint(&self) -> bool {
        self.waypoint == Waypoint::Endpoint
    }
}

/// Evaluates the route against the snapshot's exposure rules, and against the control plane's
/// exports for services without an entry.
///
/// # Errors
/// [`Reason::NotLinked`], [`Reason::NotExposed`] or [`Reason::NotForPeer`], which the peer
/// cannot distinguish. [`Reason::NotForPeer`] also covers a peer that the listener's `sources`
/// no longer contain.
pub fn run(snapshot: &Snapshot, peer: &Peer, route: Route) -> Result<Permit, Reason> {
    check(snapshot, peer, &route)?;
    Ok(Permit {
        route,
        granted_by_listener: false,
    })
}

/// Evaluates the route like [`run`], without a permit.
///
/// # Errors
/// Those of [`run`].
pub fn check(snapshot: &Snapshot, peer: &Peer, route: &Route) -> Result<(), Reason> {
    if !peer.is_admitted() {
        return Err(Reason::NotForPeer);
    }
    let of = ServicePort {
        host: &route.service().hostname,
        port: route.port(),
    };
    evaluate(snapshot, peer, route.asked(), of, route.means())
}

/// Permits the target of a listener's own route, which the configuration opens to all clients of
/// that listener.
///
/// # Errors
/// [`Reason::NotForPeer`] if the listener's `sources` no longer contain the peer.
pub fn permit_listener_route(peer: &Peer, route: Route) -> Result<Permit, Reason> {
    if !peer.is_admitted() {
        return Err(Reason::NotForPeer);
    }
    Ok(Permit {
        route,
        granted_by_listener: true,
    })
}

/// Evaluates an open tunnel again, by the current rules.
///
/// # Errors
/// The change that revoked the grant: of the listener, of trust, of exposure, of names, of
/// links, or of the peers whose `x-istio-source` is trusted.
pub fn still_allowed(snapshot: &Snapshot, peer: &Peer, grant: &Grant) -> Result<(), &'static str> {
    if let Some(refusal) = peer.lost_trust() {
        return Err(refusal.description());
    }
    if !peer.is_admitted() {
        return Err("the listener's `sources` no longer contain the peer's address");
    }
    let rules = peer.listener.rules();
    if rules.is_passthrough() {
        let name = peer.server_name.as_deref();
        match rules.still_grants(name, &grant.authority, grant.granted) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => return Err("the listener no longer routes the server name to this target"),
        }
    }
    let (asked, host, means) = (
        &grant.authority,
        &*grant.service.hostname,
        &grant.matched_by,
    );
    let of = ServicePort {
        host,
        port: grant.port,
    };
    let is_current_service = snapshot.may_answer(host, &grant.service.namespace);
    if !is_current_service
        || !snapshot.still_leads_to(
            peer.policy_source(),
            asked,
            &grant.service,
            grant.port,
            means,
        )
    {
        return Err("the name no longer refers to the service");
    }
    evaluate(snapshot, peer, asked, of, means).map_err(Reason::label)?;
    let endpoint = &grant.endpoint.definition;
    let gone = snapshot.evaluate_removed_target(peer.policy_source(), asked, means, endpoint);
    verdict_to_result(gone).map_err(Reason::label)?;
    match grant.waypoint {
        Waypoint::Bypassed(origin)
            if !route::may_bypass_waypoints(snapshot, peer, host, means, origin) =>
        {
            Err("the peer's x-istio-source is no longer trusted")
        }
        _ => Ok(()),
    }
}

/// Returns whether a server name, plain or in Istio's form, belongs to the permitted service:
/// the requested name or any other that resolves to it.
pub fn is_name_of_service(snapshot: &Snapshot, peer: &Peer, grant: &Grant, name: &str) -> bool {
    let leads_there = |port: u16| {
        let asked = sni::authority_of(name, port)?;
        let found = snapshot.find(peer.policy_source(), &asked)?;
        let is_same = found.service.hostname == grant.service.hostname;
        Some(is_same && found.port == grant.port)
    };
    // An alias may match another port than the service's own name does.
    let ports = [grant.authority.port, grant.port];
    ports
        .into_iter()
        .any(|port| leads_there(port) == Some(true))
}

fn evaluate(
    snapshot: &Snapshot,
    peer: &Peer,
    asked: &Authority,
    of: ServicePort<'_>,
    means: &MatchedBy,
) -> Result<(), Reason> {
    if !snapshot.is_linked(peer.policy_source()) {
        return Err(Reason::NotLinked);
    }
    verdict_to_result(snapshot.evaluate_exposure(peer.policy_source(), asked, of, means))
}

fn verdict_to_result(verdict: ExposureVerdict) -> Result<(), Reason> {
    match verdict {
        ExposureVerdict::Allowed => Ok(()),
        ExposureVerdict::NotForPeer => Err(Reason::NotForPeer),
        ExposureVerdict::NotExposed => Err(Reason::NotExposed),
    }
}
