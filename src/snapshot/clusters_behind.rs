//! Clusters of the split-horizon records behind each gateway. They say the cluster of a gateway
//! whose record names none, as those of istiod.
//!
//! Other workloads of a remote network do not count. A tenant can write a WorkloadEntry with any
//! `network`, and istiod gives it the cluster of its object and the gateway of that network.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use super::exclusion::{is_split_horizon, remote_network};
use super::mesh::Workload;
use super::remote::UNNAMED_CLUSTER;
use super::remote_gateways::{ClustersBehind, Gateway};
use super::remote_instances::{Changes, RemoteInstances, address_of, common};

impl RemoteInstances {
    /// Counts the clusters of the split-horizon records of changed services. Returns the networks
    /// with a record of a gateway whose cluster may have changed.
    pub(super) fn count_clusters(
        &mut self,
        services: &HashMap<&Arc<str>, Changes<'_>>,
        own_network: &str,
    ) -> BTreeSet<Arc<str>> {
        let place = |one: &Workload| {
            let (ip, port) = address_of(one.network_gateway.as_deref())?;
            let network = remote_network(one, own_network).filter(|_| says_cluster(one))?;
            Some(((network.into(), SocketAddr::new(ip, port)), Arc::clone(&one.cluster)))
        };
        let mut counted: HashMap<_, isize> = HashMap::new();
        for (name, changes) in services {
            let old = self.services.get(*name).cloned().unwrap_or_default();
            let old = old.list.iter().filter(|one| changes.contains_key(&*one.uid));
            for place in old.filter_map(|one| place(one)) {
                *counted.entry(place).or_default() -= 1;
            }
            for place in changes.values().flatten().filter_map(|one| place(one)) {
                *counted.entry(place).or_default() += 1;
            }
        }
        let mut changed = BTreeSet::new();
        for ((key, cluster), change) in counted.into_iter().filter(|(_, change)| *change != 0) {
            let old = self.clusters.get(&key).cloned().unwrap_or_default();
            let mut new = ClustersBehind::clone(&old);
            let count = new.entry(Arc::clone(&cluster)).or_default();
            *count = count.saturating_add_signed(change);
            if *count == 0 {
                new.remove(&cluster);
            }
            if !old.keys().eq(new.keys()) && self.gateways.contains_key(&key.0) {
                changed.insert(Arc::clone(&key.0));
            }
            self.clusters.set(key, (!new.is_empty()).then(|| Arc::new(new)));
        }
        changed
    }

    /// Returns the cluster of all split-horizon records behind a gateway; empty without any, or
    /// with several.
    pub(super) fn cluster_behind(&self, network: &Arc<str>, addresses: &[SocketAddr]) -> Arc<str> {
        common(self.clusters_behind(network, addresses).into_iter())
    }

    fn clusters_behind(&self, network: &Arc<str>, of: &[SocketAddr]) -> BTreeSet<&Arc<str>> {
        let known = of.iter().filter_map(|address| {
            let key = (Arc::clone(network), *address);
            self.clusters.get(&key)
        });
        known.flat_map(|clusters| clusters.keys()).collect()
    }

    pub(super) fn why_unknown(&self, gateway: &Gateway) -> &'static str {
        let addresses: Vec<_> = gateway.addresses().collect();
        let network = &gateway.remote.network;
        if self.clusters_behind(network, &addresses).is_empty() {
            "its cluster is unknown: neither its record nor a split-horizon record behind it \
             says it; write `cluster` for the network into `networks`"
        } else {
            "its cluster is unknown: split-horizon records of several clusters are behind its \
             address; write `cluster` for the network into `networks`"
        }
    }

    #[cfg(test)]
    pub(super) fn assert_clusters(&self) {
        let mut clusters = HashMap::new();
        let instances = self.services.values().flat_map(|of| &of.list);
        for one in instances.filter(|one| says_cluster(one)) {
            if let Some((ip, port)) = address_of(one.network_gateway.as_deref()) {
                let behind: &mut ClustersBehind = clusters.entry((ip, port)).or_default();
                *behind.entry(Arc::clone(&one.cluster)).or_default() += 1;
            }
        }
        let kept = self.clusters.iter();
        let kept = kept.map(|((_, at), of)| ((at.ip(), at.port()), ClustersBehind::clone(of)));
        assert_eq!(kept.collect::<HashMap<_, _>>(), clusters);
    }
}

/// Returns whether a workload of another network states the cluster behind its gateway.
fn says_cluster(workload: &Workload) -> bool {
    is_split_horizon(workload) && !["", UNNAMED_CLUSTER].contains(&&*workload.cluster)
}
