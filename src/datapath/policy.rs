//! Stage 6: exposure policy, which decides whether a peer may use a route. Denies by default.

use std::sync::Arc;
use std::time::Duration;

use crate::limits::Source;
use crate::reason::Reason;
use crate::snapshot::{
    Caller, Endpoint, Exposure, MatchedBy, Requested, ServicePort, Snapshot, mesh,
};
use crate::wire::{Authority, Transit, sni};

use super::binding::Binding;
use super::first_peer::FirstPeer;
use super::http2::tunnel::Origin;
use super::identity::Peer;
use super::limits::descriptors::Holders;
use super::limits::service::TunnelLimits;
use super::route::{self, Route};
use super::transit;

/// Permit for a peer to use a route. Only [`run`] creates one, and only a permit can be dialled. It
/// has the places of its tunnel in the counts of exposure entries.
#[derive(Debug)]
pub struct Permit {
    /// Boxed, as the future that opens a tunnel has a place for the permit at each of its stages.
    permitted: Box<Permitted>,
    limits: Option<Box<TunnelLimits>>,
}

#[derive(Debug)]
struct Permitted {
    route: Route,
    /// Holders that the tunnel is counted for: its first peer, or else the peer. `None` in an
    /// explain query, which cannot dial.
    holders: Option<Holders>,
}

#[derive(Debug)]
pub struct Rejection {
    pub reason: Reason,
    /// Route that policy rejects; none if the target was not resolved.
    pub route: Option<Box<Route>>,
    /// True if the rules permit the peer and reject the first peer.
    pub is_of_first_peer: bool,
}

impl From<Reason> for Rejection {
    fn from(reason: Reason) -> Self {
        Self { reason, route: None, is_of_first_peer: false }
    }
}

impl Permit {
    pub fn route(&self) -> &Route {
        &self.permitted.route
    }

    pub fn holders(&self) -> Option<&Holders> {
        self.permitted.holders.as_ref()
    }

    /// Returns the time to find an endpoint and to connect to it, if an exposure entry limits it.
    pub fn connect_timeout(&self) -> Option<Duration> {
        self.limits.as_ref()?.connect_timeout()
    }

    /// Converts the permit into the grant by which an open tunnel to `endpoint` is evaluated
    /// again.
    pub fn into_grant(self, endpoint: Arc<Endpoint>) -> Grant {
        let route = self.route();
        let waypoint = match (route.by_waypoint, route.bypasses_waypoints()) {
            (true, _) => Waypoint::Endpoint,
            (false, true) => Waypoint::Bypassed(route.origin),
            (false, false) => Waypoint::None,
        };
        let (service, port) = (Arc::clone(&route.service.definition), route.port);
        let (via_gateway, granted) = (route.is_via_gateway(), route.granted_by_listener);
        let route = self.permitted.route;
        Grant {
            endpoint,
            waypoint,
            service,
            port,
            authority: route.authority,
            matched_by: route.matched_by,
            granted,
            via_gateway,
            limits: self.limits,
            first_peer: route.first_peer,
            binding: route.binding,
        }
    }
}

/// Grant of an open tunnel, with the input to evaluate it again.
#[derive(Debug)]
pub struct Grant {
    authority: Authority,
    matched_by: MatchedBy,
    service: Arc<mesh::Service>,
    port: u16,
    granted: bool,
    pub(super) endpoint: Arc<Endpoint>,
    waypoint: Waypoint,
    via_gateway: bool,
    limits: Option<Box<TunnelLimits>>,
    first_peer: Option<Box<FirstPeer>>,
    pub(super) binding: Option<Arc<Binding>>,
}

/// Role of the service's waypoints in an open tunnel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waypoint {
    /// The service had no waypoint.
    None,
    Endpoint,
    /// The tunnel bypassed the waypoints, as the peer's `x-istio-source` requested.
    Bypassed(Origin),
}

impl Grant {
    /// Returns the first peer, if a trusted gateway has sent its identity.
    pub fn first_peer(&self) -> Option<&FirstPeer> {
        self.first_peer.as_deref()
    }

    pub fn requires_waypoint(&self) -> bool {
        self.waypoint == Waypoint::Endpoint
    }

    pub fn limits(&mut self) -> Option<&mut TunnelLimits> {
        self.limits.as_deref_mut()
    }

    fn requested(&self) -> Requested<'_> {
        let to = ServicePort { host: &self.service.hostname, port: self.port };
        Requested { authority: &self.authority, to, matched_by: &self.matched_by }
    }

    /// Applies the limits of the current exposure.
    pub fn update_limits(&mut self, snapshot: &Snapshot, peer: &Peer) {
        if self.limits.is_none() && !snapshot.exposure.has_limits {
            return;
        }
        let (rules, name) = (peer.listener.rules(), peer.server_name.as_deref());
        if self.granted && rules.still_grants(name, &self.authority, true) == Ok(true) {
            return;
        }
        let callers = callers(peer, self.first_peer());
        let entries = snapshot.limiting_entries(callers, self.requested());
        let source = charged_source(peer, self.first_peer());
        TunnelLimits::update(&mut self.limits, &entries, &source);
    }
}

/// Returns the source that a tunnel is charged to: its first peer, or else the peer.
fn charged_source(peer: &Peer, first_peer: Option<&FirstPeer>) -> Source {
    let of_peer = peer.charged_source();
    first_peer.map_or_else(|| of_peer.clone(), |first| first.charged_source(&of_peer))
}

/// Returns the identities that the exposure has to admit: the peer and the first peer.
fn callers<'a>(
    peer: &'a Peer,
    first_peer: Option<&'a FirstPeer>,
) -> impl Iterator<Item = Caller<'a>> + Clone {
    let first_peer = first_peer.map(FirstPeer::caller);
    std::iter::once(peer.policy_source()).chain(first_peer)
}

/// Returns the exposure entries whose limits apply to a route.
pub fn limiting_entries<'a>(
    snapshot: &'a Snapshot,
    peer: &Peer,
    route: &Route,
) -> Vec<&'a Exposure> {
    snapshot.limiting_entries(callers(peer, route.first_peer()), route.requested())
}

/// Returns the free share of the tightest limit of concurrent tunnels on a route, in percent; 100
/// without a limit.
pub fn free_percent(snapshot: &Snapshot, peer: &Peer, route: &Route) -> u32 {
    if !snapshot.exposure.has_limits {
        return 100;
    }
    let entries = limiting_entries(snapshot, peer, route).into_iter();
    let free = entries.filter_map(|entry| Some(entry.open.free_percent(entry.limits.tunnels?)));
    free.min().unwrap_or(100)
}

/// Evaluates the route against the snapshot's exposure rules, and against the control plane's
/// exports for services without an entry. The tunnel takes a place in the counts of the exposure
/// entries that admit it.
///
/// # Errors
/// [`Reason::NotLinked`], [`Reason::NotExposed`] or [`Reason::NotForPeer`], which the peer
/// cannot distinguish. [`Reason::NotForPeer`] also covers a peer that the listener's `sources`
/// no longer contain. [`Reason::TunnelLimit`] if an entry admits no further tunnel.
pub fn run(snapshot: &Snapshot, peer: &Peer, route: Route) -> Result<Permit, Rejection> {
    let limits = match check(snapshot, peer, &route) {
        Ok(limits) => limits,
        Err(rejection) => {
            return Err(Rejection { route: Some(Box::new(route)), ..rejection });
        }
    };
    let transit = transit::evaluate(snapshot, peer, &route);
    let holders = peer.holders.as_ref().map(|holders| match route.first_peer() {
        Some(first) => first.holders(holders),
        None => holders.clone(),
    });
    let route = route.with_endpoints(snapshot, transit);
    Ok(Permit { permitted: Box::new(Permitted { route, holders }), limits })
}

/// Evaluates the route for the peer, and for the first peer behind a trusted gateway. Then takes
/// places in the counts of the entries. The peer of an explain query cannot dial, and takes none.
fn check(
    snapshot: &Snapshot,
    peer: &Peer,
    route: &Route,
) -> Result<Option<Box<TunnelLimits>>, Rejection> {
    if !peer.is_admitted() {
        return Err(Reason::NotForPeer.into());
    }
    if let Some(binding) = &route.binding {
        return Ok(Some(TunnelLimits::of_idle(binding.config.idle)));
    }
    if route.granted_by_listener {
        return Ok(None);
    }
    let evaluate = |caller| evaluate(snapshot, caller, route.requested());
    evaluate(peer.policy_source())?;
    let of_first_peer = match route.first_peer() {
        Some(first) if !first.is_trusted(snapshot) => Err(Reason::NotForPeer),
        Some(first) => evaluate(first.caller()),
        None => Ok(()),
    };
    of_first_peer.map_err(|reason| Rejection { is_of_first_peer: true, ..reason.into() })?;
    let entries = limiting_entries(snapshot, peer, route);
    if entries.is_empty() {
        return Ok(None);
    }
    let source = charged_source(peer, route.first_peer());
    if peer.holders.is_some() {
        return Ok(TunnelLimits::take(&entries, &source)?);
    }
    let is_full = entries.iter().any(|entry| entry.is_full(&source));
    if is_full { Err(Reason::TunnelLimit.into()) } else { Ok(None) }
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
    if let Some(binding) = &grant.binding {
        return check_binding(snapshot, peer, binding);
    }
    if !peer.is_admitted() {
        return Err("the listener's `sources` no longer contain the peer's address, or its \
                    `balancers` the load balancer");
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
    let (of, service) = (grant.requested(), &grant.service);
    let caller = peer.policy_source();
    if !snapshot.may_answer(of.to.host, &service.namespace)
        || !snapshot.still_leads_to(caller, of.authority, service, of.to.port, of.matched_by)
    {
        return Err("the name no longer refers to the service");
    }
    let endpoint = &grant.endpoint.definition;
    let first_peer = grant.first_peer();
    if first_peer.is_some() && !snapshot.trust.is_gateway(&peer.source.principal) {
        return Err("the gateway that has verified the first peer is not in `trust.gateways`");
    }
    if first_peer.is_some_and(|first| !first.is_trusted(snapshot)) {
        return Err("the trust domain of the first peer is no longer in the trust set");
    }
    for caller in callers(peer, first_peer) {
        evaluate(snapshot, caller, of).map_err(Reason::label)?;
        let gone = snapshot.evaluate_removed_target(caller, of, endpoint);
        gone.map_err(Reason::label)?;
        if grant.endpoint.remote.is_some() {
            let granted = snapshot.transit(caller, of);
            if transit::limit(snapshot, peer, granted, grant.via_gateway) == Transit::Off {
                return Err("transit to other networks is no longer granted");
            }
        }
    }
    match grant.waypoint {
        Waypoint::Bypassed(origin) if !route::may_bypass_waypoints(snapshot, peer, of, origin) => {
            Err("the peer's x-istio-source is no longer trusted")
        }
        _ => Ok(()),
    }
}

/// Checks that the current version of a binding permits an open connection of its client.
///
/// # Errors
/// The change that revokes it.
pub fn check_binding(
    snapshot: &Snapshot,
    peer: &Peer,
    binding: &Binding,
) -> Result<(), &'static str> {
    if !peer.is_admitted() {
        return Err("the binding's `clients` no longer contain the client's address");
    }
    match peer.listener.binding() {
        Some(now) if now.admits(peer.policy_source(), snapshot) => {
            let why = "the binding has another service, cluster or workloads";
            now.leads_as(binding).then_some(()).ok_or(why)
        }
        _ => Err("the binding's `to` no longer contains the client"),
    }
}

/// Checks that a server name, plain or in Istio's form, belongs to the permitted service: the
/// requested name or any other that resolves to it.
///
/// # Errors
/// [`Reason::SniMismatch`], also without a name.
pub fn check_server_name(
    snapshot: &Snapshot,
    peer: &Peer,
    grant: &Grant,
    name: Option<&str>,
) -> Result<(), Reason> {
    let leads_there = |port: u16| {
        let requested = sni::authority_of(name?, port);
        let found = snapshot.find(peer.policy_source(), &requested)?;
        let is_same = found.service.hostname == grant.service.hostname;
        Some(is_same && found.port == grant.port)
    };
    // An alias may match another port than the service's own name does.
    let mut ports = [grant.authority.port, grant.port].into_iter();
    let is_its = ports.any(|port| leads_there(port) == Some(true));
    is_its.then_some(()).ok_or(Reason::SniMismatch)
}

fn evaluate(snapshot: &Snapshot, caller: Caller<'_>, of: Requested<'_>) -> Result<(), Reason> {
    if !snapshot.is_linked(caller) {
        return Err(Reason::NotLinked);
    }
    snapshot.evaluate_exposure(caller, of)
}
