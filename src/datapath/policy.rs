//! Stage 6: may this peer use this route? Default deny.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::{Endpoint, Means, Snapshot, Verdict, mesh};
use crate::wire::{Authority, sni};

use super::identity::Peer;
use super::route::{self, Route};
use super::tunnel::Origin;

/// A route that the peer may use. Only [`run`] and [`granted`] make one, and only a permit can be
/// dialled.
#[derive(Debug)]
pub struct Permit {
    route: Route,
    granted: bool,
}

impl Permit {
    /// The route that is permitted.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Converts the permit into the right by which an open tunnel to `endpoint` is judged anew.
    pub fn into_right(self, endpoint: Arc<Endpoint>) -> Right {
        let route = &self.route;
        let waypoint = match (route.is_by_waypoint(), route.is_past_waypoints()) {
            (true, _) => Waypoint::Endpoint,
            (false, true) => Waypoint::Past(route.origin()),
            (false, false) => Waypoint::None,
        };
        let (service, port) = (Arc::clone(&route.service().definition), route.port());
        let (asked, means) = self.route.into_asked();
        Right {
            endpoint,
            waypoint,
            service,
            port,
            asked,
            means,
            granted: self.granted,
        }
    }
}

/// Permission of an open tunnel.
#[derive(Clone, Debug)]
pub struct Right {
    asked: Authority,
    means: Means,
    service: Arc<mesh::Service>,
    port: u16,
    granted: bool,
    endpoint: Arc<Endpoint>,
    waypoint: Waypoint,
}

/// The part that the waypoints of its service have in an open tunnel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Waypoint {
    /// The service had none.
    None,
    /// The endpoint is one of a waypoint.
    Endpoint,
    /// The tunnel went past them, as the peer said this by `x-istio-source`.
    Past(Origin),
}

impl Right {
    /// The endpoint of the tunnel.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Returns whether the endpoint is one of a waypoint.
    pub fn is_by_waypoint(&self) -> bool {
        self.waypoint == Waypoint::Endpoint
    }
}

/// Judges the peer's use of the route by the snapshot's exposure rules, and by the control plane's
/// exports where they say nothing.
///
/// # Errors
/// [`Reason::NotLinked`], [`Reason::NotExposed`] or [`Reason::NotForPeer`], which are alike to the
/// peer. The last is also for a peer that the listener's `sources` have lost.
pub fn run(snapshot: &Snapshot, peer: &Peer, route: Route) -> Result<Permit, Reason> {
    if !peer.is_admitted() {
        return Err(Reason::NotForPeer);
    }
    let of = (&*route.service().hostname, route.port());
    judge(snapshot, peer, route.asked(), of, route.means())?;
    Ok(Permit {
        route,
        granted: false,
    })
}

/// The permit for the target of a listener's own route, which the configuration opens to whoever
/// reaches that listener.
///
/// # Errors
/// [`Reason::NotForPeer`]: the listener's `sources` have lost the peer.
pub fn granted(peer: &Peer, route: Route) -> Result<Permit, Reason> {
    match peer.is_admitted() {
        true => Ok(Permit {
            route,
            granted: true,
        }),
        false => Err(Reason::NotForPeer),
    }
}

/// Judges an open tunnel again, by the rules of now.
///
/// # Errors
/// The change that ended the right: of the listener, of trust, of exposure, of names, of links, or
/// of the peers whose `x-istio-source` is believed.
pub fn still_allowed(snapshot: &Snapshot, peer: &Peer, right: &Right) -> Result<(), &'static str> {
    if let Some(refusal) = peer.lost_trust() {
        return Err(refusal.words());
    }
    if !peer.is_admitted() {
        return Err("the listener's `sources` do not have the peer's address any more");
    }
    let rules = peer.listener.rules();
    if rules.is_tls() {
        let name = peer.server_name.as_deref();
        match rules.still_grants(name, &right.asked, right.granted) {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(_) => return Err("the listener does not lead from the server name there any more"),
        }
    }
    let (asked, host, means) = (&right.asked, &*right.service.hostname, &right.means);
    let of = (host, right.port);
    let is_meant = snapshot.is_meant(host, &right.service.namespace);
    let service = (&*right.service, right.port);
    if !is_meant || !snapshot.stands_for(peer.caller(), asked, service, means) {
        return Err("the name does not stand for the service any more");
    }
    judge(snapshot, peer, asked, of, means).map_err(Reason::label)?;
    let endpoint = &right.endpoint.definition;
    let gone = snapshot.judge_gone(peer.caller(), asked, means, endpoint);
    reason(gone).map_err(Reason::label)?;
    match right.waypoint {
        Waypoint::Past(origin) if !route::may_go_past(snapshot, peer, (host, means), origin) => {
            Err("the peer's x-istio-source is not believed any more")
        }
        _ => Ok(()),
    }
}

/// Returns whether a server name, by itself or in Istio's form, is one of the service that was
/// permitted: its own or any other that leads there.
pub fn is_named(snapshot: &Snapshot, peer: &Peer, right: &Right, name: &str) -> bool {
    let leads_there = |port: u16| {
        let asked = sni::target(name, port)?;
        let found = snapshot.find(peer.caller(), &asked)?;
        let is_same = found.service.hostname == right.service.hostname;
        Some(is_same && found.port == right.port)
    };
    // An alias may stand for another port than the service's own name does.
    let ports = [right.asked.port, right.port];
    ports
        .into_iter()
        .any(|port| leads_there(port) == Some(true))
}

fn judge(
    snapshot: &Snapshot,
    peer: &Peer,
    asked: &Authority,
    of: (&str, u16),
    means: &Means,
) -> Result<(), Reason> {
    if !snapshot.is_linked(peer.caller()) {
        return Err(Reason::NotLinked);
    }
    reason(snapshot.judge(peer.caller(), asked, of, means))
}

fn reason(verdict: Verdict) -> Result<(), Reason> {
    match verdict {
        Verdict::Allowed => Ok(()),
        Verdict::NotForPeer => Err(Reason::NotForPeer),
        Verdict::NotExposed => Err(Reason::NotExposed),
    }
}
