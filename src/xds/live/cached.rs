//! Objects in a cache file, for a start without the API server.
//!
//! The file has the objects of all namespaces: another selector may need them after a restart.
//! Objects whose removal waits are among them. A write merges the last file with the changes since,
//! so the text of an object is in memory until it is written. Each kind has an entry without a
//! name, so that a kind of which an older build knew nothing is listed before anything is served.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::mem;
use std::sync::Arc;
use std::time::SystemTime;

use tracing::info;

use super::held::removed;
use super::{KINDS, LiveObject, LiveSource, Watched};
use crate::status::{ReloadSource, Status};
use crate::telemetry::Metrics;
use crate::xds::cache::{self, Cache, CacheFile, Cached, Unwritten};
use crate::xds::client::Resource;

/// File of the last write, and its objects, whose text is in the file alone.
#[derive(Debug, Default)]
pub(super) struct Saved {
    file: Option<File>,
    objects: Vec<Arc<LiveObject>>,
    /// Objects of the write that runs.
    next: Vec<Arc<LiveObject>>,
}

impl LiveSource {
    /// Adds a cache file.
    #[must_use]
    pub fn with_cache(self, cache: Option<Cache>) -> Self {
        Self { file: cache.map(CacheFile::new), ..self }
    }

    /// Restores the objects of the cache file, if there are any, before the first list. An unusable
    /// file is logged and ignored. Returns the time at which the objects were saved. It blocks.
    pub fn restore(&self) -> Option<SystemTime> {
        let file = self.file.as_ref()?;
        let (_, header, entries) = file.read()?;
        for resource in &entries {
            if let Err(error) = self.take(resource) {
                file.ignore(&error);
                self.state.lock().kinds.values_mut().for_each(|kind| *kind = Watched::default());
                return None;
            }
        }
        let (saved, text) = file.describe(&header);
        info!(state = text, objects = entries.len(), "no API server yet; serving cached objects");
        let mut state = self.state.lock();
        state.restored =
            Some(format!("the API server has not listed every kind yet; serving those of {text}"));
        for watched in state.kinds.values_mut() {
            if let Some(next) = watched.next.take() {
                watched.objects = next;
                (watched.is_listed, watched.is_restored) = (true, true);
            }
        }
        state.serves_file = true;
        // What the first lists do not have is compared with this.
        self.contents_of(&mut state);
        self.version.send_modify(|version| *version += 1);
        Some(saved)
    }

    /// Adds an entry of the file to the list of its kind, which one without a name begins. That has
    /// the namespaces that are closed, because some of their objects are not in the list.
    fn take(&self, resource: &Resource) -> Result<(), String> {
        let mut kinds = KINDS.iter().map(|(kind, _)| *kind);
        let Some(kind) = kinds.find(|kind| **kind == *resource.body_type) else { return Ok(()) };
        let body = resource.body.as_deref().unwrap_or_default();
        if resource.name.is_empty() {
            self.begin(kind);
            let closed = serde_json::from_slice::<BTreeSet<Arc<str>>>(body);
            let closed = closed.map_err(|error| format!("{kind}: {error}"))?;
            let mut state = self.state.lock();
            let watched = state.kinds.get_mut(kind).and_then(|one| one.next.as_mut());
            watched.into_iter().for_each(|list| list.partial.clone_from(&closed));
            return Ok(());
        }
        let json = serde_json::from_slice(body);
        let json = json.map_err(|error| format!("{kind} {}: {error}", resource.name))?;
        let fits = self.put(kind, json, true);
        fits.then_some(()).ok_or_else(|| "it has more objects than the limits permit".to_owned())
    }

    /// Describes the objects of the cache file, until the API server has answered for each kind.
    pub fn restored(&self) -> Option<String> {
        let state = self.state.lock();
        let is_restored = state.kinds.values().any(|one| one.is_restored);
        state.restored.clone().filter(|_| is_restored)
    }

    /// Writes the cache file after changes, and never returns. Without a file it ends at once.
    /// `saved` is the time of its content.
    pub async fn write(
        self: Arc<Self>,
        saved: Option<SystemTime>,
        (status, metrics): (Arc<Status>, Arc<Metrics>),
    ) {
        let note = |written: Result<SystemTime, String>| {
            let saved = written.iter().copied();
            saved.for_each(|saved| metrics.xds.set_cache_time(ReloadSource::Objects, saved));
            status.objects_cache.lock().note(written);
        };
        saved.into_iter().for_each(|saved| note(Ok(saved)));
        if let Some(file) = self.file.clone() {
            file.run(self, note).await;
        }
    }
}

impl Cached for LiveSource {
    fn take_changes(&self) -> Option<Unwritten> {
        let state = &mut *self.state.lock();
        // Decides which of the objects that are gone wait, as long as the file has them.
        self.contents_of(state);
        let is_complete =
            |one: &Watched| one.is_listed && !one.is_restored && !one.is_over && !one.is_lost;
        let is_complete = state.kinds.values().all(is_complete) && !state.is_unread();
        if !is_complete || !mem::take(&mut state.is_unsaved) {
            return None;
        }
        let is_known = |one: &LiveObject| state.saved.file.is_some() || one.has_text();
        let mut is_lost = false;
        for kind in state.kinds.values_mut() {
            kind.is_lost = !kind.objects.objects.values().all(|one| is_known(one));
            is_lost |= kind.is_lost;
        }
        if is_lost {
            state.is_unsaved = true;
            return None;
        }
        let listed = state.kinds.values().flat_map(|one| one.objects.objects.values());
        let held = state.usable.iter().flatten();
        let held = held.filter(|one| state.hold.contains(one.kind.0, &one.name));
        let kinds = state.kinds.iter().map(|(kind, one)| {
            let closed = serde_json::to_vec(&one.objects.partial).unwrap_or_default();
            ((*kind, Arc::default()), Some(cache::entry("", closed.into())))
        });
        // Policies that may return have their text in the file.
        let parted = state.parted.iter().map(|(_, one)| one);
        let objects = parted.chain(held).chain(listed).filter(|one| is_known(one));
        let objects: HashMap<_, _> = objects.map(|one| (one.key(), one)).collect();
        let gone = state.saved.objects.iter().filter(|one| !objects.contains_key(&one.key()));
        let gone = gone.map(|one| (removed(one), None));
        let new = objects.values().filter(|one| one.has_text());
        let new = new.map(|one| (removed(one), Some(one.entry.lock().clone())));
        let changes = kinds.chain(gone).chain(new).collect();
        state.saved.next = objects.into_values().cloned().collect();
        Some((state.saved.file.take(), changes))
    }

    fn note_write(&self, result: Result<File, Option<Unwritten>>) {
        let state = &mut *self.state.lock();
        state.is_unsaved |= result.is_err();
        let Saved { file, objects, next } = &mut state.saved;
        match result {
            Ok(new) => {
                next.iter().for_each(|one| drop(mem::take(&mut *one.entry.lock())));
                (*file, *objects) = (Some(new), mem::take(next));
            }
            Err(Some((base, _))) => *file = base,
            Err(None) => {
                objects.clear();
                state.kinds.values_mut().for_each(|kind| kind.is_lost = true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use serde_json::{Value as Json, json};
    use tokio::time::{Instant, advance};

    use super::*;
    use crate::config::KubernetesApi;
    use crate::xds::live::tests::{count, list, list_kind, service, services};
    use crate::xds::live::{BYTES_MAX, Problem};

    fn cached(folder: &Path) -> LiveSource {
        limited(folder, 100)
    }

    fn limited(folder: &Path, objects: usize) -> LiveSource {
        let cache = Cache { file: folder.join("cache"), cluster: "e".into(), network: "n".into() };
        let live = LiveSource::with_limits(&KubernetesApi::default(), objects, BYTES_MAX);
        live.with_cache(Some(cache))
    }

    /// Writes the file, and returns whether there was something to write.
    fn is_written(live: &LiveSource) -> bool {
        let file = live.file.as_ref().expect("a file");
        file.write(live).expect("a write").is_some()
    }

    fn policy() -> Json {
        let mut policy = service("policy", 80);
        policy["kind"] = json!("ServiceExpositionPolicy");
        policy["apiVersion"] = json!("multicluster.istio.io/v1alpha1");
        policy
    }

    /// Writes a file with 12 Services and a policy.
    fn fill(folder: &Path) {
        let live = cached(folder);
        list(&live, &services(12));
        assert!(live.put("ServiceExpositionPolicy", policy(), false));
        assert!(is_written(&live));
    }

    #[tokio::test(start_paused = true)]
    async fn cached_objects_serve_until_each_kind_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path());
        let mode = fs::metadata(folder.path().join("cache")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let live = cached(folder.path());
        assert!(live.restore().is_some());
        assert_eq!((count(&live), live.missing()), (13, vec![]));
        live.failed("Pod", Problem::Failed("away".to_owned()));
        let contents = live.contents().unwrap();
        let found = contents.all_findings().lines();
        assert!(found[0].contains("Pod cannot be watched: away"), "{found:?}");
        live.judge(&contents, &[], &[]);
        assert!(live.verdicts().borrow().as_ref().unwrap().is_empty(), "nothing is judged");
        assert!(!is_written(&live), "nothing is listed");

        let all = KINDS.map(|(kind, _)| kind);
        for kind in all.into_iter().filter(|kind| *kind != "Service") {
            assert!(live.restored().unwrap().contains("/cache, "));
            list_kind(&live, kind, &[]);
            assert_eq!(count(&live), 13, "{kind} is listed before the others");
        }
        list_kind(&live, "Service", &services(12));
        assert_eq!(live.restored(), None);
        if count(&live) == 13 {
            // A removal waits for what else goes in this minute.
            live.changed(live.version()).await;
        }
        assert_eq!(count(&live), 12, "the policy was removed meanwhile");
        assert!(is_written(&live), "with the policy, which may return");
        advance(Duration::from_secs(61)).await;
        assert_eq!(count(&live), 12);
        live.judge(&live.contents().unwrap(), &[], &[]);
        assert!(is_written(&live));
        let live = cached(folder.path());
        assert!(live.restore().is_some());
        assert_eq!(count(&live), 12);
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_list_of_far_fewer_objects_than_are_cached_is_held() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path());
        for _ in 0..2 {
            let live = cached(folder.path());
            assert!(live.restore().is_some());
            list(&live, &[]);
            assert_eq!(count(&live), 13);
            advance(Duration::from_secs(61)).await;
            assert_eq!(count(&live), 13);
            assert!(is_written(&live), "with what is held, for a successor");
        }
        let live = cached(folder.path());
        assert!(live.restore().is_some());
        list(&live, &[]);
        assert_eq!(count(&live), 13);
        live.changed(live.version()).await;
        assert_eq!(count(&live), 0, "the time of the hold is over");
    }

    #[tokio::test(start_paused = true)]
    async fn the_text_of_a_written_object_is_in_the_file_alone_and_is_listed_again_after_a_loss() {
        let folder = tempfile::tempdir().unwrap();
        let (live, all) = (cached(folder.path()), services(12));
        list(&live, &all);
        let unwritten = || {
            let state = live.state.lock();
            let objects = state.kinds.values().flat_map(|kind| kind.objects.objects.values());
            objects.filter(|one| one.has_text()).count()
        };
        let restored = || {
            let live = cached(folder.path());
            assert!(live.restore().is_some());
            count(&live)
        };
        assert_eq!(unwritten(), 12);
        assert!(is_written(&live));
        assert_eq!((unwritten(), restored()), (0, 12));
        advance(Duration::from_secs(61)).await;
        live.remove("Service", &service("s0", 80));
        assert!(live.put("Service", service("s1", 81), false));
        assert_eq!(unwritten(), 1);
        assert!(is_written(&live));
        assert_eq!((unwritten(), restored()), (0, 11));

        let path = folder.path().join("cache");
        let mut bad = fs::read(&path).unwrap();
        *bad.last_mut().unwrap() ^= 1;
        // In place, as its writer reads it.
        fs::write(&path, &bad).unwrap();
        live.remove("Service", &service("s2", 80));
        let left = [vec![service("s1", 81)], all[3..].to_vec()].concat();
        assert!(live.file.as_ref().unwrap().write(&live).is_err());
        for (kind, _) in KINDS {
            assert!(live.is_partial(kind) && !is_written(&live), "{kind} is listed again");
            list_kind(&live, kind, if kind == "Service" { &left } else { &[] });
            assert!(!live.is_partial(kind));
        }
        assert!(is_written(&live));
        assert_eq!((unwritten(), restored()), (0, 10));
    }

    #[test]
    fn a_namespace_beyond_the_limits_is_closed_and_a_kind_that_the_file_lacks_is_awaited() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(cached(folder.path()).restore(), None, "no file");
        fill(folder.path());
        let live = limited(folder.path(), 5);
        assert!(live.restore().is_some());
        assert!(count(&live) <= 5);
        let found = live.contents().unwrap().all_findings().lines();
        assert!(found.iter().any(|one| one.contains("closed")), "{found:?}");
        for (kind, _) in KINDS {
            let all = if kind == "Service" { services(12) } else { Vec::new() };
            list_kind(&live, kind, &all);
        }
        assert!(is_written(&live), "other namespaces change");
        let live = cached(folder.path());
        assert!(live.restore().is_some());
        let found = live.contents().unwrap().all_findings().lines();
        assert!(found.iter().any(|one| one.contains("closed")), "still: {found:?}");
        fill(folder.path());

        let without_pods = cached(folder.path());
        list(&without_pods, &services(12));
        without_pods.state.lock().kinds.remove("Pod");
        assert!(is_written(&without_pods));
        let live = cached(folder.path());
        assert!(live.restore().is_some());
        assert_eq!(live.missing(), ["Pod"]);
        assert!(live.contents().is_none());
        list_kind(&live, "Pod", &[]);
        assert_eq!(count(&live), 12);
        assert!(!is_written(&live), "the other kinds are not listed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_that_cannot_be_listed_keeps_its_cached_objects_alone_after_a_minute() {
        let of_kind = |kind: &str, version: &str, name: &str| {
            let mut object = service(name, 80);
            (object["kind"], object["apiVersion"]) = (json!(kind), json!(version));
            object
        };
        let export = |name| of_kind("ServiceExport", "multicluster.x-k8s.io/v1beta1", name);
        let traffic = of_kind("GlobalTrafficPolicy", "admiral.io/v1", "traffic");
        for (failing, exported) in [("GlobalTrafficPolicy", 1), ("ServiceExpositionPolicy", 0)] {
            let folder = tempfile::tempdir().unwrap();
            let live = cached(folder.path());
            list(&live, &services(12));
            for object in [policy(), export("old"), traffic.clone()] {
                let kind = object["kind"].as_str().unwrap().to_owned();
                assert!(live.put(&kind, object, false));
            }
            assert!(is_written(&live));
            let live = cached(folder.path());
            assert!(live.restore().is_some());
            live.failed(failing, Problem::Failed("forbidden".to_owned()));
            for (kind, _) in KINDS.into_iter().filter(|(kind, _)| *kind != failing) {
                let objects = match kind {
                    "Service" => services(12),
                    "ServiceExpositionPolicy" => vec![policy()],
                    "ServiceExport" => vec![export("new")],
                    "GlobalTrafficPolicy" => vec![traffic.clone()],
                    _ => Vec::new(),
                };
                list_kind(&live, kind, &objects);
            }
            assert_eq!(count(&live), 15, "they serve together");
            let exports = || {
                let objects = live.contents().unwrap().objects;
                let exports = objects.iter().filter(|one| one.kind.0 == "ServiceExport");
                exports.map(|one| one.name.clone()).collect::<Vec<_>>()
            };
            assert_eq!(exports(), ["app/old"]);
            let begun = Instant::now();
            live.changed(live.version()).await;
            assert_eq!(begun.elapsed().as_secs(), 60);
            assert_eq!(exports(), ["app/new"][..exported], "{failing}");
            assert_eq!(count(&live), 14 + exported);
            assert!(live.restored().is_some() && !is_written(&live));
            let objects = if exported == 1 { traffic.clone() } else { policy() };
            list_kind(&live, failing, &[objects]);
            assert_eq!(exports(), ["app/new"]);
            assert!(live.restored().is_none() && is_written(&live));
        }
    }
}
