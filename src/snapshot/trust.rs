//! The set of trust domains, each with the cluster that it stands for.

use std::collections::HashMap;
use std::sync::Arc;

/// Trust domain to cluster. A peer of any other domain is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSet(HashMap<Box<str>, Arc<str>>);

impl TrustSet {
    /// The set of the given (trust domain, cluster) pairs.
    pub fn new<'a>(domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(domain, cluster): (&str, &str)| (domain.into(), cluster.into());
        Self(domains.into_iter().map(entry).collect())
    }

    /// The cluster that `domain` stands for, if the domain is in the set.
    pub fn cluster(&self, domain: &str) -> Option<&Arc<str>> {
        self.0.get(domain)
    }
}
