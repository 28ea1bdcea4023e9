//! Exposure entries whose limits apply to a tunnel.

use std::sync::Arc;

use super::{MatchedBy, Requested};
use crate::limits::Source;
use crate::snapshot::{Caller, Exposure, Snapshot};

impl Exposure {
    /// Returns whether the limit of tunnels, or the share of it that the source has, is reached.
    pub fn is_full(&self, source: &Source) -> bool {
        let limit = self.limits.tunnels;
        limit.is_some_and(|max| !self.open.has_room(max, source))
    }
}

impl Snapshot {
    /// Returns the entries with limits that admit one of the callers to the service port to which
    /// an authority leads, each once. Of several services behind an alias, the entries of each
    /// apply. All entries of a service apply to a caller that only a link admits to it.
    pub fn limiting_entries<'a>(
        &self,
        callers: impl Iterator<Item = Caller<'a>> + Clone,
        of: Requested<'_>,
    ) -> Vec<&Exposure> {
        let mut found = Vec::new();
        if !self.exposure.has_limits {
            return found;
        }
        for of in self.exposed_ports(of) {
            let mut entries = self.applying_entries(of);
            let linked_host = (*of.matched_by == MatchedBy::Service).then_some(of.to.host);
            self.retain_admitting(&mut entries, callers.clone(), linked_host);
            found.append(&mut entries);
        }
        found.retain(|entry| entry.limits.is_some());
        let mut unique: Vec<&Exposure> = Vec::with_capacity(found.len());
        for entry in found {
            let is_same = |one: &&Exposure| Arc::ptr_eq(&one.open, &entry.open);
            if !unique.iter().any(is_same) {
                unique.push(entry);
            }
        }
        unique
    }

    /// Returns the entries that apply to a service port, which is not behind an alias.
    pub fn applying_entries(&self, of: Requested<'_>) -> Vec<&Exposure> {
        self.entries_of(self.exposure_entries(of.to.host), of).collect()
    }

    /// Retains the entries that admit one of the callers. All are retained for a caller that only a
    /// link admits, by the host of the service.
    fn retain_admitting<'a>(
        &self,
        entries: &mut Vec<&Exposure>,
        callers: impl Iterator<Item = Caller<'a>> + Clone,
        linked_host: Option<&str>,
    ) {
        let admits = |entry: &Exposure, caller| entry.admits(caller, &self.trust);
        let is_by_link = |caller| {
            let is_linked = linked_host.is_some_and(|host| self.is_exposed_by_link(caller, host));
            is_linked && !entries.iter().any(|entry| admits(entry, caller))
        };
        if !callers.clone().any(is_by_link) {
            entries.retain(|entry| callers.clone().any(|caller| admits(entry, caller)));
        }
    }
}
