//! Labels that select the workloads of a subset.

/// Label of a workload that every source of the mesh gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Label {
    /// Canonical revision, as a rule the value of `version`.
    Revision,
    /// Canonical name, as a rule the value of `app`.
    Name,
    /// Cluster.
    Cluster,
    /// Region.
    Region,
    /// Zone.
    Zone,
}

impl Label {
    /// All labels with their keys in the configuration. The first key of a label is displayed.
    pub const NAMES: [(&str, Self); 7] = [
        ("version", Self::Revision),
        ("service.istio.io/canonical-revision", Self::Revision),
        ("app", Self::Name),
        ("service.istio.io/canonical-name", Self::Name),
        ("topology.istio.io/cluster", Self::Cluster),
        ("topology.kubernetes.io/region", Self::Region),
        ("topology.kubernetes.io/zone", Self::Zone),
    ];

    /// Returns the label of a key.
    pub fn parse(key: &str) -> Option<Self> {
        let found = Self::NAMES.into_iter().find(|(name, _)| *name == key);
        found.map(|(_, label)| label)
    }

    /// Returns the key.
    pub fn key(self) -> &'static str {
        let found = Self::NAMES.into_iter().find(|(_, label)| *label == self);
        found.map_or("", |(name, _)| name)
    }
}
