//! Reading of maps with a fixed set of keys.

use std::path::Path;

use super::findings::{Place, Position, Report};
use super::tree::{Document, Entry, Kind};
use super::value::{Value, did_you_mean, one_of, shortened};

impl<'a> Value<'a> {
    /// Reads a map with a fixed set of keys, called `place` in findings.
    pub fn fields(self, place: &'static str) -> Option<Fields<'a>> {
        match &self.node.kind {
            Kind::Map(entries) => Some(Fields {
                map: self,
                place,
                entries,
                known: Vec::new(),
                later: &[],
                is_foreign: false,
                is_wrong: false,
            }),
            _ => self.not("a map of keys and values"),
        }
    }

    /// As [`Value::fields`], of a map of another project, such as Kubernetes: further keys are
    /// ignored, and a key without a value is absent.
    pub fn foreign(self, place: &'static str) -> Option<Fields<'a>> {
        let mut fields = self.fields(place)?;
        fields.is_foreign = true;
        Some(fields)
    }
}

/// Limit of the keys that are compared for similarity. A Kubernetes object has ten.
const KEYS_COMPARED_MAX: usize = 64;

/// A map with a fixed set of keys: those that its reader looked up. The drop reports all others as
/// unknown, and those that are given twice.
#[derive(Debug)]
pub struct Fields<'a> {
    map: Value<'a>,
    place: &'static str,
    entries: &'a [Entry],
    known: Vec<&'static str>,
    later: &'static [&'static str],
    /// True if further keys, and keys without a value, are ignored.
    is_foreign: bool,
    /// True if a required or optional key could not be read.
    is_wrong: bool,
}

impl<'a> Fields<'a> {
    /// Returns the keys of the whole document; `None` if it is no map. `example` is a first line.
    pub fn of_document(document: &'a Document, report: &'a Report, example: &str) -> Option<Self> {
        let what = match document.root.kind {
            Kind::Map(_) => return Value::of_document(document, report).fields(""),
            Kind::Null => "the file is empty",
            _ => "the file is not a map of keys and values",
        };
        let position = document.root.position;
        report.error(position, what, format!("`{example}` and so on"));
        None
    }

    pub fn file(&self) -> &Path {
        self.map.document.file()
    }

    /// Returns the text under a key, if there is any; reports nothing.
    pub fn word(&self, key: &str) -> Option<&'a str> {
        let entry = self.entries.iter().find(|entry| *entry.key == *key)?;
        entry.value.text()
    }

    pub fn place(&self) -> Place {
        self.map.place()
    }

    /// Names planned keys, which this version lacks.
    pub fn later(&mut self, keys: &'static [&'static str]) {
        self.later = keys;
    }

    pub fn get(&mut self, key: &'static str) -> Option<Value<'a>> {
        self.known.push(key);
        let entry = self.entries.iter().find(|entry| *entry.key == *key)?;
        let value = Value::new(self.map.document, self.map.report, &entry.value, self.place, key);
        if matches!(entry.value.kind, Kind::Null) {
            if self.is_foreign {
                return None;
            }
            // A list that was commented out line by line must not mean "no restriction".
            self.map.report.error(
                entry.position,
                format!("`{value}` has no value"),
                "one or remove the key",
            );
            return None;
        }
        Some(value)
    }

    /// Returns the value of a required key; `example` is a value for the finding about its absence.
    pub fn need(&mut self, key: &'static str, example: &str) -> Option<Value<'a>> {
        if !self.entries.iter().any(|entry| *entry.key == *key) {
            let owner = match self.place {
                "" if self.map.position == Position::Line(0) => "the directory".to_owned(),
                "" => "the file".to_owned(),
                place => format!("`{place}`"),
            };
            let what = format!("{owner} has no `{key}`");
            self.map.report.error(self.map.position, what, format!("`{key}: {example}`"));
        }
        self.get(key)
    }

    /// Reads a required key; `example` is a value for the finding about its absence. A wrong value
    /// is replaced by the default of its type, and noted for [`Self::complete`].
    pub fn required<T: Default>(
        &mut self,
        key: &'static str,
        example: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> T {
        let read = self.need(key, example).and_then(read);
        self.is_wrong |= read.is_none();
        read.unwrap_or_default()
    }

    /// Reads an optional key. A wrong value is replaced by the default, and noted for
    /// [`Self::complete`].
    pub fn optional<T>(
        &mut self,
        key: &'static str,
        default: T,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> T {
        let read = self.get(key).map(read);
        self.is_wrong |= matches!(read, Some(None));
        read.flatten().unwrap_or(default)
    }

    /// Warns of keys that were not looked up, in a map of another project.
    pub fn warn_of_others(&self) {
        let is_other = |entry: &&Entry| self.known.iter().all(|known| **known != *entry.key);
        for entry in self.entries.iter().filter(is_other) {
            let what = format!("`{}.{}` is ignored", self.place, shortened(&entry.key));
            let how = "the object without it";
            self.map.report.warning(entry.position, what, how);
        }
    }

    /// Reports keys that were not looked up and resemble one that was, in a map of another project.
    /// Of a map with many keys only the first ones are compared.
    pub fn report_misspelt(&self) {
        let is_known = |entry: &Entry| self.known.iter().any(|known| **known == *entry.key);
        let is_similar =
            |entry: &Entry| !did_you_mean(&entry.key, self.known.iter().copied()).is_empty();
        let others = self.entries.iter().take(KEYS_COMPARED_MAX).filter(|entry| !is_known(entry));
        others.filter(|entry| is_similar(entry)).for_each(|entry| self.unknown(entry));
    }

    /// Finishes the map. Returns `made` unless a value was wrong.
    pub fn complete<T>(self, made: T) -> Option<T> {
        (!self.is_wrong).then_some(made)
    }

    /// Finishes the map without a report of unknown keys.
    pub fn ignore(mut self) {
        self.entries = &[];
    }

    fn unknown(&self, entry: &Entry) {
        let place = match self.place {
            "" => String::new(),
            place => format!(" in `{place}`"),
        };
        let meant = did_you_mean(&entry.key, self.known.iter().copied());
        let what = format!("unknown key `{}`{place}{meant}", shortened(&entry.key));
        let how = if self.known.is_empty() {
            "nothing there".to_owned()
        } else {
            one_of(self.known.iter().copied())
        };
        self.map.report.error(entry.position, what, how);
    }
}

impl Drop for Fields<'_> {
    fn drop(&mut self) {
        let mut seen = vec![None; self.known.len()];
        for entry in self.entries {
            let key = match self.place {
                "" => shortened(&entry.key),
                place => format!("{place}.{}", shortened(&entry.key)),
            };
            match self.known.iter().position(|known| **known == *entry.key) {
                Some(index) => match seen[index].replace(entry.position.line()) {
                    Some(first) => {
                        let what = format!("`{key}` is given twice, first on line {first}");
                        self.map.report.error(entry.position, what, "it once");
                    }
                    None => continue,
                },
                None if self.later.contains(&&*entry.key) => {
                    let what = format!("`{key}` is not implemented yet");
                    self.map.report.error(entry.position, what, "the file without it");
                }
                None if self.is_foreign => {}
                None => self.unknown(entry),
            }
        }
    }
}
