//! The set of trust domains, each with the cluster that it stands for.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Whom we trust: trust domains, each with its cluster, and identities that are believed what they
/// say of where a tunnel comes from. A peer of any other domain is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSet {
    clusters: HashMap<Box<str>, Arc<str>>,
    waypoints: HashSet<Box<str>>,
    any_domain: bool,
}

impl TrustSet {
    /// The set of the given (trust domain, cluster) pairs.
    pub fn new<'a>(domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(domain, cluster): (&str, &str)| (domain.into(), cluster.into());
        Self {
            clusters: domains.into_iter().map(entry).collect(),
            waypoints: HashSet::new(),
            any_domain: false,
        }
    }

    /// Returns the set with every other domain in it too, each standing for a cluster of its name.
    pub fn with_any_domain(self, any_domain: bool) -> Self {
        Self { any_domain, ..self }
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
        named.or_else(|| (self.any_domain && !domain.is_empty()).then_some(domain))
    }

    /// Returns the same as [`TrustSet::cluster`], shared.
    pub fn shared_cluster(&self, domain: &Arc<str>) -> Option<Arc<str>> {
        let named = self.clusters.get(&**domain);
        let named = named.or_else(|| (self.any_domain && !domain.is_empty()).then_some(domain));
        named.map(Arc::clone)
    }
}
