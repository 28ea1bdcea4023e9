//! Files that change under us: directories are watched, so that an atomic rename and a swapped
//! symlink (Kubernetes' `..data`) are seen as well as a write.
//!
//! A watcher only says that something may have changed. Whoever reads the files decides, by
//! their contents, whether anything did.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::watch;
use tokio::time::sleep;

/// Watches the directories of some files and of every link on the way to them.
#[derive(Debug)]
pub struct FileWatcher {
    files: Vec<PathBuf>,
    watched: BTreeSet<PathBuf>,
    watcher: RecommendedWatcher,
    events: watch::Receiver<u64>,
}

/// Quiet time after an event, so that the several steps of one change are read once. Istio's
/// agent waits as long (`FILE_DEBOUNCE_DURATION`).
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Links that are followed at most, as the kernel's own limit (`path_resolution(7)`).
const LINKS_MAX: usize = 40;

impl FileWatcher {
    /// Watches `files`, which need not exist yet; their directories must.
    ///
    /// # Errors
    /// A directory cannot be watched.
    pub fn new(files: Vec<PathBuf>) -> notify::Result<Self> {
        let (sender, events) = watch::channel(0_u64);
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading a file is an access event too: reacting to it would be an endless loop.
            if !event.is_ok_and(|event| event.kind.is_access()) {
                sender.send_modify(|count| *count = count.wrapping_add(1));
            }
        })?;
        let mut watch = Self {
            files,
            watched: BTreeSet::new(),
            watcher,
            events,
        };
        watch.arm()?;
        Ok(watch)
    }

    /// Watches other files from now on.
    ///
    /// # Errors
    /// A directory cannot be watched.
    pub fn replace(&mut self, files: Vec<PathBuf>) -> notify::Result<()> {
        self.files = files;
        self.arm()
    }

    /// Waits until something may have changed and has been quiet for a moment.
    pub async fn changed(&mut self) {
        if self.events.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        sleep(DEBOUNCE).await;
        self.events.mark_unchanged();
        // A swapped link leads elsewhere now. A directory that has gone away is watched again
        // when its parent brings it back.
        let _ = self.arm();
    }

    fn arm(&mut self) -> notify::Result<()> {
        let wanted: BTreeSet<_> = self
            .files
            .iter()
            .flat_map(|file| directories(file))
            .collect();
        for gone in self.watched.difference(&wanted) {
            let _ = self.watcher.unwatch(gone);
        }
        self.watched.retain(|directory| wanted.contains(directory));
        for directory in wanted {
            // Watching again is harmless, and needed where a directory was replaced by another
            // of the same name.
            self.watcher
                .watch(&directory, RecursiveMode::NonRecursive)?;
            self.watched.insert(directory);
        }
        Ok(())
    }
}

/// The directory of `file`, and those of every link that is followed on the way to it.
fn directories(file: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next = Some(file.to_owned());
    for _ in 0..LINKS_MAX {
        let Some(path) = next.take() else { break };
        let parent = match path.parent() {
            Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
            Some(parent) => parent,
            None => break,
        };
        found.push(parent.to_owned());
        // The directory may be a link itself: its own parent tells when it is swapped.
        if parent.is_symlink()
            && let Some(above) = parent.parent()
        {
            found.push(above.to_owned());
        }
        next = std::fs::read_link(&path)
            .ok()
            .map(|target| parent.join(target));
    }
    found.retain(|directory| directory.is_dir());
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::time::timeout;

    use super::*;

    async fn seen(watch: &mut FileWatcher) -> bool {
        timeout(Duration::from_secs(5), watch.changed())
            .await
            .is_ok()
    }

    #[tokio::test]
    async fn a_write_a_rename_and_a_swapped_link_are_seen() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(at("..1")).expect("first data");
        std::fs::write(at("..1/file"), "one").expect("first file");
        symlink("..1", at("..data")).expect("a data link");
        symlink("..data/file", at("file")).expect("a file link");
        let mut watch = FileWatcher::new(vec![at("file")]).expect("a watcher");

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
            assert!(
                seen(&mut watch).await,
                "a write after the swap to {generation}"
            );
        }
    }

    #[tokio::test]
    async fn reading_a_file_is_no_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, "text").expect("a file");
        let mut watch = FileWatcher::new(vec![file.clone()]).expect("a watcher");
        std::fs::read(&file).expect("a read");
        assert!(
            timeout(Duration::from_millis(400), watch.changed())
                .await
                .is_err()
        );
    }
}
