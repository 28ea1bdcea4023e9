//! SECURITY.md and docs/faults.md: each test that they name exists. Names of tests say what
//! happens.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::tree;

/// First words of names that lead to a list of findings, if a number follows.
const LISTS: [&str; 4] = ["acceptance", "issue", "istiod", "review"];
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

fn check(path: &str, text: &str, functions: &BTreeSet<String>) -> Vec<String> {
    named(text)
        .filter(|&name| !functions.contains(name))
        .map(|name| format!("{path}: there is no test `{name}`"))
        .collect()
}

/// Returns true for a name such as `review_7_a_second_stop_is_now`.
fn is_numbered(name: &str) -> bool {
    let mut words = name.split('_');
    let is_list = words.next().is_some_and(|word| LISTS.contains(&word));
    is_list && words.next().is_some_and(|word| word.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns the names of all functions in the sources, and of the cases of `tests/corpus/findings`,
/// with underscores.
fn functions() -> BTreeSet<String> {
    let sources = tree::read(&["src", "tests"]);
    let lines = sources.iter().flat_map(|source| source.text.lines());
    let functions = lines.filter_map(|line| line.split_once("fn ")?.1.split_once(['(', '<']));
    functions.map(|(name, _)| name.to_owned()).chain(cases()).collect()
}

fn cases() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/findings");
    let kinds = fs::read_dir(folder).unwrap().map(|kind| kind.unwrap().path());
    let files = kinds.flat_map(|kind| fs::read_dir(kind).unwrap().map(|file| file.unwrap().path()));
    let text: String = files.map(|file| fs::read_to_string(file).unwrap()).collect();
    let names = text.lines().filter_map(|line| line.strip_prefix("# case: "));
    names.map(|name| name.replace(' ', "_")).collect()
}

#[test]
fn each_test_that_the_threat_model_and_the_fault_matrix_name_exists() {
    let functions = functions();
    for path in ["SECURITY.md", "docs/faults.md"] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
        assert!(named(&text).count() >= 40, "the table of {path} is there");
        let findings = check(path, &text, &functions);
        assert!(findings.is_empty(), "{findings:#?}");
    }

    let bad = "| spoofing | `a_test_of_nobody_at_all`, `trust.domains`, `make test` |";
    assert_eq!(check("SECURITY.md", bad, &functions).len(), 1);
}

/// Returns the rows of the fault matrix without a test.
fn unproven(text: &str) -> Vec<&str> {
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| fault |"));
    rows.filter(|row| named(row).next().is_none()).collect()
}

#[test]
fn each_row_of_the_fault_matrix_names_a_test_and_each_test_of_faults_has_a_row() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md");
    let text = fs::read_to_string(path).unwrap();
    assert_eq!(unproven(&text), [""; 0]);
    let listed: BTreeSet<_> = named(&text).collect();
    let sources = tree::read(&["tests/it/faults"]);
    let lines = sources.iter().flat_map(|source| source.text.split("#[test]\nfn ").skip(1));
    let tests: Vec<_> = lines.filter_map(|rest| Some(rest.split_once('(')?.0)).collect();
    assert!(tests.len() >= 15, "{tests:?}");
    let absent: Vec<_> = tests.iter().filter(|&test| !listed.contains(test)).collect();
    assert!(absent.is_empty(), "docs/faults.md has no row for {absent:?}");

    assert_eq!(unproven("| fault | promise |\n|---|---|\n| fire | none |"), ["| fire | none |"]);
}

#[test]
fn names_of_tests_have_no_numbers_of_findings() {
    let functions = functions();
    let findings: Vec<_> = functions.iter().filter(|name| is_numbered(name)).collect();
    assert!(findings.is_empty(), "{findings:#?}");

    assert!(is_numbered("review_7_a_second_stop_is_now"));
    assert!(!is_numbered("section_8_5_connect"));
}
