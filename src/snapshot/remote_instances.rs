//! Instances of services in other networks, and the gateways through which they are reached.
//!
//! A network weighs its ready instances, summed over all zones. Its weight is split evenly over
//! its ready gateways. Each instance thus gets the same share, however it is reached.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::exclusion::{is_split_horizon, remote_network, served, speaks_hbone};
use super::mesh::{self, GatewayAddress, Place, Workload};
use super::networks::NetworkTable;
use super::remote::gateway_network;
use super::remote_gateways::{ClustersBehind, Gateway, Rank, remote_gateway};
use super::{Endpoint, EndpointState, RemoteGateway, Shards, Subset};

/// Instances and gateways of other networks.
#[derive(Clone, Debug, Default)]
pub(super) struct RemoteInstances {
    pub(super) gateways: Shards<Arc<str>, Arc<[Gateway]>>,
    /// Instances by `namespace/hostname` of their service.
    pub(super) services: Shards<Arc<str>, Arc<Instances>>,
    /// Number of services behind each gateway of `services`, by address and form.
    counts: Shards<(SocketAddr, Arc<RemoteGateway>), usize>,
    /// Clusters of the instances behind each gateway, by network and address.
    pub(super) clusters: Shards<(Arc<str>, SocketAddr), Arc<ClustersBehind>>,
}

#[derive(Debug, Default)]
pub(super) struct Instances {
    pub(super) list: Box<[Arc<Workload>]>,
    behind: Behind,
}

/// Gateways in front of the instances of a service, by network and address.
type Behind = HashMap<(Arc<str>, SocketAddr), BehindGateway>;

#[derive(Debug)]
struct BehindGateway {
    remote: Arc<RemoteGateway>,
    /// State of the service behind the gateway.
    state: Arc<EndpointState>,
}

/// Instances of a service in one network.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) all: Vec<&'a Arc<Workload>>,
    /// Instances that serve the port, each with whether it is ready.
    pub(super) serving: Vec<(&'a Arc<Workload>, bool)>,
}

/// Added, changed or removed records, and the affected services.
#[derive(Debug, Default)]
pub(super) struct Edits<'a> {
    gateways: HashMap<Arc<str>, Changes<'a>>,
    services: HashMap<&'a Arc<str>, Changes<'a>>,
}

/// Result of [`RemoteInstances::apply`].
#[derive(Debug)]
pub(super) struct Applied {
    /// Services, as `namespace/hostname`, whose endpoints may differ.
    pub(super) services: BTreeSet<Arc<str>>,
    /// True if a gateway is new, or has another identity or cluster.
    pub(super) has_new_gateway: bool,
}

/// New version by uid; `None` for a removed workload.
pub(super) type Changes<'a> = BTreeMap<&'a str, Option<&'a Arc<Workload>>>;

/// Endpoints of a service port in one other network, for its instances of one rank.
#[derive(Debug)]
pub(super) struct NetworkShare {
    /// Endpoint of each ready gateway, whose weight is not set yet.
    pub(super) gateways: Vec<Endpoint>,
    /// Index of the part of a subset that all instances belong to.
    pub(super) part: Option<usize>,
    /// Capacity of ready instances.
    pub(super) ready: u32,
    /// Capacity of all instances.
    pub(super) all: u32,
}

impl<'a> Edits<'a> {
    /// Records a removed workload, or the previous version of a changed one.
    pub(super) fn remove(&mut self, workload: &'a Workload, own_network: &str) {
        self.each(workload, own_network, |changes| {
            changes.entry(&*workload.uid).or_insert(None);
        });
    }

    /// Records an added workload, or the new version of a changed one.
    pub(super) fn add(&mut self, workload: &'a Arc<Workload>, own_network: &str) {
        self.each(workload, own_network, |changes| {
            changes.insert(&*workload.uid, Some(workload));
        });
    }

    fn each(&mut self, of: &'a Workload, own_network: &str, edit: impl Fn(&mut Changes<'a>)) {
        if let Some(network) = gateway_network(of) {
            if *network != *own_network {
                edit(self.gateways.entry(network.into()).or_default());
            }
        } else if remote_network(of, own_network).is_some() {
            for service in of.services.keys() {
                edit(self.services.entry(service).or_default());
            }
        }
    }
}

impl RemoteInstances {
    /// Applies edits. States and gateways are compared with those of `before`.
    pub(super) fn apply(
        &mut self,
        edits: Edits<'_>,
        rules: &NetworkTable,
        (before, own_network): (&Self, &str),
    ) -> Applied {
        let mut has_new_gateway = false;
        let mut touched: BTreeSet<Arc<str>> = edits.services.keys().copied().cloned().collect();
        let mut gateways = edits.gateways;
        for network in self.count_clusters(&edits.services, own_network) {
            gateways.entry(network).or_default();
        }
        if !gateways.is_empty() {
            let is_behind = |one: &Arc<Workload>| {
                let network = remote_network(one, own_network);
                network.is_some_and(|network| gateways.contains_key(network))
            };
            let behind = self.services.iter().filter(|(_, of)| of.list.iter().any(is_behind));
            touched.extend(behind.map(|(name, _)| Arc::clone(name)));
        }
        for (network, changes) in gateways {
            has_new_gateway |= self.update_gateways(network, &changes, (rules, before));
        }
        let mut counted: HashMap<_, isize> = HashMap::new();
        for name in &touched {
            let old = self.services.get(name).cloned().unwrap_or_default();
            let none = Changes::new();
            let changes = edits.services.get(name).unwrap_or(&none);
            let list = merge(old.list.iter().cloned(), changes);
            let earlier = before.services.get(name);
            let known = |key: &(Arc<str>, SocketAddr)| {
                let known = earlier?.behind.get(key)?;
                Some(Arc::clone(&known.state))
            };
            let behind = self.behind(&list, rules, own_network, known);
            let list = list.into();
            let instances = Arc::new(Instances { list, behind });
            for (of, change) in [(&old, -1), (&instances, 1)] {
                for ((_, address), gateway) in &of.behind {
                    let key = (*address, Arc::clone(&gateway.remote));
                    *counted.entry(key).or_default() += change;
                }
            }
            let used = (!instances.list.is_empty()).then_some(instances);
            self.services.set(Arc::clone(name), used);
        }
        for (key, change) in counted.into_iter().filter(|(_, change)| *change != 0) {
            let count = self.counts.get(&key).copied().unwrap_or_default();
            let count = count.saturating_add_signed(change);
            self.counts.set(key, (count > 0).then_some(count));
        }
        Applied { services: touched, has_new_gateway }
    }

    /// Applies changes to the records of a network. Returns true if a gateway is new, or accepts
    /// other certificates.
    fn update_gateways(
        &mut self,
        network: Arc<str>,
        changes: &Changes<'_>,
        (rules, before): (&NetworkTable, &Self),
    ) -> bool {
        let old = self.gateways.get(&network).into_iter();
        let records = old.flat_map(|list| list.iter().flat_map(Gateway::records).cloned());
        let records = merge(records, changes).into_iter();
        let behind = |addresses: &[SocketAddr]| self.cluster_behind(&network, addresses);
        let list = records.flat_map(|record| Gateway::of_record(&record, &network, rules, behind));
        let list: Arc<[_]> = Gateway::join_families(list.collect()).into();
        let earlier = before.gateways.get(&network);
        let is_known = |new: &Gateway| {
            earlier.iter().flat_map(|list| list.iter()).any(|old| {
                let [old_of, new_of] = [&old.remote, &new.remote];
                old.has_address(new.address)
                    && (&old_of.cluster, &old_of.identities)
                        == (&new_of.cluster, &new_of.identities)
            })
        };
        let has_new = !list.iter().all(is_known);
        self.gateways.set(network, (!list.is_empty()).then_some(list));
        has_new
    }

    /// Returns the current form of a gateway. One without a record keeps what the configuration of
    /// its network does not say.
    pub(super) fn current(
        &self,
        known: &RemoteGateway,
        address: SocketAddr,
        rules: &NetworkTable,
    ) -> Arc<RemoteGateway> {
        if let Some(gateway) = self.recorded(&known.network, address) {
            return Arc::clone(&gateway.remote);
        }
        let mut now = remote_gateway(&known.network, (&known.cluster, None), rules);
        if now.identities.is_empty() {
            now.identities.clone_from(&known.identities);
        }
        Arc::new(now)
    }

    /// Returns whether a gateway is one of those with an address, in the same form.
    pub(super) fn contains(&self, known: &Arc<RemoteGateway>, address: SocketAddr) -> bool {
        match self.recorded(&known.network, address) {
            Some(gateway) => gateway.remote == *known,
            None => self.counts.contains_key(&(address, Arc::clone(known))),
        }
    }

    fn recorded(&self, network: &Arc<str>, address: SocketAddr) -> Option<&Gateway> {
        self.gateways.get(network)?.iter().find(|gateway| gateway.has_address(address))
    }

    fn behind(
        &self,
        instances: &[Arc<Workload>],
        rules: &NetworkTable,
        own_network: &str,
        known: impl Fn(&(Arc<str>, SocketAddr)) -> Option<Arc<EndpointState>>,
    ) -> Behind {
        let mut networks: BTreeMap<&str, Vec<&Arc<Workload>>> = BTreeMap::new();
        for one in instances {
            if let Some(network) = remote_network(one, own_network) {
                networks.entry(network).or_default().push(one);
            }
        }
        let gateways = networks.into_iter().flat_map(|(network, instances)| {
            let gateways = self.gateways(network, &instances, rules).into_iter();
            gateways.map(|gateway| (gateway.address, gateway.remote))
        });
        let behind = |(address, remote): (SocketAddr, Arc<RemoteGateway>)| {
            let key = (Arc::clone(&remote.network), address);
            let state = known(&key).unwrap_or_default();
            (key, BehindGateway { remote, state })
        };
        gateways.map(behind).collect()
    }

    /// Returns the gateways of a network that have an address: those with a record, then those
    /// that only its instances name.
    pub(super) fn gateways(
        &self,
        network: &str,
        instances: &[&Arc<Workload>],
        rules: &NetworkTable,
    ) -> Vec<Gateway> {
        let recorded = self.gateways.get(network);
        let mut gateways: Vec<_> = recorded.map_or_else(Vec::new, |list| list.to_vec());
        for one in instances {
            let Some((ip, port)) = address_of(one.network_gateway.as_deref()) else {
                continue;
            };
            let address = SocketAddr::new(ip, port);
            if !gateways.iter().any(|gateway| gateway.has_address(address)) {
                let behind = instances.iter().filter(|other| {
                    address_of(other.network_gateway.as_deref()) == Some((ip, port))
                });
                let cluster = common(behind.map(|one| &one.cluster));
                gateways.push(Gateway {
                    address,
                    record: None,
                    second_record: None,
                    remote: Arc::new(remote_gateway(network, (&cluster, None), rules)),
                });
            }
        }
        gateways.sort_by_key(|gateway| gateway.address);
        gateways.dedup_by_key(|gateway| gateway.address);
        gateways
    }

    /// Returns the other networks with instances of the service `namespace/hostname`.
    pub(super) fn networks(&self, name: &str, own_network: &str) -> BTreeSet<Arc<str>> {
        let instances = self.services.get(name).into_iter().flat_map(|of| of.list.iter());
        instances.filter_map(|one| remote_network(one, own_network)).map(Arc::from).collect()
    }

    /// Returns the endpoints of a port of a service in other networks, apart for each rank of
    /// instances. A network without a ready gateway has none, nor has one of which not all
    /// instances are in one part of the subset.
    pub(super) fn shares(
        &self,
        (service, port): ((&mesh::Service, &str), u16),
        rules: &NetworkTable,
        (own_network, hbone_only): (&str, bool),
        subset: Option<&Subset>,
        rank: impl for<'w> Fn(&'w Workload) -> Rank<'w>,
    ) -> Vec<NetworkShare> {
        let Some(known) = self.services.get(service.1) else {
            return Vec::new();
        };
        let networks = self.instances(service, port, (own_network, hbone_only));
        let shares = |(network, found): (&str, Found<'_>)| {
            let gateways = self.gateways(network, &found.all, rules);
            let cluster = common(gateways.iter().map(|gateway| &gateway.remote.cluster));
            let part = match subset {
                Some(subset) => Some(found.part_of(subset, &cluster)?),
                None => None,
            };
            let gateways = gateways.into_iter().filter(Gateway::is_ready).filter_map(|gateway| {
                let key = (Arc::clone(&gateway.remote.network), gateway.address);
                Some((known.behind.get(&key)?.state.clone(), gateway))
            });
            let gateways: Vec<_> = gateways.collect();
            let (ready_of_network, _) = capacity(&found.serving);
            let mut ranks: BTreeMap<Rank<'_>, Vec<_>> = BTreeMap::new();
            for one in found.serving {
                ranks.entry(rank(one.0)).or_default().push(one);
            }
            let share = move |(rank, instances): (Rank<'_>, Vec<(&Arc<Workload>, bool)>)| {
                let (ready, all) = capacity(&instances);
                let gateways = gateways.iter().map(|(state, gateway)| {
                    let instances = (&*instances, ready_of_network);
                    gateway.endpoint(service, port, rank, instances, Arc::clone(state))
                });
                let gateways: Vec<_> = gateways.collect();
                (all > 0 && !gateways.is_empty()).then_some(NetworkShare {
                    gateways,
                    part,
                    ready,
                    all,
                })
            };
            Some(ranks.into_iter().filter_map(share).collect::<Vec<_>>())
        };
        networks.into_iter().filter_map(shares).flatten().collect()
    }

    /// Returns whether all instances that serve a port in one other network are in one part of a
    /// subset, whatever is ready. Gateways without an address are what the configuration of their
    /// network says.
    pub(super) fn has_part(
        &self,
        service: (&mesh::Service, &str),
        port: u16,
        rules: &NetworkTable,
        network: (&str, bool),
        subset: &Subset,
    ) -> bool {
        let networks = self.instances(service, port, network);
        networks.into_iter().any(|(network, found)| {
            let gateways = self.gateways(network, &found.all, rules);
            let configured = remote_gateway(network, (&Arc::default(), None), rules);
            let cluster = match &gateways[..] {
                [] => configured.cluster,
                gateways => common(gateways.iter().map(|gateway| &gateway.remote.cluster)),
            };
            !found.serving.is_empty() && found.part_of(subset, &cluster).is_some()
        })
    }

    /// Returns all gateways that have an address, with or without a record.
    pub(super) fn known_gateways(&self) -> BTreeMap<(SocketAddr, Arc<str>), Arc<RemoteGateway>> {
        let mut known = BTreeMap::new();
        for gateway in self.gateways.values().flat_map(|list| list.iter()) {
            let key = (gateway.address, Arc::clone(&gateway.remote.network));
            known.entry(key).or_insert_with(|| Arc::clone(&gateway.remote));
        }
        for (address, gateway) in self.counts.keys() {
            let key = (*address, Arc::clone(&gateway.network));
            known.entry(key).or_insert_with(|| Arc::clone(gateway));
        }
        known
    }

    pub(super) fn record(
        &self,
        gateway: &RemoteGateway,
        address: SocketAddr,
    ) -> Option<&Arc<Workload>> {
        let list = self.gateways.get(&gateway.network)?;
        list.iter().find(|one| one.address == address)?.record.as_ref()
    }

    /// Asserts that each gateway has the number of services behind it.
    #[cfg(test)]
    pub(super) fn assert_counts(&self) {
        let mut counts = HashMap::new();
        for ((_, address), of) in self.services.values().flat_map(|of| &of.behind) {
            *counts.entry((*address, Arc::clone(&of.remote))).or_insert(0) += 1;
        }
        let kept: HashMap<_, _> =
            self.counts.iter().map(|(key, count)| (key.clone(), *count)).collect();
        assert_eq!(kept, counts);
        self.assert_clusters();
    }

    pub(super) fn instances(
        &self,
        (service, name): (&mesh::Service, &str),
        port: u16,
        (own_network, hbone_only): (&str, bool),
    ) -> BTreeMap<&str, Found<'_>> {
        let mut networks: BTreeMap<&str, Found<'_>> = BTreeMap::new();
        let known = self.services.get(name).into_iter();
        for one in known.flat_map(|of| of.list.iter()) {
            let Some(network) = remote_network(one, own_network) else {
                continue;
            };
            let found = networks.entry(network).or_default();
            found.all.push(one);
            if let Ok((target, is_ready)) = served(service, one, port)
                && (!hbone_only || speaks_hbone(one, port, target))
            {
                found.serving.push((one, is_ready));
            }
        }
        networks
    }

    /// Returns whether an identity is that of a gateway of another network.
    pub(super) fn has_identity(&self, principal: &str) -> bool {
        self.gateways.iter().flat_map(|(_, list)| list.iter()).any(|gateway| {
            gateway.remote.identities.iter().any(|identity| **identity == *principal)
        })
    }
}

impl Found<'_> {
    /// Returns the index of the part of a subset that all instances that serve the port are in.
    fn part_of(&self, subset: &Subset, cluster: &str) -> Option<usize> {
        let instances = self.serving.iter().map(|(one, _)| &***one);
        subset.part_of_network(instances, cluster)
    }
}

fn merge<'a>(
    old: impl Iterator<Item = Arc<Workload>>,
    changes: &Changes<'a>,
) -> Vec<Arc<Workload>> {
    let old = old.map(|one| (Arc::clone(&one.uid), one));
    let mut all: BTreeMap<Arc<str>, Arc<Workload>> = old.collect();
    for (uid, change) in changes {
        match change {
            Some(one) => drop(all.insert(Arc::clone(&one.uid), Arc::clone(one))),
            None => drop(all.remove(*uid)),
        }
    }
    all.into_values().collect()
}

pub(super) fn address_of(gateway: Option<&GatewayAddress>) -> Option<(IpAddr, u16)> {
    match gateway {
        Some(GatewayAddress { place: Place::Address(_, ip), port }) => {
            Some((ip.to_canonical(), *port))
        }
        _ => None,
    }
}

/// Returns the cluster that all have; empty if it is unknown or not the same.
pub(super) fn common<'a>(mut clusters: impl Iterator<Item = &'a Arc<str>>) -> Arc<str> {
    let first = clusters.next().cloned().unwrap_or_default();
    if clusters.all(|other| *other == first) { first } else { Arc::default() }
}

/// Returns the capacity of the ready instances and of all. A split-horizon record stands for all
/// instances that are reached through its gateway: it adds nothing to instances that are known
/// one by one, or to the record of another gateway of the network.
pub(super) fn capacity(instances: &[(&Arc<Workload>, bool)]) -> (u32, u32) {
    let add = |sum: &mut (u32, u32), (one, is_ready): &(&Arc<Workload>, bool)| {
        let ready = if *is_ready { one.capacity } else { 0 };
        *sum = (sum.0.saturating_add(ready), sum.1.saturating_add(one.capacity));
    };
    let (records, single): (Vec<_>, Vec<_>) =
        instances.iter().partition(|(one, _)| is_split_horizon(one));
    let mut sum = (0, 0);
    single.iter().for_each(|one| add(&mut sum, one));
    let mut by_gateway: HashMap<Option<&GatewayAddress>, (u32, u32)> = HashMap::new();
    for record in &records {
        let gateway = record.0.network_gateway.as_deref();
        add(by_gateway.entry(gateway).or_default(), record);
    }
    if single.is_empty() { by_gateway.into_values().max().unwrap_or_default() } else { sum }
}
