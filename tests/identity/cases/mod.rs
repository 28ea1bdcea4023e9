//! Table of cases: the certificate of a peer, and the one reason for its rejection.

mod chains;
mod encoding;
mod keys;
mod names;
mod usage;

use crate::pki::{Pki, Shown};

/// Value of [`Case::expected`] for a peer that is admitted.
pub const ADMITTED: &str = "admitted";

/// Peer, by its certificate.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    /// [`ADMITTED`], or the label of the refusal.
    pub expected: &'static str,
    pub shown: Shown,
}

fn case(name: &'static str, expected: &'static str, shown: Shown) -> Case {
    Case { name, expected, shown }
}

/// Returns all cases.
pub fn cases(pki: &Pki) -> Vec<Case> {
    let parts = [
        names::cases(pki),
        usage::cases(pki),
        chains::cases(pki),
        encoding::cases(pki),
        keys::cases(pki),
    ];
    let cases: Vec<_> = parts.into_iter().flatten().collect();
    let mut names: Vec<_> = cases.iter().map(|case| case.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), cases.len(), "two cases of one name");
    cases
}
