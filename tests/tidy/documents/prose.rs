//! The size of documents and of their paragraphs.

use super::markdown::{self, Document};

const README_WORDS_MAX: usize = 700;
const CHANGELOG_WORDS_MAX: usize = 600;
const ARCHITECTURE_LINES_MAX: usize = 150;
const PARAGRAPH_WORDS_MAX: usize = 79;
/// The rows of tables in these pages may be long: each is one case.
const ROW: char = '|';

fn check_paragraphs(document: &Document) -> Vec<String> {
    let mut findings = Vec::new();
    for (line, text) in document.paragraphs() {
        let words = text.split_whitespace().count();
        if words > PARAGRAPH_WORDS_MAX && !text.starts_with(ROW) {
            findings.push(format!("{}:{line}: a paragraph of {words} words", document.path));
        }
    }
    findings
}

/// True for a page that people write and read as a whole: no list of changes, and no results.
fn is_prose(document: &Document) -> bool {
    let path = &*document.path;
    path != "CHANGELOG.md" && !path.starts_with("benches/") && !path.starts_with("tests/")
}

#[test]
fn paragraphs_have_fewer_than_80_words() {
    let documents = markdown::read();
    let prose = documents.iter().filter(|document| is_prose(document));
    let findings: Vec<_> = prose.flat_map(check_paragraphs).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));

    let long = Document::new("a.md", &"word ".repeat(PARAGRAPH_WORDS_MAX + 1));
    assert_eq!(check_paragraphs(&long).len(), 1);
}

#[test]
fn the_first_pages_are_short() {
    let documents = markdown::read();
    let page = |path: &str| documents.iter().find(|one| one.path == path).unwrap();
    let words = page("README.md").text.split_whitespace().count();
    assert!(words <= README_WORDS_MAX, "README.md has {words} words");
    let words = page("CHANGELOG.md").text.split_whitespace().count();
    assert!(words <= CHANGELOG_WORDS_MAX, "CHANGELOG.md has {words} words");
    let lines = page("ARCHITECTURE.md").text.lines().count();
    assert!(lines <= ARCHITECTURE_LINES_MAX, "ARCHITECTURE.md has {lines} lines");
}
