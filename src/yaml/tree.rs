//! A YAML document as a tree in which every key and value knows its line.
//!
//! `serde-saphyr` does the parsing. The tree is read by [`super::value`], entry by entry, so that
//! one mistake does not hide the next one: a derived `Deserialize` would stop at the first.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Location, MessageFormatter, Options, Spanned, UserMessageFormatter};

use super::findings::{Findings, Place};

/// The most bytes of a file. A mesh of 100,000 workloads is about 25 MB.
pub const FILE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// 100,000 workloads of 40 keys and as many values each. A node costs about a hundred bytes, so
/// this also bounds what a hostile file can make us allocate.
const NODES_MAX: usize = 100_000 * 40 * 2;

/// Every node is one event, every list and map one more for its end.
const EVENTS_MAX: usize = 2 * NODES_MAX;

/// One for each object of a large mesh, where a file has several documents.
const DOCUMENTS_MAX: usize = 100_000;

/// The deepest shape that we read is `policies[].rules[][][].serviceAccounts[]`, nine levels. The
/// parser recurses: a hundred levels overflowed the 2 MiB stack of a test thread.
const DEPTH_MAX: usize = 16;

/// Lines from here on are none of the file, which has fewer: what is left of them is an index into
/// the origins of a [`Layer`].
const ORIGINS: u32 = 1 << 31;

/// A parsed file, or what lies under it.
#[derive(Clone, Debug)]
pub struct Document {
    /// The file, as it was named when it was loaded.
    pub file: PathBuf,
    text: Arc<str>,
    /// The value of the whole document.
    pub root: Node,
    pub(crate) origins: Vec<String>,
}

/// A tree that was made and not parsed: each value knows the name of what it came from.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The value of the whole tree.
    pub root: Node,
    /// The names, by `Node::made`.
    pub origins: Vec<String>,
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub struct Node {
    /// The line of its first character, counted from one.
    pub line: u32,
    /// Offset and length in bytes of its text in the file, which has at most 64 MiB.
    span: (u32, u32),
    /// What it is.
    pub kind: Kind,
}

/// What a value is. Everything is boxed to its size: a mesh has millions of these.
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
    /// A list.
    List(Box<[Node]>),
    /// A map in the order of the file, repeated keys included.
    Map(Box<[Entry]>),
}

/// One key of a map and its value.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The key as text: `80` and `"80"` are the same key.
    pub key: Box<str>,
    /// The key's line.
    pub line: u32,
    /// The value.
    pub value: Node,
}

impl Document {
    /// Reads and parses a file of at most 64 MiB.
    pub fn load(file: &Path) -> Result<Self, Findings> {
        Self::parse(file, &read(file)?)
    }

    /// As [`Document::load`], of a file that may have several documents. Those without a value
    /// are left out.
    pub fn load_all(file: &Path) -> Result<Vec<Self>, Findings> {
        Self::parse_all(file, &read(file)?)
    }

    /// Parses `text`, naming `file` in findings.
    pub fn parse(file: &Path, text: &str) -> Result<Self, Findings> {
        let text = plain(file, text)?;
        let root = serde_saphyr::from_str_with_options(text, options());
        let root = root.map_err(|error| syntax_error(file, error.without_snippet()))?;
        Ok(Self::new(file, &text.into(), root))
    }

    /// As [`Document::parse`], for a text that may have several documents.
    pub fn parse_all(file: &Path, text: &str) -> Result<Vec<Self>, Findings> {
        let text = plain(file, text)?;
        let roots = serde_saphyr::from_multiple_with_options::<Node>(text, options());
        let roots = roots.map_err(|error| syntax_error(file, error.without_snippet()))?;
        let text = text.into();
        let roots = roots.into_iter();
        Ok(roots.map(|root| Self::new(file, &text, root)).collect())
    }

    fn new(file: &Path, text: &Arc<str>, root: Node) -> Self {
        Self {
            file: file.to_owned(),
            text: Arc::clone(text),
            root,
            origins: Vec::new(),
        }
    }

    /// A layer alone, as if the file were empty.
    pub(crate) fn of_layer(file: &Path, layer: &Layer) -> Self {
        Self {
            file: file.to_owned(),
            text: Arc::default(),
            root: layer.root.clone(),
            origins: layer.origins.clone(),
        }
    }

    /// Lays the file over a layer: maps are merged key by key, and all else is the file's. An
    /// empty file changes nothing.
    pub(crate) fn over(mut self, layer: &Layer) -> Self {
        self.root = match self.root.kind {
            Kind::Null => layer.root.clone(),
            _ => self.root.over(&layer.root),
        };
        self.origins.clone_from(&layer.origins);
        self
    }

    /// Where a value stands.
    pub(crate) fn place_of(&self, node: &Node) -> Place {
        place(&self.file, &self.origins, node.line.into())
    }

    /// What relative paths of a value are relative to, and how to say so: the folder of the file,
    /// or the working directory for what is of no file.
    pub(crate) fn folder_of(&self, node: &Node) -> (&Path, &'static str) {
        match node.line < ORIGINS {
            true => (
                self.file.parent().unwrap_or_else(|| Path::new("")),
                "the folder of this one",
            ),
            false => (Path::new(""), "the working directory"),
        }
    }

    /// The characters of a scalar as they stand in the file.
    pub(crate) fn text_of(&self, node: &Node) -> Option<&str> {
        let (start, length) = (node.span.0 as usize, node.span.1 as usize);
        self.text.get(start..start.checked_add(length)?)
    }
}

/// The text of a file of at most 64 MiB.
fn read(file: &Path) -> Result<String, Findings> {
    let mut bytes = Vec::new();
    // One byte over the limit shows that there is more, also where no size is known before.
    let limit = FILE_BYTES_MAX as u64 + 1;
    let read = File::open(file).and_then(|opened| opened.take(limit).read_to_end(&mut bytes));
    if let Err(error) = read {
        let what = format!("the file cannot be read: {error}");
        let how = "the path of a file that we may read";
        return Err(Findings::one(file, 1, &what, how));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + valid.iter().filter(|byte| **byte == b'\n').count() as u64;
        Findings::one(file, line, "the file is not UTF-8 text here", "it in UTF-8")
    })
}

/// The text that is parsed. Without the byte order mark, offsets into it are what the parser says
/// they are.
fn plain<'a>(file: &Path, text: &'a str) -> Result<&'a str, Findings> {
    if text.len() > FILE_BYTES_MAX {
        let what = format!("the file is larger than {} MiB", FILE_BYTES_MAX >> 20);
        return Err(Findings::one(file, 1, &what, "a smaller one"));
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// What a line stands for, for findings.
pub(crate) fn place(file: &Path, origins: &[String], line: u64) -> Place {
    let index = line.checked_sub(ORIGINS.into());
    let index = index.and_then(|index| usize::try_from(index).ok());
    match index.and_then(|index| origins.get(index)) {
        Some(name) => Place::named(name),
        None => Place {
            file: file.to_owned(),
            line,
        },
    }
}

impl Node {
    /// A value that was made, from the origin of this index.
    pub(crate) fn made(origin: usize, kind: Kind) -> Self {
        let origin = u32::try_from(origin).unwrap_or(u32::MAX);
        Self {
            line: ORIGINS.saturating_add(origin),
            span: (0, 0),
            kind,
        }
    }

    /// Lays this over `base`. Where both are maps of different `kind`, the base's other keys are
    /// those of another thing, and it goes whole.
    fn over(self, base: &Self) -> Self {
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
            merged.extend(own.map(|own| Entry {
                value: own.value.clone().over(&entry.value),
                ..own.clone()
            }));
        }
        let is_new = |own: &&Entry| below.iter().all(|entry| entry.key != own.key);
        merged.extend(entries.iter().filter(is_new).cloned());
        Self {
            kind: Kind::Map(merged.into_boxed_slice()),
            ..self
        }
    }

    /// The text under a key of this map.
    pub(crate) fn word(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.kind {
            Kind::Text(text) => Some(text),
            _ => None,
        }
    }

    /// As [`Self::get`], to change it.
    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        let Kind::Map(entries) = &mut self.kind else {
            return None;
        };
        let entry = entries.iter_mut().find(|entry| *entry.key == *key)?;
        Some(&mut entry.value)
    }

    /// The value under a key of this map.
    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Kind::Map(entries) = &self.kind else {
            return None;
        };
        let entry = entries.iter().find(|entry| *entry.key == *key)?;
        Some(&entry.value)
    }
}

/// Repeated keys are passed on, for us to report them all with their lines. Anchors, aliases and
/// merge keys are refused: without them a tree is never larger or deeper than its file.
fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS_MAX,
            max_nodes: NODES_MAX,
            max_events: EVENTS_MAX,
            max_depth: DEPTH_MAX,
            flow_nesting_limit: DEPTH_MAX,
            max_anchors: 0,
            max_aliases: 0,
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

    let line = error
        .location()
        .map_or(1, |location| location.line().max(1));
    let (what, how) = match error {
        Error::Budget { breach, .. } => match breach {
            BudgetBreach::Anchors { .. } | BudgetBreach::Aliases { .. } => (
                "anchors (`&name`) and aliases (`*name`) are not read".to_owned(),
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
            (format!("not valid YAML: {message}"), "")
        }
    };
    Findings::one(file, line, &what, how)
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, defined, .. } = Spanned::<Kind>::deserialize(deserializer)?;
        let span = defined.span();
        let span = (narrow(span.byte_offset()), narrow(span.byte_len()));
        Ok(Self {
            line: line_of(defined),
            span,
            kind: value,
        })
    }
}

/// The file is too small for a value that does not fit.
fn narrow(value: Option<u64>) -> u32 {
    value.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
}

fn line_of(location: Location) -> u32 {
    narrow(Some(location.line())).max(1)
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
            let line = line_of(key.defined);
            map.push(Entry {
                key: key.value.into_boxed_str(),
                line,
                value: entries.next_value()?,
            });
        }
        Ok(Kind::Map(map.into_boxed_slice()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Document {
        Document::parse(Path::new("a.yaml"), text).unwrap()
    }

    fn refusal(text: &str) -> String {
        Document::parse(Path::new("a.yaml"), text)
            .unwrap_err()
            .to_string()
    }

    /// The document with its lines, in a form that fits an assertion.
    fn outline(document: &Document, node: &Node) -> String {
        let line = node.line;
        match &node.kind {
            Kind::Null => format!("{line}:null"),
            Kind::Bool(value) => format!("{line}:{value}"),
            Kind::Int(value) => format!("{line}:{value}"),
            Kind::Float => format!("{line}:float {}", document.text_of(node).unwrap()),
            Kind::Text(value) => format!("{line}:{value:?}"),
            Kind::List(items) => {
                let items: Vec<_> = items.iter().map(|node| outline(document, node)).collect();
                format!("{line}:[{}]", items.join(" "))
            }
            Kind::Map(entries) => {
                let entry =
                    |e: &Entry| format!("{}@{}={}", e.key, e.line, outline(document, &e.value));
                let entries: Vec<_> = entries.iter().map(entry).collect();
                format!("{line}:{{{}}}", entries.join(" "))
            }
        }
    }

    #[test]
    fn every_key_and_value_knows_its_line() {
        let document = parse(
            "# c\na:\n  # d\n  b: [1, {x: é}]\n\n  c:\n    - d: e\n      f:\n    -\n      g: ~\n",
        );
        assert_eq!(
            outline(&document, &document.root),
            "2:{a@2=4:{b@4=4:[4:1 4:{x@4=4:\"é\"}] \
             c@6=7:[7:{d@7=7:\"e\" f@8=8:null} 10:{g@10=10:null}]}}"
        );
    }

    #[test]
    fn quotes_make_text_and_only_true_and_false_are_booleans() {
        let text =
            "\u{feff}a: \"80\"\nb: 80\nc: on\nd: true\ne: 1.10\nf: 'true'\ng: 1e999\nh: -5\n";
        let document = parse(text);
        assert_eq!(
            outline(&document, &document.root),
            "1:{a@1=1:\"80\" b@2=2:80 c@3=3:\"on\" d@4=4:true e@5=5:float 1.10 f@6=6:\"true\" \
             g@7=7:float 1e999 h@8=8:-5}"
        );
    }

    #[test]
    fn repeated_keys_are_kept_for_the_reader_to_report() {
        let document = parse("a: 1\n\"a\": 2\n80: 3\n\"80\": 4\n");
        assert_eq!(
            outline(&document, &document.root),
            "1:{a@1=1:1 a@2=2:2 80@3=3:3 80@4=4:4}"
        );
    }

    #[test]
    fn broken_syntax_is_reported_at_its_line() {
        assert_eq!(
            refusal("a: b\n  c: d\n"),
            "a.yaml:2: error: not valid YAML: mapping values are not allowed in this context"
        );
        assert_eq!(
            refusal("a: b\n---\nc: d\n"),
            "a.yaml:3: error: not valid YAML: only single YAML document expected but multiple found"
        );
        assert!(refusal("a: b\n? {c: d}\n: e\n").starts_with("a.yaml:2: error: not valid YAML:"));
    }

    #[test]
    fn several_documents_know_their_lines_and_empty_ones_are_left_out() {
        let text = "# c\n---\na: 1.10\n---\n# nothing\n---\n- b\n...\n---\n{\"c\": \"d\"}\n---\n";
        let documents = Document::parse_all(Path::new("a.yaml"), text).unwrap();
        let outlines = documents.iter().map(|one| outline(one, &one.root));
        let wanted = ["3:{a@3=3:float 1.10}", "7:[7:\"b\"]", "10:{c@10=10:\"d\"}"];
        assert_eq!(outlines.collect::<Vec<_>>(), wanted);
        assert!(Document::parse_all(Path::new("a"), "").unwrap().is_empty());
    }

    #[test]
    fn the_bounds_hold_over_all_documents_together() {
        let refusal = |text: &str| {
            let parsed = Document::parse_all(Path::new("a.yaml"), text);
            parsed.unwrap_err().to_string()
        };
        let many = refusal(&"---\na\n".repeat(DOCUMENTS_MAX + 1));
        assert!(
            many.ends_with("error: more than 100000 documents; write fewer"),
            "{many}"
        );
        let bomb = refusal("a: 1\n---\na: &x [1]\nb: *x\n");
        assert!(bomb.starts_with("a.yaml:3: error: anchors"), "{bomb}");
        let deep = refusal(&format!("a: 1\n---\n{}", "- ".repeat(100_000)));
        assert!(
            deep.starts_with("a.yaml:3: error: more than 16 levels"),
            "{deep}"
        );
    }

    #[test]
    fn anchors_are_refused_so_that_no_text_can_blow_up() {
        let want = "a.yaml:1: error: anchors (`&name`) and aliases (`*name`) are not read; \
                    write out the value";
        assert_eq!(refusal("a: &x [1]\nb: *x\n"), want);
        assert!(refusal("b: *x\n").starts_with("a.yaml:1: error:"));
    }

    #[test]
    fn deep_nesting_is_refused_before_the_stack_ends() {
        let want = "a.yaml:1: error: more than 16 levels of nesting; write fewer";
        assert_eq!(refusal(&"- ".repeat(100_000)), want);
        assert!(refusal(&"[".repeat(100_000)).starts_with("a.yaml:1: error:"));
        assert!(refusal(&"{a: ".repeat(100_000)).starts_with("a.yaml:1: error:"));
        parse(&"- ".repeat(DEPTH_MAX));
    }

    #[test]
    fn a_file_over_the_size_limit_is_refused() {
        let text = "#".repeat(FILE_BYTES_MAX + 1);
        assert_eq!(
            refusal(&text),
            "a.yaml:1: error: the file is larger than 64 MiB; write a smaller one"
        );
    }

    #[test]
    fn a_file_that_is_absent_or_not_text_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.yaml");
        let absent = Document::load(&file).unwrap_err().to_string();
        assert!(absent.contains("x.yaml:1: error: the file cannot be read: No such file"));
        std::fs::write(&file, b"a: b\nc: \xff\n").unwrap();
        let binary = Document::load(&file).unwrap_err().to_string();
        assert!(
            binary.ends_with("x.yaml:2: error: the file is not UTF-8 text here; write it in UTF-8")
        );
    }

    proptest! {
        #[test]
        fn no_text_panics_the_parser(text in "([-?:,\\[\\]{}#&*!|>'\"%@`a0 \n\t~.<]|\\PC){0,80}") {
            let _ = Document::parse(Path::new("a"), &text);
        }
    }
}
