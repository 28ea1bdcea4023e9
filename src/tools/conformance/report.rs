//! Results: a line for each group and each finding, or one JSON object.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use super::case::{Case, Group, Verdict};
use crate::labels::printed;

/// Results of a run. docs/conformance.md lists the fields; they are stable.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    to: String,
    passed: usize,
    failed: usize,
    skipped: usize,
    groups: Vec<GroupResult>,
}

#[derive(Debug, Serialize)]
struct GroupResult {
    group: Group,
    passed: usize,
    /// Outcome and expected outcome of each case that failed, by its section and name.
    failed: BTreeMap<String, String>,
    /// Number of skipped cases, by the cause.
    skipped: BTreeMap<String, usize>,
}

impl Report {
    pub(super) fn new(to: &str) -> Self {
        Self { to: to.to_owned(), passed: 0, failed: 0, skipped: 0, groups: Vec::new() }
    }

    pub(super) fn add(&mut self, case: &Case, verdict: Verdict) {
        if self.groups.last().is_none_or(|last| last.group != case.group) {
            let (failed, skipped) = (BTreeMap::new(), BTreeMap::new());
            self.groups.push(GroupResult { group: case.group, passed: 0, failed, skipped });
        }
        let Some(group) = self.groups.last_mut() else { return };
        let name = format!("{} {}", case.section, case.name);
        match verdict {
            Verdict::Passed => {
                group.passed += 1;
                self.passed += 1;
            }
            Verdict::Failed(why) => {
                group.failed.insert(name, why);
                self.failed += 1;
            }
            Verdict::Skipped(why) => {
                *group.skipped.entry(why).or_default() += 1;
                self.skipped += 1;
            }
        }
    }

    pub(super) fn print(&self, is_json: bool) -> io::Result<()> {
        printed(self.write(&mut io::stdout().lock(), is_json))
    }

    fn write(&self, out: &mut impl Write, is_json: bool) -> io::Result<()> {
        if is_json {
            serde_json::to_writer_pretty(&mut *out, self)?;
            return writeln!(out);
        }
        writeln!(out, "{}: {} of {} cases conform", self.to, self.passed, self.all())?;
        for group in &self.groups {
            let GroupResult { group, passed, failed, skipped } = group;
            let all = passed + failed.len() + skipped.values().sum::<usize>();
            writeln!(out, "  {:<8} {passed} of {all}", group.to_string())?;
            for (name, why) in failed {
                writeln!(out, "    FAILED   {name}: {why}")?;
            }
            for (why, count) in skipped {
                writeln!(out, "    SKIPPED  {count}: {why}")?;
            }
        }
        Ok(())
    }

    fn all(&self) -> usize {
        self.passed + self.failed + self.skipped
    }

    /// Returns 0 if a case conforms and none failed.
    pub(super) fn exit_code(&self) -> ExitCode {
        if self.failed == 0 && self.passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
