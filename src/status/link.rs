//! State of the budgets of links.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Link whose budget is exceeded, while that reduces weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducedLink {
    pub from: Arc<str>,
    /// True if clients without identity count, because they use that of this gateway.
    pub is_own: bool,
    pub to: Arc<str>,
    pub weight_percent: u8,
}

impl ReducedLink {
    /// Returns whether tunnels of peers of a cluster count for the link.
    pub fn is_from(&self, cluster: &str) -> bool {
        *self.from == *cluster || self.is_own && cluster.is_empty()
    }
}

/// Usage of a link with a budget, in bytes of the current period.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkUsage {
    pub from: Arc<str>,
    pub to: Arc<str>,
    pub used: u64,
    pub budget: u64,
    pub used_bytes: u64,
    pub budget_bytes: u64,
    pub weight: String,
    pub weight_percent: u8,
}
