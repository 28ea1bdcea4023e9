//! Derived services: the services behind an alias with several targets, a region or a subset,
//! combined into one.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::exclusion::remote_network;
use super::tiers::Ranking;
use super::{Alias, Service, Snapshot, Subset, mesh};
use crate::config::HostPort;

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
        let mut same = before.names.derived_aliases_for(host).iter();
        let same = same.any(|one| {
            one.label == alias.label && one.to == alias.to && one.subset == alias.subset
        });
        let earlier = before.derived_services.get(&alias.label).filter(|_| same);
        let service = self.build_service(&definition, &behind, Some(alias), earlier, ranking);
        self.derived_services.insert(Arc::clone(&alias.label), Arc::new(service));
    }

    /// Returns whether a workload of a service in the own network, or all of its instances in
    /// another one, are in a subset, whatever is ready.
    pub fn has_subset(&self, service: &Service, subset: &Subset) -> bool {
        let name = format!("{}/{}", service.namespace, service.hostname);
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
