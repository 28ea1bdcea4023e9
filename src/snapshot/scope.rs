//! What leaves this cluster besides what the exposure rules say: services that are exported or
//! kept local by objects of their own, and the clusters that are linked to ours.

use std::collections::HashSet;

/// Services by what their own cluster says of them, and who may come at all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    /// Hostnames of services that are exported to every peer that may come, on all their ports.
    pub exported: HashSet<Box<str>>,
    /// Hostnames of services that are reached from no other cluster, whatever else is said.
    pub local: HashSet<Box<str>>,
    /// The clusters whose peers may use this gateway; none is every one.
    pub linked: Option<HashSet<Box<str>>>,
}
