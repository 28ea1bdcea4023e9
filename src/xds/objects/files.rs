//! Files of objects: those named directly, and those in named directories.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::yaml::{Findings, Position, yaml_files};

/// Limit of the files of all directories together. A cluster of 10,000 services may have one
/// for each.
const FILES_MAX: usize = 20_000;

/// Limit of the bytes of all files together: four times the limit of one file.
const BYTES_MAX: u64 = 256 * 1024 * 1024;

/// Reads each file once, and returns the findings of all. A file that disappears from its
/// directory meanwhile has no findings, as if it had been removed before.
pub(super) fn read_each(paths: &[PathBuf], mut read: impl FnMut(&Path) -> Findings) -> Findings {
    let (mut findings, mut files) = (Vec::new(), Vec::new());
    for path in paths {
        match yaml_files(path) {
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
    use super::*;

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
