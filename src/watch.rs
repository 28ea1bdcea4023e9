//! File watcher for configuration, certificates and mesh files.
//!
//! Every directory on the path to a file is watched. Atomic renames, swapped symlinks (Kubernetes'
//! `..data`) and replaced directories are therefore detected as well as writes. If a path is a
//! directory, all its entries are watched.
//!
//! An event means only that something may have changed. The reader compares the contents.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::warn;

/// Watcher of a set of files and directories: of every directory on their paths, and on the paths
/// of the symlinks among them.
#[derive(Debug)]
pub struct FileWatcher {
    files: Vec<PathBuf>,
    /// Wanted directories that cannot be watched, which are logged once.
    unwatchable: BTreeSet<PathBuf>,
    /// Entries for which an event counts. Other entries of `/tmp`, for example, change often.
    relevant: Arc<Mutex<NamesByDirectory>>,
    watcher: RecommendedWatcher,
    events: watch::Receiver<u64>,
}

/// Names of entries by the directory that contains them; [`ALL_ENTRIES`] is all entries.
type NamesByDirectory = BTreeMap<PathBuf, BTreeSet<OsString>>;

/// Marker for all entries of a directory. No entry has this name.
const ALL_ENTRIES: &str = "";

/// Delay after an event, so that the steps of one change cause one read. Equals
/// `FILE_DEBOUNCE_DURATION` of Istio's agent.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Maximum number of symlinks that are followed, equal to the kernel's limit
/// (`path_resolution(7)`).
const LINKS_MAX: usize = 40;
/// Maximum number of arming rounds before the next event. Every further round handles a directory
/// that appeared or disappeared during the previous one.
const ROUNDS_MAX: usize = 8;

impl FileWatcher {
    /// Watches `files`. Neither the files nor their directories need to exist.
    ///
    /// # Errors
    /// The system provides no watcher, or the working directory is gone.
    pub fn new(files: &[PathBuf]) -> notify::Result<Self> {
        let (sender, events) = watch::channel(0_u64);
        let relevant = Arc::new(Mutex::new(NamesByDirectory::new()));
        let names = Arc::clone(&relevant);
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            if event.map_or(true, |event| is_relevant(&event, &names.lock())) {
                sender.send_modify(|count| *count = count.wrapping_add(1));
            }
        })?;
        let mut watch =
            Self { files: Vec::new(), unwatchable: BTreeSet::new(), relevant, watcher, events };
        watch.replace(files)?;
        Ok(watch)
    }

    /// Replaces the watched files.
    ///
    /// # Errors
    /// A path is relative, and the working directory is gone.
    pub fn replace(&mut self, files: &[PathBuf]) -> notify::Result<()> {
        let absolute: std::io::Result<_> = files.iter().map(std::path::absolute).collect();
        self.files = absolute?;
        self.update_watches();
        Ok(())
    }

    /// Waits for an event, then a short time for further events of the same change. Cancel safe.
    pub async fn changed(&mut self) {
        if self.events.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        // Keeps the event if this future is dropped during the sleep.
        self.events.mark_changed();
        sleep(DEBOUNCE).await;
        self.events.mark_unchanged();
        // The change may have swapped a symlink, or created, removed or replaced a directory.
        self.update_watches();
    }

    fn update_watches(&mut self) {
        for _ in 0..ROUNDS_MAX {
            let wanted = resolve_paths(&self.files);
            self.update_watches_once(&wanted);
            // A directory that was created before its parent was watched caused no event.
            if resolve_paths(&self.files) == wanted {
                return;
            }
        }
    }

    fn update_watches_once(&mut self, wanted: &NamesByDirectory) {
        let before = std::mem::replace(&mut *self.relevant.lock(), wanted.clone());
        for directory in before.keys().filter(|one| !wanted.contains_key(*one)) {
            // Fails for a directory that could not be watched.
            let _ = self.watcher.unwatch(directory);
            self.unwatchable.remove(directory);
        }
        for directory in wanted.keys() {
            // Watching a path twice is harmless. It is necessary if another directory replaced
            // this one under the same name.
            let watched = self.watcher.watch(directory, RecursiveMode::NonRecursive);
            let Err(error) = watched else {
                self.unwatchable.remove(directory);
                continue;
            };
            if self.unwatchable.insert(directory.clone()) {
                let directory = directory.display();
                warn!(%directory, %error, "cannot watch directory; its changes are not detected");
            }
        }
    }
}

/// Returns true if an event affects a watched path. An event without paths means that events were
/// lost.
fn is_relevant(event: &Event, names: &NamesByDirectory) -> bool {
    // Reading a file causes an access event too: reacting to it would loop forever.
    if event.kind.is_access() {
        return false;
    }
    let is_watched = |path: &PathBuf| {
        let names = path.parent().and_then(|directory| names.get(directory));
        let is_name = |name: &OsString| name == ALL_ENTRIES || Some(&**name) == path.file_name();
        names.is_some_and(|names| names.iter().any(is_name))
    };
    event.paths.is_empty() || event.paths.iter().any(is_watched)
}

/// Returns every directory that path resolution of `files` visits, as a real path, with the names
/// that it looks up there. Resolution of a path ends at the first missing name.
fn resolve_paths(files: &[PathBuf]) -> NamesByDirectory {
    let mut found = NamesByDirectory::new();
    for file in files {
        resolve_path(file, &mut found);
    }
    found
}

fn resolve_path(file: &Path, found: &mut NamesByDirectory) {
    let parts = |path: &Path| -> Vec<OsString> {
        path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
    };
    let mut directory = PathBuf::from("/");
    // Remaining components in reverse order.
    let mut remaining = parts(file);
    let mut links = 0;
    while let Some(part) = remaining.pop() {
        let name = match Path::new(&part).components().next() {
            Some(Component::Normal(name)) => name,
            Some(Component::ParentDir) => {
                directory.pop();
                continue;
            }
            Some(Component::RootDir) => {
                directory = PathBuf::from("/");
                continue;
            }
            _ => continue,
        };
        found.entry(directory.clone()).or_default().insert(name.to_owned());
        let path = directory.join(name);
        if let Ok(target) = std::fs::read_link(&path) {
            links += 1;
            if links > LINKS_MAX {
                return;
            }
            remaining.extend(parts(&target));
        } else if path.is_dir() {
            directory = path;
        } else {
            return;
        }
    }
    found.entry(directory).or_default().insert(ALL_ENTRIES.into());
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::time::timeout;

    use super::*;

    async fn seen(watch: &mut FileWatcher) -> bool {
        timeout(Duration::from_secs(5), watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn a_write_a_rename_and_a_swapped_link_are_seen() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("..1")).expect("first data");
        std::fs::write(at("..1/file"), "one").expect("first file");
        symlink("..1", at("..data")).expect("a data link");
        symlink("..data/file", at("file")).expect("a file link");
        let mut watch = FileWatcher::new(&[at("file")]).expect("a watcher");

        std::fs::write(at("..1/file"), "written").expect("a write");
        assert!(seen(&mut watch).await, "a write");

        std::fs::write(at("..1/new"), "renamed").expect("a new file");
        std::fs::rename(at("..1/new"), at("..1/file")).expect("a rename");
        assert!(seen(&mut watch).await, "a rename");

        for generation in ["..2", "..3"] {
            std::fs::create_dir(at(generation)).expect("next data");
            std::fs::write(at(generation).join("file"), generation).expect("next file");
            symlink(generation, at("..tmp")).expect("next link");
            std::fs::rename(at("..tmp"), at("..data")).expect("a swap");
            assert!(seen(&mut watch).await, "a swap to {generation}");
            std::fs::write(at(generation).join("file"), "after").expect("a write after");
            assert!(seen(&mut watch).await, "a write after the swap to {generation}");
        }
    }

    #[tokio::test]
    async fn reading_a_file_is_no_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, "text").expect("a file");
        let mut watch = FileWatcher::new(std::slice::from_ref(&file)).expect("a watcher");
        std::fs::read(&file).expect("a read");
        assert!(timeout(Duration::from_millis(400), watch.changed()).await.is_err());
    }

    #[tokio::test]
    async fn a_directory_that_goes_away_and_comes_back_is_watched_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let certs = dir.path().join("pki/certs");
        let file = certs.join("file");
        let mut watch = FileWatcher::new(std::slice::from_ref(&file)).expect("a watcher");
        for gone in [certs.as_path(), &dir.path().join("pki")] {
            std::fs::create_dir_all(&certs).expect("the directories");
            std::fs::write(&file, "new").expect("a file");
            assert!(seen(&mut watch).await, "a directory that came");
            std::fs::write(&file, "later").expect("a write");
            assert!(seen(&mut watch).await, "a write after it came");
            std::fs::remove_dir_all(gone).expect("no directory");
            assert!(seen(&mut watch).await, "a directory that went");
        }
    }

    #[tokio::test]
    async fn a_directory_replaced_at_once_is_watched_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let make = |name: &str| {
            std::fs::create_dir_all(at(name).join("certs")).expect("the directories");
            std::fs::write(at(name).join("certs/file"), name).expect("a file");
        };
        make("pki");
        let mut watch = FileWatcher::new(&[at("pki/certs/file")]).expect("a watcher");
        for round in ["one", "two"] {
            std::fs::remove_dir_all(at("pki/certs")).expect("no directory");
            make("pki");
            assert!(seen(&mut watch).await, "{round}: removed and made");
            make(round);
            // The parent directory is replaced; the file's own directory has no event.
            std::fs::rename(at("pki"), at("old").with_extension(round)).expect("a rename");
            std::fs::rename(at(round), at("pki")).expect("a rename");
            assert!(seen(&mut watch).await, "{round}: renamed");
            std::fs::write(at("pki/certs/file"), "after").expect("a write");
            assert!(seen(&mut watch).await, "{round}: written afterwards");
        }
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_watched_stops_no_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("blocked"), "a file, not a directory").expect("a file");
        symlink("loop", at("loop")).expect("a link");
        let files = ["blocked/x", "loop/x", "none/none/x", "file"].map(at);
        let mut watch = FileWatcher::new(&files).expect("a watcher");
        for name in ["file", "none"] {
            std::fs::write(at(name), "new").expect("a file");
            assert!(seen(&mut watch).await, "{name}");
        }
    }

    #[tokio::test]
    async fn whatever_comes_and_goes_in_a_directory_that_is_named_is_seen() {
        let dir = tempfile::tempdir().expect("a directory");
        let named = dir.path().join("named");
        std::fs::create_dir(&named).expect("a directory");
        let mut watch = FileWatcher::new(std::slice::from_ref(&named)).expect("a watcher");
        for round in ["one", "two"] {
            std::fs::write(named.join("new"), round).expect("a file");
            assert!(seen(&mut watch).await, "{round}: a new file");
            std::fs::remove_file(named.join("new")).expect("no file");
            assert!(seen(&mut watch).await, "{round}: a file that went");
        }
        std::fs::write(dir.path().join("beside"), "text").expect("a file");
        let changed = timeout(Duration::from_millis(400), watch.changed());
        assert!(changed.await.is_err(), "a file beside it");
    }

    #[tokio::test]
    async fn what_happens_beside_the_way_is_no_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut watch = FileWatcher::new(&[dir.path().join("a/file")]).expect("a watcher");
        std::fs::write(dir.path().join("beside"), "text").expect("a file");
        let changed = timeout(Duration::from_millis(400), watch.changed());
        assert!(changed.await.is_err());
    }
}
