//! Subsets of a service's endpoints, by labels of their workloads.

use std::fmt;
use std::sync::Arc;

use super::mesh::Workload;
use crate::wire::Label;

/// Subset, or shares of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subset {
    /// Name in server names and aliases.
    pub name: Box<str>,
    /// Its only part, or the subsets that share its tunnels. The first that a workload matches
    /// counts.
    pub parts: Box<[SubsetPart]>,
}

/// Endpoints of a subset with some labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsetPart {
    /// Name of the subset.
    pub name: Arc<str>,
    /// Values of all labels that its workloads have.
    pub labels: Box<[(Label, Box<str>)]>,
    /// Weight among the parts.
    pub weight: u32,
}

impl Subset {
    /// Returns whether a workload belongs to any part.
    pub(super) fn has(&self, workload: &Workload) -> bool {
        self.part_of(workload).is_some()
    }

    /// Returns the part of a workload, with its index.
    pub(super) fn part_of(&self, workload: &Workload) -> Option<(usize, &SubsetPart)> {
        let mut parts = self.parts.iter().enumerate();
        parts.find(|(_, part)| part.has(workload))
    }
}

impl SubsetPart {
    fn has(&self, workload: &Workload) -> bool {
        self.labels.iter().all(|(label, wanted)| {
            let value = match label {
                Label::Revision => &workload.canonical_revision,
                Label::Name => &workload.canonical_name,
                Label::Cluster => &workload.cluster,
                Label::Region => &workload.locality.region,
                Label::Zone => &workload.locality.zone,
            };
            **value == **wanted
        })
    }
}

impl fmt::Display for Subset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for part in &self.parts {
            let labels = part.labels.iter();
            let labels = labels.map(|(label, value)| format!("{}: {value}", label.key()));
            let labels: Vec<_> = labels.collect();
            write!(f, " {{{}}} {}", labels.join(", "), part.weight)?;
        }
        Ok(())
    }
}
