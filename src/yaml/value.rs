//! Typed reading of a located tree: each value that cannot be read becomes a finding at its line,
//! and reading goes on.
//!
//! Methods that return an `Option` have reported why before they return `None`.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::findings::{Place, Report};
use super::tree::{Document, Entry, Kind, Node};

/// Values are quoted in findings up to this many characters.
const QUOTE_CHARS_MAX: usize = 80;

/// A value of the tree with what a finding about it needs.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    document: &'a Document,
    report: &'a Report,
    node: &'a Node,
    line: u32,
    place: &'static str,
    key: &'static str,
    entry: bool,
    is_secret: bool,
}

/// A map with a fixed set of keys. The set is what the reader asked for: whatever it did not ask
/// for until [`Fields::finish`] is an unknown key.
#[derive(Debug)]
#[must_use = "unknown keys are reported by `finish`"]
pub struct Fields<'a> {
    document: &'a Document,
    report: &'a Report,
    place: &'static str,
    line: u64,
    entries: &'a [Entry],
    known: Vec<&'static str>,
    later: &'static [&'static str],
    /// Whether further keys, and keys without a value, mean nothing.
    is_foreign: bool,
}

impl<'a> Fields<'a> {
    /// The keys of the whole document; `None` when it is not a map. `example` is a first line.
    pub fn of_document(document: &'a Document, report: &'a Report, example: &str) -> Option<Self> {
        let node = &document.root;
        let Kind::Map(entries) = &node.kind else {
            let what = match node.kind {
                Kind::Null => "the file is empty",
                _ => "the file is not a map of keys and values",
            };
            report.error(node.line.into(), what, format!("`{example}` and so on"));
            return None;
        };
        Some(Self::new(document, report, "", node.line.into(), entries))
    }

    fn new(
        document: &'a Document,
        report: &'a Report,
        place: &'static str,
        line: u64,
        entries: &'a [Entry],
    ) -> Self {
        Self {
            document,
            report,
            place,
            line,
            entries,
            known: Vec::new(),
            later: &[],
            is_foreign: false,
        }
    }

    /// The line on which the map begins.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// Names keys that the design has and this version does not.
    pub fn later(&mut self, keys: &'static [&'static str]) {
        self.later = keys;
    }

    /// The value of a key that may be left out.
    pub fn get(&mut self, key: &'static str) -> Option<Value<'a>> {
        self.known.push(key);
        let entry = self.entries.iter().find(|entry| *entry.key == *key)?;
        let (document, report, place) = (self.document, self.report, self.place);
        let value = Value {
            document,
            report,
            node: &entry.value,
            line: entry.value.line,
            place,
            key,
            entry: false,
            is_secret: false,
        };
        if matches!(entry.value.kind, Kind::Null) {
            if self.is_foreign {
                return None;
            }
            // A list that was commented out line by line must not mean "no restriction".
            report.error(
                entry.line.into(),
                format!("`{value}` has no value"),
                "one or remove the key",
            );
            return None;
        }
        Some(value)
    }

    /// The value of a key that must be there; `example` is what to write after the colon.
    pub fn need(&mut self, key: &'static str, example: &str) -> Option<Value<'a>> {
        if !self.entries.iter().any(|entry| *entry.key == *key) {
            let owner = match self.place {
                "" => "the file".to_owned(),
                place => format!("`{place}`"),
            };
            let what = format!("{owner} has no `{key}`");
            self.report
                .error(self.line, what, format!("`{key}: {example}`"));
        }
        self.get(key)
    }

    /// Reports the keys that nobody asked for and those that are given twice.
    pub fn finish(self) {
        let mut seen = vec![None; self.known.len()];
        for entry in self.entries {
            let key = match self.place {
                "" => shortened(&entry.key),
                place => format!("{place}.{}", shortened(&entry.key)),
            };
            match self.known.iter().position(|known| **known == *entry.key) {
                Some(index) => match seen[index].replace(entry.line) {
                    Some(first) => {
                        let what = format!("`{key}` is given twice, first on line {first}");
                        self.report.error(entry.line.into(), what, "it once");
                    }
                    None => continue,
                },
                None if self.later.contains(&&*entry.key) => {
                    let what = format!("`{key}` is not built yet");
                    self.report
                        .error(entry.line.into(), what, "the file without it");
                }
                None if self.is_foreign => {}
                None => self.unknown(entry),
            }
        }
    }

    fn unknown(&self, entry: &Entry) {
        let place = match self.place {
            "" => String::new(),
            place => format!(" in `{place}`"),
        };
        let what = format!("unknown key `{}`{place}", shortened(&entry.key));
        let how = match self.known.is_empty() {
            true => "nothing there".to_owned(),
            false => one_of(self.known.iter().copied()),
        };
        self.report.error(entry.line.into(), what, how);
    }
}

impl<'a> Value<'a> {
    /// The value of the whole document.
    pub fn of_document(document: &'a Document, report: &'a Report) -> Self {
        Self {
            document,
            report,
            node: &document.root,
            line: document.root.line,
            place: "",
            key: "object",
            entry: false,
            is_secret: false,
        }
    }

    /// The line on which the value begins, or its key where the key is data as well.
    pub fn line(self) -> u64 {
        self.line.into()
    }

    /// Returns its place, for findings that only show later.
    pub fn place(self) -> Place {
        self.document.place_of(self.node)
    }

    /// This value and those in it are not quoted in what [`Value::parsed`] and the like report.
    pub fn secret(self) -> Self {
        Self {
            is_secret: true,
            ..self
        }
    }

    /// Reports that this value is wrong.
    pub fn error(self, what: impl fmt::Display, how: impl Into<String>) {
        self.report
            .error(self.line(), format!("`{self}` {what}"), how);
    }

    /// Reports that this value is suspicious.
    pub fn warning(self, what: impl fmt::Display, how: impl Into<String>) {
        self.report
            .warning(self.line(), format!("`{self}` {what}"), how);
    }

    /// Text of at least one character. An unquoted number or boolean is its characters in the
    /// file, as for `serde-saphyr`: a revision `1.10` stays `1.10`.
    pub fn text(self) -> Option<&'a str> {
        let text = self.text_or_empty()?;
        if text.is_empty() {
            self.error("is empty", "at least one character");
            return None;
        }
        Some(text)
    }

    /// Text, where an empty one means the default.
    pub fn text_or_empty(self) -> Option<&'a str> {
        match &self.node.kind {
            Kind::Text(text) => Some(text),
            Kind::Bool(_) | Kind::Int(_) | Kind::Float => self.document.text_of(self.node),
            _ => self.not("text"),
        }
    }

    /// `true` or `false`.
    pub fn flag(self) -> Option<bool> {
        match self.node.kind {
            Kind::Bool(value) => Some(value),
            _ => self.not("`true` or `false`"),
        }
    }

    /// A whole number between two bounds.
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

    /// A port that can be dialled.
    pub fn port(self) -> Option<u16> {
        self.number(1, u16::MAX)
    }

    /// Text that `parse` understands; `wanted` says what that is.
    pub fn parsed<T>(self, wanted: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text()?;
        let parsed = parse(text);
        if parsed.is_none() {
            return self.not(wanted);
        }
        parsed
    }

    /// One of a closed list of words.
    pub fn choice<T: Copy>(self, words: &[(&str, T)]) -> Option<T> {
        let text = self.text()?;
        let found = words.iter().find(|(word, _)| *word == text);
        if found.is_none() {
            let what = format!("cannot be `{}`", shortened(text));
            self.error(what, one_of(words.iter().map(|(word, _)| *word)));
        }
        found.map(|(_, meaning)| *meaning)
    }

    /// Reports that a word has its place in the design, but not in this version. Says whether it
    /// did, so that the caller can stop.
    pub fn is_later(self, words: &[&str], how: &str) -> bool {
        let later = matches!(&self.node.kind, Kind::Text(text) if words.contains(&&**text));
        if later {
            let word = self.text().unwrap_or_default();
            self.report.error(
                self.line(),
                format!("`{self}: {word}` is not built yet"),
                how,
            );
        }
        later
    }

    /// The entries of a list; none when it is not a list.
    pub fn items(self) -> impl Iterator<Item = Value<'a>> {
        let nodes = match &self.node.kind {
            Kind::List(nodes) => &nodes[..],
            _ => {
                self.not::<()>("a list");
                &[]
            }
        };
        nodes.iter().map(move |node| Value {
            node,
            line: node.line,
            entry: true,
            ..self
        })
    }

    /// A map with a fixed set of keys, called `place` in findings.
    pub fn fields(self, place: &'static str) -> Option<Fields<'a>> {
        match &self.node.kind {
            Kind::Map(entries) => Some(Fields::new(
                self.document,
                self.report,
                place,
                self.line(),
                entries,
            )),
            _ => self.not("a map of keys and values"),
        }
    }

    /// As [`Value::fields`], of somebody else's map, such as Kubernetes', which may have more keys
    /// than we know, and in which a key without a value is one that is not there.
    pub fn foreign(self, place: &'static str) -> Option<Fields<'a>> {
        let mut fields = self.fields(place)?;
        fields.is_foreign = true;
        Some(fields)
    }

    /// The entries of a map whose keys are data; none when it is not a map.
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
            line: entry.line,
            entry: true,
            ..self
        };
        entries.iter().map(move |entry| (entry, value(entry)))
    }

    /// Returns whether this is a list or a map without entries.
    pub fn is_vacant(self) -> bool {
        match &self.node.kind {
            Kind::List(nodes) => nodes.is_empty(),
            Kind::Map(entries) => entries.is_empty(),
            _ => false,
        }
    }

    /// Returns whether this is a list.
    pub fn is_list(self) -> bool {
        matches!(self.node.kind, Kind::List(_))
    }

    /// Returns whether this is a map.
    pub fn is_map(self) -> bool {
        matches!(self.node.kind, Kind::Map(_))
    }

    /// The text under a key of this map, if there is any; reports nothing. For checks that must
    /// know what an entry is called even when the entry is wrong.
    pub fn peek(self, key: &str) -> Option<&'a str> {
        let Kind::Map(entries) = &self.node.kind else {
            return None;
        };
        let entry = entries.iter().find(|entry| *entry.key == *key)?;
        match &entry.value.kind {
            Kind::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A path, relative to the file that names it, of something that exists. Whether it can be
    /// used is for whoever reads it to say.
    pub fn existing_path(self) -> Option<PathBuf> {
        let (path, error) = self.named_path()?;
        let Some(error) = error else {
            return Some(path);
        };
        let (what, how) = self.unusable(&path, &error);
        self.error(what, how);
        None
    }

    /// As [`Value::existing_path`], of certificates, a key or a token. The path of one that does
    /// not exist is given too: much can be checked without it ([`Severity::Absent`]).
    ///
    /// [`Severity::Absent`]: super::Severity::Absent
    pub fn credential_path(self) -> Option<PathBuf> {
        let (path, error) = self.named_path()?;
        let Some(error) = error else {
            return Some(path);
        };
        let (what, how) = self.unusable(&path, &error);
        if error.kind() != ErrorKind::NotFound {
            self.error(what, how);
            return None;
        }
        let what = format!("`{self}` {what}");
        self.report.note_absent(&path, self.line(), what, how);
        Some(path)
    }

    /// A path, relative to the file that names it, that need not exist and is watched.
    pub fn watched_path(self) -> Option<PathBuf> {
        let path = self.document.folder_of(self.node).0.join(self.text()?);
        self.report.names(path.clone(), self.line());
        Some(path)
    }

    /// A path relative to the file that names it, with the error of looking for it.
    fn named_path(self) -> Option<(PathBuf, Option<io::Error>)> {
        let text = self.text()?;
        let (folder, _) = self.document.folder_of(self.node);
        let path = folder.join(text);
        self.report.names(path.clone(), self.line());
        let error = path.metadata().err();
        Some((path, error))
    }

    /// Returns the two texts of a finding about a path: the mistake, and the text to write instead.
    fn unusable(self, path: &Path, error: &io::Error) -> (String, String) {
        let (_, its_name) = self.document.folder_of(self.node);
        let what = format!("is `{}`: {error}", shortened(&path.to_string_lossy()));
        let how = format!("the path of an existing file, relative to {its_name}");
        (what, how)
    }

    /// A path, relative to the file that names it, of a file that we write ourselves: its folder
    /// exists. It is not watched.
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
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new(".")).metadata();
        let wrong = match (is_wrong(&path), parent) {
            (Some(wrong), _) => format!("is `{shown}`, {wrong}"),
            (None, Ok(parent)) if parent.is_dir() => return Some(path),
            (None, Ok(_)) => format!("is `{shown}`, which is in no folder"),
            (None, Err(error)) => format!("is `{shown}`, whose folder cannot be used: {error}"),
        };
        let how = format!("the path of a {kind} in an existing folder, relative to {its_name}");
        self.error(wrong, how);
        None
    }

    fn not<T>(self, wanted: &str) -> Option<T> {
        let found = match &self.node.kind {
            Kind::Null => "has no value".to_owned(),
            Kind::List(_) => "is a list".to_owned(),
            Kind::Map(_) => "is a map".to_owned(),
            _ if self.is_secret => "has a value that is not shown here".to_owned(),
            Kind::Text(text) => format!("is `{}`", shortened(text)),
            Kind::Int(number) => format!("is `{number}`"),
            _ => format!(
                "is `{}`",
                shortened(self.document.text_of(self.node).unwrap_or("?"))
            ),
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
        if self.entry {
            f.write_str("[]")
        } else {
            Ok(())
        }
    }
}

fn one_of<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.map(|word| format!("`{word}`")).collect();
    match words.as_slice() {
        [word] => word.clone(),
        words => format!("one of {}", words.join(", ")),
    }
}

/// The beginning of a text, for a finding that must stay on one line.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTE_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
