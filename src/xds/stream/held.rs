//! End of a hold of removals, by its time or by an operator, and its report.

use std::time::SystemTime;

use tracing::warn;

use super::{Feed, State};
use crate::status::HeldRemovals;
use crate::xds::cache::Recorder;
use crate::xds::client::Request;
use crate::xds::hold::Removed;
use crate::xds::store::{ADDRESS, CLUSTER};

impl Feed {
    /// Makes the removals that are held, and publishes the result. Returns the changes of the
    /// subscription.
    pub(super) fn release(&self, state: &mut State, why: &str) -> Vec<Request> {
        let removals = state.store.hold.removed().len();
        let is_mass = state.store.hold.mass_times().is_some();
        if !state.store.release() {
            return Vec::new();
        }
        if is_mass {
            warn!(removals, reason = why, "held removals of the control plane are applied");
        }
        self.publish(state)
    }

    /// Makes the removals that are held whenever an operator requests it. It never returns.
    pub(super) async fn release_on_command(&self, state: &mut State) {
        loop {
            self.status.release.notified().await;
            self.release(state, "requested by `strait release`");
        }
    }

    /// Reports the removals that wait, if they have changed, and logs the begin of a hold.
    pub(super) fn report_hold(&self, store: &mut Recorder) {
        let Some(change) = store.hold.take_change() else { return };
        self.metrics.xds.add_held_removals(change);
        let hold = store.hold.mass_times().map(|times| held_removals(store, times));
        let mut is_new = false;
        self.status.set_discovery(|known| {
            is_new = known.hold.is_none() && hold.is_some();
            known.hold = hold;
        });
        if is_new {
            warn!(removals = store.hold.removed().len(), time = ?self.hold,
                "the control plane removes most of the mesh; the removals are held");
        }
    }
}

/// Describes a hold of these times.
fn held_removals(store: &mut Recorder, [since, until]: [SystemTime; 2]) -> HeldRemovals {
    let mesh = store.store.tables().mesh();
    let removed = store.hold.removed();
    let is_address = |(url, _): &&Removed| *url == ADDRESS;
    let addresses = removed.iter().filter(is_address);
    let is_service = |(_, name): &&Removed| mesh.services.get(name).is_some();
    let (services, workloads): (Vec<_>, Vec<_>) = addresses.partition(is_service);
    let clusters: Vec<_> = removed.iter().filter(|(url, _)| *url == CLUSTER).collect();
    let target = |(_, name): &&Removed| store.store.target(name);
    let targets = clusters.iter().filter_map(target).map(|(host, port)| format!("{host}:{port}"));
    let named = [&clusters, &services, &workloads].into_iter().flatten();
    let named = named.map(|(_, name)| name.to_string());
    HeldRemovals {
        removals: removed.len(),
        services: services.len(),
        workloads: workloads.len(),
        clusters: clusters.len(),
        objects: 0,
        first: named.clone().take(HeldRemovals::FIRST_MAX).collect(),
        names: named.chain(targets).collect(),
        since,
        until,
    }
}
