//! Services with their endpoints, also derived ones: the services behind an alias with several
//! targets, a region or a subset, combined into one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::exclusion::remote_network;
use super::mesh::Sorted;
use super::remote_instances::NetworkShare;
use super::service::{DialRules, SetInputs};
use super::tiers::Ranking;
use super::{Alias, Endpoint, LazySet, Service, Snapshot, Subset, TransitSets, mesh};
use crate::config::HostPort;
use crate::wire::DrainTarget;

impl Snapshot {
    /// Returns a service with the endpoints that may be dialled: its own, or those of the services
    /// that an alias leads to. It keeps the results of dials of the service that it replaces.
    pub(super) fn build_service(
        &self,
        definition: &Arc<mesh::Service>,
        behind: &[(Arc<mesh::Service>, Option<u16>)],
        alias: Option<&Arc<Alias>>,
        before: Option<&Arc<Service>>,
    ) -> Service {
        let before = before.filter(|before| before.namespace == definition.namespace);
        let used = behind.iter().filter(|(of, _)| self.balancing.drained_service(of).is_none());
        let host = alias.map_or(&*definition.hostname, |alias| alias.name.host.as_str());
        let balancing = if self.balancing.has_rules_of(host) {
            Arc::new(self.balancing.only(host))
        } else {
            Arc::clone(&self.common_balancing)
        };
        let inputs = Arc::new(SetInputs {
            definition: Arc::clone(definition),
            behind: used.map(|(of, port)| self.index.part(of, *port)).collect(),
            alias: alias.cloned(),
            network: Arc::clone(&self.index.network),
            balancing,
            rules: self.dial_rules(),
        });
        let sets = |is_passthrough| -> Sorted<u16, LazySet> {
            let earlier = before.map(|before| before.sets(is_passthrough));
            let set = |port: &u16| {
                let earlier = earlier.and_then(|sets| sets.get(port));
                (*port, LazySet::new(&inputs, (*port, is_passthrough), earlier))
            };
            definition.ports.keys().map(set).collect()
        };
        let own = sets(false);
        let remote = &self.index.remote;
        let networks = inputs.behind.iter();
        let networks: BTreeSet<_> =
            networks.flat_map(|of| remote.networks(&of.service.key(), self.network())).collect();
        let has_transit = self.exposure.has_transit && !networks.is_empty();
        let transit = own.iter().filter(|_| has_transit);
        let transit = transit
            .filter_map(|(port, set)| Some((*port, self.transit_sets(&inputs, *port, set)?)));
        Service {
            definition: Arc::clone(definition),
            drained: self.drained(behind).cloned(),
            passthrough_ports: if self.has_passthrough { sets(true) } else { Sorted::default() },
            transit_ports: transit.collect(),
            ports: own,
            other_networks: networks.into_iter().collect(),
        }
    }

    pub(super) fn dial_rules(&self) -> DialRules {
        let (hbone_only, has_passthrough) = (self.mesh.hbone_only, self.has_passthrough);
        DialRules { hbone_only, has_passthrough }
    }

    /// Returns the order that drains the first of the services, if all are drained.
    fn drained(&self, behind: &[(Arc<mesh::Service>, Option<u16>)]) -> Option<&DrainTarget> {
        let drained = behind.iter().map(|(of, _)| self.balancing.drained_service(of));
        drained.reduce(|first, next| first.filter(|_| next.is_some())).flatten()
    }

    /// Returns the endpoints of a port for tunnels that may leave the network, if other networks
    /// have some. They share the results of dials with `own`, those in this network.
    fn transit_sets(&self, inputs: &SetInputs, port: u16, own: &LazySet) -> Option<TransitSets> {
        let by_rules = inputs.ranking(port);
        let shares = self.shares(inputs, port, &by_rules);
        if shares.is_empty() {
            return None;
        }
        let entries = inputs.local(port, false).with_networks(shares);
        let failover = (!by_rules.is_own_network_first()).then(|| {
            let first = inputs.ranking(port).with_own_network_first();
            Arc::new(first.build_set(entries.clone()).with_health_of(Some(own.get())))
        });
        let always = Arc::new(by_rules.build_set(entries).with_health_of(Some(own.get())));
        let failover = failover.unwrap_or_else(|| Arc::clone(&always));
        Some(TransitSets { failover, always })
    }

    /// Returns the endpoints of a service port in other networks, in the region and the subset of
    /// an alias.
    fn shares(&self, inputs: &SetInputs, port: u16, ranking: &Ranking<'_>) -> Vec<NetworkShare> {
        let rules = (self.network(), self.mesh.hbone_only);
        let region = inputs.alias.as_ref().and_then(|alias| alias.region.as_deref());
        let shares = inputs.behind.iter().flat_map(|part| {
            let name = part.service.key();
            let service = ((&*part.service, &*name), part.port.unwrap_or(port));
            let (remote, subset) = (&self.index.remote, inputs.subset());
            remote.shares(service, &self.networks, rules, subset, |one| ranking.rank(one))
        });
        let is_in = |one: &Endpoint, region: &str| *one.definition.locality.region == *region;
        let shares = shares.filter_map(|mut share| {
            let gateways = &mut share.gateways;
            gateways.retain(|one| region.is_none_or(|region| is_in(one, region)));
            (!gateways.is_empty()).then_some(share)
        });
        shares.collect()
    }
}

impl Snapshot {
    /// Builds the derived service of an alias, or removes it if no target exists. If one target has
    /// a waypoint, tunnels to all targets go there, so that no waypoint is bypassed.
    pub(super) fn build_derived(&mut self, before: &Self, alias: &Arc<Alias>) {
        let targets = alias.to.iter().filter_map(|HostPort { host, port }| {
            let service = self.service_by_name(host)?;
            Some((Arc::clone(&service.definition), *port))
        });
        let behind: Vec<_> = targets.collect();
        let Some((first, _)) = behind.first() else {
            self.derived_services.remove(&alias.label);
            return;
        };
        let all = || behind.iter().map(|(service, _)| service);
        let requested = behind.iter().flat_map(|(service, port)| {
            let (ports, meant) = (service.ports.keys(), port.or(alias.name.port));
            let meant = ports.filter(move |own| meant.is_none_or(|port| port == **own));
            meant.map(|own| alias.name.port.unwrap_or(*own))
        });
        let ports: BTreeMap<_, _> = requested.map(|port| (port, 0)).collect();
        let assignments = ports.keys().filter_map(|port| {
            let assignment = assignment(&behind, *port)?;
            Some((*port, assignment))
        });
        let definition = Arc::new(mesh::Service {
            name: Arc::clone(&alias.label),
            hostname: Arc::clone(&alias.label),
            vips: Vec::new(),
            assignments: assignments.collect(),
            ports,
            waypoints: all().flat_map(|service| service.waypoints.clone()).collect(),
            ingress_use_waypoint: all().any(|service| service.ingress_use_waypoint),
            ..mesh::Service::clone(first)
        });
        // The results of dials of other targets say nothing.
        let host = alias.to.first().map_or("", |target| &target.host);
        let same = before.names.derived_aliases_for(host).iter().any(|one| {
            one.label == alias.label && one.to == alias.to && one.subset == alias.subset
        });
        let earlier = before.derived_services.get(&alias.label).filter(|_| same);
        let service = self.build_service(&definition, &behind, Some(alias), earlier);
        self.derived_services.insert(Arc::clone(&alias.label), Arc::new(service));
    }

    /// Returns whether a workload of a service in the own network, or all of its instances in
    /// another one, are in a subset, whatever is ready.
    pub fn has_subset(&self, service: &Service, subset: &Subset) -> bool {
        let name = service.key();
        let mut own = self.mesh.workloads.values().filter(|one| {
            let is_of_service = one.services.get(&*name).is_some();
            is_of_service && remote_network(one, self.network()).is_none()
        });
        let network = (self.network(), self.mesh.hbone_only);
        let has_part = |port: &u16| {
            let service = (&*service.definition, name.as_str());
            let remote = &self.index.remote;
            remote.has_part(service, *port, &self.networks, network, subset)
        };
        own.any(|one| subset.part_of(one).is_some())
            || service.definition.ports.keys().any(has_part)
    }
}

/// Returns the Envoy assignment of a port of a derived service, if a control plane sent one. With
/// several targets only the priorities are kept, because localities and drop overloads belong to
/// single services.
fn assignment(
    behind: &[(Arc<mesh::Service>, Option<u16>)],
    requested: u16,
) -> Option<Arc<mesh::Assignment>> {
    let first = behind.iter().find_map(|(service, port)| {
        let port = port.unwrap_or(requested);
        service.assignments.get(&port)
    })?;
    if behind.len() == 1 {
        return Some(Arc::clone(first));
    }
    Some(Arc::new(mesh::Assignment {
        overprovisioning: first.overprovisioning,
        by_locality: false,
        localities: Vec::new(),
        drops: Vec::new(),
    }))
}
