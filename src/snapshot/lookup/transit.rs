//! Permission of a tunnel to leave the network.

use std::net::SocketAddr;
use std::sync::Arc;

use super::{MatchedBy, ServicePort};
use crate::snapshot::{Caller, EndpointSet, RemoteGateway, Service, Snapshot};
use crate::wire::{Authority, Transit};

impl Snapshot {
    /// Returns the transit that the exposure grants a caller to the service port to which
    /// `requested` leads. Without an entry that grants it, there is none. Of several services
    /// behind an alias, the smallest grant applies. A workload at its address is in this network.
    pub fn transit(
        &self,
        caller: Caller<'_>,
        requested: &Authority,
        to: ServicePort<'_>,
        matched_by: &MatchedBy,
    ) -> Transit {
        let of_service = |(host, port): (&str, u16)| {
            let entry = self.exposure_host(host);
            self.exposure.transit(caller, &self.trust, &entry, port)
        };
        if !self.exposure.has_transit() || self.is_cluster_local(to.host) {
            return Transit::Off;
        }
        match matched_by {
            MatchedBy::Service => of_service((to.host, to.port)),
            MatchedBy::Exposed => self
                .exposure
                .transit_of_alias(caller, &self.trust, requested),
            MatchedBy::Alias(alias) => {
                let targets = self.behind(alias, requested.port).map(of_service);
                targets.min().unwrap_or_default()
            }
            MatchedBy::Workload(_) => Transit::Off,
        }
    }

    /// Returns the gateways of other networks, by the mesh and by the configuration, each with its
    /// address.
    pub fn remote_gateways(&self) -> impl Iterator<Item = (SocketAddr, Arc<RemoteGateway>)> {
        let known = self.index.remote.known_gateways();
        let known = known.into_iter();
        known.map(|((address, _), gateway)| (address, gateway))
    }

    /// Returns the gateway at an address of another network as it has to confirm itself now.
    pub fn current_gateway(
        &self,
        known: &RemoteGateway,
        address: SocketAddr,
    ) -> Arc<RemoteGateway> {
        self.index.remote.current(known, address, &self.networks)
    }

    /// Returns whether a gateway is still one of another network, in the same form.
    pub fn has_gateway(&self, known: &Arc<RemoteGateway>, address: SocketAddr) -> bool {
        self.index.remote.contains(known, address)
    }

    /// Returns whether an identity is that of a gateway of another network, by the mesh or by the
    /// configuration.
    pub fn is_gateway(&self, principal: &str) -> bool {
        self.networks.has_identity(principal) || self.index.remote.has_identity(principal)
    }
}

impl Service {
    /// Returns the endpoints of a port with instances in other networks, if tunnels may use these.
    pub fn endpoints_by(&self, port: u16, transit: Transit) -> Option<&Arc<EndpointSet>> {
        let sets = self.transit_ports.get(&port)?;
        match transit {
            Transit::Off => None,
            Transit::Failover => Some(&sets.failover),
            Transit::Always => Some(&sets.always),
        }
    }
}
