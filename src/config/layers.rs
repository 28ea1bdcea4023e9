//! What a configuration is read from: a file, or a file that lies over what a pod says by itself.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::pod::{Defaults, Environment, Flags, Pod};
use super::{Config, Examined, defaults, read};
use crate::yaml::{Document, Findings, Kind, Node};

/// How much further in each level is printed.
const INDENT: usize = 2;

/// The column in which the origins stand, where values are short enough.
const ORIGIN_COLUMN: usize = 56;

/// Where a configuration comes from; it can be read again at any time.
#[derive(Clone, Debug)]
pub struct Source {
    file: PathBuf,
    is_optional: bool,
    environment: Arc<Environment>,
    defaults: Option<Arc<Defaults>>,
}

impl Source {
    /// A file alone; who we are besides is said by the environment of this process.
    pub fn file(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            is_optional: false,
            environment: Arc::new(Environment::of_process()),
            defaults: None,
        }
    }

    /// What a pod with this environment and these arguments says, and over that a file, if one
    /// was named or if there is one in the `usual` place.
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

    /// Who we are to a control plane, with this configuration in force.
    pub fn who(&self, config: &Config) -> Pod {
        Pod::new(&self.environment, config)
    }

    /// The environment that says what no configuration does.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// The file. That of a pod need not exist.
    pub fn path(&self) -> &Path {
        &self.file
    }

    /// What it is called where all of it is meant.
    pub fn label(&self) -> String {
        match self.defaults.is_some() && self.is_absent() {
            true => "the pod".to_owned(),
            false => self.file.display().to_string(),
        }
    }

    /// Whether there is no file, and there need not be. A broken link is found when it is read.
    fn is_absent(&self) -> bool {
        self.is_optional && !self.file.is_symlink() && !self.file.exists()
    }

    /// Reads and checks it all, and gives what it names of other files also when it cannot be
    /// used, so that their mistakes can be found in the same run.
    pub fn examine(&self) -> Examined {
        self.examine_without_keys().strict()
    }

    /// As [`Source::examine`], but gives a configuration also where nothing is wrong but that
    /// files of certificates, keys and tokens do not exist, as on another machine than the
    /// gateway's.
    pub fn examine_without_keys(&self) -> Examined {
        let mut examined = match self.document() {
            Ok(document) => read::config(&document),
            Err(findings) => Examined {
                findings,
                ..Examined::default()
            },
        };
        if let Some(defaults) = &self.defaults {
            let more = defaults.findings.0.iter().cloned();
            examined.findings.0.splice(0..0, more);
        }
        if examined.findings.has_errors_beside_absent() {
            examined.config = None;
        }
        examined
    }

    /// All that is in force, as a file of its own would say it, each value with the place that
    /// says so as a comment. Values of `headers` may be secrets and are left out.
    ///
    /// # Errors
    /// The file cannot be read or is not YAML.
    pub fn print(&self) -> Result<String, Findings> {
        let document = self.document()?;
        let mut printer = Printer {
            document: &document,
            text: String::new(),
        };
        printer.document(&document.root);
        Ok(printer.text)
    }

    fn document(&self) -> Result<Document, Findings> {
        let Some(defaults) = &self.defaults else {
            return Document::load(&self.file);
        };
        if self.is_absent() {
            return Ok(Document::of_layer(&self.file, &defaults.under(None)));
        }
        let document = Document::load(&self.file)?;
        let layer = defaults.under(Some(&document.root));
        Ok(document.over(&layer))
    }
}

impl Examined {
    /// Without the configuration, if a file does not exist that a gateway needs.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.config = self.config.filter(|_| !self.findings.has_errors());
        self
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
    /// All sections, each with what holds for it though nobody says so.
    fn document(&mut self, root: &Node) {
        let Kind::Map(entries) = &root.kind else {
            return self.entries(root, 0, false);
        };
        let mut missing = defaults::missing(root);
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
            // Not a number that could be read back: it is looked up at the start.
            let said = "# limits.buffers: a quarter of the memory of this process";
            self.line(said, defaults::ORIGIN);
        }
    }

    /// Keys of a section that nobody says; `opens` where no key of it was printed before.
    fn missing(&mut self, name: &str, keys: &[(&str, String)], opens: bool) {
        if opens && keys.iter().any(|(key, _)| !key.is_empty()) {
            let _ = writeln!(self.text, "{name}:");
        }
        for (key, value) in keys {
            let said = match key.is_empty() {
                true => format!("{name}: {value}"),
                false => format!("{:INDENT$}{key}: {value}", ""),
            };
            self.line(&said, defaults::ORIGIN);
        }
    }

    fn line(&mut self, said: &str, by: &str) {
        let _ = writeln!(self.text, "{said:<ORIGIN_COLUMN$}  # {by}");
    }

    /// A map or list with entries, each on lines of its own; `is_secret` hides their values.
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
        let value = match is_secret {
            true => "hidden".to_owned(),
            false => value(self.document, node),
        };
        let said = format!("{start} {value}");
        let place = self.document.place_of(node);
        self.line(&said, &place.to_string());
    }
}

fn is_empty_map(node: &Node) -> bool {
    matches!(&node.kind, Kind::Map(entries) if entries.is_empty())
}

/// Whether a value takes lines of its own.
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

/// Text as YAML: as it is where nothing but text could be meant, else quoted.
pub(super) fn scalar(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    let is_word = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/')
        || text.starts_with("./");
    let means_more = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let means_more = means_more
        .iter()
        .any(|word| text.eq_ignore_ascii_case(word));
    match is_word && text.bytes().all(is_plain) && !means_more {
        true => text.to_owned(),
        // JSON is YAML.
        false => serde_json::Value::from(text).to_string(),
    }
}
