//! Locality of the gateway and its origin, for the status page.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::snapshot::traffic::Position;

/// Locality of the gateway.
#[derive(Debug, Serialize)]
pub(super) struct LocalityRow {
    pub(super) region: Arc<str>,
    pub(super) zone: Arc<str>,
    pub(super) subzone: Arc<str>,
    /// Key, variable, label or record that contains it; empty if unknown.
    pub(super) origin: Arc<str>,
}

impl LocalityRow {
    pub(super) fn of(position: &Position) -> Self {
        let locality = position.locality.clone();
        Self {
            region: locality.region,
            zone: locality.zone,
            subzone: locality.subzone,
            origin: Arc::clone(&position.origin),
        }
    }
}

impl fmt::Display for LocalityRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [&*self.region, &*self.zone, &*self.subzone];
        match self.origin.is_empty() {
            true => f.write_str("locality unknown"),
            false => {
                let place = parts.join("/");
                let place = place.trim_end_matches('/');
                write!(f, "locality {place} ({})", self.origin)
            }
        }
    }
}
