//! Atomic replacement of a file: its content is the old or the new one, also after a crash.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Replaces `path` by what `fill` writes, which only this user can read. Returns the file, open for
/// reading too. Until it is complete, its name ends in `.new.PID`, so that the two processes of a
/// hand-over do not write into one file. On failure the old file remains.
pub(crate) fn replace_file(
    path: &Path,
    fill: impl FnOnce(File) -> io::Result<File>,
) -> io::Result<File> {
    let incomplete = suffixed(path, ".new.");
    remove_incomplete(&incomplete)?;
    let new = &suffixed(&incomplete, &std::process::id().to_string());
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

/// Removes the files whose name is `prefix` and the number of this process or of one that is gone.
fn remove_incomplete(prefix: &Path) -> io::Result<()> {
    let (Some(folder), Some(name)) = (prefix.parent(), prefix.file_name()) else { return Ok(()) };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let left = entry.file_name();
        let process = left.as_bytes().strip_prefix(name.as_bytes()).map(OsStr::from_bytes);
        let Some(process) = process.and_then(|process| process.to_str()?.parse::<u32>().ok())
        else {
            continue;
        };
        let is_gone = !Path::new("/proc").join(process.to_string()).exists();
        if process == std::process::id() || is_gone {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Returns the path with a suffix after its last extension.
pub(crate) fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_incomplete_file_of_another_process_stays_and_that_of_an_ended_one_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let of = |process: u32| suffixed(&path, &format!(".new.{process}"));
        let (other, ended) = (of(1), of(u32::MAX));
        fs::write(&other, "half of the sta").unwrap();
        fs::write(&ended, "half").unwrap();
        let fill = |mut file: File| file.write_all(b"state").map(|()| file);
        replace_file(&path, fill).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "state");
        assert_eq!(fs::read_to_string(&other).unwrap(), "half of the sta");
        assert!(!ended.exists() && !of(std::process::id()).exists());

        replace_file(&path, |_| Err(io::ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!(fs::read_to_string(&path).unwrap(), "state");
        assert!(!of(std::process::id()).exists());
    }
}
