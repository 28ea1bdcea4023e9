//! The set of trust domains, each with the cluster that it stands for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The cluster that domains without an entry are counted as, all together: who may sign for the
/// shared roots can invent any number of them.
const UNLISTED: &str = "unlisted";

/// Whom we trust: trust domains, each with its cluster, and identities that are believed what they
/// say of where a tunnel comes from. A peer of any other domain is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSet {
    clusters: HashMap<Box<str>, Arc<str>>,
    waypoints: HashSet<Box<str>>,
    /// There where domains without an entry are in the set too.
    others: Option<Others>,
}

/// Domains without an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Others {
    /// The clusters that they do not stand for.
    taken: HashSet<Arc<str>>,
    /// [`UNLISTED`].
    counted: Arc<str>,
}

/// The cluster of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCluster {
    /// The name, for exposure and logs.
    pub name: Arc<str>,
    /// The name that its tunnels and descriptors are counted under. The configuration bounds how
    /// many there are.
    pub counted: Arc<str>,
}

impl TrustSet {
    /// The set of the given (trust domain, cluster) pairs.
    pub fn new<'a>(domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(domain, cluster): (&str, &str)| (domain.into(), cluster.into());
        Self {
            clusters: domains.into_iter().map(entry).collect(),
            waypoints: HashSet::new(),
            others: None,
        }
    }

    /// Returns the set with every other domain in it too, each standing for a cluster of its name.
    /// No other domain stands for a cluster that one of the set stands for.
    pub fn with_any_domain(self, any_domain: bool) -> Self {
        let others = any_domain.then(|| Others {
            taken: self.clusters.values().map(Arc::clone).collect(),
            counted: UNLISTED.into(),
        });
        Self { others, ..self }
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
        named.or_else(|| self.others(domain).map(|_| domain))
    }

    /// Returns the cluster that `domain` stands for, and what it is counted as.
    pub fn peer_cluster(&self, domain: &Arc<str>) -> Option<PeerCluster> {
        let of = |name, counted| PeerCluster {
            name: Arc::clone(name),
            counted: Arc::clone(counted),
        };
        match self.clusters.get(&**domain) {
            Some(named) => Some(of(named, named)),
            None => self.others(domain).map(|it| of(domain, &it.counted)),
        }
    }

    /// Returns the domains without an entry, if `domain` is one that is in the set.
    fn others(&self, domain: &str) -> Option<&Others> {
        let others = self.others.as_ref()?;
        (!domain.is_empty() && !others.taken.contains(domain)).then_some(others)
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
            (set.cluster(&north), set.peer_cluster(&north)),
            (None, None)
        );
        let set = set.with_any_domain(true);
        assert_eq!(set.cluster("west.local"), Some("west"));
        assert_eq!(set.cluster(&north), Some("north.local"));
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

    #[test]
    fn domains_without_an_entry_are_counted_as_one_cluster_and_the_others_by_their_own() {
        let set = TrustSet::new([("west.local", "west")]).with_any_domain(true);
        let of = |domain: &str| {
            let cluster = set.peer_cluster(&domain.into()).expect("a cluster");
            (cluster.name.to_string(), cluster.counted.to_string())
        };
        let pair = |name: &str, counted: &str| (name.to_owned(), counted.to_owned());
        assert_eq!(of("north.local"), pair("north.local", "unlisted"));
        assert_eq!(of("south.local"), pair("south.local", "unlisted"));
        assert_eq!(of("west.local"), pair("west", "west"));
        assert_eq!(set.peer_cluster(&"west".into()), None);
    }
}
