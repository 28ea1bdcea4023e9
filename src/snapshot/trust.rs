//! The set of trust domains, each with the cluster that it stands for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Whom we trust: trust domains, each with its cluster, and identities that are believed what they
/// say of where a tunnel comes from. A peer of any other domain is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSet {
    clusters: HashMap<Box<str>, Arc<str>>,
    waypoints: HashSet<Box<str>>,
    /// Where other domains are in the set too, the clusters that they do not stand for.
    taken: Option<HashSet<Arc<str>>>,
}

impl TrustSet {
    /// The set of the given (trust domain, cluster) pairs.
    pub fn new<'a>(domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(domain, cluster): (&str, &str)| (domain.into(), cluster.into());
        Self {
            clusters: domains.into_iter().map(entry).collect(),
            waypoints: HashSet::new(),
            taken: None,
        }
    }

    /// Returns the set with every other domain in it too, each standing for a cluster of its name.
    /// No other domain stands for a cluster that one of the set stands for.
    pub fn with_any_domain(self, any_domain: bool) -> Self {
        let taken = any_domain.then(|| self.clusters.values().map(Arc::clone).collect());
        Self { taken, ..self }
    }

    /// The same set, with the identities (`spiffe://…`) of waypoints and gateways.
    pub fn with_waypoints<'a>(self, waypoints: impl IntoIterator<Item = &'a str>) -> Self {
        let waypoints = waypoints.into_iter().map(Into::into).collect();
        Self { waypoints, ..self }
    }

    /// Whether the configuration says that this identity is a waypoint's or a gateway's.
    pub fn is_waypoint(&self, principal: &str) -> bool {
        self.waypoints.contains(principal)
    }

    /// Returns the cluster that `domain` stands for, if the domain is in the set.
    pub fn cluster<'a>(&'a self, domain: &'a str) -> Option<&'a str> {
        let named = self.clusters.get(domain).map(|cluster| &**cluster);
        named.or_else(|| self.is_other(domain).then_some(domain))
    }

    /// Returns the same as [`TrustSet::cluster`], shared.
    pub fn shared_cluster(&self, domain: &Arc<str>) -> Option<Arc<str>> {
        let named = self.clusters.get(&**domain);
        let named = named.or_else(|| self.is_other(domain).then_some(domain));
        named.map(Arc::clone)
    }

    /// Returns whether a domain without an entry is in the set.
    fn is_other(&self, domain: &str) -> bool {
        let taken = self.taken.as_ref();
        !domain.is_empty() && taken.is_some_and(|taken| !taken.contains(domain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_domain_is_its_own_cluster_only_where_that_is_configured() {
        let set = TrustSet::new([("west.local", "west")]);
        let north: Arc<str> = "north.local".into();
        assert_eq!(
            (set.cluster(&north), set.shared_cluster(&north)),
            (None, None)
        );
        let set = set.with_any_domain(true);
        assert_eq!(set.cluster("west.local"), Some("west"));
        assert_eq!(set.cluster(&north), Some("north.local"));
        assert_eq!(set.shared_cluster(&north), Some(north));
        assert_eq!(
            set.cluster(""),
            None,
            "a caller without identity has no cluster"
        );
        assert_eq!(
            set.cluster("west"),
            None,
            "that is the cluster of west.local"
        );
    }
}
