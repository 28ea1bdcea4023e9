//! Workloads that peers may reach at their own addresses, because an exposure entry of their
//! service allows it: their lookup, and the update of their index. No other address of a workload
//! resolves.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::{LookupResult, MatchedBy};
use crate::snapshot::members::Member;
use crate::snapshot::{Endpoint, Service, Snapshot};

impl Snapshot {
    /// Returns each service port that a workload at an address serves at the port `target`.
    pub(in crate::snapshot) fn ports_at_address(
        &self,
        ip: IpAddr,
        target: u16,
    ) -> impl Iterator<Item = LookupResult<'_>> {
        let places = self.index.exposed_workloads.get(&ip).into_iter();
        let places = places.flat_map(|places| places.iter());
        places.flat_map(move |(host, uid)| self.ports_at_target(host, uid, target))
    }

    fn ports_at_target(&self, host: &str, uid: &str, target: u16) -> Vec<LookupResult<'_>> {
        let found = self.services.get(host).zip(self.mesh.workloads.get(uid));
        let Some((service, workload)) = found else {
            return Vec::new();
        };
        let name = service.key();
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
        let found = part.endpoint(member, port, self.dial_rules(), is_passthrough);
        found.filter(|(_, is_ready)| *is_ready).map(|(endpoint, _)| Arc::clone(endpoint))
    }

    /// Updates the addresses of the workloads of these services, of which each is complete, from
    /// those of `before`.
    pub(in crate::snapshot) fn update_exposed(
        &mut self,
        before: &Self,
        hosts: &BTreeSet<Cow<'_, str>>,
    ) {
        // After the start of a rebuild nothing is there.
        let is_empty = self.index.exposed_workloads.is_empty();
        for host in hosts {
            let new = self.exposed_addresses(host);
            let old = if is_empty { BTreeSet::new() } else { before.exposed_addresses(host) };
            for (ip, uid) in old.symmetric_difference(&new) {
                let place = (Arc::from(&**host), Arc::clone(uid));
                let known = self.index.exposed_workloads.get(ip).into_iter();
                let others = known.flat_map(|places| places.iter()).filter(|of| **of != place);
                let mut places: BTreeSet<_> = others.cloned().collect();
                if new.contains(&(*ip, Arc::clone(uid))) {
                    places.insert(place);
                }
                let places = (!places.is_empty()).then(|| places.into_iter().collect());
                self.index.exposed_workloads.set(*ip, places);
            }
        }
    }

    /// Returns the addresses at which workloads of a service are exposed, each with the uid of one.
    fn exposed_addresses(&self, host: &str) -> BTreeSet<(IpAddr, Arc<str>)> {
        let opens = || self.exposure_entries(host).iter().any(|entry| entry.workloads);
        let name = self.services.get(host).filter(|_| opens()).map(|of| of.key());
        let members = name.map(|name| self.index.members_of(&name)).into_iter().flatten();
        let workloads = members.map(Member::workload);
        // The waypoint of an address is unknown. A workload with one is left out, so that it is not
        // bypassed.
        let addresses = workloads.filter(|workload| !workload.has_waypoint).flat_map(|workload| {
            let addresses = workload.addresses.iter().map(IpAddr::to_canonical);
            addresses.map(|ip| (ip, Arc::clone(&workload.uid)))
        });
        addresses.collect()
    }

    /// Returns the services whose workloads entries may expose.
    pub(in crate::snapshot) fn hosts_with_exposed(&self) -> impl Iterator<Item = String> {
        let hosts = self.exposure.hosts().filter(|host| {
            let mut entries = self.exposure.entries(host).iter();
            entries.any(|entry| entry.workloads)
        });
        // An entry may hold for any service of its family.
        hosts.flat_map(|host| self.family_of(host).chain([host.to_owned()]))
    }
}
