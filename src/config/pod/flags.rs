//! Variables that are booleans or words.

use std::path::Path;

use super::Builder;
use super::environment::Said;
use crate::yaml::{Position, Report};

/// Characters of a value that findings quote.
const SHOWN_MAX: usize = 80;

/// Parses a boolean, in the forms of Istio's proxies and in other common ones.
pub fn truth(text: &str) -> Option<bool> {
    let is_one_of = |words: &[&str]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is_one_of(&["true", "t", "1", "yes", "on"]) {
        Some(true)
    } else if is_one_of(&["false", "f", "0", "no", "off"]) {
        Some(false)
    } else {
        None
    }
}

/// Shortens a value for a finding.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(SHOWN_MAX).collect()
}

impl Builder<'_> {
    /// Returns a variable that is a boolean, and its name. Other values are ignored with a warning.
    pub(super) fn flag(&mut self, name: &str) -> Option<(bool, String)> {
        let said = self.environment.first(&[name])?;
        let read = truth(&said.value);
        if read.is_none() {
            let what = format!("is `{}`, and is ignored", shown(&said.value));
            self.report(&said, |report| {
                report.warning(Position::Line(0), what, "`true` or `false`")
            });
        }
        Some((read?, said.by))
    }

    /// Returns `LOG_FORMAT` if it is JSON. Text is the default.
    pub(super) fn log_format(&mut self) -> Option<Said> {
        let said = self.environment.first(&["LOG_FORMAT"])?;
        let is = |word| said.value.eq_ignore_ascii_case(word);
        if !is("json") && !is("text") && !is("plain") {
            let what = format!("is `{}`, and is ignored", shown(&said.value));
            self.report(&said, |report| {
                report.warning(Position::Line(0), what, "`json` or `text`")
            });
        }
        is("json").then_some(said)
    }

    /// Notes a finding about a value, once.
    pub(super) fn report(&mut self, said: &Said, note: impl FnOnce(&Report)) {
        let report = Report::new(Path::new(&said.by));
        note(&report);
        for finding in report.into_findings().0 {
            if !self.findings.0.contains(&finding) {
                self.findings.0.push(finding);
            }
        }
    }
}
