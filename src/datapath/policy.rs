//! Stage 6: may this peer use this route? Default deny.

use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::{Endpoint, Snapshot, Verdict};
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
        Right {
            endpoint,
            past_waypoints: route.is_past_waypoints().then(|| route.origin()),
            host: Arc::clone(&self.route.service().hostname),
            port: self.route.port(),
            asked: self.route.into_asked(),
            granted: self.granted,
        }
    }
}

/// What an open tunnel was permitted.
#[derive(Clone, Debug)]
pub struct Right {
    asked: Authority,
    host: Arc<str>,
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
/// [`Reason::NotExposed`] or [`Reason::NotForPeer`], which are alike to the peer.
pub fn run(snapshot: &Snapshot, peer: &Peer, route: Route) -> Result<Permit, Reason> {
    judge(
        snapshot,
        peer,
        route.asked(),
        &route.service().hostname,
        route.port(),
    )?;
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
/// What took the right away: a change of trust, of exposure, or of who is believed to come from a
/// waypoint.
pub fn still_allowed(snapshot: &Snapshot, peer: &Peer, right: &Right) -> Result<(), &'static str> {
    if right.granted {
        // Listeners change with a restart only.
        return Ok(());
    }
    let judged = judge(snapshot, peer, &right.asked, &right.host, right.port);
    judged.map_err(Reason::label)?;
    match right.past_waypoints {
        Some(origin) if !route::may_go_past(snapshot, peer, &right.host, origin) => {
            Err("the peer's x-istio-source is not believed any more")
        }
        _ => Ok(()),
    }
}

/// Whether a server name, by itself or in Istio's form, is one of the service that was permitted:
/// its own or any other that leads there.
pub fn is_named(snapshot: &Snapshot, right: &Right, name: &str) -> bool {
    let leads_there = |port: u16| {
        let asked = sni::target(name, port)?;
        let (service, port, _) = route::find(snapshot, &asked)?;
        Some(*service.hostname == *right.host && port == right.port)
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
    host: &str,
    port: u16,
) -> Result<(), Reason> {
    match snapshot
        .exposure
        .judge(peer.caller(), &snapshot.trust, asked, host, port)
    {
        Verdict::Allowed => Ok(()),
        Verdict::NotExposed if snapshot.exports_to(peer.caller(), host, port) => Ok(()),
        Verdict::NotForPeer => Err(Reason::NotForPeer),
        Verdict::NotExposed => Err(Reason::NotExposed),
    }
}
