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
use super::members::{Member, dialled_port, ports};
use super::mesh::{self, Mesh, Place};
use super::precedence::claim::Claim;
use super::remote_instances::{self, NetworkShare, RemoteInstances};
use super::tiers::Ranking;
use super::{Alias, Endpoint, Service, Shards, Snapshot, TransitSets};

/// Joined state that the builder keeps for the next change.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Network whose endpoints are local.
    pub(super) network: Arc<str>,
    /// Workloads that can be dialled, by uid, for each `namespace/hostname` that they name.
    pub(super) members: Shards<Arc<str>, Members>,
    /// Services that claim each hostname.
    pub(super) claims: Shards<Arc<str>, Arc<[Claim]>>,
    /// Places of the waypoints that services name, each with the number of these services.
    pub(super) waypoints: Shards<Place, usize>,
    /// Workloads that are reached at their addresses.
    pub(super) exposed_workloads: ExposedWorkloads,
    /// Instances and gateways of other networks.
    pub(super) remote: RemoteInstances,
}

type Members = Arc<[Member]>;

/// Effects of a change of workloads.
pub(super) struct Joined {
    /// Services, as `namespace/hostname`, whose endpoints may differ.
    pub(super) services: BTreeSet<Arc<str>>,
    /// True if other policies may select a workload.
    pub(super) reselected: bool,
    /// True if a gateway of another network is new, or has another identity or cluster.
    pub(super) has_new_gateway: bool,
}

/// Effects of a change of services.
#[derive(Default)]
pub(super) struct Claimed<'a> {
    /// Hostnames that another service may now answer to.
    pub(super) hosts: BTreeSet<&'a str>,
    /// True if the waypoints or the visibility of a service changed. A service that reappears as
    /// private may have open tunnels.
    pub(super) rerouted: bool,
    /// True if one of the services has or had waypoints.
    pub(super) has_waypoints: bool,
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

/// Changes of the index.
impl Snapshot {
    /// Joins workloads with the services that they name. Endpoints keep the states of `before`.
    pub(super) fn join(&mut self, before: &Self, old: &Mesh, new: &Mesh) -> Joined {
        let network = Arc::clone(&self.index.network);
        let mut edits: HashMap<&Arc<str>, Edits<'_>> = HashMap::new();
        let mut remote = remote_instances::Edits::default();
        let mut reselected = false;
        for (uid, then, now) in new.workloads.changes(&old.workloads, same) {
            if let Some(then) = then {
                remote.remove(then, &network);
                for service in then.services.keys() {
                    edits.entry(service).or_default().push((uid, None));
                }
            }
            let Some(now) = now else { continue };
            reselected |= match then {
                Some(then) => (&then.namespace, &then.policies) != (&now.namespace, &now.policies),
                // A workload that was absent for a while may still have open tunnels.
                None => !now.policies.is_empty(),
            };
            remote.add(now, &network);
            let Some(member) = self.dialled(now, before.index.member(then.unwrap_or(now))) else {
                continue;
            };
            for service in now.services.keys() {
                edits.entry(service).or_default().push((uid, Some(member.clone())));
            }
        }
        let earlier = (&before.index.remote, &*network);
        let remote = self.index.remote.apply(remote, &self.networks, earlier);
        let mut services = remote.services;
        for (service, edits) in edits {
            if self.index.edit(service, edits) {
                services.insert(Arc::clone(service));
            }
        }
        Joined { services, reselected, has_new_gateway: remote.has_new_gateway }
    }

    /// Returns the member for a workload, if it can be dialled from our network. `known` is its
    /// previous version.
    fn dialled(&self, workload: &Arc<mesh::Workload>, known: Option<&Member>) -> Option<Member> {
        let address = workload.addresses.first().map(IpAddr::to_canonical)?;
        let hbone_only = self.mesh.hbone_only && !self.has_passthrough;
        if workload_exclusion(workload, self.network(), hbone_only).is_some() {
            return None;
        }
        let ports = ports(workload, self.has_passthrough);
        (!ports.is_empty()).then(|| Member::new(workload, address, &ports, known))
    }
}

impl Index {
    /// Returns the member for a workload, if it can be dialled.
    fn member(&self, workload: &mesh::Workload) -> Option<&Member> {
        let mut services = workload.services.keys();
        services.find_map(|service| {
            let members = self.members.get(service)?;
            let place = members.binary_search_by(|one| one.uid().cmp(&*workload.uid));
            members.get(place.ok()?)
        })
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

    /// Updates the services that claim each hostname. Claims of the index `before` keep their age.
    pub(super) fn claim<'a>(
        &mut self,
        before: &Self,
        (old, new): (&'a Mesh, &'a Mesh),
        version: u64,
    ) -> Claimed<'a> {
        let mut claimed = Claimed::default();
        for (name, then, now) in new.services.changes(&old.services, same) {
            claimed.rerouted |= now.is_some_and(|now| match then {
                Some(then) => {
                    then.waypoints != now.waypoints
                        || then.ingress_use_waypoint != now.ingress_use_waypoint
                        || then.private != now.private
                }
                None => now.private,
            });
            for (service, is_now) in [(now, true), (then, false)] {
                self.count_waypoints(service, is_now);
            }
            for service in [then, now].into_iter().flatten() {
                claimed.has_waypoints |= !service.waypoints.is_empty();
                let mut known = before.claims(&service.hostname).iter();
                let known = known.find(|claim| claim.name == *name);
                let since = known.map_or(version, |claim| claim.since);
                let others = self.claims(&service.hostname).iter();
                let mut claims: Vec<_> =
                    others.filter(|claim| claim.name != *name).cloned().collect();
                let stays = now.filter(|now| now.hostname == service.hostname);
                claims.extend(stays.map(|now| Claim {
                    name: Arc::clone(name),
                    service: Arc::clone(now),
                    since,
                }));
                let claims = (!claims.is_empty()).then(|| claims.into());
                self.claims.set(Arc::clone(&service.hostname), claims);
                claimed.hosts.insert(&*service.hostname);
            }
        }
        claimed
    }

    /// Counts the waypoints of a service that is added, or no longer those of one that is removed.
    fn count_waypoints(&mut self, service: Option<&Arc<mesh::Service>>, is_added: bool) {
        for waypoint in service.into_iter().flat_map(|of| &of.waypoints) {
            let place = waypoint.gateway.place.canonical();
            let count = self.waypoints.get(&place).copied().unwrap_or(0);
            let count = if is_added { count + 1 } else { count.saturating_sub(1) };
            self.waypoints.set(place, (count > 0).then_some(count));
        }
    }

    /// Returns the claims to a hostname.
    pub(super) fn claims(&self, host: &str) -> &[Claim] {
        self.claims.get(host).map_or(&[], |claims| claims)
    }

    /// Returns all claimed hostnames.
    pub(super) fn all_claimed(&self) -> impl Iterator<Item = &str> {
        self.claims.keys().map(|host| &**host)
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

    /// Returns the VIPs of a service in our network.
    pub(super) fn vips(&self, service: &mesh::Service) -> BTreeSet<IpAddr> {
        let here = |network: &str| network.is_empty() || *network == *self.network;
        let vips = service.vips.iter().filter(|(network, _)| here(network));
        vips.map(|(_, vip)| vip.to_canonical()).collect()
    }
}

/// Services with their endpoints.
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
        let parts: Vec<_> = behind.iter().map(|(of, port)| self.index.part(of, *port)).collect();
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
            name: Arc::clone(&definition.name),
            namespace: Arc::clone(&definition.namespace),
            hostname: Arc::clone(&definition.hostname),
            definition: Arc::clone(definition),
            passthrough_ports: if self.has_passthrough {
                own.keys().map(|port| (*port, set(*port, true))).collect()
            } else {
                HashMap::new()
            },
            transit_ports: if self.exposure.has_transit() && !networks.is_empty() {
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
        let port = part.port.unwrap_or(requested);
        member.serves(part.service, &part.name, port, |workload, target| {
            if is_passthrough {
                Some(target)
            } else {
                let is_dialled = !self.mesh.hbone_only || speaks_hbone(workload, port, target);
                is_dialled.then(|| dialled_port(workload, target))
            }
        })
    }
}

fn same<T: PartialEq>(one: &Arc<T>, other: &Arc<T>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}
