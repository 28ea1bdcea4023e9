//! The committed code equals the generated code. `make protos` generates it again.
//!
//! The gateway compiles the messages. Servers and clients are for the control plane of the tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const PROTOS: &str = "src/grpc/proto";
const MESSAGES: &str = "src/grpc/generated";
const SERVICES: &str = "tests/it/support/generated";

/// Packages of the services and of their imports, and the modules of their messages.
const MODULES: [(&str, &str); 4] = [
    (".envoy.config.core.v3", "::strait::grpc::core"),
    (".envoy.service.discovery.v3", "::strait::grpc::discovery"),
    (".google.rpc", "::strait::grpc::rpc"),
    (".istio.v1.auth", "::strait::grpc::auth"),
];

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn files(folder: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let read = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy();
        (name.into_owned(), fs::read_to_string(&path).expect("a text"))
    };
    entries.map(|entry| read(entry.expect("a file").path())).collect()
}

fn generator() -> tonic_prost_build::Builder {
    tonic_prost_build::configure().build_transport(false).emit_rerun_if_changed(false)
}

/// Generates our messages as Rust. Maps are ordered by key, so that encodings are deterministic,
/// and the bytes of Istio's messages are slices of the received ones.
fn generate_messages(into: &Path) {
    let names = files(&folder(PROTOS)).into_keys();
    let descriptors = protox::compile(names, [folder(PROTOS)]).expect("valid messages");
    generator()
        .build_client(false)
        .build_server(false)
        .btree_map(".")
        .bytes(".istio")
        .out_dir(into)
        .compile_fds(descriptors)
        .expect("generated code");
}

/// Generates the services of the control plane, which use our messages.
fn generate_services(into: &Path) {
    let names = ["envoy.service.discovery.v3.proto", "istio.v1.auth.proto"];
    let descriptors = protox::compile(names, [folder(PROTOS)]).expect("valid services");
    let generator =
        MODULES.iter().fold(generator(), |to, (package, module)| to.extern_path(package, module));
    generator.out_dir(into).compile_fds(descriptors).expect("generated code");
}

#[test]
fn what_is_committed_is_what_is_generated() {
    for (committed, generate) in
        [(MESSAGES, generate_messages as fn(&Path)), (SERVICES, generate_services)]
    {
        let scratch = tempfile::tempdir().expect("a folder");
        generate(scratch.path());
        let (mut fresh, committed) = (files(scratch.path()), folder(committed));
        fresh.retain(|_, text| text.lines().count() > 1);
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
}
