//! `/drain/KIND`: drain of a part of the mesh or of a listener by an operator, and its reversal.
//! POST executes it; GET returns a preview of the same POST.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode};
use serde::Deserialize;

use super::{AdminState, DRAIN_FILE_UNSET, ListenerState};
use crate::config::{self, Listener, ListenerProtocol};
use crate::labels::{escape_control, join_first};
use crate::snapshot::builder::{self, Change};
use crate::snapshot::traffic::{Drained, Override, is_part_of, is_service};
use crate::snapshot::{
    BoundEndpoints, LazySet, Locality, RemoteGateway, Service, Shards, Snapshot,
};
use crate::wire::DrainTarget;

/// Maximum number of evacuated parts of the mesh. Each workload is compared with all of them.
const EVACUATED_MAX: usize = 64;

/// Answer to an order that the next process may not know.
const HANDING_OVER: &str = "the next process starts, and would not learn of the order; repeat it \
                            once that serves\n";

/// Maximum number of services or regions in an answer.
const NAMED_MAX: usize = 50;

/// Services by hostname, or derived services by label.
type ServicesByName = Shards<Arc<str>, Arc<Service>>;

/// Query parameters: the name by its kind, such as `?region=REGION`, with `?undo`, `?force` and
/// `?persist`, which need no value. Unknown parameters are errors, because a typo would change
/// the effect.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Parameters {
    region: Option<String>,
    cluster: Option<String>,
    endpoint: Option<String>,
    gateway: Option<String>,
    service: Option<String>,
    listener: Option<String>,
    persist: Option<String>,
    undo: Option<String>,
    force: Option<String>,
}

/// Request of an operator about a part of the mesh.
struct DrainRequest {
    target: DrainTarget,
    /// True if an evacuation is undone.
    undo: bool,
    /// True to evacuate even if a service or a binding would lose its last endpoints.
    force: bool,
    /// True to keep the order over restarts.
    persist: bool,
    /// True for the execution, false for a preview.
    is_execution: bool,
}

/// Evacuates a part of the mesh or undoes that, and reports the result. GET reports the result
/// that the same POST would have.
pub(super) async fn drain(
    method: Method,
    Path(kind): Path<String>,
    State(state): State<AdminState>,
    Query(parameters): Query<Parameters>,
) -> (StatusCode, String) {
    let name = match &*kind {
        "region" => &parameters.region,
        "cluster" => &parameters.cluster,
        "endpoint" => &parameters.endpoint,
        "gateway" => &parameters.gateway,
        "service" => &parameters.service,
        "listener" => &parameters.listener,
        _ => {
            let kinds = DrainTarget::KINDS.join(", ");
            return (StatusCode::BAD_REQUEST, format!("/drain/KIND, with one of {kinds}\n"));
        }
    };
    if kind == "region" && name.as_deref().is_some_and(|name| name == "*" || name == "*/*") {
        let text = "cannot evacuate every region; to stop this gateway use /quitquitquit\n";
        return (StatusCode::BAD_REQUEST, text.to_owned());
    }
    let Some(target) = name.as_deref().and_then(|name| DrainTarget::parse(&kind, name)) else {
        let text = match &*kind {
            "region" => "write ?region=REGION, a region, REGION/ZONE or REGION/ZONE/SUBZONE\n",
            "cluster" => "write ?cluster=CLUSTER\n",
            "gateway" => "write ?gateway=IP:PORT, the HBONE port of a gateway\n",
            "service" => "write ?service=HOST, a hostname or NAMESPACE/HOST\n",
            "listener" => "write ?listener=NAME\n",
            _ => "write ?endpoint=ENDPOINT, an IP address or the uid of a workload\n",
        };
        return (StatusCode::BAD_REQUEST, text.to_owned());
    };
    let order = DrainRequest {
        target,
        undo: parameters.undo.is_some(),
        force: parameters.force.is_some(),
        persist: parameters.persist.is_some(),
        is_execution: method == Method::POST,
    };
    // On a blocking thread: evaluating all services of a large mesh takes long.
    tokio::task::spawn_blocking(move || order.run(&state))
        .await
        .unwrap_or_else(|_| (StatusCode::INTERNAL_SERVER_ERROR, String::new()))
}

impl DrainRequest {
    /// Builds the next snapshot and evaluates it. Publishes it if this is no preview.
    fn run(&self, state: &AdminState) -> (StatusCode, String) {
        let target = self.target.clone();
        let overrides = if self.undo {
            Override::Restore(target)
        } else {
            Override::Drain(target, Drained::now(self.persist))
        };
        let change = Change { overrides: Some(overrides), ..Change::default() };
        let config = state.config.load();
        let check = |before: &Snapshot, next: &Snapshot| {
            if self.undo {
                self.undo(before, state.status.drain_problem.lock().is_some())
            } else if let DrainTarget::Listener(_) = &self.target {
                self.drain_listener((before, next), &config.listeners)
            } else {
                let mut lost = services_without_endpoints(&config.listeners, before, next);
                lost.extend(bindings_without_gateways(&config.bindings, before, next));
                self.evacuate((before, next), &config.bindings, &lost)
            }
        };
        if !self.is_execution {
            let before = state.reader.snapshot();
            return match check(&before, &builder::build(&before, change)) {
                Ok(text) => (StatusCode::OK, format!("{text}nothing was changed\n")),
                Err(refused) => refused,
            };
        }
        let of_successor = || {
            let is_unknown = state.status.is_handing_over.load(Ordering::Relaxed);
            is_unknown.then(|| (StatusCode::CONFLICT, HANDING_OVER.to_owned()))
        };
        if let Some(refused) = of_successor() {
            return refused;
        }
        if self.persist && config.drain.file.is_none() {
            let text = format!("{} is not drained: {DRAIN_FILE_UNSET}\n", self.subject());
            return (StatusCode::CONFLICT, text);
        }
        let must_be_stored = |before: &Snapshot, next: &Snapshot| {
            // A repeated order replaces a file that cannot be read or is out of date.
            let is_repeated = self.undo && state.status.drain_problem.lock().is_some();
            self.persist || is_repeated || self.is_kept(before) != self.is_kept(next)
        };
        let checked = state.publisher.update_if(change, |before, next| {
            check(before, next).map(|text| (text, must_be_stored(before, next)))
        });
        let (text, must_be_stored) = match checked {
            Ok(checked) => checked,
            Err(refused) => return refused,
        };
        (state.follow_drains)();
        self.log();
        match must_be_stored.then(|| (state.store_drains)()) {
            // A successor may have read the file before.
            None | Some(Ok(())) => of_successor()
                .or_else(|| self.failed_listener(state))
                .unwrap_or((StatusCode::OK, text)),
            Some(Err(why)) => {
                let (is, again) = if self.undo {
                    ("used again", "drain it again")
                } else {
                    ("drained", "end that")
                };
                let target = self.subject();
                let text =
                    format!("{target} is {is}, but a restart may {again}: {why}; repeat it\n");
                (StatusCode::CONFLICT, text)
            }
        }
    }

    fn log(&self) {
        let Self { target, force, persist, .. } = self;
        if self.undo {
            tracing::info!(%target, "evacuation undone");
        } else {
            tracing::info!(%target, force, persist, "evacuated");
        }
    }

    /// Returns why the listener of the order was put back and is not open.
    fn failed_listener(&self, state: &AdminState) -> Option<(StatusCode, String)> {
        let DrainTarget::Listener(name) = &self.target else { return None };
        let row = (state.listeners)().into_iter().find(|row| {
            *row.listener.name == **name && row.state == ListenerState::Failed && self.undo
        })?;
        let (subject, why) = (self.subject(), row.error.unwrap_or_default());
        tracing::warn!(listener = %name, error = why, "a listener that is put back is not open");
        let text =
            format!("{subject} is put back, and not open: {why}; it is tried again every 10 s\n");
        Some((StatusCode::CONFLICT, text))
    }

    /// Returns whether the order is in force and restarts keep it.
    fn is_kept(&self, snapshot: &Snapshot) -> bool {
        let known = snapshot.balancing.evacuated.get(&self.target);
        known.is_some_and(|drained| drained.is_persisted)
    }

    fn end(&self, next: &Snapshot) -> &'static str {
        if self.is_kept(next) {
            "with --undo, and not by a restart"
        } else {
            "with --undo or a restart"
        }
    }

    fn check_count(&self, before: &Snapshot) -> Result<(), (StatusCode, String)> {
        let drains = &before.balancing.evacuated;
        if drains.contains_key(&self.target) || drains.len() < EVACUATED_MAX {
            return Ok(());
        }
        let text = format!("{EVACUATED_MAX} parts are evacuated already; undo one of them\n");
        Err((StatusCode::CONFLICT, text))
    }

    fn drain_listener(
        &self,
        (before, next): (&Snapshot, &Snapshot),
        listeners: &[Listener],
    ) -> Result<String, (StatusCode, String)> {
        let (target, is, end) = (self.subject(), self.tense(), self.end(next));
        let names: BTreeSet<_> = listeners.iter().map(|one| one.name.clone()).collect();
        if !names.contains(&self.target.name()) {
            let names = join_names(&names);
            let text = format!("{target} is unknown; write one of {names}\n");
            return Err((StatusCode::NOT_FOUND, text));
        }
        self.check_count(before)?;
        Ok(format!(
            "{target} {is} drained: it accepts no connection, and open tunnels have until \
             `drain.deadline`; it ends {end}\n"
        ))
    }

    fn evacuate(
        &self,
        (before, next): (&Snapshot, &Snapshot),
        bindings: &[config::Binding],
        lost: &BTreeSet<String>,
    ) -> Result<String, (StatusCode, String)> {
        let target = self.subject();
        let evacuated = &before.balancing.evacuated;
        let is_new = !evacuated.contains_key(&self.target);
        let (there, all, what) = count(next, bindings, &self.target);
        if there == 0 && is_new {
            let hint = known_names_hint(next, &self.target);
            let text = format!("{target} cannot be evacuated: no {what} is there{hint}\n");
            return Err((StatusCode::NOT_FOUND, text));
        }
        self.check_count(before)?;
        let names = join_names(lost);
        // Rejection of its tunnels is the purpose of a drained service.
        let is_service = matches!(self.target, DrainTarget::Service(_));
        let is_meant = self.force || is_service;
        if !lost.is_empty() && !is_meant {
            let text = format!(
                "{target} is not evacuated: no endpoint would be left for {names}; write --force \
                 to refuse their tunnels\n"
            );
            return Err((StatusCode::CONFLICT, text));
        }
        let (is, end) = (self.tense(), self.end(next));
        let new = if is_service { "new tunnels are rejected" } else { "new tunnels avoid it" };
        let mut text = format!(
            "{target} {is} evacuated: {new}, open ones go on; it ends {end}\n\
             {there} of {all} {what}s are there\n"
        );
        if !lost.is_empty() {
            text += &format!("no endpoint {is} left, and tunnels are rejected: {names}\n");
        }
        Ok(text)
    }

    /// `is_repeated` is true if the file may have an order that is not in force.
    fn undo(&self, before: &Snapshot, is_repeated: bool) -> Result<String, (StatusCode, String)> {
        let target = self.subject();
        let evacuated = &before.balancing.evacuated;
        if is_repeated && !evacuated.contains_key(&self.target) {
            return Ok(format!(
                "{target} is not evacuated; the orders in force are stored again\n"
            ));
        }
        if evacuated.contains_key(&self.target) {
            let rest = match self.target {
                DrainTarget::Listener(_) => "; tunnels from before still end by `drain.deadline`",
                _ => "",
            };
            return Ok(format!("{target} {} used again{rest}\n", self.tense()));
        }
        let others = if evacuated.is_empty() {
            "nothing is".to_owned()
        } else {
            let all = evacuated.keys().map(ToString::to_string);
            format!("these are: {}", join_names(&all.collect()))
        };
        let text = format!("{target} was not evacuated by an operator; {others}\n");
        Err((StatusCode::NOT_FOUND, text))
    }

    fn subject(&self) -> String {
        escape_control(&self.target.to_string())
    }

    fn tense(&self) -> &'static str {
        if self.is_execution { "is" } else { "would be" }
    }
}

/// Counts the workloads, gateways or services of a part of the mesh, and all of them. A service
/// that only a binding names is one of them.
fn count(
    snapshot: &Snapshot,
    bindings: &[config::Binding],
    target: &DrainTarget,
) -> (usize, usize, &'static str) {
    match target {
        DrainTarget::Gateway(of) => {
            let all: BTreeMap<_, _> = snapshot.remote_gateways().collect();
            let is_it = |(address, gateway): &(&SocketAddr, &Arc<RemoteGateway>)| {
                *address == of || gateway.other_addresses.contains(of)
            };
            (all.iter().filter(is_it).count(), all.len(), "gateway")
        }
        DrainTarget::Service(name) => {
            let all = &snapshot.mesh.services;
            let hosts = bindings.iter().map(|binding| binding.service.host.as_str());
            let bound: BTreeSet<_> =
                hosts.filter(|host| snapshot.services.get(*host).is_none()).collect();
            let there = all.values().filter(|one| is_service(one, target)).count();
            let there = there + usize::from(bound.contains(&**name));
            (there, all.len() + bound.len(), "service")
        }
        _ => {
            let all = &snapshot.mesh.workloads;
            (all.values().filter(|one| is_part_of(one, target)).count(), all.len(), "workload")
        }
    }
}

/// Returns a hint with the regions, at the depth of the requested one, or the names of another kind
/// in the mesh.
fn known_names_hint(snapshot: &Snapshot, requested: &DrainTarget) -> String {
    let workloads = snapshot.mesh.workloads.values();
    let mut names: BTreeSet<String> = match requested {
        DrainTarget::Region(region) => {
            let place = |one: &Locality| {
                let parts = [&one.region, &one.zone, &one.subzone].map(|part| &**part);
                let parts = parts.into_iter().take(region.part_count());
                let parts: Vec<_> = parts.take_while(|part| !part.is_empty()).collect();
                parts.join("/")
            };
            workloads.map(|one| place(&one.locality)).collect()
        }
        DrainTarget::Cluster(_) => workloads.map(|one| one.cluster.to_string()).collect(),
        DrainTarget::Gateway(_) => {
            snapshot.remote_gateways().map(|(address, _)| address.to_string()).collect()
        }
        DrainTarget::Service(_) => snapshot.mesh.services.values().map(|one| one.key()).collect(),
        DrainTarget::Address(_) | DrainTarget::Workload(_) | DrainTarget::Listener(_) => {
            return "; `strait status SERVICE` lists endpoints with their uids, and `strait status \
                    peers` gateways"
                .to_owned();
        }
    };
    names.remove("");
    match requested {
        DrainTarget::Region(_) if names.is_empty() => {
            ", as no `workloads[].locality` names a region".to_owned()
        }
        _ if names.is_empty() => String::new(),
        _ => format!("; write one of {}", join_names(&names)),
    }
}

/// Joins the names, at most [`NAMED_MAX`] of them.
fn join_names(names: &BTreeSet<String>) -> String {
    join_first(names.iter().map(|name| escape_control(name)), NAMED_MAX)
}

/// Returns the services (`namespace/hostname`) and aliases that lose their last endpoint on a
/// port, or the last waypoint for their tunnels.
fn services_without_endpoints(
    listeners: &[Listener],
    before: &Snapshot,
    next: &Snapshot,
) -> BTreeSet<String> {
    let lost_in = |old: &ServicesByName, new: &ServicesByName| {
        let same = |(host, old): (&Arc<str>, &Arc<Service>)| {
            Some((Arc::clone(old), new.get(host)?.clone()))
        };
        let changed = old.iter().filter_map(same).filter(|(old, new)| !Arc::ptr_eq(old, new));
        let lost = changed.filter(|(old, new)| loses_endpoints(listeners, before, (old, new)));
        lost.map(|(old, _)| old).collect::<Vec<_>>()
    };
    let services = lost_in(&before.services, &next.services);
    let aliases = lost_in(&before.derived_services, &next.derived_services);
    let aliases = aliases.iter().map(|of| format!("alias {}", of.hostname));
    let all = before.services.values();
    let stranded =
        all.filter(|service| next.lacks_waypoint(service) && !before.lacks_waypoint(service));
    let stranded = stranded.map(|service| service.key());
    let lost = services.iter().map(|service| service.key()).chain(aliases);
    lost.chain(stranded).collect()
}

/// Returns whether peers of a listener lose the last endpoint of a port, in this network or in
/// those that they may use.
fn loses_endpoints(
    listeners: &[Listener],
    before: &Snapshot,
    (old, new): (&Service, &Service),
) -> bool {
    let is_empty = |set: Option<&LazySet>| set.is_none_or(LazySet::is_empty);
    let by_transit = |of: &Service, port: u16, transit| match of.endpoints_by(port, transit) {
        Some(set) => set.endpoints.is_empty(),
        None => is_empty(of.ports.get(&port)),
    };
    let limits: BTreeSet<_> = listeners
        .iter()
        .filter_map(|of| match of.protocol {
            ListenerProtocol::Hbone { transit, .. } => Some(transit),
            _ => None,
        })
        .collect();
    let is_lost = |port: &u16| {
        let granted = before.transits(old, *port);
        let used = granted.iter().flat_map(|of| limits.iter().map(|limit| *of.min(limit)));
        let used: BTreeSet<_> = used.collect();
        used.into_iter()
            .any(|transit| !by_transit(old, *port, transit) && by_transit(new, *port, transit))
    };
    let mut passthrough = old.passthrough_ports.iter();
    old.ports.keys().any(is_lost)
        || passthrough
            .any(|(port, set)| !set.is_empty() && is_empty(new.passthrough_ports.get(port)))
}

/// Returns the bindings that lose their last gateway.
fn bindings_without_gateways(
    bindings: &[config::Binding],
    before: &Snapshot,
    next: &Snapshot,
) -> Vec<String> {
    let lost = bindings.iter().filter(|binding| {
        let (host, port) = (binding.service.host.as_str(), binding.service.port);
        let is_empty = |snapshot| {
            let clusters = binding.cluster.iter().map(|of| of.as_str().into());
            let gateways = BoundEndpoints::new(clusters, host.into(), port.unwrap_or_default());
            gateways.load(snapshot).endpoints.is_empty()
        };
        is_empty(next) && !is_empty(before)
    });
    lost.map(|binding| format!("binding {}", binding.service)).collect()
}
