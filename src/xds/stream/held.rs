//! End of a hold of removals, by its time or by an operator, and its report.

use std::future::pending;
use std::time::SystemTime;

use tokio::time::{Instant, sleep_until};
use tracing::warn;

use super::{Feed, State};
use crate::status::HeldRemovals;
use crate::xds::cache::Recorder;
use crate::xds::client::Request;
use crate::xds::hold::{Hold, Removed};
use crate::xds::store::{ADDRESS, CLUSTER};

/// Limit of names in the status.
const NAMES_SHOWN: usize = 10;

/// Waits until the removals that wait have to be made; for ever if there are none.
pub(super) async fn end(hold: &Hold) {
    match hold.due() {
        Some(due) => sleep_until(due).await,
        None => pending().await,
    }
}

impl Feed {
    /// Makes the removals that are held, and publishes the result. Returns the changes of the
    /// subscription.
    pub(super) fn release(&self, state: &mut State, why: &str) -> Vec<Request> {
        let removals = state.store.hold.removed().len();
        if !state.store.release() {
            return Vec::new();
        }
        warn!(removals, reason = why, "held removals of the control plane are applied");
        self.publish(state)
    }

    /// Makes the removals that are held whenever an operator requests it. It never returns.
    pub(super) async fn release_on_command(&self, state: &mut State) {
        loop {
            self.status.release_requested().await;
            self.release(state, "requested by `strait release`");
        }
    }

    /// Reports the removals that wait, and logs the begin of a hold.
    pub(super) fn report_hold(&self, store: &mut Recorder) {
        let services = &store.store.tables().services;
        let removed = store.hold.removed();
        self.metrics.xds().set_held_removals(removed.len());
        let is_service = |(url, name): &&Removed| *url == ADDRESS && services.get(name).is_some();
        let exports = removed.iter().filter(|(url, _)| *url == CLUSTER);
        let named = exports.clone().chain(removed.iter().filter(is_service));
        let hold = store.hold.mass_until().map(|until| HeldRemovals {
            removals: removed.len(),
            services: removed.iter().filter(is_service).count(),
            clusters: exports.count(),
            first: named.take(NAMES_SHOWN).map(|(_, name)| name.to_string()).collect(),
            until: SystemTime::now() + until.saturating_duration_since(Instant::now()),
        });
        let mut is_new = false;
        self.status.set_discovery(|known| {
            is_new = known.hold.is_none() && hold.is_some();
            known.hold = hold;
        });
        if is_new {
            warn!(removals = removed.len(), time = ?self.hold,
                "the control plane removes most of the mesh; the removals are held");
        }
    }
}
