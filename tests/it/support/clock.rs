//! Wall clock of a process that a test sets, by libfaketime.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::{replace, skip};

/// Wall clock of a process. Its monotonic clock is that of the machine.
pub struct Clock {
    library: PathBuf,
    /// Folder with the file of the offset.
    folder: TempDir,
}

impl Clock {
    /// Creates a clock with the time of the machine. Without the library, the row is skipped.
    pub fn new(row: &str) -> Option<Self> {
        let Some(library) = library() else {
            skip(row, "libfaketime is missing: apt-get install faketime");
            return None;
        };
        let clock = Self { library, folder: tempfile::tempdir().expect("a folder") };
        clock.set("+0");
        Some(clock)
    }

    /// Sets the offset from the time of the machine, such as `+3h`.
    pub fn set(&self, offset: &str) {
        replace(&self.file(), offset);
    }

    /// Returns the command that executes a program with this clock.
    pub fn enter(&self) -> Vec<String> {
        vec![
            "env".to_owned(),
            format!("LD_PRELOAD={}", self.library.display()),
            format!("FAKETIME_TIMESTAMP_FILE={}", self.file().display()),
            "FAKETIME_NO_CACHE=1".to_owned(),
            "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
        ]
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("clock")
    }
}

/// Library that sets the wall clock of a process, and not its monotonic clock. It is in the Debian
/// package faketime.
fn library() -> Option<PathBuf> {
    let folders = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
        .map(|machine| Path::new("/usr/lib").join(machine).join("faketime/libfaketimeMT.so.1"));
    folders.into_iter().find(|path| path.exists())
}
