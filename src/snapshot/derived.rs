//! What stands for an alias of several services, or of a region, as a service does for its name.

use std::sync::Arc;

use super::tiers::Ranking;
use super::{Alias, Shards, Snapshot, mesh};

impl Snapshot {
    /// Builds what stands for an alias of several services, or of a region, if any is there.
    /// Where one of them has a waypoint, tunnels to all go there: none is gone past.
    pub(super) fn derive(&mut self, alias: &Alias) {
        let behind = alias.targets().iter().filter_map(|(host, port)| {
            let service = self.called(host)?;
            Some((Arc::clone(&service.definition), *port))
        });
        let behind: Vec<_> = behind.collect();
        let Some((first, _)) = behind.first() else {
            self.derived.remove(alias.label());
            return;
        };
        let all = || behind.iter().map(|(service, _)| service);
        let asked = |(service, port): &(Arc<mesh::Service>, Option<u16>)| {
            let (ports, meant) = (service.ports.keys().copied(), port.or(alias.asked()));
            let is_meant = |own: &u16| meant.is_none_or(|port| port == *own);
            let ports: Vec<_> = ports.filter(is_meant).collect();
            ports
                .into_iter()
                .map(|own| (alias.asked().unwrap_or(own), own))
        };
        // Their places are those of one service.
        let only = behind.iter().filter(|_| behind.len() == 1);
        let assignments = only.flat_map(|one| asked(one).map(move |(port, own)| (port, own, one)));
        let assignments = assignments.filter_map(|(port, own, (service, _))| {
            Some((port, Arc::clone(service.assignments.get(&own)?)))
        });
        let definition = Arc::new(mesh::Service {
            name: Arc::clone(alias.label()),
            hostname: Arc::clone(alias.label()),
            vips: Vec::new(),
            assignments: assignments.collect(),
            ports: behind
                .iter()
                .flat_map(asked)
                .map(|(port, _)| (port, 0))
                .collect(),
            waypoints: all()
                .flat_map(|service| service.waypoints.clone())
                .collect(),
            ingress_use_waypoint: all().any(|service| service.ingress_use_waypoint),
            ..mesh::Service::clone(first)
        });
        let (network, balancing) = (&self.index.network, &self.balancing);
        let ranking = |port| Ranking::new((&definition, port), alias.host(), network, balancing);
        let region = alias.region();
        let service = self.index.service(&definition, &behind, region, ranking);
        self.derived
            .insert(Arc::clone(alias.label()), Arc::new(service));
    }

    /// Builds anew what stands for aliases.
    pub(super) fn derive_all(&mut self) {
        self.derived = Shards::default();
        let names = Arc::clone(&self.names);
        for alias in names.all_derived() {
            self.derive(alias);
        }
    }
}
