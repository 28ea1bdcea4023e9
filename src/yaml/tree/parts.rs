//! Directory of YAML files as one document.

use std::path::Path;
use std::sync::Arc;

use super::{Document, Entry, FILE_BYTES_MAX, Kind, Node, narrow};
use crate::yaml::files::yaml_files;
use crate::yaml::findings::{Findings, Position};
use crate::yaml::value::shortened;

/// Limit of the files of a directory. Each is read and watched.
const FILES_MAX: usize = 1000;

impl Document {
    /// As [`Document::load`], or of a directory: the maps of its files are merged key by key, and
    /// any other value that two of them have is a mistake. So is an empty file, which may be about
    /// to be written: without its keys, the rest could allow more.
    pub fn load_parts(path: &Path) -> Result<Self, Findings> {
        if !path.is_dir() {
            return Self::load(path);
        }
        let refusal = |what: &str, how: &str| Findings::one(path, Position::Line(0), what, how);
        let files = yaml_files(path).map_err(|error| {
            let what = format!("the directory cannot be read: {error}");
            refusal(&what, "the path of a readable directory")
        })?;
        if files.is_empty() {
            return Err(refusal("the directory has no YAML file", "`*.yaml` files into it"));
        }
        let empty = Kind::Map(Box::default());
        let root = Node { position: Position::Line(0), span: (0, 0), kind: empty };
        let mut whole = Self::new(path, &Arc::default(), root);
        let (mut text, mut unusable) = (String::new(), Vec::new());
        for (index, file) in (0..).zip(&files) {
            let loaded = Self::load(file);
            let size = text.len() + loaded.as_ref().map_or(0, |part| part.text.len());
            if files.len() > FILES_MAX || size > FILE_BYTES_MAX {
                let most = FILE_BYTES_MAX >> 20;
                let what = format!("the directory has more than {FILES_MAX} files or {most} MiB");
                return Err(refusal(&what, "fewer"));
            }
            whole.sources.parts.push(file.clone());
            match loaded {
                Ok(mut part) => {
                    part.root.move_to(index, narrow(Some(text.len() as u64)));
                    text.push_str(&part.text);
                    whole.add(&part.root);
                }
                Err(findings) => unusable.extend(findings.0),
            }
        }
        whole.text = text.into();
        if unusable.is_empty() {
            return Ok(whole);
        }
        unusable.extend(whole.report().into_findings().0);
        Err(Findings(unusable))
    }

    fn add(&mut self, part: &Node) {
        let (Kind::Map(known), Kind::Map(entries)) = (&mut self.root.kind, &part.kind) else {
            let is_empty = matches!(part.kind, Kind::Null);
            let what = if is_empty { "is empty" } else { "is not a map of keys and values" };
            let what = format!("the file {what}");
            return self.mistakes.push((part.position, what, "keys into it, or remove it"));
        };
        let mut repeated = Vec::new();
        merge(known, entries, "", &mut repeated);
        self.mistakes.extend(repeated.into_iter().map(|(path, first, position)| {
            let first = self.sources.place_of(first);
            let what = format!("`{path}` is given twice, first at {first}");
            (position, what, "it once: only maps are merged")
        }));
    }
}

impl Node {
    /// Turns lines into those of a file of a directory, whose text begins at `offset`.
    fn move_to(&mut self, part: u16, offset: u32) {
        self.position = self.position.of_part(part);
        self.span.0 += offset;
        match &mut self.kind {
            Kind::List(items) => items.iter_mut().for_each(|item| item.move_to(part, offset)),
            Kind::Map(entries) => entries.iter_mut().for_each(|entry| {
                entry.position = entry.position.of_part(part);
                entry.value.move_to(part, offset);
            }),
            _ => {}
        }
    }
}

/// Adds the entries of a file to those of earlier ones, below the keys `path`. Of a value that is
/// no map the first stays, and `repeated` receives the path and both positions.
fn merge(
    known: &mut Box<[Entry]>,
    entries: &[Entry],
    path: &str,
    repeated: &mut Vec<(String, Position, Position)>,
) {
    let mut all = std::mem::take(known).into_vec();
    for (index, entry) in entries.iter().enumerate() {
        let path = format!("{path}{}", shortened(&entry.key));
        let in_file = entries.iter().take(index).find(|other| other.key == entry.key);
        let Some(known) = all.iter_mut().find(|other| other.key == entry.key) else {
            all.push(entry.clone());
            continue;
        };
        match (in_file, &mut known.value.kind, &entry.value.kind) {
            (None, Kind::Map(known), Kind::Map(below)) => {
                merge(known, below, &format!("{path}."), repeated);
            }
            _ => {
                let first = in_file.map_or(known.position, |first| first.position);
                repeated.push((path, first, entry.position));
            }
        }
    }
    *known = all.into();
}
