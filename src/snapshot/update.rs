//! Update of a snapshot to another mesh, configuration or load balancing.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use super::index::Index;
use super::mesh::Mesh;
use super::tiers::Ranking;
use super::waypoints::AffectedServices;
use super::{Shards, Snapshot};

/// Replaces the mesh of the snapshot. A change of the network, of HBONE-only dialling or of the
/// presence of TLS listeners rebuilds everything; endpoints keep their state and claims their age.
///
/// Returns true if open tunnels must be authorized again: other policies may select a workload, a
/// waypoint has lost an identity of its workloads since `before`, a service has other waypoints or
/// another visibility, a hostname is an alias of objects too, or a gateway of another network is
/// new or has another identity.
pub(super) fn apply(
    snapshot: &mut Snapshot,
    before: &Snapshot,
    mesh: Mesh,
    network: Arc<str>,
) -> bool {
    let index = &snapshot.index;
    let old_rules = (&index.network, index.hbone_only, index.has_passthrough, index.transit);
    let (hbone_only, has_passthrough) = (mesh.hbone_only, snapshot.has_passthrough);
    let networks = Arc::clone(&snapshot.networks);
    let transit = snapshot.exposure.has_transit();
    let mut previous = Index::default();
    let mut claims_before = None;
    if old_rules != (&network, hbone_only, has_passthrough, transit) || index.networks != networks {
        snapshot.mesh = Mesh::default();
        let services = mem::take(&mut snapshot.services);
        snapshot.derived_services = Shards::default();
        claims_before = Some((mem::take(&mut snapshot.vips), services));
        let index =
            Index { network, hbone_only, has_passthrough, networks, transit, ..Index::default() };
        previous = mem::replace(&mut snapshot.index, index);
    }
    let old = mem::replace(&mut snapshot.mesh, mesh);
    // The snapshot is written while the mesh is read, so this is a copy. It shares everything.
    let new = snapshot.mesh.clone();
    let joined = snapshot.index.join(&old, &new, &previous);
    let claimed = snapshot.index.claim(&old, &new, &previous, snapshot.version);
    let mut hosts = claimed.hosts.iter();
    let overrides = hosts.any(|host| snapshot.exposure.namespace_of_alias(host).is_some());
    // The owner of a family takes the family's other names away from other services, or releases
    // them.
    let families = claimed.hosts.iter().flat_map(|host| snapshot.family_of(host));
    let families = families.filter(|name| !snapshot.index.claims(name).is_empty());
    let mut reclaimed: BTreeSet<Cow<'_, str>> = families.map(Cow::Owned).collect();
    reclaimed.extend(claimed.hosts.into_iter().map(Cow::Borrowed));
    let mut touched = reclaimed.clone();
    touched.extend(joined.hosts.into_iter().map(Cow::Borrowed));
    let services = joined.remote.services.iter();
    let hosts = services.filter_map(|name| name.split_once('/'));
    touched.extend(hosts.map(|(_, host)| Cow::Borrowed(host)));
    let renamed = snapshot.refresh(before, touched.iter().map(|host| &**host));
    if let Some((vips, services)) = &claims_before {
        snapshot.restore_claim_ages(vips, services);
    }
    let touched = AffectedServices {
        all: claims_before.is_some(),
        has_waypoints: claimed.has_waypoints,
        hosts: reclaimed,
        lost_identity: joined.losers,
    };
    let lost = snapshot.apply_waypoint_changes(before, &touched);
    let gained = joined.reselected || joined.remote.has_new_gateway;
    gained || claimed.rerouted || overrides || renamed || lost
}

/// Recomputes the owners of hostnames and VIPs after a change of the configuration.
pub(super) fn reclaim(snapshot: &mut Snapshot, before: &Snapshot) {
    let is_other = |host: &&Arc<str>| {
        let now = snapshot.services.get(&***host).map(|of| &of.definition);
        now.map(Arc::as_ptr) != snapshot.answering(host).map(Arc::as_ptr)
    };
    let hosts = snapshot.index.claims.keys().filter(is_other).cloned();
    let hosts: Vec<_> = hosts.collect();
    snapshot.refresh(before, hosts.iter().map(|host| &**host));
    snapshot.rerank_contested_vips();
}

/// Rebuilds services of `before` whose load balancing differs. Services that are new in this
/// change are up to date already. Open tunnels continue.
pub(super) fn rebalance(snapshot: &mut Snapshot, before: &Snapshot) {
    let (new, old) = (Arc::clone(&snapshot.balancing), &before.balancing);
    if Arc::ptr_eq(&new, old) {
        return;
    }
    let hosts = before.services.keys();
    let hosts: Vec<_> = hosts
        .filter(|host| snapshot.services.contains_key(&***host) && new.differs(old, host))
        .cloned()
        .collect();
    for host in hosts {
        snapshot.rebuild(before, &host);
    }
    let names = Arc::clone(&snapshot.names);
    for alias in names.derived_aliases() {
        if new.differs(old, &alias.name.host) {
            snapshot.build_derived(before, alias);
        }
    }
}

impl Snapshot {
    /// Returns true if addresses of a network can be dialled.
    pub fn is_local(&self, network: &str) -> bool {
        network.is_empty() || *network == *self.index.network
    }

    /// Rebuilds these hostnames and the aliases of their services. Returns true if rules of a
    /// family may now hold for another of its services.
    fn refresh<'a>(&mut self, before: &Self, hosts: impl Iterator<Item = &'a str>) -> bool {
        let (mut aliases, mut renamed) = (BTreeMap::new(), false);
        for host in hosts {
            let was = self.services.contains_key(host);
            self.rebuild(before, host);
            self.update_exposed(host);
            if self.services.contains_key(host) != was {
                renamed |= self.moves_family_rules(host);
                self.update_exposed_family(host);
            }
            let derived = self.names.derived_aliases_for(host).iter();
            aliases.extend(derived.map(|alias| (Arc::clone(&alias.label), Arc::clone(alias))));
        }
        for alias in aliases.values() {
            self.build_derived(before, alias);
        }
        renamed
    }

    /// Rebuilds the service that owns a hostname.
    fn rebuild(&mut self, before: &Self, host: &str) {
        let service = self.answering(host).map(|from| {
            let (own, host) = ([(Arc::clone(from), None)], &from.hostname);
            let (network, balancing) = (&self.index.network, &self.balancing);
            let ranking = |port| Ranking::new(from, port, host, network, balancing);
            let before = before.services.get(&**host);
            Arc::new(self.index.service(from, &own, None, before, ranking))
        });
        let old = match &service {
            Some(new) => self.services.insert(Arc::clone(&new.hostname), Arc::clone(new)),
            None => self.services.remove(host),
        };
        let definitions = [&old, &service].map(|one| one.as_ref().map(|one| &one.definition));
        if definitions[0].map(Arc::as_ptr) == definitions[1].map(Arc::as_ptr) {
            return;
        }
        let namespaces = definitions.map(|one| one.map(|one| &*one.namespace));
        let is_same = namespaces[0] == namespaces[1];
        let [old, new] = definitions.map(|one| one.map(|one| self.index.vips(one)));
        let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
        for vip in old.union(&new) {
            self.update_vip_claim(*vip, host, new.contains(vip), is_same);
        }
    }
}
