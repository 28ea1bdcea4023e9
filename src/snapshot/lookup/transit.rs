//! Permission of a tunnel to leave the network.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use super::{MatchedBy, Requested, ServicePort};
use crate::snapshot::mesh::UNKNOWN_NAMESPACE;
use crate::snapshot::{Caller, EndpointSet, RemoteGateway, Service, Snapshot, TransitRule};
use crate::wire::{DrainTarget, Transit};

impl Snapshot {
    /// Returns the transit that the exposure grants a caller to the service port to which
    /// an authority leads. Of several services behind an alias, the smallest grant applies. A
    /// workload at its address is in this network.
    pub fn transit(&self, caller: Caller<'_>, of: Requested<'_>) -> Transit {
        if !self.exposure.has_transit || self.is_cluster_local(of.to.host) {
            return Transit::Off;
        }
        let transits = self.exposed_ports(of).map(|of| self.transit_to_port(caller, of));
        transits.min().unwrap_or_default()
    }

    /// Returns the transit of a caller to one service port, which is not behind an alias: the
    /// greatest of the entries that admit the caller, else the default if the service is exported.
    /// A link alone grants none.
    fn transit_to_port(&self, caller: Caller<'_>, of: Requested<'_>) -> Transit {
        let ServicePort { host, port } = of.to;
        let (entries, default) = (self.exposure_entries(host), self.default_transit(host));
        match of.matched_by {
            MatchedBy::Workload(_) => return Transit::Off,
            MatchedBy::Service if entries.is_empty() => {
                let is_exposed = self.is_exposed_without_entry(caller, host, port);
                return if is_exposed { default } else { Transit::Off };
            }
            _ => {}
        }
        let entries = self.entries_of(entries, of);
        let admitting = entries.filter(|entry| entry.admits(caller, &self.trust));
        admitting.map(|entry| entry.transit.unwrap_or(default)).max().unwrap_or_default()
    }

    /// Returns the transit of entries and exports of a service that state none.
    pub fn default_transit(&self, host: &str) -> Transit {
        let rule = self.transit_rule(host);
        rule.map_or(Transit::Off, |rule| rule.transit)
    }

    /// Returns the rule of `exposure.transit` for a service.
    pub fn transit_rule(&self, host: &str) -> Option<&TransitRule> {
        let namespace = self.services.get(host).map(|service| &*service.namespace);
        let namespace = namespace.filter(|of| *of != UNKNOWN_NAMESPACE);
        self.exposure.transit_rule(namespace, |pattern| self.has_name(pattern, host))
    }

    pub fn transits(&self, service: &Service, port: u16) -> BTreeSet<Transit> {
        let mut aliases = self.names.derived_aliases();
        let derived = aliases.find(|alias| *alias.label == *service.hostname);
        let Some(alias) = derived else {
            return self.transits_to_service(&service.hostname, port);
        };
        let targets = self.behind(alias, port);
        let of_targets = targets.map(|(host, port)| self.transits_to_service(host, port));
        let smaller = |of: BTreeSet<Transit>, other: BTreeSet<Transit>| {
            of.iter().flat_map(|one| other.iter().map(move |two| *one.min(two))).collect()
        };
        of_targets.reduce(smaller).unwrap_or_default()
    }

    fn transits_to_service(&self, host: &str, port: u16) -> BTreeSet<Transit> {
        let entries = self.exposure_entries(host);
        let default = self.default_transit(host);
        let of_port = entries.iter().filter(|entry| entry.applies_to(port));
        let mut found: BTreeSet<_> =
            of_port.map(|entry| entry.transit.unwrap_or(default)).collect();
        if entries.is_empty() {
            found.insert(default);
        }
        if found.is_empty() || self.clusters_by_link(host).next().is_some() {
            found.insert(Transit::Off);
        }
        found
    }

    /// Returns the gateways of other networks, by the mesh and by the configuration, each with its
    /// address.
    pub fn remote_gateways(&self) -> impl Iterator<Item = (SocketAddr, Arc<RemoteGateway>)> {
        let known = self.index.remote.known_gateways();
        known.into_iter().map(|((address, _), gateway)| (address, gateway))
    }

    /// Returns whether new tunnels may use one of [`Self::remote_gateways`]: it can prove its
    /// identity, its record is ready, and no operator has evacuated it.
    pub fn is_gateway_used(&self, gateway: &RemoteGateway, address: SocketAddr) -> bool {
        let cluster = DrainTarget::Cluster(gateway.cluster.as_ref().into());
        let is_evacuated = self.balancing.evacuated.contains_key(&cluster)
            || self.balancing.evacuated_address(address, Some(gateway)).is_some();
        let record = self.index.remote.record(gateway, address);
        let is_ready = record.is_none_or(|record| {
            let is_ready = record.healthy && record.capacity > 0;
            is_ready && self.balancing.evacuated_with(record).is_none()
        });
        gateway.is_verifiable() && is_ready && !is_evacuated
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
