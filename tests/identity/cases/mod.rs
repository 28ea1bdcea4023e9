//! The table: what a peer shows, and the one reason by which it is refused.

mod chains;
mod encoding;
mod keys;
mod names;
mod usage;

use crate::pki::{Pki, Shown};

/// What stands in a reason's place for a peer that gets in.
pub const ADMITTED: &str = "admitted";

/// A peer, by what it shows.
#[derive(Debug)]
pub struct Case {
    pub name: &'static str,
    /// [`ADMITTED`], or the label of the refusal.
    pub expected: &'static str,
    pub shown: Shown,
}

fn case(name: &'static str, expected: &'static str, shown: Shown) -> Case {
    Case {
        name,
        expected,
        shown,
    }
}

/// All cases.
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
