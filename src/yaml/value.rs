//! Typed reading of a located tree. A value that cannot be read becomes a finding at its line, and
//! reading continues.
//!
//! Methods that return an `Option` report a finding before they return `None`, unless they say
//! otherwise.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::findings::{Place, Position, Report};
use super::tree::{Document, Entry, Kind, Node};

/// Characters of a value that findings quote.
const QUOTE_CHARS_MAX: usize = 80;

/// A value of the tree, with its path and line for findings.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    pub(super) document: &'a Document,
    pub(super) report: &'a Report,
    pub(super) node: &'a Node,
    pub(super) position: Position,
    place: &'static str,
    key: &'static str,
    entry: bool,
    is_secret: bool,
}

impl<'a> Value<'a> {
    /// Makes a value from the one under a key of the map that findings call `place`.
    pub(super) fn new(
        document: &'a Document,
        report: &'a Report,
        node: &'a Node,
        place: &'static str,
        key: &'static str,
    ) -> Self {
        Self {
            document,
            report,
            node,
            position: node.position,
            place,
            key,
            entry: false,
            is_secret: false,
        }
    }

    pub fn of_document(document: &'a Document, report: &'a Report) -> Self {
        Self::new(document, report, &document.root, "", "object")
    }

    /// Returns the line on which the value begins, or that of its key if the key is data too.
    pub fn line(self) -> u64 {
        self.position.line()
    }

    pub fn position(self) -> Position {
        self.position
    }

    pub fn node(self) -> &'a Node {
        self.node
    }

    /// Returns its place, for later findings.
    pub fn place(self) -> Place {
        self.document.place_of(self.node)
    }

    /// Marks this value and those in it as secret: findings do not quote them.
    pub fn secret(self) -> Self {
        Self { is_secret: true, ..self }
    }

    /// Returns the path of this value, if it is one of these, or the first of them.
    pub fn path_among(self, paths: &[&'static str]) -> &'static str {
        let first = paths.first().copied().unwrap_or_default();
        let own = paths.iter().skip(1).find(|path| self.to_string() == **path);
        own.copied().unwrap_or(first)
    }

    pub fn error(self, what: impl fmt::Display, how: impl Into<String>) {
        self.report.error(self.position, format!("`{self}` {what}"), how);
    }

    pub fn warning(self, what: impl fmt::Display, how: impl Into<String>) {
        self.report.warning(self.position, format!("`{self}` {what}"), how);
    }

    /// Reads text of at least one character. An unquoted number or boolean is its characters in
    /// the file, as for `serde-saphyr`: a revision `1.10` stays `1.10`.
    pub fn text(self) -> Option<&'a str> {
        let text = self.text_or_empty()?;
        if text.is_empty() {
            self.error("is empty", "at least one character");
            return None;
        }
        Some(text)
    }

    pub fn text_or_empty(self) -> Option<&'a str> {
        match &self.node.kind {
            Kind::Text(text) => Some(text),
            Kind::Bool(_) | Kind::Int(_) | Kind::Float => self.document.text_of(self.node),
            _ => self.not("text"),
        }
    }

    /// Reads `true` or `false`.
    pub fn flag(self) -> Option<bool> {
        match self.node.kind {
            Kind::Bool(value) => Some(value),
            _ => self.not("`true` or `false`"),
        }
    }

    /// Reads a whole number between two bounds, which are included.
    pub fn number<T: TryFrom<i64> + Into<i64> + fmt::Display>(self, min: T, max: T) -> Option<T> {
        let bounds = format!("a whole number from {min} to {max}");
        let (min, max) = (min.into(), max.into());
        let number = match self.node.kind {
            Kind::Int(number) if (min..=max).contains(&number) => T::try_from(number).ok(),
            _ => None,
        };
        if number.is_none() {
            return self.not(&bounds);
        }
        number
    }

    /// Reads a port that can be dialled.
    pub fn port(self) -> Option<u16> {
        self.number(1, u16::MAX)
    }

    /// Reads text by `parse`; `wanted` describes its format in findings.
    pub fn parsed<T>(self, wanted: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text()?;
        let parsed = parse(text);
        if parsed.is_none() {
            return self.not(wanted);
        }
        parsed
    }

    /// Reads one of a closed list of words.
    pub fn choice<T: Copy>(self, words: &[(&str, T)]) -> Option<T> {
        let text = self.text()?;
        let found = words.iter().find(|(word, _)| *word == text);
        if found.is_none() {
            let meant = did_you_mean(text, words.iter().map(|(word, _)| *word));
            let what = format!("cannot be `{}`{meant}", shortened(text));
            self.error(what, one_of(words.iter().map(|(word, _)| *word)));
        }
        found.map(|(_, meaning)| *meaning)
    }

    /// Returns the entries of a list; none after a finding if it is no list.
    pub fn items(self) -> impl Iterator<Item = Self> {
        if !self.is_list() {
            self.not::<()>("a list");
        }
        self.entries()
    }

    /// Reads all entries of a list by `read`. Each invalid entry has reported its finding.
    pub fn all<T>(self, read: impl Fn(Self) -> Option<T>) -> Option<Vec<T>> {
        let read: Vec<_> = self.items().map(read).collect();
        read.into_iter().collect()
    }

    /// Returns this list; none after a finding if it has more than `max` entries.
    pub fn at_most(self, max: usize, how: &str) -> Option<Self> {
        let is_within = self.node.items().len() <= max;
        if !is_within {
            self.error(format!("has more than {max} items"), how);
        }
        is_within.then_some(self)
    }

    /// Returns the entries of a map whose keys are data; none after a finding if it is no map.
    pub fn pairs(self) -> impl Iterator<Item = (&'a Entry, Value<'a>)> {
        let entries = match &self.node.kind {
            Kind::Map(entries) => &entries[..],
            _ => {
                self.not::<()>("a map of keys and values");
                &[]
            }
        };
        let value = move |entry: &'a Entry| Value {
            node: &entry.value,
            position: entry.position,
            entry: true,
            ..self
        };
        entries.iter().map(move |entry| (entry, value(entry)))
    }

    /// Returns the value under a key of this map, which findings call `place.key`; reports nothing.
    pub fn child(self, place: &'static str, key: &'static str) -> Option<Self> {
        let node = self.node.get(key)?;
        Some(Self { node, position: node.position, place, key, entry: false, ..self })
    }

    /// As [`Value::child`], or this value if there is no such key: the place for findings.
    pub fn at(self, place: &'static str, key: &'static str) -> Self {
        self.child(place, key).unwrap_or(self)
    }

    /// Returns the entries of a list; reports nothing.
    pub fn entries(self) -> impl Iterator<Item = Self> {
        self.node.items().iter().map(move |node| Self {
            node,
            position: node.position,
            entry: true,
            ..self
        })
    }

    /// Returns the values of the document with a path such as `trust.domains[].name`, as findings
    /// write it; reports nothing.
    pub fn find(self, path: &'static str) -> Vec<Self> {
        let mut nodes = vec![&self.document.root];
        for segment in path.split('.') {
            let key = segment.trim_end_matches("[]");
            let values = nodes.into_iter().filter_map(|node| node.get(key));
            nodes = match (segment == key, values) {
                (true, values) => values.collect(),
                (false, values) => values.flat_map(Node::items).collect(),
            };
        }
        let (place, segment) = path.rsplit_once('.').unwrap_or(("", path));
        let key = segment.trim_end_matches("[]");
        let value = |node: &'a Node| Self {
            node,
            position: node.position,
            place,
            key,
            entry: segment != key,
            ..self
        };
        nodes.into_iter().map(value).collect()
    }

    /// Returns the text of a scalar; reports nothing.
    pub fn word(self) -> Option<&'a str> {
        self.node.text().or_else(|| self.document.scalar_of(self.node))
    }

    /// Returns whether this is a list or a map without entries.
    pub fn is_vacant(self) -> bool {
        match &self.node.kind {
            Kind::List(nodes) => nodes.is_empty(),
            Kind::Map(entries) => entries.is_empty(),
            _ => false,
        }
    }

    pub fn is_list(self) -> bool {
        matches!(self.node.kind, Kind::List(_))
    }

    pub fn is_map(self) -> bool {
        matches!(self.node.kind, Kind::Map(_))
    }

    /// Returns the text under a key of this map, if there is any; reports nothing. Checks use it to
    /// name entries that are unreadable.
    pub fn peek(self, key: &str) -> Option<&'a str> {
        self.node.word(key)
    }

    /// Reads a path, relative to the file that names it, of an existing file or directory.
    pub fn existing_path(self) -> Option<PathBuf> {
        self.named_path(false)
    }

    /// As [`Value::existing_path`], of certificates, a key or a token. The path of an absent file
    /// is returned too: much can be checked without it ([`Severity::Absent`]).
    ///
    /// [`Severity::Absent`]: super::Severity::Absent
    pub fn credential_path(self) -> Option<PathBuf> {
        self.named_path(true)
    }

    fn named_path(self, may_be_absent: bool) -> Option<PathBuf> {
        let text = self.text()?;
        let (folder, its_name) = self.document.folder_of(self.node);
        let path = folder.join(text);
        self.report.names(path.clone(), self.position);
        let Err(error) = path.metadata() else {
            return Some(path);
        };
        let what = format!("is `{}`: {error}", shortened(&path.to_string_lossy()));
        let how = format!("the path of an existing file, relative to {its_name}");
        if may_be_absent && error.kind() == ErrorKind::NotFound {
            let what = format!("`{self}` {what}");
            self.report.note_absent(&path, self.position, what, how);
            return Some(path);
        }
        self.error(what, how);
        None
    }

    /// Reads a path, relative to the file that names it, that need not exist and is watched.
    pub fn watched_path(self) -> Option<PathBuf> {
        let path = self.document.folder_of(self.node).0.join(self.text()?);
        self.report.names(path.clone(), self.position);
        Some(path)
    }

    /// Reads a path, relative to the file that names it, of a file that the gateway writes. Its
    /// directory exists. It is not watched.
    pub fn new_path(self) -> Option<PathBuf> {
        let is_wrong = |path: &Path| path.is_dir().then_some("a folder");
        self.own_path(is_wrong, "file")
    }

    /// As [`Value::new_path`], of a directory, which may exist.
    pub fn new_folder(self) -> Option<PathBuf> {
        let is_wrong = |path: &Path| (path.exists() && !path.is_dir()).then_some("no directory");
        self.own_path(is_wrong, "directory")
    }

    fn own_path(
        self,
        is_wrong: impl Fn(&Path) -> Option<&'static str>,
        kind: &str,
    ) -> Option<PathBuf> {
        let text = self.text()?;
        let (folder, its_name) = self.document.folder_of(self.node);
        let path = folder.join(text);
        let shown = shortened(&path.to_string_lossy());
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new(".")).metadata();
        let wrong = match (is_wrong(&path), parent) {
            (Some(wrong), _) => format!("is `{shown}`, {wrong}"),
            (None, Ok(parent)) if parent.is_dir() => return Some(path),
            (None, Ok(_)) => format!("is `{shown}`, whose parent is not a folder"),
            (None, Err(error)) => format!("is `{shown}`, whose folder cannot be used: {error}"),
        };
        let how = format!("the path of a {kind} in an existing folder, relative to {its_name}");
        self.error(wrong, how);
        None
    }

    pub(super) fn not<T>(self, wanted: &str) -> Option<T> {
        let found = match &self.node.kind {
            Kind::Null => "has no value".to_owned(),
            Kind::List(_) => "is a list".to_owned(),
            Kind::Map(_) => "is a map".to_owned(),
            _ if self.is_secret => "has an invalid value, which is not shown here".to_owned(),
            Kind::Text(text) => format!("is `{}`", shortened(text)),
            Kind::Int(number) => format!("is `{number}`"),
            _ => format!("is `{}`", shortened(self.document.text_of(self.node).unwrap_or("?"))),
        };
        self.error(found, wanted);
        None
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}.", self.place)?;
        }
        f.write_str(self.key)?;
        if self.entry { f.write_str("[]") } else { Ok(()) }
    }
}

/// Names the most similar word, if one is similar enough to be meant.
pub(super) fn did_you_mean<'a>(text: &str, words: impl Iterator<Item = &'a str>) -> String {
    /// One of three characters may be wrong, or two swapped.
    const SIMILAR: f64 = 0.6;
    let text = shortened(text);
    let similarity = |word| strsim::normalized_damerau_levenshtein(&text, word);
    let similar = words.map(|word| (similarity(word), word));
    let best = similar.max_by(|one, other| one.0.total_cmp(&other.0));
    match best.filter(|(similarity, _)| *similarity > SIMILAR) {
        Some((_, word)) => format!(" (did you mean `{word}`?)"),
        None => String::new(),
    }
}

pub(super) fn one_of<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.map(|word| format!("`{word}`")).collect();
    match words.as_slice() {
        [word] => word.clone(),
        words => format!("one of {}", words.join(", ")),
    }
}

/// Cuts a text to the length that findings quote.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTE_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
