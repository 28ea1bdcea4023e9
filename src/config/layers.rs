//! Sources of a configuration: a file or a directory, alone or over the settings of a pod.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value as Json;

use super::define::{Absent, Key, Shape};
use super::pod::{Defaults, Environment, Flags, Pod};
use super::{Config, Examined};
use crate::yaml::{Document, Findings, Kind, Node, Place, Severity};

const INDENT: usize = 2;

/// Column of the origins, after short values.
const ORIGIN_COLUMN: usize = 56;

/// Source of a configuration, which can be read again at any time.
#[derive(Clone, Debug)]
pub struct Source {
    file: PathBuf,
    is_optional: bool,
    environment: Arc<Environment>,
    defaults: Option<Arc<Defaults>>,
}

impl Source {
    /// Makes a source of a file or directory alone. The environment of this process names the pod.
    pub fn file(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            is_optional: false,
            environment: Arc::new(Environment::of_process()),
            defaults: None,
        }
    }

    /// Makes a source of the settings of a pod, with this environment and these arguments, and of a
    /// file or a directory over them, if one is named or exists in the `usual` place.
    pub fn pod(
        environment: Environment,
        flags: &Flags,
        named: Option<&Path>,
        usual: &Path,
    ) -> Self {
        Self {
            file: named.unwrap_or(usual).to_owned(),
            is_optional: named.is_none(),
            defaults: Some(Arc::new(Defaults::new(&environment, flags))),
            environment: Arc::new(environment),
        }
    }

    /// Returns the pod towards a control plane, with this configuration in force.
    pub fn who(&self, config: &Config) -> Pod {
        Pod::new(&self.environment, config)
    }

    /// Returns the environment.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// Returns the file or directory. That of a pod need not exist.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// Returns the name of the whole source.
    pub fn label(&self) -> String {
        if self.defaults.is_some() && self.is_absent() {
            "the pod".to_owned()
        } else {
            self.file.display().to_string()
        }
    }

    /// Returns whether there is no file, and none is needed. A broken link is an error of reading.
    fn is_absent(&self) -> bool {
        self.is_optional && !self.file.is_symlink() && !self.file.exists()
    }

    /// Reads and checks the source. The files that it names are returned even if it cannot be used,
    /// so that their mistakes are found in the same run.
    pub fn examine(&self) -> Examined {
        self.examine_without_keys().strict()
    }

    /// As [`Source::examine`], but returns a configuration also if files of certificates, keys and
    /// tokens are absent, as on another machine than the gateway's.
    pub fn examine_without_keys(&self) -> Examined {
        self.examine_document(self.document().as_ref())
    }

    fn examine_document(&self, document: Result<&Document, &Findings>) -> Examined {
        let mut examined = match document {
            Ok(document) => Examined::of(document),
            Err(findings) => Examined { findings: findings.clone(), ..Examined::default() },
        };
        if let Some(defaults) = &self.defaults {
            let more = defaults.findings.0.iter().cloned();
            examined.findings.0.splice(0..0, more);
        }
        if examined.findings.has_errors() {
            examined.config = None;
        }
        examined
    }

    /// Prints all values in force as one file, each with its origin as a comment; fails if the file
    /// cannot be read or is not YAML. Values of `headers` may be secrets and are left out. Also
    /// returns [`Source::examine_without_keys`], as a pipe cannot be read twice.
    pub fn print(&self) -> (Result<String, Findings>, Examined) {
        let document = self.document();
        let examined = self.examine_document(document.as_ref());
        let printed = document.map(|document| {
            let mut printer = Printer { document: &document, text: String::new() };
            printer.document(&document.root);
            printer.text
        });
        (printed, examined)
    }

    fn document(&self) -> Result<Document, Findings> {
        let Some(defaults) = &self.defaults else {
            return Document::load_parts(&self.file);
        };
        if self.is_absent() {
            return Ok(Document::of_layer(&self.file, &defaults.under(None)));
        }
        let document = Document::load_parts(&self.file)?;
        let layer = defaults.under(Some(&document.root));
        Ok(document.over(&layer))
    }
}

impl Examined {
    /// Makes absent files errors, and removes the configuration if there is one.
    #[must_use]
    pub fn strict(mut self) -> Self {
        let absent = self.findings.0.iter_mut().filter(|one| one.severity == Severity::Absent);
        absent.for_each(|finding| finding.severity = Severity::Error);
        self.config = self.config.filter(|_| !self.findings.has_errors());
        self
    }

    /// Returns the place that names a file, or the start of the configuration in `path`.
    pub fn place_of(&self, file: &Path, path: &Path) -> Place {
        let found = self.named.iter().find(|(named, _)| named == file);
        let first = || Place { file: path.to_owned(), line: u64::from(!path.is_dir()) };
        found.map_or_else(first, |(_, place)| place.clone())
    }

    /// Returns whether this is a file of certificates, a key or a token that does not exist.
    pub fn is_absent(&self, file: &Path) -> bool {
        self.absent.iter().any(|(absent, _)| absent == file)
    }
}

/// Writes a tree as YAML, line by line.
struct Printer<'a> {
    document: &'a Document,
    text: String,
}

impl Printer<'_> {
    /// Prints all sections, each with its defaults.
    fn document(&mut self, root: &Node) {
        let Kind::Map(entries) = &root.kind else {
            return self.entries(root, 0, false);
        };
        let mut missing = missing(root);
        for entry in entries {
            if !is_empty_map(&entry.value) {
                let start = format!("{}:", scalar(&entry.key));
                self.entry(&start, &entry.value, 0, false);
            }
            let mut sections = missing.iter_mut();
            if let Some((name, keys)) = sections.find(|(name, _)| **name == *entry.key) {
                let keys = std::mem::take(keys);
                self.missing(name, &keys, is_empty_map(&entry.value));
            }
        }
        for (name, keys) in &missing {
            self.missing(name, keys, true);
        }
        let limits = root.get("limits");
        if limits.is_none_or(|limits| limits.get("buffers").is_none()) {
            // No number that could be read back: it is determined at the start.
            let reported = "# limits.buffers: a quarter of the memory of this process";
            self.line(reported, DEFAULT_ORIGIN);
        }
    }

    /// Prints the defaults of a section; `opens` if no key of it was printed before.
    fn missing(&mut self, name: &str, keys: &[(&str, String)], opens: bool) {
        if opens && keys.iter().any(|(key, _)| !key.is_empty()) {
            let _ = writeln!(self.text, "{name}:");
        }
        for (key, value) in keys {
            let reported = if key.is_empty() {
                format!("{name}: {value}")
            } else {
                format!("{:INDENT$}{key}: {value}", "")
            };
            self.line(&reported, DEFAULT_ORIGIN);
        }
    }

    fn line(&mut self, reported: &str, by: &str) {
        let _ = writeln!(self.text, "{reported:<ORIGIN_COLUMN$}  # {by}");
    }

    /// Prints the entries of a map or list, each on lines of its own; `is_secret` hides values.
    fn entries(&mut self, node: &Node, depth: usize, is_secret: bool) {
        match &node.kind {
            Kind::Map(entries) => {
                for entry in entries {
                    let start = format!("{}:", scalar(&entry.key));
                    let is_secret = is_secret || *entry.key == *"headers";
                    self.entry(&start, &entry.value, depth, is_secret);
                }
            }
            Kind::List(items) => {
                for item in items {
                    self.entry("-", item, depth, is_secret);
                }
            }
            _ => self.entry("", node, depth, is_secret),
        }
    }

    fn entry(&mut self, start: &str, node: &Node, depth: usize, is_secret: bool) {
        let start = format!("{}{start}", " ".repeat(depth * INDENT));
        if is_open(node) {
            let _ = writeln!(self.text, "{start}");
            return self.entries(node, depth + 1, is_secret);
        }
        let value = if is_secret { "hidden".to_owned() } else { value(self.document, node) };
        let reported = format!("{start} {value}");
        let place = self.document.place_of(node);
        self.line(&reported, &place.to_string());
    }
}

fn is_empty_map(node: &Node) -> bool {
    matches!(&node.kind, Kind::Map(entries) if entries.is_empty())
}

/// Returns whether a value takes lines of its own.
fn is_open(node: &Node) -> bool {
    match &node.kind {
        Kind::Map(entries) => !entries.is_empty(),
        Kind::List(items) => !items.is_empty(),
        _ => false,
    }
}

fn value(document: &Document, node: &Node) -> String {
    match &node.kind {
        Kind::Null => "~".to_owned(),
        Kind::Bool(flag) => flag.to_string(),
        Kind::Int(number) => number.to_string(),
        Kind::Float => document.text_of(node).unwrap_or("~").to_owned(),
        Kind::Text(text) => scalar(text),
        Kind::List(_) => "[]".to_owned(),
        Kind::Map(_) => "{}".to_owned(),
    }
}

/// Returns text as YAML, quoted if it could be read as another type.
fn scalar(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    let is_word = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        || text.starts_with("./");
    let means_more = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let means_more = means_more.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is_word && text.bytes().all(is_plain) && !means_more {
        text.to_owned()
    } else {
        // JSON is YAML.
        serde_json::Value::from(text).to_string()
    }
}

/// The origin of a default in `--print-config`.
const DEFAULT_ORIGIN: &str = "the default";

/// A section and its keys with their values in YAML; a section that is one value has the key ``.
type Section = (&'static str, Vec<(&'static str, String)>);

/// Returns the defaults of all keys that a document lacks, by section.
fn missing(root: &Node) -> Vec<Section> {
    let sections = Config::keys().into_iter();
    let sections = sections.map(|section| (section.name, missing_in(root, &section)));
    let mut sections: Vec<_> = sections.collect();
    if let Some(gateway) = root.get("gateway")
        && let (Some(cluster), None) = (gateway.word("cluster"), gateway.get("network"))
    {
        let own = sections.iter_mut().find(|(name, _)| *name == "gateway");
        own.into_iter().for_each(|(_, keys)| keys.push(("network", scalar(cluster))));
    }
    sections
}

fn missing_in(root: &Node, section: &Key) -> Vec<(&'static str, String)> {
    let given = root.get(section.name);
    let keys = match (&section.shape, given) {
        (Shape::Map(keys), Some(_)) => keys,
        (Shape::Map(keys), None) if matches!(section.absent, Absent::Nested) => keys,
        (Shape::Kinds(kinds), Some(given)) => {
            let kind = kinds.iter().find(|(kind, _)| given.word("kind") == Some(kind));
            let Some((_, keys)) = kind else {
                return Vec::new();
            };
            keys
        }
        (Shape::Map(_) | Shape::Kinds(_), _) => return Vec::new(),
        (_, Some(_)) => return Vec::new(),
        (_, None) => return default(section, "").into_iter().collect(),
    };
    // A section that is no map is a mistake, and has a finding.
    let is_absent = |key: &&Key| {
        given
            .is_none_or(|given| matches!(given.kind, Kind::Map(_)) && given.get(key.name).is_none())
    };
    keys.iter().filter(is_absent).filter_map(|key| default(key, key.name)).collect()
}

fn default(key: &Key, name: &'static str) -> Option<(&'static str, String)> {
    let Absent::Value(value) = &key.absent else {
        return None;
    };
    let text = match value {
        Json::String(text) => scalar(text),
        // JSON is YAML.
        other => other.to_string(),
    };
    Some((name, text))
}
