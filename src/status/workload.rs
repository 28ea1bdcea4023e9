//! Names of a workload in metrics and logs.

use std::fmt;

/// Labels of a workload in metrics and logs. Empty means unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct WorkloadLabels {
    /// The workload's name, such as the Deployment's.
    pub workload: String,
    pub namespace: String,
    /// Its SPIFFE identity, as claimed by the source of the mesh.
    pub principal: String,
    pub cluster: String,
    pub canonical_name: String,
    pub canonical_revision: String,
    pub region: String,
    pub zone: String,
}

/// Owner of a pod's name. The log reads it from there, because a copy for each tunnel would cost
/// memory.
pub trait PodName: fmt::Debug + Send + Sync {
    /// Returns the name; empty if it is unknown.
    fn pod_name(&self) -> &str;
}

impl PodName for String {
    fn pod_name(&self) -> &str {
        self
    }
}
