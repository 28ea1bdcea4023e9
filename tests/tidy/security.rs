//! SECURITY.md: each test that it names exists, and each finding of the review has a test.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::tree;

/// Rows of the security review whose tests begin with `review_ROW_`.
const REVIEW_ROWS: std::ops::RangeInclusive<u32> = 1..=23;
/// Minimum number of words in the name of a test; shorter code spans are keys and commands.
const WORDS_MIN: usize = 4;

/// Returns the code spans of the text that are names of tests.
fn named(text: &str) -> impl Iterator<Item = &str> {
    let spans = text.split('`').skip(1).step_by(2);
    spans.filter(|span| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        span.chars().all(plain) && span.split('_').count() >= WORDS_MIN
    })
}

fn check(text: &str, functions: &BTreeSet<String>) -> Vec<String> {
    named(text)
        .filter(|&name| !functions.contains(name))
        .map(|name| format!("SECURITY.md: there is no test `{name}`"))
        .collect()
}

fn check_rows(functions: &BTreeSet<String>) -> Vec<String> {
    REVIEW_ROWS
        .map(|row| format!("review_{row}_"))
        .filter(|prefix| !functions.iter().any(|name| name.starts_with(prefix)))
        .map(|prefix| format!("no test begins with `{prefix}`"))
        .collect()
}

/// Returns the names of all functions in the sources.
fn functions() -> BTreeSet<String> {
    let sources = tree::read(&["src", "tests"]);
    let lines = sources.iter().flat_map(|source| source.text.lines());
    lines
        .filter_map(|line| line.split_once("fn ")?.1.split_once(['(', '<']))
        .map(|(name, _)| name.to_owned())
        .collect()
}

#[test]
fn each_test_that_the_threat_model_names_exists() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("SECURITY.md");
    let text = fs::read_to_string(path).unwrap();
    assert!(named(&text).count() >= 40, "the table of threats is there");
    let findings = check(&text, &functions());
    assert!(findings.is_empty(), "{findings:#?}");

    let bad = "| spoofing | `a_test_of_nobody_at_all`, `trust.domains`, `make test` |";
    assert_eq!(check(bad, &functions()).len(), 1);
}

#[test]
fn each_finding_of_the_security_review_has_a_test() {
    let mut functions = functions();
    let findings = check_rows(&functions);
    assert!(findings.is_empty(), "{findings:#?}");

    functions.retain(|name| !name.starts_with("review_7_"));
    assert_eq!(check_rows(&functions).len(), 1);
}
