//! YAML document as a tree with the line of every key and value.
//!
//! `serde-saphyr` does the parsing. The tree is read by [`super::value`], entry by entry, so that
//! one mistake does not hide the next one: a derived `Deserialize` would stop at the first.

mod parts;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Location, MessageFormatter, Options, Spanned, UserMessageFormatter};

use super::findings::{Findings, Place, Position, Report, Sources};

/// Maximum bytes of a file. A mesh of 100,000 workloads has about 25 MB.
pub const FILE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Maximum nodes: 100,000 workloads of 40 keys and 40 values. A node takes about 100 bytes, so this
/// also bounds the memory for a hostile file.
const NODES_MAX: usize = 100_000 * 40 * 2;

/// Maximum events: one for each node, and one for the end of each list and map.
const EVENTS_MAX: usize = 2 * NODES_MAX;

/// Maximum documents of a file: one for each object of a large mesh.
const DOCUMENTS_MAX: usize = 100_000;

/// Maximum depth. The deepest known shape, `policies[].rules[][][].serviceAccounts[]`, has nine
/// levels. The parser recurses: 100 levels overflowed the 2 MiB stack of a test thread.
const DEPTH_MAX: usize = 16;

/// A parsed file or directory, or a layer below it.
#[derive(Clone, Debug)]
pub struct Document {
    sources: Sources,
    text: Arc<str>,
    pub root: Node,
    /// Mistakes between the files of a directory: what is wrong, and what to write.
    mistakes: Vec<(Position, String, &'static str)>,
}

/// A tree from other sources than a file. Each value has the name of its origin.
#[derive(Clone, Debug)]
pub struct Layer {
    pub root: Node,
    /// The names, by `Node::made`.
    pub origins: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Node {
    /// The position of its first character.
    pub position: Position,
    /// Offset and length in bytes of its text in the file, which has at most 64 MiB.
    span: (u32, u32),
    pub kind: Kind,
}

/// Kind of a value. All are boxed to their size: a mesh has millions of these.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `null`, `~` or nothing at all.
    Null,
    /// `true` or `false`; `yes` and `on` are text.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number; its text is in the file.
    Float,
    /// Text, quoted or not.
    Text(Box<str>),
    List(Box<[Node]>),
    /// A map in the order of the file, repeated keys included.
    Map(Box<[Entry]>),
}

/// One key of a map and its value.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The key as text: `80` and `"80"` are the same key.
    pub key: Box<str>,
    pub position: Position,
    /// The value.
    pub value: Node,
}

impl Document {
    /// Reads and parses a file of at most 64 MiB.
    pub fn load(file: &Path) -> Result<Self, Findings> {
        Self::parse(file, &read(file)?)
    }

    /// As [`Document::load`], of a file with any number of documents and at most so many aliases.
    /// Empty documents are left out.
    pub fn load_all(file: &Path, aliases: usize) -> Result<Vec<Self>, Findings> {
        Self::parse_aliased(file, &read(file)?, aliases)
    }

    pub fn parse(file: &Path, text: &str) -> Result<Self, Findings> {
        let text = plain(file, text)?;
        let root = serde_saphyr::from_str_with_options(text, options(0));
        let root = root.map_err(|error| syntax_error(file, error.without_snippet()))?;
        Ok(Self::new(file, &text.into(), root))
    }

    /// As [`Document::parse`], of a text with any number of documents.
    pub fn parse_all(file: &Path, text: &str) -> Result<Vec<Self>, Findings> {
        Self::parse_aliased(file, text, 0)
    }

    fn parse_aliased(file: &Path, text: &str, aliases: usize) -> Result<Vec<Self>, Findings> {
        let text = plain(file, text)?;
        let roots = serde_saphyr::from_multiple_with_options::<Node>(text, options(aliases));
        let roots = roots.map_err(|error| syntax_error(file, error.without_snippet()))?;
        let text = text.into();
        let roots = roots.into_iter();
        Ok(roots.map(|root| Self::new(file, &text, root)).collect())
    }

    fn new(file: &Path, text: &Arc<str>, root: Node) -> Self {
        let (sources, text) = (Sources::new(file), Arc::clone(text));
        Self { sources, text, root, mistakes: Vec::new() }
    }

    /// Makes a document of a value that comes from no file. It has no lines.
    pub(crate) fn of_json(name: &Path, json: Json) -> Self {
        let mut text = String::new();
        let root = Node::of_json(json, &mut text);
        Self::new(name, &text.into(), root)
    }

    /// Makes a document of a layer alone, as if the file were empty.
    pub(crate) fn of_layer(file: &Path, layer: &Layer) -> Self {
        let mut document = Self::new(file, &Arc::default(), layer.root.clone());
        document.sources.origins.clone_from(&layer.origins);
        document
    }

    /// Lays the file over a layer: maps are merged key by key, and all else is the file's. An
    /// empty file changes nothing.
    pub(crate) fn over(mut self, layer: &Layer) -> Self {
        self.root = match self.root.kind {
            Kind::Null => layer.root.clone(),
            _ => self.root.over(&layer.root),
        };
        self.sources.origins.clone_from(&layer.origins);
        self
    }

    /// Returns the file or directory, as named when it was loaded.
    pub fn file(&self) -> &Path {
        &self.sources.file
    }

    pub(crate) fn place_of(&self, node: &Node) -> Place {
        self.sources.place_of(node.position)
    }

    /// Returns a report about this document. It has the mistakes between the files of a directory.
    pub fn report(&self) -> Report {
        let report = Report::with_sources(self.sources.clone());
        for (position, what, how) in &self.mistakes {
            report.error(*position, what.as_str(), *how);
        }
        report
    }

    /// Returns the base of relative paths in a value, and its name: the folder of the file, or the
    /// working directory for values of a layer.
    pub(crate) fn folder_of(&self, node: &Node) -> (&Path, &'static str) {
        if let Position::Origin(_) = node.position {
            return (Path::new(""), "the working directory");
        }
        let folder = self.sources.file_of(node.position).parent();
        (folder.unwrap_or_else(|| Path::new("")), "the folder of this one")
    }

    /// Returns the characters of a number or a boolean.
    pub(crate) fn scalar_of(&self, node: &Node) -> Option<&str> {
        match node.kind {
            Kind::Bool(_) | Kind::Int(_) | Kind::Float => self.text_of(node),
            _ => None,
        }
    }

    /// Returns the characters of a scalar in the file.
    pub(crate) fn text_of(&self, node: &Node) -> Option<&str> {
        let (start, length) = (node.span.0 as usize, node.span.1 as usize);
        self.text.get(start..start.checked_add(length)?)
    }
}

/// Reads a file of at most 64 MiB.
fn read(file: &Path) -> Result<String, Findings> {
    let mut bytes = Vec::new();
    // One byte over the limit shows that there is more, also where no size is known before.
    let limit = FILE_BYTES_MAX as u64 + 1;
    let read = File::open(file).and_then(|opened| opened.take(limit).read_to_end(&mut bytes));
    if let Err(error) = read {
        let what = format!("the file cannot be read: {error}");
        let how = "the path of a readable file";
        return Err(Findings::one(file, Position::Line(1), &what, how));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let breaks = valid.iter().filter(|byte| **byte == b'\n').count() as u64;
        let position = Position::Line(narrow(Some(breaks + 1)));
        Findings::one(file, position, "the file is not UTF-8 text here", "it in UTF-8")
    })
}

/// Removes a byte order mark, which the parser's offsets do not count, and checks the size.
fn plain<'a>(file: &Path, text: &'a str) -> Result<&'a str, Findings> {
    if text.len() > FILE_BYTES_MAX {
        let what = format!("the file is larger than {} MiB", FILE_BYTES_MAX >> 20);
        return Err(Findings::one(file, Position::Line(1), &what, "a smaller one"));
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

impl Node {
    /// Makes a value of a layer, with the index of its origin.
    pub(crate) fn made(origin: usize, kind: Kind) -> Self {
        let origin = u32::try_from(origin).unwrap_or(u32::MAX);
        Self { position: Position::Origin(origin), span: (0, 0), kind }
    }

    /// Makes a node without a line, and appends the characters of numbers and booleans to `text`.
    fn of_json(json: Json, text: &mut String) -> Self {
        let (position, start) = (Position::Line(0), text.len());
        if json.is_number() || json.is_boolean() {
            text.push_str(&json.to_string());
        }
        let of = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let span = (of(start), of(text.len() - start));
        let kind = match json {
            Json::Null => Kind::Null,
            Json::Bool(value) => Kind::Bool(value),
            Json::Number(number) => number.as_i64().map_or(Kind::Float, Kind::Int),
            Json::String(value) => Kind::Text(value.into()),
            Json::Array(items) => {
                Kind::List(items.into_iter().map(|item| Self::of_json(item, text)).collect())
            }
            Json::Object(entries) => {
                let entries = entries.into_iter().map(|(key, value)| {
                    let value = Self::of_json(value, text);
                    Entry { key: key.into(), position, value }
                });
                Kind::Map(entries.collect())
            }
        };
        Self { position, span, kind }
    }

    /// Lays this over `base`. A map of another `kind` replaces the whole map of the base, whose
    /// keys mean something else.
    pub(crate) fn over(self, base: &Self) -> Self {
        let (Kind::Map(entries), Kind::Map(below)) = (&self.kind, &base.kind) else {
            return self;
        };
        if let (Some(kind), Some(other)) = (self.word("kind"), base.word("kind"))
            && kind != other
        {
            return self;
        }
        let mut merged = Vec::with_capacity(entries.len() + below.len());
        for entry in below {
            // A repeated key stays repeated, for the reader to report.
            let mut own = entries.iter().filter(|own| own.key == entry.key).peekable();
            if own.peek().is_none() {
                merged.push(entry.clone());
            }
            merged.extend(
                own.map(|own| Entry { value: own.value.clone().over(&entry.value), ..own.clone() }),
            );
        }
        let is_new = |own: &&Entry| below.iter().all(|entry| entry.key != own.key);
        merged.extend(entries.iter().filter(is_new).cloned());
        Self { kind: Kind::Map(merged.into_boxed_slice()), ..self }
    }

    /// Returns the text under a key of this map.
    pub(crate) fn word(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match &self.kind {
            Kind::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn items(&self) -> &[Self] {
        match &self.kind {
            Kind::List(items) => items,
            _ => &[],
        }
    }

    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        let Kind::Map(entries) = &mut self.kind else {
            return None;
        };
        let entry = entries.iter_mut().find(|entry| *entry.key == *key)?;
        Some(&mut entry.value)
    }

    /// Returns the value under a key of this map.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Kind::Map(entries) = &self.kind else {
            return None;
        };
        let entry = entries.iter().find(|entry| *entry.key == *key)?;
        Some(&entry.value)
    }
}

/// Returns the parser's options. Repeated keys are kept, so that all can be reported with their
/// lines. Merge keys are ordinary ones. Without aliases a tree is never larger or deeper than its
/// file, and what an alias repeats counts as if the file had it, up to 64 MiB of text.
fn options(aliases: usize) -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS_MAX,
            max_nodes: NODES_MAX,
            max_events: EVENTS_MAX,
            max_depth: DEPTH_MAX,
            flow_nesting_limit: DEPTH_MAX,
            max_anchors: aliases,
            max_aliases: aliases,
        },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
    }
}

fn syntax_error(file: &Path, error: &serde_saphyr::Error) -> Findings {
    use serde_saphyr::Error;
    use serde_saphyr::budget::BudgetBreach;

    let position = error.location().map_or(Position::Line(1), position_of);
    let (what, how) = match error {
        Error::Budget { breach, .. } => match breach {
            BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => (
                "anchors (`&name`) and aliases (`*name`) are not supported".to_owned(),
                "out the value",
            ),
            BudgetBreach::Depth { .. } => {
                (format!("more than {DEPTH_MAX} levels of nesting"), "fewer")
            }
            BudgetBreach::Documents { .. } => {
                (format!("more than {DOCUMENTS_MAX} documents"), "fewer")
            }
            _ => (format!("more than {NODES_MAX} keys and values"), "fewer"),
        },
        other => {
            let message = UserMessageFormatter.format_message(other);
            let is_about_form = message.contains("did not find expected");
            let how = "the keys of a map with one indentation, and values with `[`, `{` or `: ` in \
                       quotes";
            (format!("not valid YAML: {message}"), if is_about_form { how } else { "" })
        }
    };
    Findings::one(file, position, &what, how)
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, defined, .. } = Spanned::<Kind>::deserialize(deserializer)?;
        let span = defined.span();
        let span = (narrow(span.byte_offset()), narrow(span.byte_len()));
        Ok(Self { position: position_of(defined), span, kind: value })
    }
}

/// Narrows an offset, which fits because files have at most 64 MiB.
fn narrow(value: Option<u64>) -> u32 {
    value.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
}

fn position_of(location: Location) -> Position {
    Position::Line(narrow(Some(location.line())).max(1))
}

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(KindVisitor)
    }
}

struct KindVisitor;

impl<'de> Visitor<'de> for KindVisitor {
    type Value = Kind;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Kind, E> {
        Ok(Kind::Null)
    }

    fn visit_none<E>(self) -> Result<Kind, E> {
        Ok(Kind::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Kind, E> {
        Ok(Kind::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Kind, E> {
        Ok(Kind::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Kind, E> {
        Ok(i64::try_from(value).map_or(Kind::Float, Kind::Int))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Kind, E> {
        Ok(Kind::Float)
    }

    fn visit_str<E>(self, value: &str) -> Result<Kind, E> {
        Ok(Kind::Text(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Kind, E> {
        Ok(Kind::Text(value.into_boxed_str()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Kind, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = items.next_element()? {
            list.push(node);
        }
        Ok(Kind::List(list.into_boxed_slice()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Kind, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key::<Spanned<String>>()? {
            let position = position_of(key.defined);
            map.push(Entry {
                key: key.value.into_boxed_str(),
                position,
                value: entries.next_value()?,
            });
        }
        Ok(Kind::Map(map.into_boxed_slice()))
    }
}
