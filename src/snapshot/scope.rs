//! Visibility of services beyond the exposure rules: services that separate objects export or keep
//! local, and the linked clusters.

use std::collections::HashSet;

/// Services exported or kept local by their own cluster, and the clusters that are linked to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceVisibility {
    /// Hostnames of services exported on all ports to every peer of a linked cluster.
    pub exported: HashSet<Box<str>>,
    /// Hostnames of services that no other cluster reaches, regardless of all other rules.
    pub local: HashSet<Box<str>>,
    /// Clusters whose peers may use this gateway; `None` means every cluster.
    pub linked: Option<HashSet<Box<str>>>,
}
