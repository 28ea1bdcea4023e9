//! Lookup of exposed workloads by their addresses, and the update of their index.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::{LookupResult, MatchedBy};
use crate::snapshot::exposed_workloads::WorkloadAddress;
use crate::snapshot::{Endpoint, Service, Snapshot};

impl Snapshot {
    /// Returns each service port that a workload at an address serves at the port `target`.
    pub(in crate::snapshot) fn ports_at_address(
        &self,
        ip: IpAddr,
        target: u16,
    ) -> impl Iterator<Item = LookupResult<'_>> {
        let places = self.index.exposed_workloads.addresses.get(&ip).into_iter();
        let places = places.flat_map(|places| places.iter());
        places.flat_map(move |(host, uid)| self.ports_at_target(host, uid, target))
    }

    fn ports_at_target(&self, host: &str, uid: &str, target: u16) -> Vec<LookupResult<'_>> {
        let found = self.services.get(host).zip(self.mesh.workloads.get(uid));
        let Some((service, workload)) = found else {
            return Vec::new();
        };
        let name = format!("{}/{}", service.namespace, service.hostname);
        let ports = workload.services.get(&*name).into_iter();
        let ports = ports.flat_map(|ports| ports.iter());
        let ports = ports.filter(|&(port, at)| *at == target && service.ports.contains_key(port));
        let found = |(port, _): (&u16, _)| LookupResult {
            service,
            port: *port,
            matched_by: MatchedBy::Workload(Arc::clone(workload)),
        };
        ports.map(found).collect()
    }

    /// Returns the endpoint of one workload for a port of a service, if it may be dialled.
    pub(in crate::snapshot) fn workload_endpoint(
        &self,
        service: &Service,
        uid: &str,
        port: u16,
        is_passthrough: bool,
    ) -> Option<Arc<Endpoint>> {
        let part = self.index.part(&service.definition, None);
        let place = part.members.binary_search_by(|member| member.uid().cmp(uid));
        let member = part.members.get(place.ok()?)?;
        let found = self.endpoint(&part, member, port, is_passthrough);
        let ready = found.filter(|(_, is_ready)| *is_ready);
        ready.map(|(endpoint, _)| Arc::clone(endpoint))
    }

    /// Updates the exposed workloads of a service.
    pub(in crate::snapshot) fn update_exposed(&mut self, host: &str) {
        let opens = || {
            let entry = self.exposure_host(host);
            let mut entries = self.exposure.entries(&entry).iter();
            entries.any(|entry| entry.workloads)
        };
        let service = self.services.get(host).filter(|_| opens()).cloned();
        let old = self.index.exposed_workloads.services.get(host).cloned();
        if old.is_none() && service.is_none() {
            return;
        }
        let name = service.map(|of| format!("{}/{}", of.namespace, of.hostname));
        let members = name.map(|name| self.index.members_of(&name));
        let members = members.into_iter().flatten();
        let workloads = members.filter_map(|member| member.workload());
        // The waypoint of an address is unknown. A workload with one is left out, so that it is not
        // bypassed.
        let workloads = workloads.filter(|workload| !workload.has_waypoint);
        let new: BTreeSet<WorkloadAddress> = workloads
            .flat_map(|workload| {
                let addresses = workload.addresses.iter().map(IpAddr::to_canonical);
                addresses.map(|ip| (ip, Arc::clone(&workload.uid)))
            })
            .collect();
        let old = old.unwrap_or_default();
        let host: Arc<str> = host.into();
        for (ip, uid) in old.symmetric_difference(&new) {
            self.index.exposed_workloads.set_served(
                *ip,
                &host,
                uid,
                new.contains(&(*ip, Arc::clone(uid))),
            );
        }
        let new = (!new.is_empty()).then(|| Arc::new(new));
        self.index.exposed_workloads.services.set(host, new);
    }

    /// Updates the exposed workloads of all services of a family, after one was added or removed.
    pub(in crate::snapshot) fn update_exposed_family(&mut self, host: &str) {
        let names = Arc::clone(&self.names);
        for name in names.stem(host).into_iter().flat_map(|stem| names.family(stem)) {
            self.update_exposed(&name);
        }
    }

    /// Updates the exposed workloads of all services, after a change of the rules.
    pub(in crate::snapshot) fn update_all_exposed(&mut self) {
        let mut hosts: BTreeSet<Arc<str>> =
            self.index.exposed_workloads.services.keys().cloned().collect();
        let entries = self.exposure.hosts().filter(|host| {
            let mut entries = self.exposure.entries(host).iter();
            entries.any(|entry| entry.workloads)
        });
        // An entry may hold for any service of its family, so each one is evaluated.
        let family = entries.flat_map(|host| {
            let stem = self.names.stem(host).into_iter();
            let names = stem.flat_map(|stem| self.names.family(stem));
            names.chain([host.to_owned()])
        });
        hosts.extend(family.map(Arc::from));
        for host in hosts {
            self.update_exposed(&host);
        }
    }
}
