//! Update of a snapshot to another mesh, configuration or load balancing.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use foldhash::HashMap;

use super::exclusion::workload_exclusion;
use super::index::{Edits, Index, same};
use super::members::Member;
use super::mesh::{Mesh, Place, Workload};
use super::remote_instances;
use super::{Shards, Snapshot};

/// Rebuilds what a change since `before` affects. The snapshot has its new mesh and rules already,
/// and `network` is the one whose endpoints are local. A change of the network, of other networks,
/// of HBONE-only dialling, of the presence of TLS listeners or of any transit rebuilds everything;
/// endpoints keep their state and claims their age.
///
/// Returns true if open tunnels must be authorized again: other policies may select a workload, a
/// waypoint has lost an identity of its workloads, a service has other waypoints or another
/// visibility, a hostname is an alias of objects too, rules of a family may hold for another of its
/// services, or a gateway of another network is new or has another identity.
pub(super) fn apply(next: &mut Snapshot, before: &Snapshot, network: Arc<str>) -> bool {
    let rules = |of: &Snapshot| (of.mesh.hbone_only, of.has_passthrough, of.exposure.has_transit);
    let is_rebuilt = *network != *before.network()
        || rules(next) != rules(before)
        || !Arc::ptr_eq(&next.networks, &before.networks);
    let (new, empty) = (next.mesh.clone(), Mesh::default());
    let mut old = &before.mesh;
    if is_rebuilt {
        next.services = Shards::default();
        next.derived_services = Shards::default();
        next.vips = Shards::default();
        next.index = Index { network, ..Index::default() };
        old = &empty;
    }
    let joined = next.join(before, old, &new);
    let claimed = next.index.claim(&before.index, (old, &new), next.version);
    let mut names = claimed.hosts.iter();
    let overrides = names.any(|host| next.exposure.namespace_of_alias(host).is_some());
    // The owner of a family takes the family's other names away from other services, or releases
    // them.
    let families = claimed.hosts.iter().flat_map(|host| next.family_of(host));
    let families = families.filter(|name| !next.index.claims(name).is_empty());
    let mut hosts: BTreeSet<Cow<'_, str>> = families.map(Cow::Owned).collect();
    hosts.extend(claimed.hosts.iter().map(|host| Cow::Borrowed(*host)));
    let joined_hosts = joined.services.iter().filter_map(|name| name.split_once('/'));
    hosts.extend(joined_hosts.map(|(_, host)| Cow::Borrowed(host)));
    hosts.extend(next.reconfigured(before));
    let renamed = next.refresh(before, &hosts);
    let hosts = hosts.iter().map(|host| &**host);
    let waypoints: Vec<Place> = if is_rebuilt {
        next.index.waypoints.keys().cloned().collect()
    } else {
        next.named_waypoints(before, hosts).collect()
    };
    if is_rebuilt || claimed.has_waypoints || !waypoints.is_empty() {
        next.hosts.reconsider();
    }
    let lost = next.has_lost_waypoint_identity(before, &waypoints);
    let gained = joined.reselected || joined.has_new_gateway;
    gained || claimed.rerouted || overrides || renamed || lost
}

/// Effects of a change of workloads.
struct Joined {
    /// Services, as `namespace/hostname`, whose endpoints may differ.
    services: BTreeSet<Arc<str>>,
    /// True if other policies may select a workload.
    reselected: bool,
    /// True if a gateway of another network is new, or has another identity or cluster.
    has_new_gateway: bool,
}

impl Snapshot {
    /// Joins workloads with the services that they name. Endpoints keep the states of `before`.
    fn join(&mut self, before: &Self, old: &Mesh, new: &Mesh) -> Joined {
        let network = Arc::clone(&self.index.network);
        let mut edits: HashMap<&Arc<str>, Edits<'_>> = HashMap::default();
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
    fn dialled(&self, workload: &Arc<Workload>, known: Option<&Member>) -> Option<Member> {
        let hbone_only = self.mesh.hbone_only && !self.has_passthrough;
        let is_excluded = workload_exclusion(workload, self.network(), hbone_only).is_some();
        let has_port = workload.services.values().any(|ports| !ports.is_empty());
        (has_port && !is_excluded).then(|| Member::new(workload, self.has_passthrough, known))
    }

    /// Returns true if addresses of a network can be dialled.
    pub fn is_local(&self, network: &str) -> bool {
        network.is_empty() || *network == *self.index.network
    }

    /// Returns whether aliases are others than in `before`.
    fn has_other_names(&self, before: &Self) -> bool {
        !Arc::ptr_eq(&self.names, &before.names)
    }

    /// Returns whether the rules about names or peers are others than in `before`.
    pub(super) fn has_other_exposure(&self, before: &Self) -> bool {
        self.has_other_names(before) || !Arc::ptr_eq(&self.exposure, &before.exposure)
    }

    /// Returns whether any service or alias may have other load balancing than in `before`.
    fn has_other_balancing(&self, before: &Self) -> bool {
        !Arc::ptr_eq(&self.balancing, &before.balancing)
    }

    /// Returns the hostnames of `before` to which another service answers by the configuration, and
    /// those that have other load balancing. The cost without such a change is constant.
    fn reconfigured<'a>(&self, before: &'a Self) -> impl Iterator<Item = Cow<'a, str>> {
        let is_reexposed = self.has_other_exposure(before);
        let is_any = is_reexposed || self.has_other_balancing(before);
        let hosts = is_any.then(|| before.index.claims.keys()).into_iter().flatten();
        let hosts = hosts.filter(move |host| {
            let has_other_owner = || {
                let now = self.services.get(&***host).map(|of| &of.definition);
                now.map(Arc::as_ptr) != self.answering(host).map(Arc::as_ptr)
            };
            self.balancing.differs(&before.balancing, host) || is_reexposed && has_other_owner()
        });
        hosts.map(|host| Cow::Borrowed(&**host))
    }

    /// Rebuilds these hostnames, the aliases of their services, and what depends on the rules as a
    /// whole, if these are others than in `before`. Returns true if rules of a family may now hold
    /// for another of its services.
    fn refresh(&mut self, before: &Self, hosts: &BTreeSet<Cow<'_, str>>) -> bool {
        let (mut renamed, mut exposed) = (false, hosts.clone());
        for host in hosts {
            let was = self.services.contains_key(&**host);
            self.rebuild(before, host);
            if self.services.contains_key(&**host) != was {
                renamed |= self.moves_family_rules(host);
                exposed.extend(self.family_of(host).map(Cow::Owned));
            }
        }
        let (names, has_other_names) = (Arc::clone(&self.names), self.has_other_names(before));
        if has_other_names {
            self.derived_services = Shards::default();
        }
        let is_any = has_other_names || self.has_other_balancing(before);
        let others = is_any.then(|| names.derived_aliases()).into_iter().flatten().filter(|of| {
            has_other_names || self.balancing.differs(&before.balancing, &of.name.host)
        });
        let of_hosts = hosts.iter().flat_map(|host| names.derived_aliases_for(host));
        let aliases: BTreeMap<_, _> =
            of_hosts.chain(others).map(|alias| (&alias.label, alias)).collect();
        for alias in aliases.values() {
            self.build_derived(before, alias);
        }
        if self.has_other_exposure(before) {
            self.rank_contested_vips(before);
        }
        if self.has_other_exposure(before) || !Arc::ptr_eq(&self.scope, &before.scope) {
            let all = [before, self].map(Self::hosts_with_exposed).into_iter().flatten();
            exposed.extend(all.map(Cow::Owned));
        }
        self.update_exposed(before, &exposed);
        renamed
    }

    /// Rebuilds the service that owns a hostname.
    fn rebuild(&mut self, before: &Self, host: &str) {
        let service = self.answering(host).map(|from| {
            let before = before.services.get(&*from.hostname);
            Arc::new(self.build_service(from, &[(Arc::clone(from), None)], None, before))
        });
        let old = match &service {
            Some(new) => self.services.insert(Arc::clone(&new.hostname), Arc::clone(new)),
            None => self.services.remove(host),
        };
        let definitions = [&old, &service].map(|one| one.as_ref().map(|one| &one.definition));
        if definitions[0].map(Arc::as_ptr) == definitions[1].map(Arc::as_ptr) {
            return;
        }
        let vips: BTreeSet<_> =
            definitions.into_iter().flatten().flat_map(|one| self.index.vips(one)).collect();
        for vip in vips {
            self.rank_vip_claims(before, vip, Some(host));
        }
    }
}
