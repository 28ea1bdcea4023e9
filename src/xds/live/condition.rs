//! Condition of an object: what `strait check` would print about it.

use serde_json::{Value as Json, json};

use super::LiveObject;
use crate::yaml::{Finding, Severity};

/// Limit of the findings that one condition names.
pub(super) const FINDINGS_MAX: usize = 5;

/// Type of the condition.
pub(super) const TYPE: &str = "Accepted";

/// Limit of the message of a condition in characters: that of Kubernetes.
pub(super) const MESSAGE_MAX: usize = 32_768;

/// Condition `Accepted` of an object, as in the Gateway API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its status.
    pub holds: bool,
    /// `Accepted`, `Invalid` (it cannot be read, and only restricts), `Refused` (a part of it must
    /// not have an effect), `NoEffect` (a part of it has none) or `PortUnavailable` (a listener of
    /// it is not open).
    pub reason: &'static str,
    /// Findings as `strait check` prints them.
    pub message: String,
}

impl Condition {
    pub(super) fn status(&self) -> &'static str {
        if self.holds { "True" } else { "False" }
    }
}

impl LiveObject {
    /// Returns whether the object has a condition at the API server.
    pub(super) fn has(&self, wanted: &Condition) -> bool {
        self.condition.lock().as_ref().is_some_and(|one| {
            one["status"] == wanted.status()
                && one["reason"] == wanted.reason
                && one["message"] == *wanted.message
                && one["observedGeneration"] == json!(self.generation)
        })
    }
}

/// Returns the parts of a condition at the API server that a [`Condition`] decides.
pub(super) fn content(condition: Option<&Json>) -> [Option<&Json>; 4] {
    ["status", "reason", "message", "observedGeneration"].map(|part| condition?.get(part))
}

/// Returns the condition of an object, given the findings when it was read, those of the join, and
/// those about its listeners that are not open.
pub(super) fn of(read: &[Finding], joined: &[&Finding], closed: &[&Finding]) -> Condition {
    let is_wrong = |one: &&Finding| one.severity != Severity::Warning;
    let wrong: Vec<_> = read.iter().filter(is_wrong).collect();
    let is_refused = joined.iter().any(is_wrong);
    let (holds, reason, found) = match (&*wrong, joined, closed) {
        ([], [], []) => (true, "Accepted", read.iter().collect()),
        ([], [], closed) => (false, "PortUnavailable", closed.to_vec()),
        ([], joined, closed) => {
            let reason = if is_refused { "Refused" } else { "NoEffect" };
            (false, reason, [joined, closed].concat())
        }
        _ => (false, "Invalid", wrong),
    };
    let lines = found.into_iter().take(FINDINGS_MAX).map(|one| one.message());
    let mut message = lines.collect::<Vec<_>>().join("\n");
    let end = message.char_indices().nth(MESSAGE_MAX).map_or(message.len(), |(end, _)| end);
    message.truncate(end);
    Condition { holds, reason, message }
}
