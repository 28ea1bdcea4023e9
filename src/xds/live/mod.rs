//! Objects of an API server: the last complete list of each kind, with the changes since, and the
//! conditions that they get.
//!
//! Each object is read by [`objects`] as the document that a file would contain, once for each of
//! its changes. A list replaces the former one when it is complete, so an API server that is away
//! or answers 410 removes nothing. A list without most of what was there is held. Beyond the limits
//! the namespace with the most objects is closed and loses some of them. A cache file keeps the
//! lists for a start without the API server.

mod cached;
#[cfg(feature = "kubernetes")]
pub mod client;
mod condition;
mod held;
mod selection;
mod share;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::Value as Json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::cache::{self, CacheFile};
use super::hold::{Before, Hold, WINDOW};
use super::objects::{self, KINDS, Objects, WARNINGS_MAX, limit_findings};
use super::sleep_until_some;
use crate::config::{KubernetesApi, Selector};
use crate::yaml::{Finding, Findings, Place, Severity};

pub use condition::Condition;

/// Limit of the objects of all kinds: pods, slices and Services of a mesh of 100,000 workloads.
const OBJECTS_MAX: usize = 250_000;

/// Limit of the bytes of all objects, without the parts that no kind is read for: that of files.
const BYTES_MAX: usize = 256 * 1024 * 1024;

/// Parts of `metadata` that are read.
const METADATA: [&str; 5] = ["name", "namespace", "labels", "annotations", "creationTimestamp"];

/// Place of findings about the API server.
const PLACE: &str = "Kubernetes";

/// Kinds whose objects get conditions: those by which a tenant asks this gateway for something.
const JUDGED: [&str; 5] = [
    "ServiceExport",
    "ServiceExpositionPolicy",
    "RemoteServiceBinding",
    "GlobalTrafficPolicy",
    "Dependency",
];

/// Objects, and changes of them, from the tasks that watch to the thread that applies.
#[derive(Debug)]
pub struct LiveSource {
    state: Mutex<State>,
    version: watch::Sender<u64>,
    /// Conditions of all judged objects; none until the first objects are applied.
    verdicts: watch::Sender<Option<Arc<Vec<Verdict>>>>,
    file: Option<Arc<CacheFile>>,
    namespaces: Option<Selector>,
    limits: share::Size,
    hasher: RandomState,
}

/// Object, and its condition by the last application, as far as that is known.
pub type Verdict = (Arc<LiveObject>, Option<Condition>);

/// Contents of a source at one time. Copies are cheap.
#[derive(Clone, Debug, Default)]
pub struct LiveObjects {
    /// The objects in the order of their kinds and names.
    pub objects: Vec<Arc<LiveObject>>,
    /// Namespaces that are closed, because some of their objects are not known.
    closed: Objects,
    /// Objects that may not be used while policies about them may be unknown.
    withheld: Vec<Arc<LiveObject>>,
    /// Objects of closed namespaces without a condition that says so.
    left_out: Vec<Arc<LiveObject>>,
    /// Findings about the source itself, about each closed namespace and each withheld object.
    pub findings: Findings,
    /// True if the API server has not answered for some of them yet.
    is_restored: bool,
}

/// Object of an API server.
#[derive(Debug, Default)]
pub struct LiveObject {
    /// The object as it was read, alone.
    pub read: Objects,
    /// Findings about it.
    pub findings: Findings,
    /// Kind, and version of the API, by which it was read.
    pub kind: (&'static str, String),
    /// Namespace and name.
    pub name: String,
    /// Number of its last change by a user.
    pub generation: Option<i64>,
    uid: Box<str>,
    /// Its condition at the API server, as far as that is known.
    pub condition: Mutex<Option<Json>>,
    bytes: usize,
    hash: u64,
    /// Its entry in the cache file; empty without a file, or if the file has it.
    entry: Mutex<Bytes>,
}

/// Reason for which a kind cannot be watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The API server does not have the kind.
    Missing,
    /// Any other error, which the next try may not have.
    Failed(String),
}

#[derive(Debug, Default)]
struct State {
    kinds: HashMap<&'static str, Watched>,
    /// Objects of the last state within the limits, with those whose removal waits; none until each
    /// kind was listed.
    usable: Option<Vec<Arc<LiveObject>>>,
    hold: Hold,
    /// Policies that went within [`WINDOW`], and when. They return if what they cover is held.
    parted: Vec<(Instant, Arc<LiveObject>)>,
    /// Description of the content of the cache file, if it was restored.
    restored: Option<String>,
    /// True while the objects of the file serve together: an export without its policy would be
    /// open.
    serves_file: bool,
    /// Time at which that ends, although some kinds may not be listed.
    file_end: Option<Instant>,
    /// True after a change that the cache file does not have.
    is_unsaved: bool,
    saved: cached::Saved,
}

#[derive(Debug, Default)]
struct Watched {
    is_listed: bool,
    /// True while its objects are those of the cache file.
    is_restored: bool,
    /// True from the loss of the cache file, which alone had the text of its objects, to a list.
    is_lost: bool,
    /// Time of the last complete list, or of the answer that there is no such kind, until the hold
    /// has learned of it, and what preceded that.
    listed_at: Option<(Instant, Before)>,
    objects: List,
    /// List that is not complete.
    next: Option<List>,
    /// True if objects without a namespace were left out since the last complete list.
    is_over: bool,
    problem: Option<Problem>,
}

#[derive(Debug, Default)]
struct List {
    objects: BTreeMap<String, Arc<LiveObject>>,
    bytes: usize,
    /// Namespaces of which objects are left out.
    partial: BTreeSet<Arc<str>>,
    /// Such objects, without their content, that wait for a condition.
    left_out: BTreeMap<String, Arc<LiveObject>>,
}

impl LiveSource {
    /// Creates a source without objects.
    pub fn new(api: &KubernetesApi) -> Self {
        Self::with_limits(api, OBJECTS_MAX, BYTES_MAX)
    }

    fn with_limits(api: &KubernetesApi, objects: usize, bytes: usize) -> Self {
        let kinds = KINDS.iter().map(|(kind, _)| (*kind, Watched::default()));
        let hold = Hold::with(api.hold, held::RULE);
        let state = State { kinds: kinds.collect(), hold, ..State::default() };
        Self {
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            verdicts: watch::Sender::new(None),
            file: None,
            namespaces: api.namespaces.clone(),
            limits: share::Size { objects, bytes },
            hasher: RandomState::new(),
        }
    }

    /// Begins a list of a kind.
    pub fn begin(&self, kind: &str) {
        self.change(kind, |watched| {
            watched.next = Some(List::default());
            false
        });
    }

    /// Adds an object to the list that has begun, or changes one after a list. Returns false if no
    /// namespace can make room for it: the kind has to be listed again.
    #[must_use]
    pub fn put(&self, kind: &str, json: Json, in_list: bool) -> bool {
        let (Some(name), Some((kind, _))) =
            (name_of(&json), KINDS.iter().find(|(known, _)| *known == kind))
        else {
            return true;
        };
        let generation = json.pointer("/metadata/generation").and_then(Json::as_i64);
        let uid = json.pointer("/metadata/uid").and_then(Json::as_str).unwrap_or_default();
        let uid: Box<str> = uid.into();
        let is_judged = JUDGED.contains(kind);
        let condition = is_judged.then(|| condition_of(&json)).flatten();
        let (json, text) = trim(kind, json);
        let hash = self.hasher.hash_one(&text);
        let bytes = text.len();
        // Another generation or object of the name gets its own condition.
        let known = self.known(kind, &name).filter(|known| {
            let is_same = (known.generation, &known.uid) == (generation, &uid);
            known.hash == hash && (is_same || !is_judged)
        });
        known
            .iter()
            .filter(|_| is_judged)
            .for_each(|known| self.observe(known, condition.as_ref()));
        let object = known.unwrap_or_else(|| {
            let place = format!("{kind} {name}");
            let version = json.get("apiVersion").and_then(Json::as_str).unwrap_or_default();
            let kind = (*kind, version.to_owned());
            let (read, mut findings) = objects::of_json(Path::new(&place), json);
            let bytes = bytes.max(read.bytes());
            // Errors first: a small object may have many findings, which its bytes do not count.
            findings.0.sort_by_key(|one| one.severity == Severity::Warning);
            findings.0.truncate(condition::FINDINGS_MAX);
            findings.0.shrink_to_fit();
            let entry = || cache::entry("", text.into());
            let entry = Mutex::new(self.file.as_ref().map(|_| entry()).unwrap_or_default());
            let name = name.clone();
            Arc::new(LiveObject {
                read,
                findings,
                kind,
                name,
                generation,
                uid,
                condition: Mutex::new(condition),
                bytes,
                hash,
                entry,
            })
        });
        let mut state = self.state.lock();
        let (is_changed, room) = state.put(kind, &object, in_list, self.limits);
        self.announce(&mut state, kind, is_changed);
        room != share::Room::Full
    }

    /// Notes the condition that an object has, which another replica may have written. Another time
    /// of the same condition is no change.
    fn observe(&self, object: &LiveObject, condition: Option<&Json>) {
        let mut known = object.condition.lock();
        let is_changed = condition::content(known.as_ref()) != condition::content(condition);
        *known = condition.cloned();
        if is_changed {
            self.verdicts.send_modify(|_| ());
        }
    }

    /// Removes an object.
    pub fn remove(&self, kind: &str, json: &Json) {
        let Some(name) = name_of(json) else { return };
        self.change(kind, |watched| watched.objects.remove(&name));
    }

    /// Completes a list, which replaces the former one.
    pub fn complete(&self, kind: &str) {
        self.complete_after(kind, Before::Gap)
    }

    fn complete_after(&self, kind: &str, before: Before) {
        self.change(kind, |watched| {
            let next = watched.next.take();
            let is_same = watched.is_listed
                && !watched.is_restored
                && !watched.is_lost
                && !watched.is_over
                && watched.problem.is_none();
            let changed = next.as_ref().is_none_or(|next| !next.is(&watched.objects));
            (watched.is_listed, watched.is_restored, watched.is_lost) = (true, false, false);
            watched.listed_at = Some((Instant::now(), before));
            watched.problem = None;
            watched.is_over = false;
            watched.objects = next.unwrap_or_default();
            !is_same || changed
        });
    }

    /// Notes that a kind cannot be watched, and returns whether that is new. Its last state stays.
    /// A kind that was never there has no objects.
    pub fn failed(&self, kind: &str, problem: Problem) -> bool {
        let mut is_new = false;
        self.change(kind, |watched| {
            is_new = watched.problem.as_ref() != Some(&problem);
            let is_missing = problem == Problem::Missing;
            watched.is_listed |= is_missing;
            watched.is_restored &= !is_missing;
            watched.is_lost &= !is_missing;
            if is_missing && is_new {
                watched.listed_at = Some((Instant::now(), Before::Gap));
            }
            // The second answer in a row: nothing of the kind is left, whatever was missed.
            let is_gone = is_missing && !is_new;
            let has_rest = watched.is_over || !watched.objects.is(&List::default());
            if is_gone {
                watched.objects = List::default();
                watched.is_over = false;
            }
            watched.problem = Some(problem);
            watched.next = None;
            is_new || (is_gone && has_rest)
        });
        is_new
    }

    /// Returns whether objects are left out of the last complete list of a kind, or the text of
    /// some is lost.
    pub fn is_partial(&self, kind: &str) -> bool {
        let state = self.state.lock();
        let kind = state.kinds.get(kind);
        kind.is_some_and(|one| one.is_lost || !one.objects.partial.is_empty())
    }

    /// Returns the kinds that were never listed.
    pub fn missing(&self) -> Vec<&'static str> {
        let state = self.state.lock();
        let kinds = KINDS.iter().map(|(kind, _)| *kind);
        kinds.filter(|kind| state.kinds.get(kind).is_some_and(|one| !one.is_listed)).collect()
    }

    /// Returns the number of the current contents.
    pub fn version(&self) -> u64 {
        *self.version.borrow()
    }

    /// Waits for contents of another number. Removals that wait are made when their time has come.
    pub async fn changed(&self, version: u64) {
        let (end, other_end) = {
            let state = self.state.lock();
            let file_end = state.file_end.filter(|_| state.serves_file);
            let parted = state.parted.iter().map(|(since, _)| *since + WINDOW);
            let parted = parted.filter(|end| *end > Instant::now());
            (state.hold.end(), file_end.into_iter().chain(parted).min())
        };
        let mut versions = self.version.subscribe();
        tokio::select! {
            // The sender lives as long as this.
            _ = versions.wait_for(|now| *now != version) => {}
            () = end => self.release("its time has passed"),
            () = sleep_until_some(other_end) => self.version.send_modify(|version| *version += 1),
        }
    }

    /// Returns the contents; none until each kind was listed.
    pub fn contents(&self) -> Option<LiveObjects> {
        self.contents_of(&mut self.state.lock())
    }

    fn contents_of(&self, state: &mut State) -> Option<LiveObjects> {
        if !state.kinds.values().all(|one| one.is_listed) {
            return None;
        }
        state.end_file();
        let is_restored = state.kinds.values().any(|one| one.is_restored);
        let lists = || KINDS.iter().filter_map(|(kind, _)| Some((*kind, state.kinds.get(kind)?)));
        let is_over = lists().any(|(_, one)| one.is_over);
        let closed: BTreeSet<_> =
            lists().flat_map(|(_, one)| one.objects.partial.iter().cloned()).collect();
        let namespaces = state.kinds.get("Namespace").map(|one| &one.objects.objects);
        let find = |name: &str| namespaces.and_then(|all| all.get(name));
        let is_wanted = |one: &&Arc<LiveObject>| {
            let selector = self.namespaces.as_ref();
            !is_over && selector.is_none_or(|one_of| selection::is_selected(one_of, one, find))
        };
        let left_out = lists().flat_map(|(_, one)| one.objects.left_out.values());
        let left_out = left_out.filter(is_wanted).cloned().collect();
        let mut found = problems(lists());
        found.extend(closed.iter().map(|namespace| share::finding(namespace, self.limits)));
        let mut withheld = Vec::new();
        if is_over {
            found.push(finding(Severity::PassedOver, share::over(self.limits)));
        } else if !state.serves_file || state.usable.is_none() {
            withheld = state.select(self.namespaces.as_ref(), &closed);
            state.is_unsaved |= state.hold.is_changed;
        }
        found.extend(withheld.iter().map(|one| state.refusal(one)));
        let objects = state.usable.clone()?;
        let closed = Objects::closing(closed);
        let findings = Findings(found);
        Some(LiveObjects { objects, closed, withheld, left_out, findings, is_restored })
    }

    /// Notes that contents are applied, has them written to the cache file, and derives their
    /// conditions from the findings of their join, and those about listeners that are not open.
    /// Objects of the file get none. If the join may have more findings, objects without one keep
    /// their condition in namespaces that have some: those of a namespace are never all omitted.
    /// The finding about a closed namespace is one about each of its objects.
    pub fn judge(&self, contents: &LiveObjects, joined: &[Finding], closed: &[Finding]) {
        let is_complete = joined.len() < WARNINGS_MAX;
        let namespaces: HashSet<_> = joined.iter().map(|one| &*one.namespace).collect();
        let own = &*contents.findings.0;
        let [joined, closed, own] = [joined, closed, own].map(|found| {
            let mut by_place = HashMap::<_, Vec<_>>::new();
            for one in found {
                by_place.entry(one.place.file.as_path()).or_default().push(one);
            }
            by_place
        });
        let shut = own.get(Path::new(PLACE)).into_iter().flatten();
        let shut = shut.filter(|one| !one.namespace.is_empty());
        let shut: HashMap<_, _> = shut.map(|one| (&*one.namespace, *one)).collect();
        let withheld: HashSet<_> = contents.withheld.iter().map(|one| one.key()).collect();
        let used = contents.objects.iter().filter(|one| !withheld.contains(&one.key()));
        let judged = used.chain(&contents.withheld).filter(|one| JUDGED.contains(&one.kind.0));
        let judged = judged.chain(&contents.left_out).filter(|_| !contents.is_restored);
        let verdicts = judged.map(|object| {
            let place = format!("{} {}", object.kind.0, object.name);
            let of = |found: &HashMap<&Path, Vec<_>>| {
                found.get(Path::new(&place)).cloned().unwrap_or_default()
            };
            let mut found: Vec<_> = shut.get(object.namespace()).copied().into_iter().collect();
            found.extend(of(&own));
            found.extend(of(&joined));
            let has_findings = namespaces.contains(object.namespace());
            let is_known = is_complete || !found.is_empty() || !has_findings;
            let condition =
                is_known.then(|| condition::of(&object.findings.0, &found, &of(&closed)));
            (Arc::clone(object), condition)
        });
        self.verdicts.send_replace(Some(Arc::new(verdicts.collect())));
        self.file.iter().for_each(|file| file.request_write());
    }

    /// Waits until objects are applied.
    pub async fn applied(&self) {
        // The sender lives as long as this.
        let _ = self.verdicts.subscribe().wait_for(Option::is_some).await;
    }

    /// Returns the conditions by each application.
    pub fn verdicts(&self) -> watch::Receiver<Option<Arc<Vec<Verdict>>>> {
        self.verdicts.subscribe()
    }

    fn known(&self, kind: &str, name: &str) -> Option<Arc<LiveObject>> {
        let state = self.state.lock();
        let watched = state.kinds.get(kind).filter(|one| !one.is_lost)?;
        watched.objects.objects.get(name).cloned()
    }

    /// Changes a kind. Contents have a new number if the change returns true.
    fn change(&self, kind: &str, change: impl FnOnce(&mut Watched) -> bool) {
        let mut state = self.state.lock();
        let Some(watched) = state.kinds.get_mut(kind) else { return };
        let is_changed = change(watched);
        self.announce(&mut state, kind, is_changed);
    }

    fn announce(&self, state: &mut State, kind: &str, is_changed: bool) {
        // A list without a change may be what a removal waits for.
        let is_awaited = || {
            let watched = state.kinds.get(kind);
            watched.is_some_and(|one| one.listed_at.is_some()) && !state.hold.removed().is_empty()
        };
        if is_changed || is_awaited() {
            state.is_unsaved = true;
            self.version.send_modify(|version| *version += 1);
        }
    }
}

impl LiveObject {
    /// Returns its kind and name.
    fn key(&self) -> (&'static str, &str) {
        (self.kind.0, &self.name)
    }

    /// Returns whether its text is here, and not in the cache file alone.
    fn has_text(&self) -> bool {
        !self.entry.lock().is_empty()
    }

    fn namespace(&self) -> &str {
        self.name.split_once('/').map_or("", |(namespace, _)| namespace)
    }
}

impl List {
    /// Returns whether both have the same objects.
    fn is(&self, other: &Self) -> bool {
        let pairs = self.objects.iter().zip(&other.objects);
        (self.objects.len(), &self.partial) == (other.objects.len(), &other.partial)
            && self.left_out.keys().eq(other.left_out.keys())
            && pairs.into_iter().all(|(one, other)| one.0 == other.0 && one.1.hash == other.1.hash)
    }
}

impl LiveObjects {
    /// Returns the objects as they are read from each, and what closes namespaces.
    pub fn read(&self) -> impl Iterator<Item = &Objects> {
        self.objects.iter().map(|one| &one.read).chain([&self.closed])
    }

    /// Returns the findings about the source and its objects.
    pub fn all_findings(&self) -> Findings {
        let of_objects = self.objects.iter().flat_map(|one| one.findings.0.iter().cloned());
        let own = self.findings.0.iter().cloned();
        Findings(limit_findings(own.chain(of_objects)))
    }
}

/// Returns a finding for each problem, with the kinds that have it.
fn problems<'a>(lists: impl Iterator<Item = (&'static str, &'a Watched)>) -> Vec<Finding> {
    let (mut missing, mut failed) = (Vec::new(), BTreeMap::<_, Vec<_>>::new());
    for (kind, watched) in lists {
        match &watched.problem {
            Some(Problem::Missing) => missing.push(kind),
            Some(Problem::Failed(why)) => failed.entry(why).or_default().push(kind),
            None => {}
        }
    }
    let failed = failed.into_iter().map(|(why, kinds)| {
        let kinds = kinds.join(", ");
        let what = format!("{kinds} cannot be watched: {why}; the last state stays in use");
        finding(Severity::PassedOver, what)
    });
    let mut found: Vec<_> = failed.collect();
    if !missing.is_empty() {
        let kinds = missing.join(", ");
        let what = format!("the API server has no {kinds}, and is asked again every 30 s");
        found.push(finding(Severity::Warning, what));
    }
    found
}

/// Returns whether tenants write the objects of a kind as they like.
#[cfg(feature = "kubernetes")]
fn is_of_tenants(kind: &str) -> bool {
    JUDGED.contains(&kind) || kind == "ServiceImport"
}

fn finding(severity: Severity, what: String) -> Finding {
    let place = Place { file: PLACE.into(), line: 0 };
    Finding { severity, ..Finding::warning(&place, what, "") }
}

/// Returns the namespace and name of an object; the name alone if it is of no namespace.
fn name_of(json: &Json) -> Option<String> {
    let metadata = json.get("metadata")?;
    let name = metadata.get("name")?.as_str()?;
    let namespace = metadata.get("namespace").and_then(Json::as_str);
    Some(namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}/{name}")))
}

/// Returns the condition that this gateway writes, as an object has it.
fn condition_of(json: &Json) -> Option<Json> {
    let mut conditions = json.pointer("/status/conditions")?.as_array()?.iter();
    conditions.find(|one| one["type"] == condition::TYPE).cloned()
}

/// Removes the parts that the reader ignores and that are large or change often. Returns the text
/// as well.
fn trim(kind: &str, mut json: Json) -> (Json, String) {
    let keep = |json: &mut Json, part: &str, names: &[&str]| {
        if let Some(fields) = json.get_mut(part).and_then(Json::as_object_mut) {
            fields.retain(|name, _| names.contains(&name.as_str()));
        }
    };
    keep(&mut json, "metadata", &METADATA);
    match kind {
        "Pod" => {
            keep(&mut json, "spec", &["hostNetwork"]);
            keep(&mut json, "status", &["phase", "podIPs"]);
        }
        "Node" => {
            keep(&mut json, "spec", &[]);
            keep(&mut json, "status", &["addresses"]);
        }
        _ => {
            if let Some(fields) = json.as_object_mut() {
                fields.remove("status");
            }
        }
    }
    let text = json.to_string();
    (json, text)
}
