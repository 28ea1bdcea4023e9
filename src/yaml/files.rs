//! Files of a path: a file, or those of a directory.

use std::path::{Path, PathBuf};

/// Returns the files of a path: the path itself or, for a directory, its YAML and JSON files by
/// extension, ordered by name.
///
/// Hidden files, such as `..data` of Kubernetes, are left out. So are pipes and other special
/// files, on which a read could block forever. Dangling links are included, so that reading
/// them reports the error.
pub fn yaml_files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn of_a_directory_only_files_and_lost_links_are_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for name in ["b.yaml", "a.json", "c.txt", ".hidden.yaml", "b.yaml~", "#b.yaml#"] {
            std::fs::write(path(name), "").expect("a file");
        }
        std::fs::create_dir(path("d.yaml")).expect("a folder");
        std::os::unix::fs::symlink("nowhere", path("lost.yml")).expect("a link");
        // Like a pipe, it would block the reader.
        let _socket = UnixListener::bind(path("socket.yaml")).expect("a socket");
        let found = yaml_files(folder.path()).expect("the names");
        assert_eq!(found, ["a.json", "b.yaml", "lost.yml"].map(path));
    }
}
