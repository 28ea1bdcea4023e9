//! Removals of live objects that wait, as those by a control plane do.
//!
//! A list that has far fewer objects than were known does not empty the gateway. The objects stay
//! in the contents, although no list has them. A held Pod goes once another one has its address.
//! Kinds are listed one after another, so a removal by a list waits for the others.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::time::Instant;
use tracing::warn;

use super::{LiveObject, LiveSource, State};
use crate::status::{HeldRemovals, Status};
use crate::telemetry::Metrics;
use crate::xds::client::Removals;
use crate::xds::hold::{Removed, WINDOW, WaitRule};

/// Rule for objects: each kind waits for those that every API server has, which tell whether it has
/// lost its view.
pub(super) const RULE: WaitRule = WaitRule {
    of: &[
        "Namespace",
        "Node",
        "Pod",
        "Service",
        "EndpointSlice",
        "ServiceExport",
        "ServiceImport",
        "ServiceExpositionPolicy",
        "RemoteServiceBinding",
        "GlobalTrafficPolicy",
        "Dependency",
    ],
    on: &["Namespace", "Pod", "Service", "EndpointSlice"],
    covers: may_cover,
};

/// Kind of the policies about exported services.
const POLICY: &str = "ServiceExpositionPolicy";

/// Limit of the bytes of policies that may return.
const PARTED_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Kinds of which a rollout replaces the objects by others.
const REPLACED: [&str; 3] = ["Node", "Pod", "EndpointSlice"];

/// Changes of the objects of one kind.
#[derive(Default)]
struct Changes {
    /// Number of objects before, without those whose removal waits.
    before: usize,
    gone: Vec<Arc<str>>,
    /// Number of objects of namespaces whose removal is judged first.
    follow: usize,
    added: usize,
}

impl LiveSource {
    /// Makes the removals that wait.
    pub fn release(&self, why: &str) {
        let mut state = self.state.lock();
        let is_mass = state.hold.mass_times().is_some();
        let released = state.hold.release();
        if released.is_empty() {
            return;
        }
        if is_mass {
            warn!(removals = released.len(), reason = why, "held removals of objects are applied");
        }
        let is_released = |one: &LiveObject| released.contains(&removed(one));
        if let Some(objects) = &mut state.usable {
            objects.retain(|one| !is_released(one));
        }
        state.is_unsaved = true;
        self.version.send_modify(|version| *version += 1);
    }

    /// Reports the removals that wait, if they have changed, and logs the begin of a hold.
    pub fn report_hold(&self, status: &Status, metrics: &Metrics) {
        let mut state = self.state.lock();
        let Some(change) = state.hold.take_change() else { return };
        metrics.xds.add_held_removals(change);
        let held = state.held_removals();
        let removals = held.as_ref().map(|held| held.removals);
        let old = mem::replace(&mut *status.held_objects.lock(), held);
        if let (None, Some(removals)) = (old, removals) {
            warn!(removals, "the API server lists far fewer objects; the removals are held");
        }
    }
}

impl State {
    /// Returns the selected objects and, of the contents before, those whose removal waits. The
    /// objects of closed namespaces do not wait, because they are removed for their memory. Those
    /// of `lost` namespaces go once these have gone, and count already.
    pub(super) fn with_held(
        &mut self,
        mut selected: Vec<Arc<LiveObject>>,
        closed: &BTreeSet<Arc<str>>,
        lost: &BTreeMap<String, Arc<LiveObject>>,
    ) -> Vec<Arc<LiveObject>> {
        let mut before = self.usable.take().unwrap_or_default();
        self.begin_windows();
        let now = Instant::now();
        let is_idle = self.hold.is_idle(now);
        let count = self.parted.len();
        self.parted.retain(|(since, _)| !is_idle && now.duration_since(*since) < WINDOW);
        // The cache file has them until then.
        self.is_unsaved |= self.parted.len() < count;
        if is_idle {
            return selected;
        }
        let known: HashSet<_> = selected.iter().map(|one| one.key()).collect();
        let pods = selected.iter().flat_map(|one| one.read.pod_addresses());
        let pods: HashSet<IpAddr> = pods.collect();
        before.retain(|one| {
            let is_known = known.contains(&one.key());
            let is_closed = closed.contains(one.namespace());
            let is_replaced = || one.read.pod_addresses().any(|ip| pods.contains(&ip));
            let stays = is_known || !(is_closed || is_replaced());
            if is_known || !stays {
                self.hold.forget(one.kind.0, &one.name);
            }
            stays
        });
        let is_held = self.hold.mass_times().is_some();
        let mut changes = BTreeMap::<_, Changes>::new();
        for one in before.iter().filter(|one| !self.hold.contains(one.kind.0, &one.name)) {
            let of_kind = changes.entry(one.kind.0).or_default();
            of_kind.before += 1;
            if !known.contains(&one.key()) {
                of_kind.gone.push(one.name.as_str().into());
            } else if lost.contains_key(one.namespace()) && !is_held {
                of_kind.follow += 1;
            }
        }
        let old: HashSet<_> = before.iter().map(|one| one.key()).collect();
        let is_new = |one: &&Arc<LiveObject>| !old.contains(&one.key());
        for one in selected.iter().filter(is_new) {
            changes.entry(one.kind.0).or_default().added += 1;
        }
        changes.entry(POLICY).or_default();
        self.announce(&changes, before.len() + self.parted.len());
        drop(old);
        let before = before.into_iter().map(|one| (now, one)).chain(mem::take(&mut self.parted));
        let mut bytes = 0;
        let (held, mut gone): (Vec<_>, Vec<_>) =
            before.partition(|(_, one)| self.hold.contains(one.kind.0, &one.name));
        gone.retain(|(_, one)| {
            let is_parted = one.kind.0 == POLICY && !known.contains(&one.key());
            bytes += if is_parted { one.bytes } else { 0 };
            is_parted && bytes <= PARTED_BYTES_MAX && !closed.contains(one.namespace())
        });
        self.parted = gone;
        drop(known);
        selected.extend(held.into_iter().map(|(_, one)| one));
        selected.sort_by(|one, other| one.key().cmp(&other.key()));
        selected
    }

    /// Begins the windows of the kinds that were listed since the last contents.
    fn begin_windows(&mut self) {
        for (&kind, watched) in &mut self.kinds {
            let Some((at, before)) = watched.listed_at.take() else { continue };
            if self.hold.is_over(at) {
                self.hold.connected();
            }
            self.hold.begin(kind, at, before);
        }
    }

    /// Evaluates the removals: those of all kinds wait if those of one are too many.
    fn announce(&mut self, changes: &BTreeMap<&'static str, Changes>, held_of_all: usize) {
        for names_them in [false, true] {
            for (&kind, Changes { before, gone, follow, added }) in changes {
                let added = if REPLACED.contains(&kind) { *added } else { 0 };
                let lost = (gone.len() + follow).saturating_sub(added);
                let mut names = if names_them { gone.clone() } else { Vec::new() };
                if kind == POLICY {
                    let waiting = self.hold.removed();
                    let parted = self.parted.iter();
                    let parted = parted.filter(|(_, one)| may_cover(kind, &one.name, waiting));
                    names.extend(parted.map(|(_, one)| removed(one).1));
                }
                let (is_first, held, gone) = (false, *before, &*names);
                let removals = Removals { is_first, held, held_of_all, gone, added: &[] };
                self.hold.announce(kind, &removals, [(held, lost), (0, 0)]);
            }
        }
    }

    /// Describes the hold of a mass removal.
    fn held_removals(&self) -> Option<HeldRemovals> {
        let [since, until] = self.hold.mass_times()?;
        let held = self.usable.iter().flatten();
        let held = held.filter(|one| self.hold.removed().contains(&removed(one)));
        let names = held.flat_map(|one| one.read.service_names());
        let removed = self.hold.removed();
        let (services, others): (Vec<_>, Vec<_>) =
            removed.iter().partition(|(kind, _)| *kind == "Service");
        let first = services.into_iter().chain(others).take(HeldRemovals::FIRST_MAX);
        Some(HeldRemovals {
            removals: removed.len(),
            services: 0,
            workloads: 0,
            clusters: 0,
            objects: removed.len(),
            first: first.map(|(kind, name)| format!("{kind} {name}")).collect(),
            names: names.map(|name| name.to_string()).collect(),
            since,
            until,
        })
    }
}

/// Returns whether an object is a policy of a namespace in which a service or an export is held.
fn may_cover(kind: &'static str, name: &str, held: &BTreeSet<Removed>) -> bool {
    let Some((namespace, _)) = name.split_once('/').filter(|_| kind == POLICY) else {
        return false;
    };
    let prefix: Arc<str> = format!("{namespace}/").into();
    ["Service", "ServiceExport"].into_iter().any(|of| {
        let first = held.range((of, Arc::clone(&prefix))..).next();
        first.is_some_and(|(kind, name)| *kind == of && name.starts_with(&*prefix))
    })
}

/// Returns an object as a hold names it.
pub(super) fn removed(object: &LiveObject) -> Removed {
    (object.kind.0, object.name.as_str().into())
}
