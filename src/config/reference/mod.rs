//! Reference of the configuration's keys: JSON Schema, and `docs/configuration.md`.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json, json};

use super::Config;
use super::define::{Absent, Key, Shape};
use crate::labels::join;

const HEAD: &str = "\
# Configuration

<!-- Generated from src/config: change the definition of a key there, not this file. -->

All keys of `strait.yaml`. A key that Strait does not know is an error, which names the most similar
one. `[]` in a path stands for each entry of a list. Paths of files are relative to the file that
names them. `strait check -c strait.yaml` reports every mistake with its line.

`-c` also takes a directory. Its files `*.yaml`, `*.yml` and `*.json`, in the order of their names,
are parts of one configuration. Hidden files and directories in it are ignored, and links are
followed.

The maps of two files are merged key by key. Any other value, such as a list, is in one of them: a
second one is an error that names both places. So is an empty file, which may be about to be
written.

`strait schema > strait.schema.json` writes these keys as a JSON Schema, which is also
[here](strait.schema.json). Editors with a YAML language server use it if the first line of the file
is `# yaml-language-server: $schema=strait.schema.json`.

With `strait proxy`, `strait.yaml` overrides the settings of the pod: keys that are required here
may be absent there.
";

/// Returns the JSON Schema (draft 2020-12) of `strait.yaml`.
pub fn schema() -> Json {
    let mut schema = map(&Config::keys());
    if let Json::Object(keys) = &mut schema {
        let draft = "https://json-schema.org/draft/2020-12/schema";
        keys.insert("$schema".to_owned(), json!(draft));
        keys.insert("title".to_owned(), json!("strait.yaml"));
    }
    schema
}

/// Returns the reference in Markdown.
pub fn markdown() -> String {
    let mut text = HEAD.to_owned();
    for section in Config::keys() {
        let _ = write!(text, "\n## {}\n\n", section.name);
        if matches!(section.shape, Shape::Map(_) | Shape::Kinds(_)) {
            let required = match section.absent {
                Absent::Error => " Required.",
                _ => "",
            };
            let _ = write!(text, "{}{required}\n\n", section.about);
        }
        text.push_str("| key | description | type | default | since |\n|---|---|---|---|---|\n");
        let is_table = matches!(section.shape, Shape::Map(_) | Shape::Kinds(_));
        let mut rows = rows(&section, section.name, "");
        if is_table {
            rows.remove(0);
        }
        rows.iter().for_each(|row| text.push_str(row));
    }
    text
}

/// The rows of a key and of those below it.
fn rows(key: &Key, path: &str, kinds: &str) -> Vec<String> {
    let default = match &key.absent {
        Absent::Error => "required".to_owned(),
        Absent::Value(value) => shown(value),
        Absent::Otherwise(text) => (*text).to_owned(),
        Absent::Nested => String::new(),
    };
    let (about, format, since) = (&key.about, format(&key.shape), key.since);
    let about = format!("{about}{kinds}").replace('|', "\\|");
    let mut all = vec![format!("| `{path}` | {about} | {format} | {default} | {since} |\n")];
    all.extend(rows_below(&key.shape, path));
    all
}

fn rows_below(shape: &Shape, path: &str) -> Vec<String> {
    match shape {
        Shape::Scalar(..) | Shape::Pairs(_) => Vec::new(),
        Shape::List { of, .. } => rows_below(of, &format!("{path}[]")),
        Shape::Either(of) => of.iter().flat_map(|of| rows_below(of, path)).collect(),
        Shape::Map(keys) => {
            let below = keys.iter().map(|key| (key, format!("{path}.{}", key.name)));
            below.flat_map(|(key, path)| rows(key, &path, "")).collect()
        }
        Shape::Kinds(kinds) => {
            let words = join(kinds.iter().map(|(kind, _)| format!("`{kind}`")), ", ");
            let mut all = vec![format!(
                "| `{path}.kind` | Kind, which determines the other keys. | {words} | required | \
                 {} |\n",
                super::define::FIRST_VERSION
            )];
            for (key, kinds) in by_key(kinds) {
                let path = format!("{path}.{}", key.name);
                all.extend(rows(key, &path, &format!(" (`kind: {}`)", kinds.join("`, `"))));
            }
            all
        }
    }
}

/// The keys of all kinds, each with the kinds that have it with this meaning.
fn by_key<'a>(kinds: &'a [(&'static str, Vec<Key>)]) -> Vec<(&'a Key, Vec<&'static str>)> {
    let mut all: Vec<(&Key, Vec<_>)> = Vec::new();
    for (kind, keys) in kinds {
        for key in keys {
            let row = rows(key, key.name, "");
            let is_same = |(other, _): &&mut (&Key, _)| rows(other, other.name, "") == row;
            match all.iter_mut().find(is_same) {
                Some((_, kinds)) => kinds.push(*kind),
                None => all.push((key, vec![*kind])),
            }
        }
    }
    all
}

/// Describes type and unit.
fn format(shape: &Shape) -> String {
    match shape {
        Shape::Scalar(format, _) => format.clone(),
        Shape::List { of, or_one, .. } => {
            let of = format(of);
            if *or_one { format!("{of}; or a list of such") } else { format!("list: {of}") }
        }
        Shape::Either(of) => of.each_ref().map(format).join("; or "),
        Shape::Pairs(of) => format!("map of names to values: {}", format(of)),
        Shape::Map(_) | Shape::Kinds(_) => "map".to_owned(),
    }
}

fn shown(value: &Json) -> String {
    match value {
        Json::String(text) if text.is_empty() => "empty".to_owned(),
        Json::String(text) => format!("`{text}`"),
        Json::Array(items) if items.is_empty() => "none".to_owned(),
        Json::Array(items) => join(items.iter().map(shown), ", "),
        other => format!("`{other}`"),
    }
}

/// The schema of a key: that of its values, with its description and default.
fn key(key: &Key) -> Json {
    let mut schema = values(&key.shape);
    if let Json::Object(keys) = &mut schema {
        let mut about = key.about.clone();
        match &key.absent {
            Absent::Value(value) => {
                keys.insert("default".to_owned(), value.clone());
            }
            Absent::Otherwise(text) => {
                let _ = write!(about, " Default: {text}.");
            }
            Absent::Error | Absent::Nested => {}
        }
        if !matches!(key.shape, Shape::Map(_) | Shape::Kinds(_)) {
            let _ = write!(about, " Type: {}.", format(&key.shape));
        }
        let _ = write!(about, " Since {}.", key.since);
        keys.insert("description".to_owned(), json!(about));
    }
    schema
}

fn values(shape: &Shape) -> Json {
    match shape {
        Shape::Scalar(_, schema) => schema.clone(),
        Shape::List { of, needs_entry, or_one } => {
            let mut list = json!({"type": "array", "items": values(of)});
            if *needs_entry {
                list["minItems"] = json!(1);
            }
            if *or_one { json!({"anyOf": [values(of), list]}) } else { list }
        }
        Shape::Either(of) => json!({"anyOf": of.each_ref().map(values)}),
        Shape::Pairs(of) => json!({"type": "object", "additionalProperties": values(of)}),
        Shape::Map(keys) => map(keys),
        Shape::Kinds(kinds) => {
            let kinds = kinds.iter().map(|(kind, keys)| {
                let mut one = map(keys);
                one["properties"]["kind"] = json!({"const": kind});
                one
            });
            let kinds: Vec<_> = kinds.collect();
            json!({"type": "object", "required": ["kind"], "oneOf": kinds})
        }
    }
}

fn map(keys: &[Key]) -> Json {
    let is_required = |key: &&Key| matches!(key.absent, Absent::Error);
    let required: Vec<_> = keys.iter().filter(is_required).map(|key| key.name).collect();
    let properties: Map<_, _> = keys.iter().map(|one| (one.name.to_owned(), key(one))).collect();
    let mut map = json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    });
    let conditions = keys.iter().filter_map(|key| {
        let unless = key.unless.as_ref()?;
        Some(json!({"anyOf": [unless, {"required": [key.name]}]}))
    });
    let conditions: Vec<_> = conditions.collect();
    if !conditions.is_empty() {
        map["allOf"] = json!(conditions);
    }
    map
}
