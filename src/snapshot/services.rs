//! Services with their endpoints, also derived ones: the services behind an alias with several
//! targets, a region or a subset, combined into one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use foldhash::HashMap;

use super::endpoints::Entries;
use super::exclusion::{remote_network, served, speaks_hbone};
use super::index::Behind;
use super::members::{Member, dialled_port};
use super::remote_instances::NetworkShare;
use super::tiers::Ranking;
use super::{Alias, Endpoint, Service, Snapshot, Subset, TransitSets, mesh};
use crate::config::HostPort;
use crate::wire::DrainTarget;

impl Snapshot {
    /// Returns a service with the endpoints that may be dialled: its own, or those of the services
    /// that an alias leads to. It keeps the results of dials of the service that it replaces.
    pub(super) fn build_service<'r>(
        &self,
        definition: &Arc<mesh::Service>,
        behind: &[(Arc<mesh::Service>, Option<u16>)],
        alias: Option<&Alias>,
        before: Option<&Arc<Service>>,
        ranking: impl Fn(u16) -> Ranking<'r>,
    ) -> Service {
        let before = before.filter(|before| before.namespace == definition.namespace);
        let used = behind.iter().filter(|(of, _)| self.balancing.drained_service(of).is_none());
        let parts: Vec<_> = used.map(|(of, port)| self.index.part(of, *port)).collect();
        let subset = alias.and_then(|alias| alias.subset.as_ref());
        let local = |port: u16, is_passthrough: bool| {
            let endpoints = parts.iter().flat_map(|part| {
                let members = part.members.iter();
                members.filter_map(move |member| self.endpoint(part, member, port, is_passthrough))
            });
            let mut endpoints: Vec<_> = endpoints.collect();
            if parts.len() > 1 {
                // A workload of several services is one endpoint. It is ready if it is ready for
                // any of them.
                endpoints.sort_by_key(|(one, ready)| (one.uid(), one.address, !ready));
                endpoints.dedup_by(|(one, _), (other, _)| Arc::ptr_eq(one, other));
            }
            endpoints.retain(|(one, _)| alias.is_none_or(|alias| alias.has(&one.definition)));
            Entries::local(endpoints.into_iter(), subset)
        };
        let set = |port, is_passthrough| {
            let set = ranking(port).build_set(local(port, is_passthrough));
            let earlier = before.and_then(|before| before.sets(is_passthrough).get(&port));
            Arc::new(set.with_health_of(earlier))
        };
        let own: HashMap<_, _> =
            definition.ports.keys().map(|port| (*port, set(*port, false))).collect();
        let remote = |port: u16| {
            let by_rules = ranking(port);
            let shares = self.shares(&parts, port, alias, &by_rules);
            if shares.is_empty() {
                return None;
            }
            let entries = local(port, false).with_networks(shares);
            let failover = (!by_rules.is_own_network_first()).then(|| {
                let first = ranking(port).with_own_network_first();
                Arc::new(first.build_set(entries.clone()).with_health_of(own.get(&port)))
            });
            let always = Arc::new(by_rules.build_set(entries).with_health_of(own.get(&port)));
            let failover = failover.unwrap_or_else(|| Arc::clone(&always));
            Some(TransitSets { failover, always })
        };
        let networks =
            parts.iter().flat_map(|part| self.index.remote.networks(&part.name, self.network()));
        let networks: BTreeSet<_> = networks.collect();
        Service {
            definition: Arc::clone(definition),
            drained: self.drained(behind).cloned(),
            passthrough_ports: if self.has_passthrough {
                own.keys().map(|port| (*port, set(*port, true))).collect()
            } else {
                HashMap::default()
            },
            transit_ports: if self.exposure.has_transit && !networks.is_empty() {
                own.keys().filter_map(|port| Some((*port, remote(*port)?))).collect()
            } else {
                HashMap::default()
            },
            ports: own,
            other_networks: networks.into_iter().collect(),
        }
    }

    /// Returns the order that drains the first of the services, if all are drained.
    fn drained(&self, behind: &[(Arc<mesh::Service>, Option<u16>)]) -> Option<&DrainTarget> {
        let drained = behind.iter().map(|(of, _)| self.balancing.drained_service(of));
        drained.reduce(|first, next| first.filter(|_| next.is_some())).flatten()
    }

    /// Returns the endpoints of a service port in other networks, in the region and the subset of
    /// an alias.
    fn shares(
        &self,
        parts: &[Behind<'_>],
        port: u16,
        alias: Option<&Alias>,
        ranking: &Ranking<'_>,
    ) -> Vec<NetworkShare> {
        let rules = (self.network(), self.mesh.hbone_only);
        let region = alias.and_then(|alias| alias.region.as_deref());
        let subset = alias.and_then(|alias| alias.subset.as_ref());
        let shares = parts.iter().flat_map(|part| {
            let service = (part.service, part.name.as_str());
            let service = (service, part.port.unwrap_or(port));
            let remote = &self.index.remote;
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

    /// Returns the endpoint of a member and whether it is ready. With `is_passthrough`, it is
    /// always dialled at its target port. Routing decides later between it and a waypoint.
    pub(super) fn endpoint<'a>(
        &self,
        part: &Behind<'_>,
        member: &'a Member,
        requested: u16,
        is_passthrough: bool,
    ) -> Option<(&'a Arc<Endpoint>, bool)> {
        let (port, workload) = (part.port.unwrap_or(requested), member.workload()?);
        let (target, is_ready) = served(part.service, workload, port).ok()?;
        let is_tunnelled = !self.mesh.hbone_only || speaks_hbone(workload, port, target);
        let tunnelled = || is_tunnelled.then(|| dialled_port(workload, target));
        let dialled = if is_passthrough { Some(target) } else { tunnelled() };
        let endpoint = member.endpoint(dialled.filter(|port| *port != 0)?)?;
        Some((endpoint, is_ready))
    }
}

/// Derived services.
impl Snapshot {
    /// Builds the derived service of an alias, or removes it if no target exists. If one target has
    /// a waypoint, tunnels to all targets go there, so that no waypoint is bypassed.
    pub(super) fn build_derived(&mut self, before: &Self, alias: &Alias) {
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
        let (network, balancing) = (&self.index.network, &self.balancing);
        let ranking = |port| {
            let ranking = Ranking::new(&definition, port, &alias.name.host, network, balancing);
            ranking.with_subset(alias.subset.as_ref())
        };
        // The results of dials of other targets say nothing.
        let host = alias.to.first().map_or("", |target| &target.host);
        let same = before.names.derived_aliases_for(host).iter().any(|one| {
            one.label == alias.label && one.to == alias.to && one.subset == alias.subset
        });
        let earlier = before.derived_services.get(&alias.label).filter(|_| same);
        let service = self.build_service(&definition, &behind, Some(alias), earlier, ranking);
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
