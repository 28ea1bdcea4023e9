//! Places by which services name their waypoints.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::Shards;
use super::mesh::{self, Place};

/// Places of the waypoints that services name, each with the number of these services.
#[derive(Clone, Debug, Default)]
pub(super) struct NamedWaypoints(pub(super) Shards<Place, usize>);

impl NamedWaypoints {
    /// Counts the waypoints of a service that is added, removed or changed.
    pub(super) fn update_counts(
        &mut self,
        before: Option<&Arc<mesh::Service>>,
        after: Option<&Arc<mesh::Service>>,
    ) {
        let of = |service: Option<&Arc<mesh::Service>>| -> Vec<Place> {
            let waypoints = service.into_iter().flat_map(|of| &of.waypoints);
            waypoints.map(|one| canonical(&one.gateway.place)).collect()
        };
        let (before, after) = (of(before), of(after));
        if before == after {
            return;
        }
        for place in after {
            let count = self.0.get(&place).copied().unwrap_or(0);
            self.0.insert(place, count + 1);
        }
        for place in before {
            let count = self.0.get(&place).copied().unwrap_or(0);
            self.0.set(place, count.checked_sub(1).filter(|rest| *rest > 0));
        }
    }

    /// Returns the places, each once.
    pub(super) fn places(&self) -> impl Iterator<Item = &Place> {
        self.0.keys()
    }
}

/// Services that a change of the mesh affects.
pub(super) struct AffectedServices<'a> {
    /// True if all services are rebuilt.
    pub(super) all: bool,
    /// True if an added, removed or changed service has or had waypoints.
    pub(super) has_waypoints: bool,
    /// Hostnames that another service may now answer to.
    pub(super) hosts: BTreeSet<Cow<'a, str>>,
    /// Services (`namespace/hostname`) that have lost an identity.
    pub(super) lost_identity: Vec<Arc<str>>,
}

/// Returns a place with its address in canonical form, as VIPs are stored.
fn canonical(place: &Place) -> Place {
    match place {
        Place::Name(name) => Place::Name(name.clone()),
        Place::Address(network, ip) => Place::Address(network.clone(), ip.to_canonical()),
    }
}

impl mesh::Service {
    /// Returns the names of the waypoints, separated by commas, for display.
    pub fn waypoint_names(&self) -> String {
        let names = self.waypoints.iter();
        let names: Vec<_> = names.map(|of| of.gateway.place.to_string()).collect();
        names.join(", ")
    }
}
