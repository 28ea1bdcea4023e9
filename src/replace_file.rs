//! Atomic replacement of a file: its content is the old or the new one, also after a crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Replaces `path` by what `fill` writes, which only this user can read. Returns the file, open for
/// reading too. Until it is complete, its name ends in `.new`. On failure the old file remains.
pub(crate) fn replace_file(
    path: &Path,
    fill: impl FnOnce(File) -> io::Result<File>,
) -> io::Result<File> {
    let new = &suffixed(path, ".new");
    if let Err(error) = fs::remove_file(new)
        && error.kind() != ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(new);
    let replaced = file.and_then(fill).and_then(|file| {
        file.sync_all()?;
        fs::rename(new, path)?;
        Ok(file)
    });
    if replaced.is_err() {
        // If the removal of an incomplete file fails, the next write removes it.
        drop(fs::remove_file(new));
        return replaced;
    }
    // Best effort: without it, only a crash of the machine could bring back the old file.
    let folder = path.parent().and_then(|folder| File::open(folder).ok());
    drop(folder.map(|folder| folder.sync_all()));
    replaced
}

/// Returns the path with a suffix after its last extension.
pub(crate) fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
