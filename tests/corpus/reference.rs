//! Comparison of reader, JSON Schema and `docs/configuration.md`, and validation of examples.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Value as Json, json};
use strait::config::Config;
use strait::config::reference::{markdown, schema};

use crate::findings::ROOT;

/// A key of the schema, and a file with this key alone, without value.
struct Found {
    path: String,
    name: String,
    text: String,
}

/// Finds all keys of a schema; `wrap` puts the text of a value into its place in a file.
fn find(schema: &Json, path: &str, wrap: &dyn Fn(&str) -> String, all: &mut Vec<Found>) {
    for one in ["anyOf", "oneOf"] {
        for branch in schema[one].as_array().into_iter().flatten() {
            find(branch, path, wrap, all);
        }
    }
    if schema["items"].is_object() {
        let wrap = |text: &str| wrap(&format!("[{text}]"));
        find(&schema["items"], &format!("{path}[]"), &wrap, all);
    }
    let kind = schema["properties"]["kind"]["const"].as_str();
    for (name, below) in schema["properties"].as_object().into_iter().flatten() {
        let kind = kind.filter(|_| name != "kind");
        let kind = kind.map_or(String::new(), |kind| format!("kind: {kind}, "));
        let wrap = |text: &str| wrap(&format!("{{{kind}{name}: {text}}}"));
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        all.push(Found { path: path.clone(), name: name.clone(), text: wrap("~") });
        find(below, &path, &wrap, all);
    }
}

fn keys() -> Vec<Found> {
    let mut all = Vec::new();
    find(&schema(), "", &str::to_owned, &mut all);
    assert!(all.len() > 100, "{}", all.len());
    all
}

fn reported(text: &str) -> String {
    let (config, findings) = Config::parse(Path::new("s.yaml"), text);
    assert!(config.is_none());
    findings.to_string()
}

#[test]
fn reader_schema_and_document_have_the_same_keys() {
    let keys = keys();
    for Found { path, name, text } in &keys {
        let findings = reported(text);
        let is_known = findings.contains(&format!("{name}` has no value"));
        assert!(is_known, "{path} by {text}: {findings}");
        let unknown = reported(&text.replace(&format!("{name}: ~"), &format!("{name}x: ~")));
        let refusal = format!("unknown key `{name}x`");
        // Only the keys of a known kind are checked.
        let is_refused = name == "kind" || unknown.contains(&refusal);
        assert!(is_refused, "{path}: {unknown}");
    }
    let of_schema: BTreeSet<_> = keys.into_iter().map(|key| key.path).collect();
    let document = markdown();
    let rows = document.lines().filter_map(|line| {
        let row = line.strip_prefix("| `").and_then(|row| row.split_once('`'));
        row.map(|(path, _)| path).or_else(|| line.strip_prefix("## "))
    });
    let of_document: BTreeSet<_> = rows.map(str::to_owned).collect();
    assert_eq!(of_document, of_schema);
}

#[test]
fn the_reader_and_the_schema_require_the_same_keys() {
    let of_map = |schema: &Json| -> Vec<String> {
        let names = schema["required"].as_array().expect("a list").iter();
        names.map(|name| name.as_str().expect("a name").to_owned()).collect()
    };
    let schema = schema();
    let empty = reported("{workers: 0}");
    for name in of_map(&schema) {
        assert!(empty.contains(&format!("the file has no `{name}`")), "{empty}");
    }
    for section in ["identity", "discovery"] {
        for branch in schema["properties"][section]["oneOf"].as_array().expect("kinds") {
            let kind = branch["properties"]["kind"]["const"].as_str().expect("a kind");
            let findings = reported(&format!("{section}: {{kind: {kind}}}"));
            for name in of_map(branch) {
                let want = format!("`{section}` has no `{name}`");
                assert!(name == "kind" || findings.contains(&want), "{kind}: {findings}");
            }
        }
    }
}

#[test]
fn the_schema_requires_the_keys_that_other_keys_require() {
    let mut parts = schema();
    parts["required"] = json!([]);
    let (schemas, index) = compile(parts);
    let is_valid = |text: &str| schemas.validate(&parsed(text), index).is_ok();
    let auto = |rule: &str| format!("exposure: {{files: [src], auto: [{rule}]}}");
    let hash = "0".repeat(64);
    for (bad, good, want) in [
        ("trust: {}", "trust: {skip_validation: true}", "`trust` has no `domains`"),
        (
            "trust: {domains: [{name: a}], unknown_issuers: reject}",
            &*format!(
                "trust: {{domains: [{{name: a}}], unknown_issuers: reject, \
                 clusters: [{{name: b, issuers: [\"{hash}\"]}}]}}"
            ),
            "`trust.clusters`, which is not set",
        ),
        (
            &auto("{except: {matchLabels: {a: b}}}"),
            &auto("{namespaces: {matchLabels: {a: b}}}"),
            "selects no Service by itself",
        ),
        (
            &auto("{services: {}}"),
            &auto("{services: {matchExpressions: [{key: a, operator: Exists}]}}"),
            "is empty, which would select everything",
        ),
        (
            &auto("{services: {matchExpressions: [{key: a, operator: In}]}}"),
            &auto("{services: {matchExpressions: [{key: a, operator: In, values: [b]}]}}"),
            "has no `values`",
        ),
        (
            "exposure: {services: [{service: a, to: [{}]}]}",
            "exposure: {services: [{service: a, to: [{cluster: b}]}]}",
            "admits nobody",
        ),
        (
            "listeners: [{name: a, bind: \"[::]:1\", protocol: tls}]",
            "listeners: [{name: a, bind: \"[::]:1\", protocol: tls, routing: istio}]",
            "neither `routing` nor `routes`",
        ),
        (
            "discovery: {kind: envoy, address: \"a:1\"}",
            "discovery: {kind: envoy, address: \"a:1\", tls: \"off\"}",
            "`discovery` has no `roots`",
        ),
    ] {
        assert!(reported(bad).contains(want) && !is_valid(bad), "{bad}");
        assert!(!reported(good).contains(want) && is_valid(good), "{good}");
    }
}

#[test]
fn the_schema_has_the_bounds_and_patterns_of_the_reader() {
    let mut parts = schema();
    parts["required"] = json!([]);
    let (schemas, index) = compile(parts);
    for (bad, good) in [
        ("workers: 1025", "workers: 1024"),
        ("dial: {allow: [10.0.0.1]}", "dial: {allow: [10.0.0.1/32]}"),
        ("dns: {servers: [10.0.0.1]}", "dns: {servers: [\"10.0.0.1:53\"]}"),
        ("traffic: [{service: a, spill_below: 101%}]", "traffic: [{service: a, spill_below: 70%}]"),
        ("drain: {lag: five}", "drain: {lag: 1m 30s}"),
        ("limits: {buffers: 512}", "limits: {buffers: 1.5GiB}"),
        ("trust: {skip_validation: true, waypoints: [a]}", "trust: {skip_validation: true}"),
        (
            "links: [{from: a, to: b, budget: {bytes: 1GiB, excess_weight: 0%}}]",
            "links: [{from: a, to: b, budget: {bytes: 1GiB, excess_weight: 10%}}]",
        ),
    ] {
        let is_valid = |text: &str| schemas.validate(&parsed(text), index).is_ok();
        assert!(reported(bad).contains("; write a"), "{bad}: {}", reported(bad));
        assert!(!is_valid(bad) && is_valid(good), "{bad} {good}");
    }
}

#[test]
fn the_files_in_docs_are_current() {
    for (file, text, flag) in [
        ("configuration.md", markdown(), " --markdown"),
        ("strait.schema.json", format!("{:#}\n", schema()), ""),
    ] {
        let path = Path::new(ROOT).join("docs").join(file);
        let current = fs::read_to_string(path).unwrap_or_default();
        let how = format!("cargo run -- schema{flag} > docs/{file}");
        assert!(current == text, "docs/{file} is outdated; write it anew: {how}");
    }
}

/// Compiles a schema by an independent validator.
fn compile(schema: Json) -> (Schemas, SchemaIndex) {
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("strait.json", schema).expect("a schema");
    let index = compiler.compile("strait.json", &mut schemas);
    (schemas, index.expect("a valid schema"))
}

fn parsed(text: &str) -> Json {
    serde_saphyr::from_str(text).expect("YAML")
}

#[test]
fn the_example_is_valid_and_damaged_ones_are_not() {
    let text = fs::read_to_string(Path::new(ROOT).join("deploy/local/strait.yaml"));
    let text = text.expect("the example");
    let line = "# yaml-language-server: $schema=../../docs/strait.schema.json\n";
    assert!(text.starts_with(line));
    let (schemas, index) = compile(schema());
    let validate = |text: &str| {
        let file = parsed(text);
        let valid = schemas.validate(&file, index);
        valid.map_err(|error| error.to_string())
    };
    validate(&text).expect("a valid example");
    for (old, new) in [
        ("kind: files", "kind: file"),
        ("  cluster: east", "  clutser: east"),
        ("gateway:", "gatewy:"),
        ("listeners:", "listeners: []\nlinks:"),
    ] {
        assert!(text.contains(old), "{old}");
        assert!(validate(&text.replacen(old, new, 1)).is_err(), "{new}");
    }
}

/// The YAML of documents: fenced blocks, and files that a command writes.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    for (start, end) in [("```yaml\n", "\n```"), ("> strait.yaml <<EOF\n", "\nEOF")] {
        for rest in text.split(start).skip(1) {
            blocks.extend(rest.split(end).next().map(str::to_owned));
        }
    }
    blocks
}

fn documents(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            documents(&path, all);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            all.push(path);
        }
    }
}

#[test]
fn the_configuration_in_documents_is_valid_as_far_as_it_goes() {
    let mut parts = schema();
    let names: Vec<_> = keys().into_iter().map(|key| key.path).collect();
    parts["required"] = json!([]);
    let (schemas, index) = compile(parts);
    let mut files = vec![Path::new(ROOT).join("README.md")];
    ["docs", "deploy"]
        .iter()
        .for_each(|folder| documents(&Path::new(ROOT).join(folder), &mut files));
    let mut count = 0;
    for file in files {
        for block in blocks(&fs::read_to_string(&file).expect("a document")) {
            let Ok(Json::Object(map)) = serde_saphyr::from_str::<Json>(&block) else {
                continue;
            };
            if map.is_empty() || !map.keys().all(|key| names.contains(key)) {
                continue;
            }
            count += 1;
            let part = Json::Object(map);
            let valid = schemas.validate(&part, index);
            let valid = valid.map_err(|error| error.to_string());
            assert_eq!(valid, Ok(()), "{}: {block}", file.display());
        }
    }
    assert!(count > 2, "{count}");
}
