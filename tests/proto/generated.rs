//! The committed code equals the generated code. `make protos` generates it again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/grpc")
        .join(name)
}

fn files(folder: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let read = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy();
        (
            name.into_owned(),
            fs::read_to_string(&path).expect("a text"),
        )
    };
    entries
        .map(|entry| read(entry.expect("a file").path()))
        .collect()
}

/// Generates our messages as Rust. Maps are ordered by key, so that encodings are deterministic,
/// and the bytes of Istio's messages are slices of the received ones.
fn generate(into: &Path) {
    let sources = folder("proto");
    let names = files(&sources).into_keys();
    let descriptors = protox::compile(names, [&sources]).expect("valid messages");
    tonic_prost_build::configure()
        .build_transport(false)
        .btree_map(".")
        .bytes(".istio")
        .emit_rerun_if_changed(false)
        .out_dir(into)
        .compile_fds(descriptors)
        .expect("generated code");
}

#[test]
fn what_is_committed_is_what_is_generated() {
    let scratch = tempfile::tempdir().expect("a folder");
    generate(scratch.path());
    let (fresh, committed) = (files(scratch.path()), folder("generated"));
    if std::env::var_os("STRAIT_UPDATE").is_some() {
        for name in files(&committed).keys() {
            fs::remove_file(committed.join(name)).expect("an old file");
        }
        for (name, text) in &fresh {
            fs::write(committed.join(name), text).expect("a new file");
        }
    }
    let committed = files(&committed);
    let names = |files: &BTreeMap<String, String>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&committed), names(&fresh), "type: make protos");
    for (name, text) in fresh {
        assert!(committed[&name] == text, "{name} is old; type: make protos");
    }
}
