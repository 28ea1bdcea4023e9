//! Incremental join of workloads, services and hostnames from one mesh to the next.
//!
//! Two meshes share all that has not changed. Workloads are joined with the services that they
//! name, and hostnames with the services that claim them. A change rebuilds only the joins that it
//! touches.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use super::endpoints::Entries;
use super::exclusion::{speaks_hbone, workload_exclusion};
use super::exposed_workloads::ExposedWorkloads;
use super::identities::{self, Identities};
use super::members::{Member, dialled_port, ports};
use super::mesh::{self, Mesh};
use super::networks::NetworkTable;
use super::precedence::claim::Claim;
use super::remote_instances::{self, NetworkShare, RemoteInstances};
use super::tiers::Ranking;
use super::waypoints::NamedWaypoints;
use super::{Alias, Endpoint, Service, Shards, TransitSets};

/// Joined state that the builder keeps for the next change.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Network whose endpoints are local.
    pub(super) network: Arc<str>,
    /// True if HBONE listeners skip endpoints without HBONE.
    pub(super) hbone_only: bool,
    /// True if TLS listeners need endpoints, too.
    pub(super) has_passthrough: bool,
    /// Workloads that can be dialled, by uid, for each `namespace/hostname` that they name.
    pub(super) members: Shards<Arc<str>, Members>,
    /// Services that claim each hostname.
    pub(super) claims: Shards<Arc<str>, Arc<[Claim]>>,
    /// Identities of the workloads of each service.
    pub(super) identities: Identities,
    /// Waypoints that services name.
    pub(super) waypoints: NamedWaypoints,
    /// Workloads that are reached at their addresses.
    pub(super) exposed_workloads: ExposedWorkloads,
    /// Instances and gateways of other networks.
    pub(super) remote: RemoteInstances,
    /// Configuration of other networks.
    pub(super) networks: Arc<NetworkTable>,
    /// True if some tunnel may leave the network, which takes sets with remote endpoints.
    pub(super) transit: bool,
}

type Members = Arc<[Member]>;

/// Services and workloads affected by a change of workloads.
pub(super) struct Joined<'a> {
    pub(super) hosts: BTreeSet<&'a str>,
    /// True if other policies may select a workload.
    pub(super) reselected: bool,
    /// Services that have lost an identity.
    pub(super) losers: Vec<Arc<str>>,
    /// Effects on other networks.
    pub(super) remote: remote_instances::Applied,
}

/// Hostnames affected by a change of services.
#[derive(Default)]
pub(super) struct Claimed<'a> {
    pub(super) hosts: BTreeSet<&'a str>,
    /// True if the waypoints or the visibility of a service changed. A service that reappears as
    /// private may have open tunnels.
    pub(super) rerouted: bool,
    /// True if one of the services has or had waypoints.
    pub(super) has_waypoints: bool,
}

/// Workloads of one template and of the same services that are added, changed or removed.
struct Pods<'a> {
    /// One of the workloads.
    like: &'a mesh::Workload,
    gone: Vec<&'a mesh::Workload>,
    /// Added or changed workloads, each with its previous version.
    come: Vec<(&'a Arc<mesh::Workload>, Option<&'a mesh::Workload>)>,
}

/// Service with its members, at one of its ports or at the requested one.
#[derive(Debug)]
pub(super) struct Behind<'a> {
    service: &'a mesh::Service,
    port: Option<u16>,
    /// `namespace/hostname`.
    name: String,
    /// Members by uid.
    pub(super) members: &'a [Member],
}

/// Members of a service that are added or changed, and uids of those that are removed.
type Edits<'a> = Vec<(&'a str, Option<Member>)>;

impl Index {
    /// Joins workloads with the services that they name. Endpoint states of workloads unknown to
    /// this index are taken from `previous`.
    pub(super) fn join<'a>(&mut self, old: &'a Mesh, new: &'a Mesh, previous: &Self) -> Joined<'a> {
        let (pods, reselected) = pods(old, new);
        let mut identities = identities::Edits::default();
        let mut edits: HashMap<&'a Arc<str>, Edits<'a>> = HashMap::new();
        let mut remote = remote_instances::Edits::default();
        for Pods { like, gone, come } in pods {
            gone.iter().for_each(|one| remote.remove(one, &self.network));
            come.iter().for_each(|(one, _)| remote.add(one, &self.network));
            identities.change(like, come.len(), gone.len());
            let ports = ports(like, self.has_passthrough);
            let come = come.into_iter().filter_map(|(workload, before)| {
                let address = self.dialled(workload).filter(|_| !ports.is_empty())?;
                let known = before.and_then(|before| self.member(before));
                let known = known.or_else(|| previous.member(workload));
                let member = Member::new(workload, address, &ports, known);
                Some((&*workload.uid, Some(member)))
            });
            let gone = gone.into_iter().map(|workload| (&*workload.uid, None));
            let changed: Vec<_> = gone.chain(come).collect();
            for service in like.services.keys() {
                edits.entry(service).or_default().extend_from_slice(&changed);
            }
        }
        let losers = self.identities.apply(identities);
        let earlier = (&previous.remote, &*self.network);
        let remote = self.remote.apply(remote, &self.networks, earlier);
        let mut hosts = BTreeSet::new();
        for (service, edits) in edits {
            if self.edit(service, edits) {
                hosts.extend(service.split_once('/').map(|(_, host)| host));
            }
        }
        Joined { hosts, reselected, losers, remote }
    }

    /// Returns the member for a workload, if it can be dialled.
    fn member(&self, workload: &mesh::Workload) -> Option<&Member> {
        let mut services = workload.services.keys();
        services.find_map(|service| {
            let members = self.members.get(service)?;
            let place = members.binary_search_by(|one| one.uid().cmp(&*workload.uid));
            members.get(place.ok()?)
        })
    }

    /// Returns the address of a workload if it can be dialled from our network.
    fn dialled(&self, workload: &mesh::Workload) -> Option<IpAddr> {
        let first = workload.addresses.first().map(IpAddr::to_canonical);
        let hbone_only = self.hbone_only && !self.has_passthrough;
        first.filter(|_| workload_exclusion(workload, &self.network, hbone_only).is_none())
    }

    /// Returns true if HBONE listeners dial a workload for a port of a service.
    fn tunnels_to(&self, workload: &mesh::Workload, port: u16, target: u16) -> bool {
        !self.hbone_only || speaks_hbone(workload, port, target)
    }

    /// Changes the members of a service. Returns false if nothing changed.
    fn edit(&mut self, service: &Arc<str>, mut edits: Edits<'_>) -> bool {
        // A changed member has two edits, its removal and its addition. The addition is kept.
        edits.sort_by_key(|(uid, member)| (*uid, member.is_none()));
        edits.dedup_by_key(|(uid, _)| *uid);
        let old: &[Member] = self.members.get(service).map_or(&[], |members| members);
        let mut members = Vec::with_capacity(old.len() + edits.len());
        let (mut rest, mut is_changed) = (old, false);
        for (uid, member) in edits {
            let found = rest.binary_search_by(|one| one.uid().cmp(uid));
            let (stay, after) = match found {
                Ok(place) => (&rest[..place], &rest[place + 1..]),
                Err(place) => rest.split_at(place),
            };
            is_changed |= found.is_ok() || member.is_some();
            members.extend_from_slice(stay);
            members.extend(member);
            rest = after;
        }
        members.extend_from_slice(rest);
        if is_changed {
            let members = (!members.is_empty()).then(|| members.into());
            self.members.set(Arc::clone(service), members);
        }
        is_changed
    }

    /// Updates the services that claim each hostname.
    pub(super) fn claim<'a>(
        &mut self,
        old: &'a Mesh,
        new: &'a Mesh,
        previous: &Self,
        version: u64,
    ) -> Claimed<'a> {
        let mut claimed = Claimed::default();
        for (name, before, after) in new.services.changes(&old.services, same) {
            claimed.rerouted |= after.is_some_and(|after| match before {
                Some(before) => {
                    before.waypoints != after.waypoints
                        || before.ingress_use_waypoint != after.ingress_use_waypoint
                        || before.private != after.private
                }
                None => after.private,
            });
            self.waypoints.update_counts(before, after);
            for service in [before, after].into_iter().flatten() {
                claimed.has_waypoints |= !service.waypoints.is_empty();
                let old = self.claims(&service.hostname).iter();
                let earlier = previous.claims(&service.hostname).iter();
                let mut known = old.clone().chain(earlier);
                let before = known.find(|claim| claim.name == *name);
                let since = before.map_or(version, |claim| claim.since);
                let others = old.filter(|claim| claim.name != *name);
                let mut claims: Vec<_> = others.cloned().collect();
                let stays = after.filter(|after| after.hostname == service.hostname);
                claims.extend(stays.map(|after| Claim {
                    name: Arc::clone(name),
                    service: Arc::clone(after),
                    since,
                }));
                let claims = (!claims.is_empty()).then(|| claims.into());
                self.claims.set(Arc::clone(&service.hostname), claims);
                claimed.hosts.insert(&*service.hostname);
            }
        }
        claimed
    }

    /// Returns the claims to a hostname.
    pub(super) fn claims(&self, host: &str) -> &[Claim] {
        self.claims.get(host).map_or(&[], |claims| claims)
    }

    /// Returns all claimed hostnames.
    pub(super) fn all_claimed(&self) -> impl Iterator<Item = &str> {
        self.claims.keys().map(|host| &**host)
    }

    /// Returns a service with the endpoints that may be dialled: its own, or those of the services
    /// that an alias leads to. It keeps the results of dials of the service that it replaces.
    pub(super) fn service<'r>(
        &self,
        definition: &Arc<mesh::Service>,
        behind: &[(Arc<mesh::Service>, Option<u16>)],
        alias: Option<&Alias>,
        before: Option<&Arc<Service>>,
        ranking: impl Fn(u16) -> Ranking<'r>,
    ) -> Service {
        let before = before.filter(|before| before.namespace == definition.namespace);
        let parts: Vec<_> = behind.iter().map(|(of, port)| self.part(of, *port)).collect();
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
            parts.iter().flat_map(|part| self.remote.networks(&part.name, &self.network));
        let networks: BTreeSet<_> = networks.collect();
        Service {
            name: Arc::clone(&definition.name),
            namespace: Arc::clone(&definition.namespace),
            hostname: Arc::clone(&definition.hostname),
            definition: Arc::clone(definition),
            passthrough_ports: if self.has_passthrough {
                own.keys().map(|port| (*port, set(*port, true))).collect()
            } else {
                HashMap::new()
            },
            transit_ports: if self.transit && !networks.is_empty() {
                own.keys().filter_map(|port| Some((*port, remote(*port)?))).collect()
            } else {
                HashMap::new()
            },
            ports: own,
            other_networks: networks.into_iter().collect(),
        }
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
        let rules = (&*self.network, self.hbone_only);
        let region = alias.and_then(|alias| alias.region.as_deref());
        let subset = alias.and_then(|alias| alias.subset.as_ref());
        let shares = parts.iter().flat_map(|part| {
            let service = (part.service, part.name.as_str());
            let service = (service, part.port.unwrap_or(port));
            let remote = &self.remote;
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

    /// Returns a service with its members, at one of its ports or at the requested one.
    pub(super) fn part<'a>(&'a self, service: &'a mesh::Service, port: Option<u16>) -> Behind<'a> {
        let name = format!("{}/{}", service.namespace, service.hostname);
        Behind { service, port, members: self.members_of(&name), name }
    }

    /// Returns the workloads of the service `namespace/hostname` that can be dialled, by uid.
    pub(super) fn members_of(&self, name: &str) -> &[Member] {
        let members = self.members.get(name);
        members.map_or(&[], |members| members)
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
        let port = part.port.unwrap_or(requested);
        member.serves(part.service, &part.name, port, |workload, target| {
            if is_passthrough {
                Some(target)
            } else {
                self.tunnels_to(workload, port, target).then(|| dialled_port(workload, target))
            }
        })
    }

    /// Returns the VIPs of a service in our network.
    pub(super) fn vips(&self, service: &mesh::Service) -> BTreeSet<IpAddr> {
        let here = |network: &str| network.is_empty() || *network == *self.network;
        let vips = service.vips.iter().filter(|(network, _)| here(network));
        vips.map(|(_, vip)| vip.to_canonical()).collect()
    }
}

/// Returns the changed workloads by template and services, and whether other policies may select
/// one of them.
fn pods<'a>(old: &'a Mesh, new: &'a Mesh) -> (Vec<Pods<'a>>, bool) {
    let mut reselected = false;
    let mut places = HashMap::new();
    let mut all: Vec<Pods<'a>> = Vec::new();
    let mut of = |workload: &'a mesh::Workload, see: &mut dyn FnMut(&mut Pods<'a>)| {
        let place = *places
            .entry((Arc::as_ptr(&workload.template), Arc::as_ptr(&workload.services.0)))
            .or_insert(all.len());
        if place == all.len() {
            all.push(Pods { like: workload, gone: Vec::new(), come: Vec::new() });
        }
        all.get_mut(place).map(see);
    };
    for (_, before, after) in new.workloads.changes(&old.workloads, same) {
        let before = before.map(|before| &**before);
        reselected |= after.is_some_and(|after| match before {
            Some(before) => {
                (&before.namespace, &before.policies) != (&after.namespace, &after.policies)
            }
            // A workload that was absent for a while may still have open tunnels.
            None => !after.policies.is_empty(),
        });
        if let Some(before) = before {
            of(before, &mut |pods| pods.gone.push(before));
        }
        if let Some(after) = after {
            of(after, &mut |pods| pods.come.push((after, before)));
        }
    }
    (all, reselected)
}

fn same<T: PartialEq>(one: &Arc<T>, other: &Arc<T>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}
