//! Part of stage 6: permission of a tunnel to leave the network, and the explanation of a route
//! without endpoints.

use crate::snapshot::{ExclusionReason, Snapshot};
use crate::wire::{HOPS_MAX, Transit, Via};

use super::first_peer::FirstPeer;
use super::http2::tunnel::Forwarded;
use super::identity::Peer;
use super::route::Route;

/// Evaluates the permission of a tunnel to leave the network. Of those of a gateway and of the
/// first peer behind it, the smaller one applies. What a listener grants does not leave it.
pub fn evaluate(snapshot: &Snapshot, peer: &Peer, route: &Route) -> Transit {
    if route.granted_by_listener {
        return Transit::Off;
    }
    let of_caller = |caller| snapshot.transit(caller, route.requested());
    let of_peer = of_caller(peer.policy_source());
    let first_peer = route.first_peer().map(|first| of_caller(first.caller()));
    let granted = first_peer.map_or(of_peer, |of_first| of_first.min(of_peer));
    limit(snapshot, peer, granted, route.is_via_gateway())
}

/// Limits a grant by the listener, and for tunnels that came through a gateway. Such a tunnel
/// needs `always`, so that two networks without endpoints do not send it back and forth.
pub fn limit(snapshot: &Snapshot, peer: &Peer, granted: Transit, via_gateway: bool) -> Transit {
    let granted = granted.min(peer.listener.rules().transit());
    let principal = &peer.source.principal;
    let is_gateway = || snapshot.is_gateway(principal) || snapshot.trust.is_gateway(principal);
    let is_via_gateway = || via_gateway || is_gateway();
    if granted == Transit::Failover && is_via_gateway() { Transit::Off } else { granted }
}

impl Route {
    /// Returns the headers for gateways of other networks.
    pub fn forwarded(&self) -> Option<&Forwarded> {
        self.forwarded.as_deref()
    }

    /// Returns true if the tunnel came through a gateway of another network.
    pub fn is_via_gateway(&self) -> bool {
        self.forwarded().is_some_and(|headers| headers.via.is_some())
    }

    /// Returns the first peer, if a trusted gateway has sent its identity.
    pub fn first_peer(&self) -> Option<&FirstPeer> {
        self.first_peer.as_deref()
    }

    /// Returns true if no gateway has forwarded the tunnel. After a loop through the next gateway,
    /// other endpoints may then be tried. Later gateways leave that to the first one, which bounds
    /// the connections of a loop.
    pub fn is_from_client(&self) -> bool {
        self.passed().is_none_or(|via| via.is_empty())
    }

    /// Returns true if the tunnel may leave the network, but has passed as many gateways as are
    /// allowed.
    pub fn is_at_hop_limit(&self) -> bool {
        let is_at_limit = || self.passed().is_some_and(|via| via.is_full());
        self.service.endpoints_by(self.port, self.transit).is_some() && is_at_limit()
    }

    /// Returns the gateways that the tunnel has passed, by a list that is not malformed.
    fn passed(&self) -> Option<Via> {
        Via::parse(self.forwarded()?.via.as_deref()?)
    }

    /// Adds the endpoints of a permitted route, with those of other networks as far as `transit`
    /// permits. Tunnels to a waypoint, those of TLS listeners, and those at the limit of gateways
    /// stay. A binding has its gateways already.
    pub fn with_endpoints(mut self, snapshot: &Snapshot, transit: Transit) -> Self {
        if self.binding.is_some() {
            return self;
        }
        self.endpoints = self.own_endpoints(snapshot);
        if self.by_waypoint || self.passthrough {
            return self;
        }
        self.transit = transit;
        if self.is_at_hop_limit() {
            return self;
        }
        if let Some(endpoints) = self.service.endpoints_by(self.port, transit).cloned() {
            self.endpoints = endpoints;
        }
        self
    }

    /// Returns a detail for the log if there is no endpoint and the reason alone does not
    /// explain it.
    pub fn detail(&self) -> Option<String> {
        if let Some(target) = self.service.drained.clone() {
            return Some(format!("no endpoint is left: {}", ExclusionReason::Evacuated(target)));
        }
        if self.by_waypoint {
            let names = self.service.definition.waypoint_names();
            return Some(format!(
                "it is behind the waypoint {names}, which is unknown or has no HBONE endpoint"
            ));
        }
        if self.is_at_hop_limit() {
            return Some(format!(
                "no endpoint is in this network, and the tunnel has passed {HOPS_MAX} gateways"
            ));
        }
        let networks = &self.service.other_networks;
        if self.transit == Transit::Off && !networks.is_empty() {
            let networks = networks.join(", ");
            return Some(format!(
                "no endpoint is in this network, and transit is off; others in: {networks}"
            ));
        }
        let left_out = self.endpoints.left_out();
        let left_out: Vec<_> = left_out.iter().map(ToString::to_string).collect();
        let why = || format!("no endpoint is left: {}", left_out.join("; "));
        (!left_out.is_empty()).then(why)
    }
}
