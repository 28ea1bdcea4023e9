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

    /// What an open tunnel to `endpoint` keeps of its permit, to be judged anew by.
    pub fn into_right(self, endpoint: Arc<Endpoint>) -> Right {
        let route = &self.route;
        let past_waypoints = route.is_past_waypoints().then(|| route.origin());
        let (service, port) = (Arc::clone(&route.service().definition), route.port());
        let (asked, means) = self.route.into_asked();
        Right {
            endpoint,
            past_waypoints,
            service,
            port,
            asked,
            means,
            granted: self.granted,
        }
    }
}

/// What an open tunnel was permitted.
#[derive(Clone, Debug)]
pub struct Right {
    asked: Authority,
    means: Means,
    service: Arc<mesh::Service>,
    port: u16,
    granted: bool,
    endpoint: Arc<Endpoint>,
    /// The word by which it went past the waypoints of the service.
    past_waypoints: Option<Origin>,
}

impl Right {
    /// The endpoint of the tunnel.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }
}

/// Judges the peer's use of the route by the snapshot's exposure rules, and by the control plane's
/// exports where they say nothing.
///
/// # Errors
/// [`Reason::NotLinked`], [`Reason::NotExposed`] or [`Reason::NotForPeer`], which are alike to the
/// peer.
pub fn run(snapshot: &Snapshot, peer: &Peer, route: Route) -> Result<Permit, Reason> {
    let of = (&*route.service().hostname, route.port());
    judge(snapshot, peer, route.asked(), of, route.means())?;
    Ok(Permit {
        route,
        granted: false,
    })
}

/// The permit for the target of a listener's own route, which the configuration opens to whoever
/// reaches that listener.
pub fn granted(route: Route) -> Permit {
    Permit {
        route,
        granted: true,
    }
}

/// Judges an open tunnel again, by the rules of now.
///
/// # Errors
/// What took the right away: a change of trust, of exposure, of names, of links, or of who is
/// believed to come from a waypoint.
pub fn still_allowed(snapshot: &Snapshot, peer: &Peer, right: &Right) -> Result<(), &'static str> {
    if let Some(refusal) = peer.lost_trust() {
        return Err(refusal.words());
    }
    if right.granted {
        // Listeners change with a restart only.
        return Ok(());
    }
    let (asked, host, means) = (&right.asked, &*right.service.hostname, &right.means);
    let of = (host, right.port);
    if !snapshot.stands_for(peer.caller(), asked, of, means) {
        return Err("the name does not stand for the service any more");
    }
    judge(snapshot, peer, asked, of, means).map_err(Reason::label)?;
    let endpoint = &right.endpoint.definition;
    let gone = snapshot.judge_gone(peer.caller(), asked, means, endpoint);
    reason(gone).map_err(Reason::label)?;
    match right.past_waypoints {
        Some(origin) if !route::may_go_past(snapshot, peer, host, origin) => {
            Err("the peer's x-istio-source is not believed any more")
        }
        _ => Ok(()),
    }
}

/// Whether a server name, by itself or in Istio's form, is one of the service that was permitted:
/// its own or any other that leads there.
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
