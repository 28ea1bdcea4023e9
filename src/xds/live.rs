//! Objects of an API server: the last complete list of each kind, with the changes since.
//!
//! Each object is read by [`objects`] as the document that a file would contain, once for each of
//! its changes. A list replaces the former one when it is complete, so an API server that is away
//! or answers 410 removes nothing. Beyond the limits nothing changes either: to leave an object out
//! could widen what others may reach.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value as Json;
use tokio::sync::watch;

use super::objects::{self, KINDS, Objects, limit_findings};
use crate::yaml::{Finding, Findings, Place, Severity};

/// Limit of the objects of all kinds: pods, slices and Services of a mesh of 100,000 workloads.
const OBJECTS_MAX: usize = 250_000;

/// Limit of the bytes of all objects, without the parts that no kind is read for: that of files.
const BYTES_MAX: usize = 256 * 1024 * 1024;

/// Parts of `metadata` that are read.
const METADATA: [&str; 5] = ["name", "namespace", "labels", "annotations", "creationTimestamp"];

/// Place of findings about the API server.
const PLACE: &str = "Kubernetes";

/// Objects, and changes of them, from the tasks that watch to the thread that applies.
#[derive(Debug)]
pub struct LiveSource {
    state: Mutex<State>,
    version: watch::Sender<u64>,
    limits: (usize, usize),
    hasher: RandomState,
}

/// Contents of a source at one time. Copies are cheap.
#[derive(Clone, Debug, Default)]
pub struct LiveObjects {
    /// The objects in the order of their kinds and names.
    pub objects: Vec<Arc<LiveObject>>,
    /// Findings about the source itself.
    pub findings: Findings,
}

/// Object of an API server.
#[derive(Debug)]
pub struct LiveObject {
    /// The object as it was read, alone.
    pub read: Objects,
    /// Findings about it.
    pub findings: Findings,
    bytes: usize,
    hash: u64,
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
    /// Objects of the last state within the limits; none until each kind was listed.
    usable: Option<Vec<Arc<LiveObject>>>,
}

#[derive(Debug, Default)]
struct Watched {
    is_listed: bool,
    objects: List,
    /// List that is not complete.
    next: Option<List>,
    /// True if objects were left out since the last complete list.
    is_over: bool,
    problem: Option<Problem>,
}

#[derive(Debug, Default)]
struct List {
    objects: BTreeMap<String, Arc<LiveObject>>,
    bytes: usize,
}

impl Default for LiveSource {
    fn default() -> Self {
        Self::with_limits(OBJECTS_MAX, BYTES_MAX)
    }
}

impl LiveSource {
    fn with_limits(objects: usize, bytes: usize) -> Self {
        let kinds = KINDS.iter().map(|(kind, _)| (*kind, Watched::default()));
        let state = State { kinds: kinds.collect(), usable: None };
        Self {
            state: Mutex::new(state),
            version: watch::Sender::new(0),
            limits: (objects, bytes),
            hasher: RandomState::new(),
        }
    }

    /// Begins a list of a kind.
    pub fn begin(&self, kind: &str) {
        self.change(kind, |watched, _| {
            watched.next = Some(List::default());
            false
        });
    }

    /// Adds an object to the list that has begun, or changes one after a list. Returns false if it
    /// is left out because of the limits: the kind has to be listed again.
    #[must_use]
    pub fn put(&self, kind: &str, json: Json, in_list: bool) -> bool {
        let Some(name) = name_of(&json) else { return true };
        let (json, text) = trim(kind, json);
        let hash = self.hasher.hash_one(&text);
        let bytes = text.len();
        let known = self.known(kind, &name).filter(|known| known.hash == hash);
        let object = known.unwrap_or_else(|| {
            let place = format!("{kind} {name}");
            let (read, findings) = objects::of_json(Path::new(&place), json);
            Arc::new(LiveObject { read, findings, bytes, hash })
        });
        let mut fits = true;
        self.change(kind, |watched, others| {
            let next = if in_list { watched.next.as_mut() } else { None };
            let list = next.unwrap_or(&mut watched.objects);
            let old = list.objects.get(&name);
            let (count, held) = match old {
                Some(old) if Arc::ptr_eq(old, &object) => return false,
                Some(old) => (list.objects.len(), list.bytes - old.bytes),
                None => (list.objects.len() + 1, list.bytes),
            };
            let (objects_max, bytes_max) = self.limits;
            if others.0 + count > objects_max || others.1 + held + bytes > bytes_max {
                fits = false;
                watched.is_over = true;
                return true;
            }
            list.bytes = held + bytes;
            list.objects.insert(name, object);
            !in_list
        });
        fits
    }

    /// Removes an object.
    pub fn remove(&self, kind: &str, json: &Json) {
        let Some(name) = name_of(json) else { return };
        self.change(kind, |watched, _| {
            let removed = watched.objects.objects.remove(&name);
            watched.objects.bytes -= removed.as_ref().map_or(0, |removed| removed.bytes);
            removed.is_some()
        });
    }

    /// Completes a list, which replaces the former one.
    pub fn complete(&self, kind: &str) {
        self.change(kind, |watched, _| {
            let next = watched.next.take();
            let is_same = watched.is_listed && !watched.is_over && watched.problem.is_none();
            let changed = next.as_ref().is_none_or(|next| !next.is(&watched.objects));
            watched.is_listed = true;
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
        self.change(kind, |watched, _| {
            is_new = watched.problem.as_ref() != Some(&problem);
            watched.is_listed |= problem == Problem::Missing;
            watched.problem = Some(problem);
            watched.next = None;
            is_new
        });
        is_new
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

    /// Waits for contents of another number.
    pub async fn changed(&self, version: u64) {
        // The sender lives as long as this.
        let _ = self.version.subscribe().wait_for(|now| *now != version).await;
    }

    /// Returns the contents; none until each kind was listed.
    pub fn contents(&self) -> Option<LiveObjects> {
        let mut state = self.state.lock();
        let lists = || KINDS.iter().filter_map(|(kind, _)| Some((*kind, state.kinds.get(kind)?)));
        if !lists().all(|(_, one)| one.is_listed) {
            return None;
        }
        let is_over = lists().any(|(_, one)| one.is_over);
        let mut found = problems(lists());
        if is_over {
            let (objects, bytes) = (self.limits.0, self.limits.1 >> 20);
            found.push(finding(
                Severity::PassedOver,
                format!(
                    "more than {objects} objects, or {bytes} MiB in them, are too many; the last \
                     state stays in use"
                ),
            ));
        } else {
            let objects = lists().flat_map(|(_, one)| one.objects.objects.values().cloned());
            let objects: Vec<_> = objects.collect();
            state.usable = Some(objects);
        }
        let objects = state.usable.clone()?;
        Some(LiveObjects { objects, findings: Findings(found) })
    }

    fn known(&self, kind: &str, name: &str) -> Option<Arc<LiveObject>> {
        let state = self.state.lock();
        state.kinds.get(kind)?.objects.objects.get(name).cloned()
    }

    /// Changes a kind, given the number and the bytes of the objects of others. Contents have a new
    /// number if the change returns true.
    fn change(&self, kind: &str, change: impl FnOnce(&mut Watched, (usize, usize)) -> bool) {
        let mut state = self.state.lock();
        let others = state.kinds.iter().filter(|(other, _)| **other != kind);
        let others = others.map(|(_, one)| (one.objects.objects.len(), one.objects.bytes));
        let others = others.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        let Some(watched) = state.kinds.get_mut(kind) else { return };
        if change(watched, others) {
            self.version.send_modify(|version| *version += 1);
        }
    }
}

impl List {
    /// Returns whether both have the same objects.
    fn is(&self, other: &Self) -> bool {
        let pairs = self.objects.iter().zip(&other.objects);
        self.objects.len() == other.objects.len()
            && pairs.into_iter().all(|(one, other)| one.0 == other.0 && one.1.hash == other.1.hash)
    }
}

impl LiveObjects {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(name: &str, port: i64) -> Json {
        let metadata = json!({"name": name, "namespace": "app", "resourceVersion": "7"});
        let spec = json!({"ports": [{"port": port}], "clusterIP": "10.1.0.1"});
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    }

    /// Lists Services, as far as they fit, and nothing of the other kinds.
    fn list(live: &LiveSource, services: &[Json]) {
        for (kind, _) in KINDS {
            live.begin(kind);
            let items = if kind == "Service" { services } else { &[] };
            if items.iter().all(|item| live.put(kind, item.clone(), true)) {
                live.complete(kind);
            }
        }
    }

    fn findings(live: &LiveSource) -> Vec<String> {
        live.contents().unwrap().all_findings().lines()
    }

    #[test]
    fn there_are_no_contents_before_each_kind_was_listed() {
        let live = LiveSource::default();
        let (last, others) = KINDS.split_last().unwrap();
        for (kind, _) in others {
            live.begin(kind);
            live.complete(kind);
            assert!(live.contents().is_none(), "{kind}");
        }
        assert_eq!(live.missing(), [last.0]);
        live.failed(last.0, Problem::Failed("away".to_owned()));
        assert!(live.contents().is_none());
        live.failed(last.0, Problem::Missing);
        assert_eq!(
            findings(&live),
            [format!(
                "Kubernetes: warning: the API server has no {}, and is asked again every 30 s",
                last.0
            )]
        );
    }

    #[test]
    fn a_list_removes_objects_once_it_is_complete() {
        let live = LiveSource::default();
        list(&live, &[service("a", 80), service("b", 80)]);
        live.begin("Service");
        assert!(live.put("Service", service("b", 80), true));
        live.failed("Service", Problem::Failed("away".to_owned()));
        live.failed("Pod", Problem::Failed("away".to_owned()));
        assert_eq!(live.contents().unwrap().objects.len(), 2);
        let away = "Kubernetes: error: Pod, Service cannot be watched: away; the last state stays \
                    in use";
        assert_eq!(findings(&live), [away]);
        list(&live, &[service("b", 80)]);
        assert_eq!(live.contents().unwrap().objects.len(), 1);
        assert_eq!(findings(&live), [""; 0]);
        live.remove("Service", &service("b", 80));
        assert!(live.contents().unwrap().objects.is_empty());
    }

    #[test]
    fn an_equal_object_changes_nothing() {
        let live = LiveSource::default();
        list(&live, &[service("a", 80)]);
        let version = live.version();
        let mut same = service("a", 80);
        same["metadata"]["resourceVersion"] = json!("8");
        same["status"] = json!({"loadBalancer": {}});
        assert!(live.put("Service", same, false));
        list(&live, &[service("a", 80)]);
        assert_eq!(live.version(), version);
        assert!(live.put("Service", service("a", 81), false));
        assert_ne!(live.version(), version);
    }

    #[test]
    fn an_invalid_object_is_named_with_its_field() {
        let live = LiveSource::default();
        list(&live, &[service("a", 80), service("b", 0)]);
        let found = findings(&live).join("\n");
        assert!(found.starts_with("Service app/b: error: `spec.ports[].port` "), "{found}");
    }

    #[test]
    fn objects_beyond_the_limits_change_nothing_until_a_list_fits() {
        let live = LiveSource::with_limits(2, BYTES_MAX);
        list(&live, &[service("a", 80), service("b", 80)]);
        assert_eq!(live.contents().unwrap().objects.len(), 2);
        assert!(!live.put("Service", service("c", 80), false));
        live.remove("Service", &service("a", 80));
        assert_eq!(live.contents().unwrap().objects.len(), 2, "the last state");
        assert!(findings(&live)[0].starts_with("Kubernetes: error: more than 2 objects"));
        list(&live, &[service("a", 80), service("b", 80), service("c", 80)]);
        assert_eq!(live.contents().unwrap().objects.len(), 2, "the last state");
        list(&live, &[service("c", 80)]);
        assert_eq!(live.contents().unwrap().objects.len(), 1);
        assert_eq!(findings(&live), [""; 0]);
        let small = LiveSource::with_limits(2, 10);
        list(&small, &[service("a", 80)]);
        assert!(small.contents().is_none());
    }
}
