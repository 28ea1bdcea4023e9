//! Last good state of the control plane on disk, for a start without a control plane.
//!
//! A [`Recorder`] wraps a [`MeshStore`] and keeps each accepted resource as received, if a file is
//! configured: until it is written in memory, and then in the file alone, which each write merges
//! with the changes since. Removals that `hold` holds back reach neither. A separate task writes
//! the file every five seconds, or up to every minute if writes are slow. Live objects have a file
//! of their own (`CacheFile`).

mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::future::pending;
use std::io::{self, ErrorKind};
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use self::file::{Entry, Header};
use super::client::{Client, Removals, Resource, ResourceStore, Response, SHARED_PLACEHOLDER};
use super::envoy::ENDPOINT;
use super::hold::Hold;
use super::store::{ADDRESS, AUTHORIZATION, BODY_BYTES_MAX, CLUSTER, is_workload};
use super::tables::{MeshStore, Tables};

pub(super) use self::file::Changes;

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

/// Cache file, and the trigger of its writer.
#[derive(Debug)]
pub(super) struct CacheFile {
    cache: Cache,
    write_requested: Notify,
}

/// Content of a write: an earlier file, if it is to be merged, and the changes since.
pub(super) type Unwritten = (Option<File>, Changes);

/// State that a cache file keeps.
pub(super) trait Cached: Send + Sync + 'static {
    /// Takes what has changed since the last call. None of a state that is not complete, or if
    /// nothing has.
    fn take_changes(&self) -> Option<Unwritten>;

    /// Notes the new file, or that the next write has to have the same changes too. `Err(None)`
    /// says that the earlier file cannot be read, and what it alone had is lost.
    fn note_write(&self, result: Result<File, Option<Unwritten>>);
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

/// File, and its content.
#[derive(Debug)]
struct Kept {
    file: Arc<CacheFile>,
    state: Mutex<State>,
    lost: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// File of the last write, or of the start. It stays readable if its name is given to another.
    base: Option<File>,
    /// Changes since.
    changes: Changes,
    extent: Extent,
    /// Size of the bodies of unreadable policies, by name and in total.
    unreadable: BTreeMap<Arc<str>, usize>,
    unreadable_bytes: usize,
    /// True while the changes may lack the policies about new services.
    awaits_policies: bool,
}

/// Part of the state that the base and the changes have. Only the whole one is written.
#[derive(Debug, Default, PartialEq, Eq)]
enum Extent {
    #[default]
    Partial,
    Whole,
    /// The base is lost, and nothing was requested again since.
    Lost,
}

impl Recorder {
    /// Returns a recorder without a file.
    pub fn new(store: Box<dyn MeshStore>) -> Self {
        Self { store, hold: Hold::default(), kept: None, restored: None, saved: None }
    }

    /// Begins a stream. What is new waits until its policies are received, in the file as well.
    pub(super) fn connected(&mut self) {
        self.hold.connected();
        let awaits_policies = self.store.await_policies();
        self.kept.iter().for_each(|kept| kept.state().awaits_policies = awaits_policies);
    }

    /// Marks the policies of a stream, or those of the file, as received.
    pub(super) fn set_policies_received(&mut self) {
        self.store.set_policies_received();
        self.kept.iter().for_each(|kept| kept.state().awaits_policies = false);
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
        let file = CacheFile::new(cache);
        let read = file.read();
        let kept = Kept { file: Arc::clone(&file), state: Mutex::default(), lost: Notify::new() };
        let mut recorder = Self { kept: Some(Arc::new(kept)), ..Self::new(store) };
        if let Some((base, header, resources)) = read {
            recorder.fill(&file, (base, &header), &resources, client);
        }
        recorder
    }

    fn fill(
        &mut self,
        of: &CacheFile,
        (base, header): (File, &Header),
        resources: &[Resource],
        client: &mut Client,
    ) {
        let began = Instant::now();
        if let Some(kept) = &self.kept {
            kept.state().base = Some(base);
        }
        let addresses = resources.iter().filter(|resource| *resource.body_type == *ADDRESS);
        let addresses: Vec<_> = addresses.collect();
        client.reserve(ADDRESS, addresses.len());
        self.store.announce_upserts(ADDRESS, &addresses);
        let held = resources.iter().filter(|resource| self.take(resource, client)).count();
        self.store.announce_upserts(ADDRESS, &[]);
        let (file, total) = (of.cache.file.display(), resources.len());
        if held == 0 && total > 0 {
            warn!(%file, total, "no part of the cached state is usable; it is ignored");
            return;
        }
        let (saved, text) = of.describe(header);
        let took = began.elapsed();
        info!(%file, state = text, resources = held, left_out = total - held, ?took,
            "no control plane yet; serving the cached state");
        self.saved = Some(saved);
        self.restored = Some(format!("no control plane yet; serving the state of {text}"));
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
        let Some(kept) = &self.kept else { return };
        let state = &mut *kept.state();
        if state.extent == Extent::Lost {
            return;
        }
        state.extent = Extent::Whole;
        if !state.changes.is_empty() {
            kept.file.request_write();
        }
    }

    /// Waits until the last file cannot be read any more. What it alone had is lost then, and the
    /// control plane has to send the whole state again, from which a new record begins.
    pub(super) fn lost(&self) -> impl Future<Output = ()> + use<> {
        let kept = self.kept.clone();
        async move {
            let Some(kept) = kept else { return pending().await };
            kept.lost.notified().await;
            *kept.state() = State::default();
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
                Arc::clone(&kept.file).run(kept, report).await;
            }
        }
    }
}

impl CacheFile {
    pub(super) fn new(cache: Cache) -> Arc<Self> {
        Arc::new(Self { cache, write_requested: Notify::new() })
    }

    /// Reads the file. An unusable one is logged and ignored.
    pub(super) fn read(&self) -> Option<(File, Header, Vec<Resource>)> {
        let Cache { file, cluster, network } = &self.cache;
        let read = file::read(file).and_then(|read| match read {
            Some((_, header, _)) if (&header.cluster, &header.network) != (cluster, network) => {
                let Header { cluster, network, .. } = header;
                Err(format!("it is of cluster {cluster:?} and network {network:?}"))
            }
            read => Ok(read),
        });
        match read {
            Ok(Some(read)) => return Some(read),
            Ok(None) => info!(file = %file.display(), "no state is cached yet"),
            Err(error) => self.ignore(&error),
        }
        None
    }

    /// Logs the reason for which the content of the file is not used.
    pub(super) fn ignore(&self, error: &str) {
        let file = self.cache.file.display();
        warn!(%file, error, "the cached state cannot be used and is ignored");
    }

    /// Returns the time at which the content was saved, and describes it.
    pub(super) fn describe(&self, header: &Header) -> (SystemTime, String) {
        let saved = UNIX_EPOCH + Duration::from_secs(header.saved.min(LAST_SECOND));
        let age = SystemTime::now().duration_since(saved).unwrap_or_default();
        let age = humantime::format_duration(Duration::from_secs(age.as_secs()));
        let (file, at) = (self.cache.file.display(), humantime::format_rfc3339_seconds(saved));
        (saved, format!("{at} from {file}, {age} old at the start"))
    }

    pub(super) fn request_write(&self) {
        self.write_requested.notify_one();
    }

    /// Writes the entries of a state after each request, and reports the writes. It never returns.
    pub(super) async fn run(
        self: Arc<Self>,
        state: Arc<impl Cached>,
        report: impl Fn(Result<SystemTime, String>),
    ) {
        let (mut next, mut failed) = (Instant::now(), None);
        loop {
            self.write_requested.notified().await;
            sleep_until(next.max(Instant::now() + SETTLE)).await;
            let (file, state, began) = (Arc::clone(&self), Arc::clone(&state), Instant::now());
            let write = move || file.write(&*state);
            // The task fails only while the process exits.
            let Ok(written) = tokio::task::spawn_blocking(write).await else {
                return;
            };
            next = Instant::now() + pause(began.elapsed());
            if let Ok(Some(at)) = written {
                report(Ok(at));
            }
            let error = written.err();
            if let Some(error) = &error {
                report(Err(error.to_string()));
                self.request_write();
                if failed != Some(error.kind()) {
                    let file = self.cache.file.display();
                    warn!(%file, %error, "cannot save the state; the old file stays");
                }
            }
            failed = error.map(|error| error.kind());
        }
    }

    /// Writes the file if the state has changed. Returns the time of the write. Meanwhile the last
    /// file is in memory, if it is merged.
    pub(super) fn write(&self, state: &impl Cached) -> io::Result<Option<SystemTime>> {
        let Some((base, mut changes)) = state.take_changes() else { return Ok(None) };
        let now = SystemTime::now();
        let since = now.duration_since(UNIX_EPOCH);
        let header = Header {
            cluster: self.cache.cluster.clone(),
            network: self.cache.network.clone(),
            saved: since.unwrap_or_default().as_secs(),
            ..Header::default()
        };
        match file::write(&self.cache.file, header, base.as_ref(), &mut changes) {
            Ok(file) => state.note_write(Ok(file)),
            Err(error) => {
                let is_lost = error.kind() == ErrorKind::InvalidData;
                state.note_write(Err((!is_lost).then_some((base, changes))));
                return Err(error);
            }
        }
        Ok(Some(now))
    }
}

/// Returns an entry without its type and name.
pub(super) fn entry(version: &str, body: Bytes) -> Bytes {
    Entry { version: version.to_owned(), body, ..Entry::default() }.encode()
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
        self.change(type_url, &resource.name, Some(entry(&resource.version, body)));
    }

    /// Records an encoded entry, without its type and name, or a removal.
    fn change(&self, type_url: &'static str, name: &Arc<str>, entry: Option<Bytes>) {
        let state = &mut *self.state();
        if type_url == AUTHORIZATION {
            state.unreadable_bytes -= state.unreadable.remove(name).unwrap_or(0);
        }
        // Only a base and a running write may have what is removed.
        if entry.is_none() && state.base.is_none() && state.extent != Extent::Whole {
            state.changes.remove(&(type_url, Arc::clone(name)));
        } else {
            state.changes.insert((type_url, Arc::clone(name)), entry);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Cached for Kept {
    fn take_changes(&self) -> Option<Unwritten> {
        let state = &mut *self.state();
        let is_ready = state.extent == Extent::Whole && !state.awaits_policies;
        if state.changes.is_empty() || !is_ready {
            return None;
        }
        Some((state.base.take(), mem::take(&mut state.changes)))
    }

    fn note_write(&self, result: Result<File, Option<Unwritten>>) {
        let state = &mut *self.state();
        match result {
            Ok(file) => state.base = Some(file),
            Err(Some((base, changes))) => {
                state.base = base;
                let newer = mem::replace(&mut state.changes, changes);
                state.changes.extend(newer);
            }
            Err(None) => {
                state.extent = Extent::Lost;
                self.lost.notify_one();
            }
        }
    }
}
