//! Last good state of the control plane on disk, for a start without a control plane.
//!
//! A [`Recorder`] wraps a [`MeshStore`] and keeps each accepted resource as received, if a file is
//! configured: until it is written in memory, and then in the file alone, which each write merges
//! with the changes since. Removals that `hold` holds back reach neither. A separate task writes
//! the file every five seconds, or up to every minute if writes are slow.

mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use self::file::{Changes, Entry, Header};
use super::client::{Client, Removals, Resource, ResourceStore, Response, SHARED_PLACEHOLDER};
use super::envoy::ENDPOINT;
use super::hold::Hold;
use super::store::{ADDRESS, AUTHORIZATION, BODY_BYTES_MAX, CLUSTER, is_workload};
use super::tables::{MeshStore, Tables};

/// Factor of the pause after a write over its duration, because each write covers the whole state.
/// The pause is also bounded below and above.
const EVERY: u32 = 50;
const EVERY_MIN: Duration = Duration::from_secs(5);
const EVERY_MAX: Duration = Duration::from_secs(60);
/// Limit of the bodies of unreadable policies. After a restart the bodies tell what the
/// placeholders deny. The client does not count them.
const UNREADABLE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Delay before a write, because the first state comes in several messages.
const SETTLE: Duration = Duration::from_secs(1);

/// Cache file and owner of its state. A file of another cluster or network is refused.
#[derive(Clone, Debug)]
pub struct Cache {
    pub file: PathBuf,
    pub cluster: String,
    pub network: String,
}

/// Store with an optional record of the accepted resources.
#[derive(Debug)]
pub struct Recorder {
    pub store: Box<dyn MeshStore>,
    pub(super) hold: Hold,
    kept: Option<Arc<Kept>>,
    /// Description of the state that comes from the file, if any does.
    pub(super) restored: Option<String>,
    /// Time at which that state was saved.
    pub(super) saved: Option<SystemTime>,
}

/// Content of the file, and the trigger of its writer.
#[derive(Debug)]
struct Kept {
    cache: Cache,
    state: Mutex<State>,
    write_requested: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// File of the last write, or of the start. It stays readable if its name is given to another.
    base: Option<File>,
    /// Changes since.
    changes: Changes,
    /// Size of the bodies of unreadable policies, by name and in total.
    unreadable: BTreeMap<Arc<str>, usize>,
    unreadable_bytes: usize,
}

impl Recorder {
    /// Returns a recorder without a file.
    pub fn new(store: Box<dyn MeshStore>) -> Self {
        Self { store, hold: Hold::default(), kept: None, restored: None, saved: None }
    }

    /// Makes the removals that wait. Returns false if none did.
    pub(super) fn release(&mut self) -> bool {
        let released = self.hold.release();
        for (type_url, name) in &released {
            self.remove(type_url, name);
        }
        !released.is_empty()
    }

    /// Returns a recorder for a file, and restores the content of the file into the store and the
    /// client. An unusable file is logged and ignored. The call blocks, so it must not run on a
    /// runtime.
    pub fn restore(cache: Cache, store: Box<dyn MeshStore>, client: &mut Client) -> Self {
        let path = cache.file.clone();
        let read = file::read(&path).and_then(|read| match read {
            Some((_, header, _))
                if (&header.cluster, &header.network) != (&cache.cluster, &cache.network) =>
            {
                Err(format!(
                    "it is of cluster {:?} and network {:?}",
                    header.cluster, header.network
                ))
            }
            read => Ok(read),
        });
        let mut recorder = Self {
            kept: Some(Arc::new(Kept {
                cache,
                state: Mutex::default(),
                write_requested: Notify::new(),
            })),
            ..Self::new(store)
        };
        match read {
            Ok(Some((file, header, resources))) => {
                recorder.fill(&path, (file, &header), &resources, client);
            }
            Ok(None) => info!(file = %path.display(), "no state is cached yet"),
            Err(error) => {
                let file = path.display();
                warn!(%file, %error, "the cached state cannot be used and is ignored");
            }
        }
        recorder
    }

    fn fill(
        &mut self,
        path: &Path,
        (base, header): (File, &Header),
        resources: &[Resource],
        client: &mut Client,
    ) {
        let began = Instant::now();
        let addresses = resources.iter().filter(|resource| *resource.body_type == *ADDRESS);
        let addresses: Vec<_> = addresses.collect();
        client.reserve(ADDRESS, addresses.len());
        self.store.announce_upserts(ADDRESS, &addresses);
        let held = resources.iter().filter(|resource| self.take(resource, client)).count();
        self.store.announce_upserts(ADDRESS, &[]);
        let (file, total) = (path.display(), resources.len());
        if held == 0 && total > 0 {
            warn!(%file, total, "no part of the cached state is usable; it is ignored");
            return;
        }
        if let Some(kept) = &self.kept {
            kept.state().base = Some(base);
        }
        let saved = UNIX_EPOCH + Duration::from_secs(header.saved.min(LAST_SECOND));
        let age = SystemTime::now().duration_since(saved).unwrap_or_default();
        let age = Duration::from_secs(age.as_secs());
        let took = began.elapsed();
        info!(%file, ?age, resources = held, left_out = total - held, ?took,
            "no control plane yet; serving the cached state");
        self.saved = Some(saved);
        let age = humantime::format_duration(age);
        let saved = humantime::format_rfc3339_seconds(saved);
        self.restored = Some(format!(
            "no control plane yet; serving the state of {saved} from {file}, {age} old at the start"
        ));
    }

    /// Restores a resource from the file into the store and the client. Returns whether it, or a
    /// placeholder for it, is in force.
    fn take(&mut self, resource: &Resource, client: &mut Client) -> bool {
        let mut types = [ADDRESS, AUTHORIZATION, CLUSTER, ENDPOINT].into_iter();
        let Some(type_url) = types.find(|known| **known == *resource.body_type) else {
            return false;
        };
        let name = &resource.name;
        let (version, bytes) = match self.store.upsert(type_url, resource) {
            Ok(()) => {
                let bytes = resource.body.as_ref().map_or(0, Bytes::len);
                (Arc::clone(&resource.version), bytes)
            }
            // The control plane has to send it again or remove it.
            Err(_) if self.store.has_placeholder(type_url, name) => {
                if let Some(kept) = &self.kept {
                    kept.put_unreadable(type_url, resource);
                }
                (Arc::default(), 0)
            }
            Err(_) => {
                self.remove(type_url, name);
                return false;
            }
        };
        let is_held = client.restore(type_url, Arc::clone(name), version, bytes);
        if !is_held {
            self.remove(type_url, name);
            self.handle_rejection(type_url, SHARED_PLACEHOLDER);
        }
        is_held
    }

    /// Schedules a write if the state has changed. The state must be complete and in force.
    pub fn save(&self) {
        if let Some(kept) = &self.kept
            && !kept.state().changes.is_empty()
        {
            kept.write_requested.notify_one();
        }
    }

    /// Returns the task that writes the file for ever and reports each write. Without a file it
    /// ends at once.
    pub fn writer(
        &self,
        report: impl Fn(Result<SystemTime, String>) + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let kept = self.kept.clone();
        async move {
            if let Some(kept) = kept {
                kept.run(report).await;
            }
        }
    }
}

/// Returns the pause after a write of this duration.
fn pause(took: Duration) -> Duration {
    took.saturating_mul(EVERY).clamp(EVERY_MIN, EVERY_MAX)
}

/// Limit of RFC 3339: the end of the year 9999, in seconds since 1970.
const LAST_SECOND: u64 = 253_402_300_799;

impl ResourceStore for Recorder {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        let result = self.store.upsert(type_url, resource);
        if result.is_ok() {
            self.hold.forget(type_url, &resource.name);
        }
        if let Some(kept) = &self.kept {
            // A placeholder for a policy denies what the policy covers after a restart too.
            if result.is_ok() {
                kept.put(type_url, resource, self.store.uses_bodies(type_url));
            } else if self.store.has_placeholder(type_url, &resource.name) {
                kept.put_unreadable(type_url, resource);
            }
        }
        result
    }

    fn announce_upserts(&mut self, type_url: &'static str, resources: &[&Resource]) {
        self.store.announce_upserts(type_url, resources);
    }

    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        // The version that the store still has is one that the control plane removed.
        if self.hold.forget(type_url, name) {
            self.remove(type_url, name);
        }
        let has_placeholder = self.store.handle_rejection(type_url, name);
        if let Some(kept) = &self.kept
            && has_placeholder
            && !kept.state().unreadable.contains_key(name)
        {
            // Unknown content: a restart restores it as unreadable too.
            let unreadable =
                Resource { name: name.into(), body_type: type_url.into(), ..Resource::default() };
            kept.put_unreadable(type_url, &unreadable);
        }
        has_placeholder
    }

    fn uses_bodies(&self, type_url: &str) -> bool {
        self.store.uses_bodies(type_url)
    }

    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        self.store.is_complete_state(type_url, response)
    }

    fn announce(&mut self, type_url: &'static str, removals: &Removals<'_>) {
        let mut counted = [(removals.held, removals.gone.len()), (0, 0)];
        if type_url == ADDRESS {
            let Tables { services, workloads, .. } = self.store.tables();
            let gone = removals.gone.iter().filter(|name| services.get(*name).is_some()).count();
            // A rollout replaces workloads, also while the gateway was away.
            let new = removals.added.iter().filter(|one| is_workload(one)).count();
            let lost = (removals.gone.len() - gone).saturating_sub(new);
            counted = [(services.len(), gone), (workloads.len(), lost)];
        }
        self.hold.announce(type_url, removals, counted);
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        if self.hold.contains(type_url, name) {
            return;
        }
        self.store.remove(type_url, name);
        if let Some(kept) = &self.kept {
            kept.change(type_url, &name.into(), None);
        }
    }
}

impl Kept {
    /// Records an unreadable policy. Beyond the limit its body is dropped, so that the placeholder
    /// denies all after a restart.
    fn put_unreadable(&self, type_url: &'static str, resource: &Resource) {
        let bytes = resource.body.as_ref().map_or(0, Bytes::len);
        let old = self.state().unreadable.get(&resource.name).copied();
        let all = self.state().unreadable_bytes - old.unwrap_or(0) + bytes;
        let fits = bytes <= BODY_BYTES_MAX && all <= UNREADABLE_BYTES_MAX;
        self.put(type_url, resource, fits);
        let (state, bytes) = (&mut *self.state(), if fits { bytes } else { 0 });
        state.unreadable.insert(Arc::clone(&resource.name), bytes);
        state.unreadable_bytes += bytes;
    }

    /// Records a resource, with its body if `with_body`.
    fn put(&self, type_url: &'static str, resource: &Resource, with_body: bool) {
        let body = resource.body.clone().filter(|_| with_body).unwrap_or_default();
        let entry = Entry { version: resource.version.to_string(), body, ..Entry::default() };
        self.change(type_url, &resource.name, Some(entry.encode()));
    }

    /// Records an encoded entry, without its type and name, or a removal.
    fn change(&self, type_url: &'static str, name: &Arc<str>, entry: Option<Bytes>) {
        let state = &mut *self.state();
        if type_url == AUTHORIZATION {
            state.unreadable_bytes -= state.unreadable.remove(name).unwrap_or(0);
        }
        state.changes.insert((type_url, Arc::clone(name)), entry);
    }

    async fn run(self: Arc<Self>, report: impl Fn(Result<SystemTime, String>)) {
        let (mut next, mut failed) = (Instant::now(), None);
        loop {
            self.write_requested.notified().await;
            sleep_until(next.max(Instant::now() + SETTLE)).await;
            let (kept, began) = (Arc::clone(&self), Instant::now());
            // The task fails only while the process exits.
            let Ok(written) = tokio::task::spawn_blocking(move || kept.write()).await else {
                return;
            };
            next = Instant::now() + pause(began.elapsed());
            if let Ok(Some(at)) = written {
                report(Ok(at));
            }
            let error = written.err();
            if let Some(error) = &error {
                report(Err(error.to_string()));
                self.write_requested.notify_one();
                if failed != Some(error.kind()) {
                    let file = self.cache.file.display();
                    warn!(%file, %error, "cannot save the state; the old file stays");
                }
            }
            failed = error.map(|error| error.kind());
        }
    }

    /// Writes the file if the state has changed since the last write. Returns the time of the
    /// write. Meanwhile the last file is in memory.
    fn write(&self) -> io::Result<Option<SystemTime>> {
        let (changes, base) = {
            let state = &mut *self.state();
            if state.changes.is_empty() {
                return Ok(None);
            }
            (mem::take(&mut state.changes), state.base.take())
        };
        let now = SystemTime::now();
        let since = now.duration_since(UNIX_EPOCH);
        let header = Header {
            cluster: self.cache.cluster.clone(),
            network: self.cache.network.clone(),
            saved: since.unwrap_or_default().as_secs(),
            ..Header::default()
        };
        let written = file::write(&self.cache.file, header, base.as_ref(), &changes);
        let state = &mut *self.state();
        match written {
            Ok(file) => {
                state.base = Some(file);
                Ok(Some(now))
            }
            Err(error) => {
                state.base = base;
                let newer = mem::replace(&mut state.changes, changes);
                state.changes.extend(newer);
                Err(error)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
