//! Services that links expose to all peers of a cluster.

use crate::snapshot::{Caller, Snapshot};
use crate::wire::sni::SniPattern;

impl Snapshot {
    /// Returns whether the link from the caller's cluster exposes a service.
    pub fn is_exposed_by_link(&self, caller: Caller<'_>, host: &str) -> bool {
        if self.scope.by_link.is_empty() {
            return false;
        }
        let cluster = self.cluster(caller);
        let patterns = cluster.and_then(|cluster| self.scope.by_link.get(cluster));
        patterns.is_some_and(|patterns| self.has_pattern(patterns, host))
    }

    pub fn clusters_by_link(&self, host: &str) -> impl Iterator<Item = &str> {
        let links = self.scope.by_link.iter();
        let exposing = links.filter(move |(_, patterns)| self.has_pattern(patterns, host));
        exposing.map(|(cluster, _)| &**cluster)
    }

    /// Returns whether the hostname of a service or a name of its family matches a pattern. A
    /// service that is visible only in its namespace matches none.
    fn has_pattern(&self, patterns: &[SniPattern], host: &str) -> bool {
        let service = self.services.get(host);
        if service.is_some_and(|service| service.private) {
            return false;
        }
        patterns.iter().any(|pattern| self.has_name(pattern, host))
    }

    /// Returns whether the hostname of a service or a name of its family matches a pattern.
    pub(super) fn has_name(&self, pattern: &SniPattern, host: &str) -> bool {
        let mut others = self.family_of(host);
        pattern.matches(host)
            || others.any(|name| pattern.matches(&name) && self.is_other_name(&name, host))
    }
}
