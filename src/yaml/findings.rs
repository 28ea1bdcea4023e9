//! Findings about a file, each with its line, in the one form that all commands print.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use derive_more::Display;

use crate::labels::{escape_control, join};

/// Maximum findings of a file: a hostile file must not cost more memory in findings than in text.
const FINDINGS_MAX: usize = 200;

#[derive(Clone, Copy, Debug, Default, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// The file is not used.
    #[default]
    #[display("error")]
    Error,
    /// A file with certificates, a key or a token does not exist: an error where it is needed.
    #[display("error")]
    Absent,
    /// One object of the file is not used. The rest of the file is.
    #[display("error")]
    PassedOver,
    /// The file is used, but probably not as its author intended.
    #[display("warning")]
    Warning,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Position {
    /// A line of the file, counted from one; 0 in a source that has no lines.
    Line(u32),
    /// Index into the files of a directory, and a line.
    Part(u16, u32),
    /// Index into the origins of a [`Layer`](super::Layer).
    Origin(u32),
}

impl Position {
    /// Returns the line; 0 where there is none.
    pub fn line(self) -> u64 {
        match self {
            Self::Line(line) | Self::Part(_, line) => line.into(),
            Self::Origin(_) => 0,
        }
    }

    /// Returns a line as that of a file of a directory.
    pub(super) fn of_part(self, part: u16) -> Self {
        match self {
            Self::Line(line) => Self::Part(part, line),
            other => other,
        }
    }
}

/// Names of the sources of a document.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    /// The file or directory, as named when it was loaded.
    pub(super) file: PathBuf,
    /// The files of a directory.
    pub(super) parts: Vec<PathBuf>,
    /// The origins of a layer.
    pub(super) origins: Vec<String>,
}

impl Sources {
    pub(super) fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), ..Self::default() }
    }

    /// Returns the file of a position, or the name of its origin.
    pub(super) fn file_of(&self, position: Position) -> &Path {
        let found = match position {
            Position::Line(_) => None,
            Position::Part(part, _) => self.parts.get(usize::from(part)).map(PathBuf::as_path),
            Position::Origin(index) => self.origins.get(index as usize).map(Path::new),
        };
        found.unwrap_or(&self.file)
    }

    /// Returns the place of a position, for findings.
    pub(super) fn place_of(&self, position: Position) -> Place {
        Place { file: self.file_of(position).to_owned(), line: position.line() }
    }
}

/// Place of a text: a line of a file, or a source without lines.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq, Hash)]
#[display("{}{}", file.display(), if *line > 0 { format!(":{line}") } else { String::new() })]
pub struct Place {
    /// The file, as named when it was loaded, or the name of another source, such as a variable of
    /// the environment.
    pub file: PathBuf,
    /// The line, counted from one; 0 where it is no file.
    pub line: u64,
}

/// One thing that is wrong at one place.
#[derive(Clone, Debug, Display, PartialEq, Eq, Hash)]
#[display("{place}: {severity}: {}", self.message())]
pub struct Finding {
    pub place: Place,
    /// Its severity, which decides whether the file can be used nevertheless.
    pub severity: Severity,
    pub what: String,
    /// Text to write instead; empty when there is nothing to say.
    pub how: String,
    /// Namespace of the Kubernetes object; empty for anything else.
    pub namespace: Arc<str>,
}

impl Finding {
    pub fn warning(place: &Place, what: String, how: &str) -> Self {
        Self {
            place: place.clone(),
            severity: Severity::Warning,
            what,
            how: how.to_owned(),
            namespace: Arc::default(),
        }
    }

    pub fn error(place: &Place, what: String, how: &str) -> Self {
        Self { severity: Severity::Error, ..Self::warning(place, what, how) }
    }

    pub fn of(self, namespace: &str) -> Self {
        let namespace = namespace.into();
        Self { namespace, ..self }
    }

    /// Returns what is wrong, and the text to write instead.
    pub fn message(&self) -> String {
        let how = (!self.how.is_empty()).then(|| format!("; write {}", self.how));
        format!("{}{}", self.what, how.unwrap_or_default())
    }
}

/// All findings of one load, sorted by file and line; one per line when displayed.
#[derive(Clone, Debug, Default, Display, PartialEq, Eq)]
#[display("{}", join(_0, "\n"))]
pub struct Findings(pub Vec<Finding>);

impl Findings {
    /// Returns whether any finding keeps the file from being used.
    pub fn has_errors(&self) -> bool {
        self.with(Severity::Error).next().is_some()
    }

    pub fn with(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.0.iter().filter(move |finding| finding.severity == severity)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(ToString::to_string).collect()
    }

    /// Makes the findings of a file that cannot be parsed.
    pub(crate) fn one(file: &Path, position: Position, what: &str, how: &str) -> Self {
        let report = Report::new(file);
        report.error(position, what, how);
        report.into_findings()
    }
}

impl std::error::Error for Findings {}

/// Collects findings while a file is read, so that reading goes on after the first one.
#[derive(Debug, Default)]
pub struct Report {
    sources: Sources,
    found: RefCell<Vec<Finding>>,
    /// Severity of the errors that are noted from now on.
    severity: Cell<Severity>,
    namespace: RefCell<Arc<str>>,
    errors: Cell<usize>,
    /// Presence of an error that keeps the whole file from being used.
    is_refused: Cell<bool>,
    left_out: Cell<usize>,
    paths: RefCell<Vec<(PathBuf, Place)>>,
    absent: RefCell<Vec<(PathBuf, Place)>>,
}

impl Report {
    /// Makes an empty report about `file`.
    pub fn new(file: &Path) -> Self {
        Self::with_sources(Sources::new(file))
    }

    pub(super) fn with_sources(sources: Sources) -> Self {
        Self { sources, ..Self::default() }
    }

    /// Notes the line that names another file, for findings about that file's contents.
    pub fn names(&self, path: PathBuf, position: Position) {
        let place = self.sources.place_of(position);
        self.paths.borrow_mut().push((path, place));
    }

    /// Returns the files that were named so far, each with its place.
    pub fn named(&self) -> Vec<(PathBuf, Place)> {
        self.paths.borrow().clone()
    }

    /// Returns the named files of certificates, keys and tokens that do not exist, each with its
    /// place.
    pub fn absent(&self) -> Vec<(PathBuf, Place)> {
        self.absent.borrow().clone()
    }

    /// Notes a file of certificates, a key or a token that does not exist.
    pub fn note_absent(&self, path: &Path, position: Position, what: String, how: String) {
        let place = self.sources.place_of(position);
        self.absent.borrow_mut().push((path.to_owned(), place));
        self.push(Severity::Absent, position, what, how);
    }

    /// Sets the severity of the errors that follow: [`Severity::Error`], which it is at first, or
    /// [`Severity::PassedOver`] while an object is read.
    pub fn grade_errors(&self, severity: Severity) {
        self.severity.set(severity);
    }

    pub fn set_namespace(&self, namespace: Arc<str>) {
        self.namespace.replace(namespace);
    }

    /// Notes an error: the file, or an object of it, is not used.
    pub fn error(&self, position: Position, what: impl Into<String>, how: impl Into<String>) {
        let severity = self.severity.get();
        self.errors.set(self.errors.get() + 1);
        let is_refused = self.is_refused.get() || severity == Severity::Error;
        self.is_refused.set(is_refused);
        self.push(severity, position, what.into(), how.into());
    }

    /// Notes a warning: something that the author probably did not intend.
    pub fn warning(&self, position: Position, what: impl Into<String>, how: impl Into<String>) {
        self.push(Severity::Warning, position, what.into(), how.into());
    }

    /// Returns the number of errors so far. A reader compares two counts to see whether a part has
    /// errors.
    pub fn errors(&self) -> usize {
        self.errors.get()
    }

    /// Returns the findings, sorted by line: those without one first, then those of each file.
    pub fn into_findings(self) -> Findings {
        fn key(finding: &Finding) -> (Option<&Path>, u64) {
            let Place { file, line } = &finding.place;
            ((*line > 0).then_some(file.as_path()), *line)
        }
        let mut found = self.found.into_inner();
        found.sort_by(|one, other| key(one).cmp(&key(other)));
        if self.left_out.get() > 0 {
            let place = found.last().map(|finding| finding.place.clone());
            let what = format!("{} more findings are omitted", self.left_out.get());
            let severity = match self.errors.get() {
                0 => Severity::Warning,
                _ if self.is_refused.get() => Severity::Error,
                _ => Severity::PassedOver,
            };
            found.push(Finding {
                place: place.unwrap_or_default(),
                severity,
                what,
                how: String::new(),
                namespace: Arc::default(),
            });
        }
        Findings(found)
    }

    fn push(&self, severity: Severity, position: Position, what: String, how: String) {
        let mut found = self.found.borrow_mut();
        if found.len() >= FINDINGS_MAX {
            self.left_out.set(self.left_out.get() + 1);
            return;
        }
        // Keys and values are quoted in findings, and findings go to terminals and logs, of which a
        // file must not forge a line.
        let (what, how) = (escape_control(&what), escape_control(&how));
        found.push(Finding {
            place: self.sources.place_of(position),
            severity,
            what,
            how,
            namespace: Arc::clone(&self.namespace.borrow()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_come_sorted_by_line_one_per_line() {
        let report = Report::new(Path::new("a.yaml"));
        report.warning(Position::Line(7), "late", "");
        report.error(Position::Line(3), "early", "`x: 1`");
        let findings = report.into_findings();
        assert!(findings.has_errors());
        assert_eq!(
            findings.to_string(),
            "a.yaml:3: error: early; write `x: 1`\na.yaml:7: warning: late"
        );
    }

    #[test]
    fn errors_of_objects_let_the_file_be_used_until_one_is_of_the_file_itself() {
        for of_the_file in [0, 1] {
            let report = Report::new(Path::new("a"));
            report.grade_errors(Severity::PassedOver);
            (0..FINDINGS_MAX).for_each(|_| report.error(Position::Line(1), "x", ""));
            report.error(Position::Line(1), "left out", "");
            report.grade_errors(Severity::Error);
            (0..of_the_file).for_each(|_| report.error(Position::Line(1), "left out too", ""));
            let findings = report.into_findings();
            assert_eq!(findings.has_errors(), of_the_file > 0);
            let more = format!("error: {} more findings are omitted", 1 + of_the_file);
            assert!(findings.to_string().ends_with(&more));
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let findings = Findings::one(Path::new("a"), Position::Line(1), "key `\u{1b}[31m\n`", "");
        assert_eq!(findings.to_string(), "a:1: error: key `\\u{1b}[31m\\n`");
    }

    #[test]
    fn a_flood_of_findings_is_cut_and_counted() {
        let report = Report::new(Path::new("a"));
        (0..FINDINGS_MAX + 5).for_each(|_| report.error(Position::Line(1), "x", ""));
        let findings = report.into_findings();
        assert_eq!(findings.0.len(), FINDINGS_MAX + 1);
        assert!(findings.to_string().ends_with("error: 5 more findings are omitted"));
    }
}
