//! Incremental join of workloads, services and hostnames from one mesh to the next.
//!
//! Two meshes share all that has not changed. Workloads are joined with the services that they
//! name, and hostnames with the services that claim them. A change rebuilds only the joins that it
//! touches.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::Shards;
use super::members::Member;
use super::mesh::{self, Mesh, Place};
use super::precedence::claim::Claim;
use super::remote_instances::RemoteInstances;
use super::service::Behind;

/// Joined state that the builder keeps for the next change.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Network whose endpoints are local.
    pub(super) network: Arc<str>,
    /// Workloads that can be dialled, by uid, for each `namespace/hostname` that they name.
    pub(super) members: Shards<Arc<str>, Members>,
    pub(super) claims: Shards<Arc<str>, Arc<[Claim]>>,
    /// Places of the waypoints that services name, each with the number of these services.
    pub(super) waypoints: Shards<Place, usize>,
    /// Services and workloads that are exposed at each address of this network, in order.
    pub(super) exposed_workloads: Shards<IpAddr, Arc<[ServiceWorkload]>>,
    /// Instances and gateways of other networks.
    pub(super) remote: RemoteInstances,
}

type Members = Arc<[Member]>;

/// Hostname of a service, and uid of one of its workloads.
type ServiceWorkload = (Arc<str>, Arc<str>);

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

/// Members of a service that are added or changed, and uids of those that are removed.
pub(super) type Edits<'a> = Vec<(&'a str, Option<Member>)>;

impl Index {
    pub(super) fn member(&self, workload: &mesh::Workload) -> Option<&Member> {
        workload.services.keys().find_map(|service| {
            let members = self.members.get(service)?;
            let place = members.binary_search_by(|one| one.uid().cmp(&*workload.uid));
            members.get(place.ok()?)
        })
    }

    /// Changes the members of a service. Returns false if nothing changed.
    pub(super) fn edit(&mut self, service: &Arc<str>, mut edits: Edits<'_>) -> bool {
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

    pub(super) fn claims(&self, host: &str) -> &[Claim] {
        self.claims.get(host).map_or(&[], |claims| claims)
    }

    pub(super) fn all_claimed(&self) -> impl Iterator<Item = &str> {
        self.claims.keys().map(|host| &**host)
    }

    /// Returns a service with its members, at one of its ports or at the requested one.
    pub(super) fn part(&self, service: &Arc<mesh::Service>, port: Option<u16>) -> Behind {
        let members = self.members.get(&*service.key()).cloned().unwrap_or_default();
        Behind { service: Arc::clone(service), port, members }
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

pub(super) fn same<T: PartialEq>(one: &Arc<T>, other: &Arc<T>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}
