//! Watches of an API server, one for each kind of objects that files may have, and the conditions
//! that it is given.
//!
//! A watch begins with a list in pages. After an error the kind is listed again, with a delay that
//! grows from 0.8 s to 30 s, and its last state stays in use meanwhile.

mod access;
mod kubeconfig;
mod object;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kube::api::{Api, ApiResource, GroupVersionKind, Patch, PatchParams};
use kube::config::KubeConfigOptions;
use kube::runtime::watcher::{self, DefaultBackoff, Event, watcher};
use kube::{Client, Config};
use serde_json::{Value as Json, json};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_stream::StreamExt;
use tracing::{info, warn};

use super::{Condition, LiveObject, LiveSource, Problem, condition, is_of_tenants};
use crate::xds::hold::Before;
use crate::xds::objects::KINDS;

use object::TextObject;

/// Number of objects of a page.
const PAGE: u32 = 200;

/// The same for kinds whose objects tenants write freely. A page is in memory as a whole, and an
/// object has at most 1.5 MiB.
const PAGE_OF_TENANTS: u32 = 20;

/// Time after which the API server ends a watch, which is then begun again at the same place.
const WATCH_SECONDS: u32 = 60;

/// Time without a byte of an answer after which a connection is given up. The API server sends at
/// least the end of a watch in [`WATCH_SECONDS`].
const SILENCE: Duration = Duration::from_secs(90);

/// Deadline of a page of a list: a server that sends some bytes now and then is not silent.
const PAGE_DEADLINE: Duration = Duration::from_secs(60);

/// Time after which a kind beyond the limits is listed again.
const OVER_DELAY: Duration = Duration::from_secs(60);

/// Deadline of the write of one object's conditions.
const WRITE_DEADLINE: Duration = Duration::from_secs(10);

/// Delay before conditions that could not be written are tried again.
const WRITE_RETRY: Duration = Duration::from_secs(60);

/// Longest time without a look at the conditions, and between two corrections of one.
const WRITE_IDLE: Duration = Duration::from_secs(3600);

/// Owner of the conditions at the API server: that of all replicas.
const MANAGER: &str = "strait";

/// Watches all kinds, and does not return. Without a kubeconfig the API server is that of the pod.
/// Conditions are written until `may_write` says no.
pub async fn run(
    kubeconfig: Option<PathBuf>,
    live: Arc<LiveSource>,
    may_write: impl Fn() -> bool + Send + 'static,
) {
    let mut delays = DefaultBackoff::default();
    let client = loop {
        match client(kubeconfig.as_deref()).await {
            Ok(client) => break client,
            Err(error) => {
                let error = describe(&*error);
                for (kind, _) in KINDS {
                    live.failed(kind, Problem::Failed(error.clone()));
                }
                warn!(%error, "cannot use the Kubernetes API");
                sleep(delays.next().unwrap_or(OVER_DELAY)).await;
            }
        }
    };
    let mut watches = JoinSet::new();
    for (kind, versions) in KINDS {
        watches.spawn(watch(client.clone(), kind, versions, Arc::clone(&live)));
    }
    watches.spawn(write_conditions(client, Arc::clone(&live), may_write));
    while let Some(ended) = watches.join_next().await {
        if let Err(error) = ended {
            // A panic: the thread ends by it, and readiness shows that.
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

async fn client(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = kubeconfig::read(path)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None => Config::incluster()?,
    };
    config.read_timeout = Some(SILENCE);
    access::client(config).await
}

/// Watches one kind, in the first of its versions that the API server has.
async fn watch(
    client: Client,
    kind: &'static str,
    versions: &'static [&'static str],
    live: Arc<LiveSource>,
) {
    let mut delays = DefaultBackoff::default();
    let mut before = Before::Gap;
    loop {
        let mut problem = Problem::Missing;
        let mut wait = None;
        let before_list = mem::take(&mut before);
        for version in versions {
            let resource = resource(kind, version);
            match watch_version(&client, &resource, &live, before_list).await {
                End::Missing if is_built_in(version) => {
                    problem = Problem::Failed("the API server does not have it (404)".to_owned());
                }
                End::Missing => continue,
                End::Gone => wait = delays.next(),
                End::Over => {
                    warn!(kind, "more objects of Kubernetes than the limits permit");
                    wait = Some(OVER_DELAY);
                }
                End::Partial => (wait, before) = (Some(Duration::ZERO), Before::Watch),
                End::Failed(why) => problem = Problem::Failed(why),
            }
            break;
        }
        if let Some(wait) = wait {
            sleep(wait).await;
            continue;
        }
        let error = match &problem {
            Problem::Missing => "the API server does not have the kind",
            Problem::Failed(why) => why,
        };
        let error = error.to_owned();
        if live.failed(kind, problem) && !live.missing().is_empty() {
            warn!(kind, error, "cannot list objects of Kubernetes");
        }
        sleep(delays.next().unwrap_or(OVER_DELAY)).await;
    }
}

/// Returns whether each API server has a version. A 404 then comes from another server.
fn is_built_in(version: &str) -> bool {
    matches!(version, "v1" | "discovery.k8s.io/v1")
}

/// End of a watch.
enum End {
    /// The API server does not have the version.
    Missing,
    /// Changes since the last event are no longer known.
    Gone,
    /// There are more objects than the limits permit.
    Over,
    /// Objects of some namespaces were left out, and are listed again.
    Partial,
    /// Any other error.
    Failed(String),
}

/// Lists and watches one version of a kind, until that ends.
async fn watch_version(
    client: &Client,
    resource: &ApiResource,
    live: &LiveSource,
    before: Before,
) -> End {
    let kind = &*resource.kind;
    let api = Api::<TextObject>::all_with(client.clone(), resource);
    let page = if is_of_tenants(kind) { PAGE_OF_TENANTS } else { PAGE };
    let config = watcher::Config::default().page_size(page).timeout(WATCH_SECONDS);
    let mut events = pin!(watcher(api, config));
    let mut is_listing = true;
    let mut listed_at = Instant::now();
    loop {
        if !is_listing && listed_at.elapsed() >= OVER_DELAY {
            if live.is_partial(kind) {
                return End::Partial;
            }
            listed_at = Instant::now();
        }
        let limit = if is_listing { PAGE_DEADLINE } else { OVER_DELAY };
        let event = match timeout(limit, events.next()).await {
            Ok(Some(event)) => event,
            Ok(None) => return End::Failed("the watch ended".to_owned()),
            Err(_) if !is_listing => continue,
            Err(_) => {
                let seconds = PAGE_DEADLINE.as_secs();
                return End::Failed(format!("a page of the list takes more than {seconds} s"));
            }
        };
        match event {
            Ok(Event::Init) => live.begin(kind),
            Ok(Event::InitApply(object)) => {
                if !live.put(kind, object.json(resource), true) {
                    return End::Over;
                }
            }
            Ok(Event::Apply(object)) => {
                if !live.put(kind, object.json(resource), false) {
                    return End::Over;
                }
            }
            Ok(Event::InitDone) => {
                live.complete_after(kind, before);
                (is_listing, listed_at) = (false, Instant::now());
                info!(kind, version = resource.api_version, "objects of Kubernetes are listed");
            }
            Ok(Event::Delete(object)) => live.remove(kind, &object.json(resource)),
            Err(error) => return end(&error),
        }
    }
}

/// Writes the conditions that differ from those at the API server, after each application and each
/// change of those. Ends when they may not be written any more: a successor may judge otherwise.
async fn write_conditions(
    client: Client,
    live: Arc<LiveSource>,
    may_write: impl Fn() -> bool + Send + 'static,
) {
    let mut verdicts = live.verdicts();
    let mut written = HashMap::<Key, Written>::new();
    let mut again = HashMap::<Key, Instant>::new();
    let mut last_error = None;
    let mut last_namespace = String::new();
    loop {
        let all = verdicts.borrow_and_update().clone().unwrap_or_default();
        let objects: HashSet<_> = all.iter().map(|(object, _)| key(object)).collect();
        let (now, mut next) = (Instant::now(), Instant::now() + WRITE_IDLE);
        written.retain(|key, _| objects.contains(key));
        again.retain(|key, at| objects.contains(key) && *at > now);
        let due = all.iter().filter_map(|(object, condition)| {
            let (condition, key) = (condition.as_ref()?, key(object));
            if object.has(condition) {
                return None;
            }
            let last = written.get(&key).filter(|last| last.is_of(object, condition));
            let at = again.get(&key).copied().max(last.map(|last| last.correct_at));
            let Some(at) = at.filter(|at| *at > now) else { return Some((object, condition)) };
            next = next.min(at);
            None
        });
        let mut due: Vec<_> = due.collect();
        // Replicas that start together write different conditions, and find those of the others.
        fastrand::shuffle(&mut due);
        for (object, condition) in in_turns(due, &last_namespace) {
            if object.has(condition) {
                continue;
            }
            if !may_write() {
                return;
            }
            let key = key(object);
            object.namespace().clone_into(&mut last_namespace);
            let new = Written::new(object, condition, written.get(&key));
            // Before the write, so that an event after it is not forgotten.
            let before = object.condition.lock().replace(new.json());
            let done = timeout(WRITE_DEADLINE, write(&client, &new)).await;
            if let Err(error) = done.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
                if object.has(condition) {
                    *object.condition.lock() = before;
                }
                let at = Instant::now() + WRITE_RETRY;
                again.insert(key, at);
                next = next.min(at);
                let error = Some((object.kind.0, error));
                if let Some((kind, error)) = error.as_ref().filter(|_| error != last_error) {
                    warn!(kind, error, "cannot write conditions of Kubernetes objects");
                }
                last_error = error;
            } else {
                written.insert(key, new);
            }
            // Only after a write, so that each pass has some progress.
            if verdicts.borrow().as_ref().is_some_and(|new| !Arc::ptr_eq(new, &all)) {
                break;
            }
        }
        // The sender lives as long as `live`.
        let _ = timeout_at(next, verdicts.changed()).await;
    }
}

/// Condition that was written last.
struct Written {
    object: Arc<LiveObject>,
    condition: Condition,
    since: Json,
    /// Number of corrections in a row: another replica has overwritten the same condition.
    corrections: u32,
    /// Time before which it is not corrected again. Replicas that do not agree would otherwise
    /// write without end.
    correct_at: Instant,
}

impl Written {
    /// Returns the next write, after the last one of an object of that name.
    fn new(object: &Arc<LiveObject>, condition: &Condition, last: Option<&Self>) -> Self {
        let now = Instant::now();
        let same = last.filter(|last| last.is_of(object, condition));
        let corrections = same.map_or(0, |last| {
            let is_recent = now < last.correct_at + WRITE_IDLE;
            1 + if is_recent { last.corrections } else { 0 }
        });
        let doubled = |times| WRITE_RETRY.saturating_mul(2_u32.saturating_pow(times));
        let wait = corrections.checked_sub(1).map_or(Duration::ZERO, doubled);
        Self {
            object: Arc::clone(object),
            condition: condition.clone(),
            since: transition(object, condition, last),
            corrections,
            correct_at: now + wait.min(WRITE_IDLE),
        }
    }

    /// Returns the condition as the API server has it.
    fn json(&self) -> Json {
        let Self { object, condition, since, .. } = self;
        json!({
            "type": condition::TYPE, "status": condition.status(), "reason": condition.reason,
            "message": condition.message, "observedGeneration": object.generation,
            "lastTransitionTime": since,
        })
    }

    /// Returns whether the same condition of the same object would be written again.
    fn is_of(&self, object: &Arc<LiveObject>, condition: &Condition) -> bool {
        Arc::ptr_eq(&self.object, object) && self.condition == *condition
    }
}

/// Sorts the conditions so that namespaces take turns, beginning after the one that was last: one
/// with many objects, or whose objects cannot be written, does not hold the others up.
fn in_turns<'a>(
    due: Vec<(&'a Arc<LiveObject>, &'a Condition)>,
    last: &str,
) -> Vec<(&'a Arc<LiveObject>, &'a Condition)> {
    let mut turns = BTreeMap::<&str, usize>::new();
    let mut due: Vec<_> = due
        .into_iter()
        .map(|one| {
            let namespace = one.0.namespace();
            let turn = turns.entry(namespace).or_default();
            *turn += 1;
            ((*turn, namespace <= last, namespace), one)
        })
        .collect();
    due.sort_unstable_by_key(|(turn, _)| *turn);
    due.into_iter().map(|(_, one)| one).collect()
}

/// Returns the time since which the condition has its status.
fn transition(object: &LiveObject, condition: &Condition, last: Option<&Written>) -> Json {
    let last = last.filter(|last| last.object.uid == object.uid);
    let since = match last {
        Some(last) => (last.condition.holds == condition.holds).then(|| last.since.clone()),
        None => {
            let found = object.condition.lock();
            let same = found.as_ref().filter(|one| one["status"] == condition.status());
            same.map(|one| one["lastTransitionTime"].clone()).filter(Json::is_string)
        }
    };
    let now = || json!(humantime::format_rfc3339_seconds(SystemTime::now()).to_string());
    since.unwrap_or_else(now)
}

/// Kind, and namespace and name.
type Key = (&'static str, String);

fn key(object: &LiveObject) -> Key {
    (object.kind.0, object.name.clone())
}

/// Writes the condition of an object. One that is gone, or whose kind has no status, gets none.
async fn write(client: &Client, new: &Written) -> Result<(), String> {
    let Some((namespace, name)) = new.object.name.split_once('/') else { return Ok(()) };
    let (kind, version) = &new.object.kind;
    let patch = json!({
        "apiVersion": version, "kind": kind, "metadata": {"name": name},
        "status": {"conditions": [new.json()]},
    });
    let resource = resource(kind, version);
    let api = Api::<TextObject>::namespaced_with(client.clone(), namespace, &resource);
    match api.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(&patch)).await
    {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(describe(&error)),
    }
}

fn end(error: &watcher::Error) -> End {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        _ => None,
    };
    match status {
        Some(status) if status.code == 404 => End::Missing,
        Some(status) if status.code == 410 => End::Gone,
        Some(status) => End::Failed(format!("{} ({})", status.message, status.code)),
        None => End::Failed(describe(error)),
    }
}

/// Returns the innermost cause of an error, which names what the system or the server reported.
fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    loop {
        // Of these, libraries name their own part.
        match innermost.downcast_ref::<io::Error>().map(io::Error::kind) {
            Some(io::ErrorKind::UnexpectedEof) => {
                return "the API server closed the connection".to_owned();
            }
            Some(io::ErrorKind::TimedOut) => return "the API server does not answer".to_owned(),
            _ => {}
        }
        let Some(source) = innermost.source() else { return innermost.to_string() };
        innermost = source;
    }
}

fn resource(kind: &str, version: &str) -> ApiResource {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}
