//! The last good state of the control plane on disk, for a start while there is none.
//!
//! A [`Recorder`] stands in front of the [`Source`] and remembers each accepted resource as it was
//! sent, where a file is configured. A task of its own writes the file: five seconds apart, or up
//! to a minute where that takes long.

mod file;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use self::file::{Entry, Header, Restored};
use super::client::{Client, Resource, ResourceStore, Response, SHARED_PLACEHOLDER};
use super::envoy::ENDPOINT;
use super::source::Source;
use super::store::{ADDRESS, AUTHORIZATION, BODY_BYTES_MAX, CLUSTER};

/// The time from the end of one write to the next: so many times what that took, because each
/// writes all there is, and at least and at most this.
const EVERY: u32 = 50;
const EVERY_MIN: Duration = Duration::from_secs(5);
const EVERY_MAX: Duration = Duration::from_secs(60);
/// Bytes of policies that cannot be read: they say what is refused in their place after a restart,
/// and the client does not count them.
const UNREADABLE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long further changes are waited for: the first state comes in several messages.
const SETTLE: Duration = Duration::from_secs(1);

/// The file, and whose state it has: that of another cluster or network is refused.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Where it is.
    pub file: PathBuf,
    /// The cluster of the gateway that it is told to.
    pub cluster: String,
    /// Its network.
    pub network: String,
}

/// A source that remembers what it was given, if there is a file for it.
#[derive(Debug, Default)]
pub struct Recorder {
    /// What was accepted, decoded.
    pub store: Source,
    kept: Option<Arc<Kept>>,
    restored: Option<String>,
    saved: Option<SystemTime>,
}

/// What the file will have, and the one who writes it is told by.
#[derive(Debug)]
struct Kept {
    cache: Cache,
    state: Mutex<State>,
    told: Notify,
}

/// By type and name, each resource but for these two as it stands in the file.
#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<&'static str, BTreeMap<Arc<str>, Bytes>>,
    /// Bytes of the bodies of policies that cannot be read, by name and together.
    unreadable: BTreeMap<Arc<str>, usize>,
    unreadable_bytes: usize,
    changed: bool,
}

impl Recorder {
    /// A recorder that remembers nothing.
    pub fn new(store: Source) -> Self {
        Self {
            store,
            ..Self::default()
        }
    }

    /// A recorder for a file, with what is in it, which the client holds then too. A file that
    /// cannot be used is ignored, and the log says why. Reads and decodes: not for a runtime.
    pub fn restore(cache: Cache, store: Source, client: &mut Client) -> Self {
        let path = cache.file.clone();
        let read = file::read(&path).and_then(|read| match read {
            Some((header, _))
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
                told: Notify::new(),
            })),
            ..Self::new(store)
        };
        match read {
            Ok(Some((header, entries))) => recorder.fill(&path, &header, entries, client),
            Ok(None) => info!(file = %path.display(), "no state is cached yet"),
            Err(why) => {
                let file = path.display();
                warn!(%file, %why, "the cached state cannot be used and is ignored");
            }
        }
        recorder
    }

    fn fill(&mut self, path: &Path, header: &Header, entries: Vec<Restored>, client: &mut Client) {
        let began = Instant::now();
        let (total, mut held) = (entries.len(), 0);
        for entry in entries {
            held += usize::from(self.take(entry, client));
        }
        let file = path.display();
        if held == 0 && total > 0 {
            warn!(%file, total, "nothing of the cached state can be used, and it is ignored");
            return;
        }
        if let Some(kept) = &self.kept {
            kept.state().changed = held < total;
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

    /// Takes a resource from the file; says whether it is in use.
    fn take(&mut self, (entry, rest): Restored, client: &mut Client) -> bool {
        let mut types = [ADDRESS, AUTHORIZATION, CLUSTER, ENDPOINT].into_iter();
        let Some(type_url) = types.find(|known| *known == entry.type_url) else {
            return false;
        };
        let resource = Resource {
            name: entry.name.into(),
            version: entry.version.into(),
            body: Some(entry.body),
            body_type: entry.type_url,
        };
        let name = Arc::clone(&resource.name);
        let bytes = resource.body.as_ref().map_or(0, Bytes::len);
        let (version, bytes) = match self.store.upsert(type_url, &resource) {
            Ok(()) => {
                if let Some(kept) = &self.kept {
                    kept.keep(type_url, &name, rest);
                }
                (Arc::clone(&resource.version), bytes)
            }
            // It is to be sent again, or to be said to be gone.
            Err(_) if self.store.has_placeholder(type_url, &name) => {
                if let Some(kept) = &self.kept {
                    kept.put_unreadable(type_url, &resource);
                }
                Default::default()
            }
            Err(_) => return false,
        };
        let holds = client.restore(type_url, Arc::clone(&name), version, bytes);
        if !holds {
            self.remove(type_url, &name);
            self.handle_rejection(type_url, SHARED_PLACEHOLDER);
        }
        holds
    }

    /// What is served without a control plane having told it to this process.
    pub fn restored(&self) -> Option<&str> {
        self.restored.as_deref()
    }

    /// When that was saved.
    pub fn saved(&self) -> Option<SystemTime> {
        self.saved
    }

    /// The state is complete and in force: if it has changed, the file is to follow.
    pub fn save(&self) {
        if let Some(kept) = &self.kept
            && kept.state().changed
        {
            kept.told.notify_one();
        }
    }

    /// What writes the file, for ever, and tells when it did. There is nothing to do without one.
    pub fn writer(
        &self,
        saved: impl Fn(SystemTime) + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let kept = self.kept.clone();
        async move {
            if let Some(kept) = kept {
                kept.run(saved).await;
            }
        }
    }
}

/// How long to wait after a write that took so long.
fn pause(took: Duration) -> Duration {
    took.saturating_mul(EVERY).clamp(EVERY_MIN, EVERY_MAX)
}

/// The last that RFC 3339 can say: the end of the year 9999.
const LAST_SECOND: u64 = 253_402_300_799;

impl ResourceStore for Recorder {
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String> {
        let result = self.store.upsert(type_url, resource);
        if let Some(kept) = &self.kept {
            // What stands in for a policy refuses what it covers, after a restart too.
            if result.is_ok() {
                kept.put(type_url, resource, self.store.uses_bodies(type_url));
            } else if self.store.has_placeholder(type_url, &resource.name) {
                kept.put_unreadable(type_url, resource);
            }
        }
        result
    }

    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool {
        let stands_in = self.store.handle_rejection(type_url, name);
        if let Some(kept) = &self.kept
            && stands_in
            && !kept.has(type_url, name)
        {
            // Nothing of it is known, so that nothing of it is read after a restart either.
            let unreadable = Resource {
                name: name.into(),
                body_type: type_url.to_owned(),
                ..Resource::default()
            };
            kept.put_unreadable(type_url, &unreadable);
        }
        stands_in
    }

    fn uses_bodies(&self, type_url: &str) -> bool {
        self.store.uses_bodies(type_url)
    }

    fn is_complete_state(&self, type_url: &str, response: &Response) -> bool {
        self.store.is_complete_state(type_url, response)
    }

    fn remove(&mut self, type_url: &'static str, name: &str) {
        self.store.remove(type_url, name);
        if let Some(kept) = &self.kept {
            let state = &mut *kept.state();
            state.drop_unreadable(type_url, name);
            let entries = state.entries.get_mut(type_url);
            state.changed |= entries.is_some_and(|entries| entries.remove(name).is_some());
        }
    }
}

impl State {
    fn drop_unreadable(&mut self, type_url: &str, name: &str) {
        if type_url == AUTHORIZATION {
            self.unreadable_bytes -= self.unreadable.remove(name).unwrap_or(0);
        }
    }
}

impl Kept {
    fn has(&self, type_url: &'static str, name: &str) -> bool {
        let state = self.state();
        let entries = state.entries.get(type_url);
        entries.is_some_and(|entries| entries.contains_key(name))
    }

    /// Keeps a policy that cannot be read: without its body if there is no room for that, so that
    /// after a restart it refuses all.
    fn put_unreadable(&self, type_url: &'static str, resource: &Resource) {
        let bytes = resource.body.as_ref().map_or(0, Bytes::len);
        let old = self.state().unreadable.get(&resource.name).copied();
        let all = self.state().unreadable_bytes - old.unwrap_or(0) + bytes;
        if bytes > BODY_BYTES_MAX || all > UNREADABLE_BYTES_MAX {
            let bodiless = Resource {
                body: None,
                ..resource.clone()
            };
            self.put(type_url, &bodiless, true);
            return;
        }
        self.put(type_url, resource, true);
        let state = &mut *self.state();
        state.unreadable.insert(Arc::clone(&resource.name), bytes);
        state.unreadable_bytes = all;
    }

    /// Keeps a resource, with its body if anybody reads that.
    fn put(&self, type_url: &'static str, resource: &Resource, reads: bool) {
        let body = resource.body.clone().filter(|_| reads).unwrap_or_default();
        let entry = Entry {
            version: resource.version.to_string(),
            body,
            ..Entry::default()
        };
        self.keep(type_url, &resource.name, entry.encode());
    }

    /// Keeps an entry as it is in the file, without its type and name.
    fn keep(&self, type_url: &'static str, name: &Arc<str>, entry: Bytes) {
        let state = &mut *self.state();
        state.drop_unreadable(type_url, name);
        let entries = state.entries.entry(type_url).or_default();
        match entries.get_mut(&**name) {
            Some(old) if *old == entry => return,
            Some(old) => *old = entry,
            None => drop(entries.insert(Arc::clone(name), entry)),
        }
        state.changed = true;
    }

    async fn run(self: Arc<Self>, saved: impl Fn(SystemTime)) {
        let (mut next, mut failed) = (Instant::now(), None);
        loop {
            self.told.notified().await;
            sleep_until(next.max(Instant::now() + SETTLE)).await;
            let (kept, began) = (Arc::clone(&self), Instant::now());
            // It fails only where the process ends.
            let Ok(written) = tokio::task::spawn_blocking(move || kept.write()).await else {
                return;
            };
            next = Instant::now() + pause(began.elapsed());
            if let Ok(Some(at)) = written {
                saved(at);
            }
            let error = written.err();
            if let Some(error) = &error {
                self.told.notify_one();
                if failed != Some(error.kind()) {
                    let file = self.cache.file.display();
                    warn!(%file, %error, "cannot save the state; the old file stays");
                }
            }
            failed = error.map(|error| error.kind());
        }
    }

    /// Writes the file if anything has changed since that was done last, and says when.
    fn write(&self) -> io::Result<Option<SystemTime>> {
        let entries: Vec<_> = {
            let mut state = self.state();
            if !std::mem::take(&mut state.changed) {
                return Ok(None);
            }
            let entries = state.entries.iter();
            let entries = entries.flat_map(|(of, entries)| entries.iter().map(move |it| (*of, it)));
            let entries = entries.map(|(of, (name, rest))| (of, Arc::clone(name), rest.clone()));
            entries.collect()
        };
        let now = SystemTime::now();
        let since = now.duration_since(UNIX_EPOCH);
        let header = Header {
            cluster: self.cache.cluster.clone(),
            network: self.cache.network.clone(),
            saved: since.unwrap_or_default().as_secs(),
            resources: u64::try_from(entries.len()).unwrap_or(u64::MAX),
        };
        let written = file::write(&self.cache.file, &header, &entries);
        self.state().changed |= written.is_err();
        written.map(|()| Some(now))
    }

    /// Each critical section is a step that leaves it whole.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
