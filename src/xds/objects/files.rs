//! Files of objects: those named directly, and those in named directories.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::yaml::{Findings, Position};

/// Limit of the files of all directories together. A cluster of 10,000 services may have one
/// for each.
const FILES_MAX: usize = 20_000;

/// Limit of the bytes of all files together: four times the limit of one file.
const BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Returns the files of a path: the path itself or, for a directory, its YAML and JSON files by
/// extension, ordered by name.
///
/// Hidden files, such as `..data` of Kubernetes, are left out. So are pipes and other special
/// files, on which a read could block forever. Dangling links are included, so that reading
/// them reports the error.
pub fn object_files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir()? {
        let file = entry?.path();
        let name = file.file_name().map(|name| name.to_string_lossy());
        let is_hidden = name.is_none_or(|name| name.starts_with('.'));
        let extension = file.extension().and_then(|text| text.to_str());
        let is_file = file.metadata().map_or(true, |metadata| metadata.is_file());
        if is_file && !is_hidden && matches!(extension, Some("yaml" | "yml" | "json")) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Reads each file once, and returns the findings of all. A file that disappears from its
/// directory meanwhile has no findings, as if it had been removed before.
pub(super) fn read_each(paths: &[PathBuf], mut read: impl FnMut(&Path) -> Findings) -> Findings {
    let (mut findings, mut files) = (Vec::new(), Vec::new());
    for path in paths {
        match object_files(path) {
            Ok(found) => files.extend(found),
            Err(cause) => {
                let what = format!("the directory cannot be read: {cause}");
                findings.extend(Findings::one(path, Position::Line(1), &what, "").0);
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    files.retain(|file| seen.insert(file.clone()));
    let size = |file: &PathBuf| file.metadata().map_or(0, |metadata| metadata.len());
    if files.len() > FILES_MAX || files.iter().map(size).sum::<u64>() > BYTES_MAX {
        let most = BYTES_MAX >> 20;
        let what = format!("more than {FILES_MAX} files, or {most} MiB in them, are too many");
        let first = paths.first().cloned().unwrap_or_default();
        return Findings::one(&first, Position::Line(1), &what, "");
    }
    for file in files {
        let found = read(&file).0;
        if paths.contains(&file) || !is_gone(&file) {
            findings.extend(found);
        }
    }
    Findings(findings)
}

/// Returns whether a path does not exist. A dangling link does exist itself.
fn is_gone(file: &Path) -> bool {
    let found = file.symlink_metadata();
    found.is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn of_a_directory_only_files_and_lost_links_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for name in ["b.yaml", "a.json", "c.txt", ".hidden.yaml"] {
            std::fs::write(path(name), "").expect("a file");
        }
        std::fs::create_dir(path("d.yaml")).expect("a folder");
        std::os::unix::fs::symlink("nowhere", path("lost.yml")).expect("a link");
        // Like a pipe, it would block the reader.
        let _socket = UnixListener::bind(path("socket.yaml")).expect("a socket");
        let found = object_files(folder.path()).expect("the names");
        assert_eq!(found, ["a.json", "b.yaml", "lost.yml"].map(path));
    }

    #[test]
    fn a_file_that_leaves_its_directory_before_it_is_read_is_no_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("a.yaml");
        let found = |path: &Path| {
            std::fs::write(&file, "").expect("a file");
            let remove = |file: &Path| {
                std::fs::remove_file(file).expect("no file");
                Findings::one(file, Position::Line(1), "it is gone", "")
            };
            read_each(&[path.to_owned()], remove).has_errors()
        };
        assert!(!found(folder.path()));
        assert!(found(&file), "a file that the configuration names");
    }
}
