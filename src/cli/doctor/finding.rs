//! Findings of checks, and the report of all.

use serde::Serialize;

use crate::labels::{count, escape_control};

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Ok,
    Warning,
    Failure,
}

/// Finding of a check.
#[derive(Debug, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    #[serde(rename = "result")]
    pub(super) outcome: Outcome,
    pub(super) found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
    /// Origin of what was found, if several findings of the check may have the same one.
    #[serde(skip)]
    pub(super) origin: String,
}

/// All findings, in the order of the checks.
#[derive(Debug, Serialize)]
pub(in crate::cli) struct Report {
    pub(super) ok: bool,
    pub(super) checks: Vec<Finding>,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        let (found, origin) = (found.into(), String::new());
        Self { check, outcome: Outcome::Ok, found, remedy: None, origin }
    }

    pub(super) fn failure(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let remedy = Some(remedy.into());
        Self { outcome: Outcome::Failure, remedy, ..Self::ok(check, found) }
    }

    /// Sets the origin.
    pub(super) fn of(self, origin: impl ToString) -> Self {
        Self { origin: origin.to_string(), ..self }
    }

    pub(super) fn warning(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { outcome: Outcome::Warning, ..Self::failure(check, found, remedy) }
    }

    /// Returns a finding of a message in the form `what failed; remedy`.
    pub(super) fn of_message(check: &'static str, outcome: Outcome, message: &str) -> Self {
        let (found, remedy) = message.rsplit_once("; ").unwrap_or((message, ""));
        let remedy = Some(remedy).filter(|remedy| !remedy.is_empty());
        Self { outcome, remedy: remedy.map(str::to_owned), ..Self::ok(check, found) }
    }

    fn line(&self) -> String {
        let outcome = match self.outcome {
            Outcome::Ok => "ok",
            Outcome::Warning => "warning",
            Outcome::Failure => "failure",
        };
        let remedy = self.remedy.as_ref().map(|remedy| format!("; {remedy}"));
        let line = format!("{}: {}{}", self.check, self.found, remedy.unwrap_or_default());
        format!("{outcome:<8}{}\n", escape_control(&line))
    }
}

impl Report {
    pub(super) fn text(&self) -> String {
        let lines = self.checks.iter().map(Finding::line);
        let of = |wanted| self.checks.iter().filter(|one| one.outcome == wanted).count();
        let warnings = count(of(Outcome::Warning), "warning");
        let failures = count(of(Outcome::Failure), "failure");
        lines.collect::<String>() + &format!("{failures}, {warnings}\n")
    }
}
