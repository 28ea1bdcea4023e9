//! Workloads that are reached at their own addresses, where an exposure entry of their service says
//! so: only of those it is known what is at an address.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::lookup::{Found, Means};
use super::{Endpoint, Service, Shards, Snapshot};

/// The workloads of services whose entry opens them.
#[derive(Clone, Debug, Default)]
pub(super) struct Opened {
    /// By the hostname of their service.
    services: Shards<Arc<str>, Arc<BTreeSet<Place>>>,
    /// What is at each address of this network, in the order of the hostnames.
    addresses: Shards<IpAddr, Arc<[Served]>>,
}

/// The hostname of a service, and the uid of a workload of it.
type Served = (Arc<str>, Arc<str>);

/// An address of a workload, and its uid.
type Place = (IpAddr, Arc<str>);

impl Snapshot {
    /// What is at an address: each service port that a workload serves at `target` there.
    pub(super) fn at_address(&self, ip: IpAddr, target: u16) -> impl Iterator<Item = Found<'_>> {
        let places = self.index.opened.addresses.get(&ip).into_iter();
        let places = places.flat_map(|places| places.iter());
        places.flat_map(move |(host, uid)| self.at_target(host, uid, target))
    }

    fn at_target(&self, host: &str, uid: &str, target: u16) -> Vec<Found<'_>> {
        let found = self.services.get(host).zip(self.mesh.workloads.get(uid));
        let Some((service, workload)) = found else {
            return Vec::new();
        };
        let name = format!("{}/{}", service.namespace, service.hostname);
        let ports = workload.services.get(&*name).into_iter();
        let ports = ports.flat_map(|ports| ports.iter());
        let ports = ports.filter(|&(port, at)| *at == target && service.ports.contains_key(port));
        let found = |(port, _): (&u16, _)| Found {
            service,
            port: *port,
            means: Means::Workload(Arc::clone(workload)),
        };
        ports.map(found).collect()
    }

    /// The endpoint of one workload for a port of a service, if it may be dialled.
    pub(super) fn workload_endpoint(
        &self,
        service: &Service,
        uid: &str,
        port: u16,
        direct: bool,
    ) -> Option<Arc<Endpoint>> {
        let part = self.index.part(&service.definition, None);
        let place = part
            .members
            .binary_search_by(|member| member.uid().cmp(uid));
        let member = part.members.get(place.ok()?)?;
        let found = self.index.endpoint(&part, member, port, direct);
        let ready = found.filter(|(_, is_ready)| *is_ready);
        ready.map(|(endpoint, _)| Arc::clone(endpoint))
    }

    /// Looks anew at which workloads of a service are reached at their addresses.
    pub(super) fn open(&mut self, host: &str) {
        let opens = || {
            let entry = self.entry_of(host);
            let mut entries = self.exposure.entries(&entry).iter();
            entries.any(|entry| entry.workloads)
        };
        let service = self.services.get(host).filter(|_| opens()).cloned();
        let old = self.index.opened.services.get(host).cloned();
        if old.is_none() && service.is_none() {
            return;
        }
        let name = service.map(|of| format!("{}/{}", of.namespace, of.hostname));
        let members = name.map(|name| self.index.members_of(&name));
        let members = members.into_iter().flatten();
        let workloads = members.filter_map(|member| member.workload());
        // Nobody says which waypoint stands for an address: what has one is not gone past.
        let workloads = workloads.filter(|workload| !workload.has_waypoint);
        let new: BTreeSet<Place> = workloads
            .flat_map(|workload| {
                let addresses = workload.addresses.iter().map(IpAddr::to_canonical);
                addresses.map(|ip| (ip, Arc::clone(&workload.uid)))
            })
            .collect();
        let old = old.unwrap_or_default();
        let host: Arc<str> = host.into();
        for (ip, uid) in old.symmetric_difference(&new) {
            self.index
                .opened
                .note(*ip, (&host, uid), new.contains(&(*ip, Arc::clone(uid))));
        }
        match new.is_empty() {
            true => drop(self.index.opened.services.remove(&host)),
            false => drop(self.index.opened.services.insert(host, Arc::new(new))),
        }
    }

    /// The same for all services of a family, of which another has come or gone.
    pub(super) fn open_family(&mut self, host: &str) {
        let names = Arc::clone(&self.names);
        for name in names
            .stem(host)
            .into_iter()
            .flat_map(|stem| names.family(stem))
        {
            self.open(&name);
        }
    }

    /// The same for all services, after a change of the rules.
    pub(super) fn open_all(&mut self) {
        let mut hosts: BTreeSet<Arc<str>> = self.index.opened.services.keys().cloned().collect();
        let entries = self.exposure.hosts().filter(|host| {
            let mut entries = self.exposure.entries(host).iter();
            entries.any(|entry| entry.workloads)
        });
        // Which of its family it holds for is looked at for each.
        let family = entries.flat_map(|host| {
            let stem = self.names.stem(host).into_iter();
            let names = stem.flat_map(|stem| self.names.family(stem));
            names.chain([host.to_owned()])
        });
        hosts.extend(family.map(Arc::from));
        for host in hosts {
            self.open(&host);
        }
    }
}

impl Opened {
    /// Notes whether a workload of a service is at an address.
    fn note(&mut self, ip: IpAddr, (host, uid): (&Arc<str>, &Arc<str>), is_there: bool) {
        let old = self.addresses.get(&ip).into_iter();
        let old = old.flat_map(|places| places.iter());
        let others = old.filter(|(other, own)| (other, own) != (host, uid));
        let mut places: Vec<_> = others.cloned().collect();
        places.extend(is_there.then(|| (Arc::clone(host), Arc::clone(uid))));
        places.sort_unstable();
        match places.is_empty() {
            true => drop(self.addresses.remove(&ip)),
            false => drop(self.addresses.insert(ip, places.into())),
        }
    }
}
