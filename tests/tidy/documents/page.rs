//! Sections of documents, and of rules of Prometheus, that are generated from the code.

use std::fs;

use super::markdown::top;

/// The variable that makes the tests write the pages.
const UPDATE: &str = "STRAIT_UPDATE";
const COMMAND: &str = "STRAIT_UPDATE=1 cargo test --locked --test tidy page";

/// Compares the section `name` of a page with `text`, or writes it where [`UPDATE`] is set. The
/// marks of a section are comments of Markdown, or of PromQL in a file of rules.
pub(super) fn assert_generated(page: &str, name: &str, text: &str) {
    let path = top().join(page);
    let old = fs::read_to_string(&path).unwrap();
    let (open, close) =
        if page.ends_with(".md") { ("<!-- ", " -->") } else { ("            # ", "") };
    let begin = format!("{open}generated: {name}{close}\n");
    let end = format!("{open}/generated{close}");
    let (before, rest) = old.split_once(&begin).unwrap();
    let (section, after) = rest.split_once(&end).unwrap();
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, format!("{before}{begin}{text}{end}{after}")).unwrap();
        return;
    }
    let first = section.lines().zip(text.lines()).find(|(old, new)| old != new);
    assert!(section == text, "{page} is old at {first:?}; type: {COMMAND}");
}

/// A Markdown table.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(head.iter().map(|&cell| cell.to_owned()).collect());
    text.push_str(&format!("|{}\n", "---|".repeat(head.len())));
    for row in rows {
        // A cell ends at a bar.
        let cells = row.iter().map(|cell| cell.replace('|', "\\|"));
        text.push_str(&line(cells.collect()));
    }
    text
}
