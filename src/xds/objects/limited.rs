//! Limits of findings, shared by the namespaces of the objects that they are about.

use std::sync::Arc;

use super::shares::Shares;
use crate::yaml::{Finding, Severity};

/// Limit of the warnings of one kind. Nobody reads more than a screen of them.
pub(in crate::xds) const WARNINGS_MAX: usize = 200;

/// Limits warnings and findings of skipped objects. The objects of one tenant can have any number
/// of them.
pub(crate) fn limit_findings(findings: impl IntoIterator<Item = Finding>) -> Vec<Finding> {
    let mut limited = LimitedFindings::default();
    limited.extend(findings);
    limited.into_vec()
}

/// Findings as they are collected, of which [`WARNINGS_MAX`] warnings and as many about skipped
/// objects are kept, shared by their namespaces. The others are counted.
#[derive(Default)]
pub(super) struct LimitedFindings {
    warnings: Limited,
    passed_over: Limited,
    /// Other findings.
    others: Vec<(usize, Finding)>,
    count: usize,
}

impl LimitedFindings {
    pub(super) fn push(&mut self, finding: Finding) {
        let one = (self.count, finding);
        self.count += 1;
        match one.1.severity {
            Severity::Warning => self.warnings.add(one),
            Severity::PassedOver => self.passed_over.add(one),
            Severity::Error | Severity::Absent => self.others.push(one),
        }
    }

    /// Returns the findings in their order, and one about those that are omitted of each kind.
    pub(super) fn into_vec(self) -> Vec<Finding> {
        let (mut kept, mut last) = (self.others, Vec::new());
        for of in [self.warnings, self.passed_over] {
            kept.extend(of.kept);
            let what =
                format!("{} more findings are omitted; this is the first of them", of.omitted);
            last.extend(of.first_omitted.map(|(_, first)| Finding {
                what,
                how: String::new(),
                ..first
            }));
        }
        kept.sort_unstable_by_key(|(position, _)| *position);
        let kept = kept.into_iter().map(|(_, finding)| finding);
        kept.chain(last).collect()
    }
}

impl Extend<Finding> for LimitedFindings {
    fn extend<I: IntoIterator<Item = Finding>>(&mut self, findings: I) {
        findings.into_iter().for_each(|one| self.push(one));
    }
}

/// Findings of one severity, with the position of each among all.
struct Limited {
    shares: Shares,
    kept: Vec<(usize, Finding)>,
    omitted: usize,
    first_omitted: Option<(usize, Finding)>,
}

impl Default for Limited {
    fn default() -> Self {
        let shares = Shares::new(WARNINGS_MAX);
        Self { shares, kept: Vec::new(), omitted: 0, first_omitted: None }
    }
}

impl Limited {
    /// Adds a finding. If no place is free, the last one of the namespace with the most is omitted.
    fn add(&mut self, finding: (usize, Finding)) {
        let most = self.shares.take(Arc::clone(&finding.1.namespace));
        self.kept.push(finding);
        let mut kept = self.kept.iter();
        let Some(last) = most.and_then(|most| kept.rposition(|(_, one)| one.namespace == most))
        else {
            return;
        };
        self.omitted += 1;
        let last = self.kept.remove(last);
        let first = self.first_omitted.take().filter(|(position, _)| *position < last.0);
        self.first_omitted = first.or(Some(last));
    }
}
