//! Holders of the data path's descriptors, for the status page.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::columns;

/// Maximum number of holders on the page.
const SHOWN: usize = 10;

/// Source of the usage of the pool: a function of the data path that takes a maximum of holders.
#[derive(Clone)]
pub struct DescriptorUsageSource(Arc<dyn Fn(usize) -> DescriptorUsage + Send + Sync>);

/// Usage of the descriptor pool.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DescriptorUsage {
    /// Number of descriptors in use.
    pub used: usize,
    /// Maximum number of descriptors.
    pub max: usize,
    /// Clusters, identities and source addresses with the most descriptors, and their numbers.
    pub holders: Vec<(String, usize)>,
}

impl DescriptorUsageSource {
    /// Wraps the function that returns the usage.
    pub fn new(ask: impl Fn(usize) -> DescriptorUsage + Send + Sync + 'static) -> Self {
        Self(Arc::new(ask))
    }

    pub(super) fn most(&self) -> DescriptorUsage {
        self.0(SHOWN)
    }
}

impl fmt::Debug for DescriptorUsageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Holders")
    }
}

impl DescriptorUsage {
    /// Returns the table of holders; empty if there are none.
    pub(super) fn lines(&self) -> Vec<String> {
        let row = |(name, held): &(String, usize)| [name.clone(), held.to_string()];
        match self.holders.is_empty() {
            true => Vec::new(),
            false => {
                let rows = self.holders.iter().map(row).collect();
                columns::lines("  ", ["HOLDER", "DESCRIPTORS"], rows).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_a_table() {
        let held = DescriptorUsage {
            used: 12,
            max: 100,
            holders: vec![("cluster west".into(), 10), ("source 10.0.0.1".into(), 2)],
        };
        let lines = held.lines();
        let lines: Vec<_> = lines.iter().map(|line| line.trim_end()).collect();
        let want = [
            "  HOLDER           DESCRIPTORS",
            "  cluster west     10",
            "  source 10.0.0.1  2",
        ];
        assert_eq!(lines, want);
        assert!(DescriptorUsage::default().lines().is_empty());
    }
}
