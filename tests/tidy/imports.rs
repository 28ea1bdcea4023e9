//! Allowed imports between the modules of ARCHITECTURE.md.
//!
//! It keeps the graph two arms that meet in one place: `xds → snapshot ← datapath`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::references::references;
use crate::tree::{self, Source};

/// Module, and the modules that it may import besides itself.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("labels", &[]),
    ("reason", &["labels"]),
    ("lifecycle", &[]),
    ("output", &[]),
    ("replace_file", &[]),
    ("sock_diag", &[]),
    ("watch", &[]),
    ("wire", &["labels"]),
    ("yaml", &["labels"]),
    ("config", &["labels", "wire", "yaml"]),
    ("snapshot", &["labels", "wire", "config", "limits", "reason", "status"]),
    ("status", &["labels"]),
    ("limits", &["labels", "status"]),
    ("telemetry", &["labels", "wire", "config", "limits", "reason", "status"]),
    ("grpc", &["config"]),
    ("tls", &["wire", "config", "replace_file", "status", "grpc", "reason"]),
    ("tools", &["labels", "config", "lifecycle", "output", "tls", "telemetry"]),
    (
        "datapath",
        &[
            "wire",
            "config",
            "limits",
            "snapshot",
            "tls",
            "outer",
            "telemetry",
            "lifecycle",
            "reason",
            "sock_diag",
        ],
    ),
    ("outer", &["wire", "limits", "snapshot", "tls", "status", "lifecycle", "reason", "sock_diag"]),
    ("responder", &["config", "limits"]),
    (
        "explain",
        &["labels", "wire", "config", "snapshot", "tls", "outer", "datapath", "reason", "status"],
    ),
    (
        "xds",
        &[
            "labels",
            "yaml",
            "wire",
            "config",
            "snapshot",
            "grpc",
            "telemetry",
            "replace_file",
            "status",
        ],
    ),
    (
        "admin",
        &[
            "labels",
            "wire",
            "config",
            "limits",
            "reason",
            "snapshot",
            "telemetry",
            "lifecycle",
            "status",
            "explain",
        ],
    ),
];

/// Modules that compose the others, and the modules that they may not import.
const MAY_IMPORT_ALL_BUT: &[(&str, &[&str])] = &[("app", &["cli", "tools"]), ("cli", &[])];

/// Crates that the parsers of `wire` may use besides the standard library.
const CRATES_OF_WIRE: &[&str] = &["bytes", "derive_more", "ppp", "thiserror"];

fn check_modules(source: &Source) -> Vec<String> {
    let module = source.module();
    let Some(own) = module.first() else {
        return Vec::new();
    };
    let row = |table: &[(&str, &'static [&'static str])]| {
        let found = table.iter().find(|(name, _)| name == own);
        found.map(|(_, modules)| *modules)
    };
    let (allowed, forbidden) = (row(MAY_IMPORT), row(MAY_IMPORT_ALL_BUT));
    if allowed.is_none() && forbidden.is_none() {
        let path = &source.path;
        return vec![format!(
            "{path}: module `{own}` is not in the table of who may import whom; add a row there"
        )];
    }
    let mut findings = Vec::new();
    for reference in references(source) {
        let (path, line) = (&source.path, reference.line);
        if reference.path.first().is_none_or(|first| first != "crate") {
            continue;
        }
        // `pub(in crate)` and the like name no module.
        let Some(target) = reference.path.get(1) else {
            continue;
        };
        let is_allowed = allowed.is_some_and(|modules| modules.contains(&target.as_str()))
            || forbidden.is_some_and(|modules| !modules.contains(&target.as_str()));
        if target != own && !is_allowed {
            findings.push(format!("{path}:{line}: `{own}` may not use `crate::{target}`"));
        }
    }
    findings
}

fn check_crates_of_wire(source: &Source, dependencies: &[String]) -> Vec<String> {
    if source.module().first().is_none_or(|own| own != "wire") {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for reference in references(source) {
        let Some(name) = reference.path.first() else {
            continue;
        };
        if dependencies.contains(name) && !CRATES_OF_WIRE.contains(&name.as_str()) {
            let (path, line) = (&source.path, reference.line);
            findings.push(format!("{path}:{line}: `wire` may not use the crate `{name}`"));
        }
    }
    findings
}

/// Returns the names, as written in code, of the crates in a manifest's dependency sections.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut inside = false;
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            inside = section.trim_end().ends_with("dependencies]");
            if let Some((_, name)) = section.split_once("dependencies.") {
                names.push(name.trim_end_matches([']', ' ']).replace('-', "_"));
            }
        } else if let (true, Some((name, _))) = (inside, line.split_once('=')) {
            names.push(name.trim().replace('-', "_"));
        }
    }
    names
}

#[test]
fn modules_import_only_what_the_table_allows() {
    let findings: Vec<String> = tree::production().iter().flat_map(check_modules).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn every_import_that_the_table_allows_is_used() {
    let mut used = BTreeSet::new();
    for source in tree::production() {
        let Some(own) = source.module().first().cloned() else { continue };
        let targets = references(&source).into_iter();
        let targets = targets.filter(|one| one.path.first().is_some_and(|first| first == "crate"));
        used.extend(targets.filter_map(|one| Some((own.clone(), one.path.get(1)?.clone()))));
    }
    let allowed = MAY_IMPORT.iter().flat_map(|(own, all)| all.iter().map(move |to| (own, to)));
    let unused = allowed.filter(|(own, to)| !used.contains(&(own.to_string(), to.to_string())));
    let unused: Vec<_> = unused.map(|(own, to)| format!("`{own}` does not use `{to}`")).collect();
    assert!(unused.is_empty(), "remove from the table:\n{}\n", unused.join("\n"));
}

#[test]
fn wire_uses_no_crate_but_bytes_and_thiserror() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let names = dependencies(&fs::read_to_string(manifest).unwrap());
    assert!(names.contains(&"tokio".to_owned()), "{names:?}");
    let sources = tree::production();
    let findings: Vec<String> =
        sources.iter().flat_map(|source| check_crates_of_wire(source, &names)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn an_import_outside_the_table_is_caught() {
    for (path, text) in [
        ("src/datapath/copy.rs", "use crate::xds::Client;"),
        ("src/xds/client.rs", "fn f() { crate::datapath::serve(); }"),
        ("src/wire/authority.rs", "use super::super::config::Config;"),
        ("src/reason/mod.rs", "use super::wire::Authority;"),
        ("src/admin/mod.rs", "use crate::app::App;"),
        ("src/datapath/dial.rs", "use crate::explain::Question;"),
        // A name in lib.rs would bypass the table.
        ("src/tls/mod.rs", "use crate::Everything;"),
        ("src/tls/mod.rs", "use crate::*;"),
        ("src/newcomer.rs", ""),
    ] {
        let findings = check_modules(&Source::new(path, text));
        assert_eq!(findings.len(), 1, "{path}: {text}: {findings:?}");
    }
}

#[test]
fn an_import_inside_the_table_passes() {
    for (path, text) in [
        ("src/datapath/copy.rs", "use crate::datapath::dial::Upstream; use crate::reason::Reason;"),
        ("src/xds/client.rs", "use super::cache; use crate::snapshot::Publisher; use std::fs;"),
        ("src/cli/run.rs", "use crate::app::App;"),
        ("src/cli/mod.rs", "use crate::tools::load;"),
        ("src/app/mod.rs", "#[cfg(test)] mod tests { use crate::tools::dev; }"),
        ("src/lib.rs", "pub use crate::xds::Client;"),
        ("src/main.rs", "use strait::cli::run;"),
        ("src/wire/mod.rs", "pub(crate) fn f() {}"),
    ] {
        let findings = check_modules(&Source::new(path, text));
        assert!(findings.is_empty(), "{path}: {text}: {findings:?}");
    }
}

#[test]
fn a_further_crate_in_wire_is_caught() {
    let manifest = "[package]\nname = \"x\"\n[dependencies]\ntokio = \"1\"\nx509-parser = \"1\"\n\
                    bytes = \"1\"\n[dependencies.tracing]\nversion = \"1\"\n";
    let names = dependencies(manifest);
    assert_eq!(names, ["tokio", "x509_parser", "bytes", "tracing"]);
    for text in [
        "use tokio::net::TcpStream;",
        "use x509_parser as x;",
        "fn f() { tracing::info!(\"so\"); }",
        "#[derive(tracing::Instrument)] struct S;",
    ] {
        let source = Source::new("src/wire/authority.rs", text);
        assert_eq!(check_crates_of_wire(&source, &names).len(), 1, "{text}");
        let elsewhere = Source::new("src/tls/mod.rs", text);
        assert!(check_crates_of_wire(&elsewhere, &names).is_empty());
    }
    let fine = "use bytes::Bytes; use std::fmt; fn f() { u8::from_str(\"1\"); }
                #[cfg(test)] mod tests { use tokio::net::TcpStream; }";
    let fine = Source::new("src/wire/authority.rs", fine);
    assert!(check_crates_of_wire(&fine, &names).is_empty());
}
