//! Exposure entries whose limits apply to a tunnel.

use std::sync::Arc;

use super::{MatchedBy, ServicePort};
use crate::snapshot::{Caller, Exposure, Snapshot};
use crate::wire::Authority;

impl Exposure {
    /// Returns whether the limit of tunnels is reached.
    pub fn is_full(&self) -> bool {
        self.limits
            .tunnels
            .is_some_and(|max| self.open.get() >= max)
    }
}

impl Snapshot {
    /// Returns the entries with limits that admit one of the callers to the service port to which
    /// `asked` leads, each once. Of several services behind an alias, the entries of each apply.
    pub fn limiting_entries<'a>(
        &self,
        callers: impl Iterator<Item = Caller<'a>> + Clone,
        asked: &Authority,
        to: ServicePort<'_>,
        means: &MatchedBy,
    ) -> Vec<&Exposure> {
        let mut found = Vec::new();
        if !self.exposure.has_limits() {
            return found;
        }
        match means {
            MatchedBy::Exposed => found.extend(self.exposure.entries_with_alias(asked)),
            MatchedBy::Alias(alias) => {
                for (host, port) in self.behind(alias, asked.port) {
                    self.add_entries(&mut found, host, port);
                }
            }
            MatchedBy::Service | MatchedBy::Workload(_) => {
                self.add_entries(&mut found, to.host, to.port);
            }
        }
        let by_workload = matches!(means, MatchedBy::Workload(_));
        found.retain(|entry| {
            entry.limits.is_some()
                && (entry.exposes_workloads || !by_workload)
                && callers
                    .clone()
                    .any(|caller| entry.admits(caller, &self.trust))
        });
        let mut unique: Vec<&Exposure> = Vec::with_capacity(found.len());
        for entry in found {
            let is_same = |one: &&Exposure| Arc::ptr_eq(&one.open, &entry.open);
            if !unique.iter().any(is_same) {
                unique.push(entry);
            }
        }
        unique
    }

    fn add_entries<'a>(&'a self, found: &mut Vec<&'a Exposure>, host: &str, port: u16) {
        let entries = self.exposure.entries(&self.exposure_host(host)).iter();
        found.extend(entries.filter(|entry| entry.applies_to(port)));
    }
}
