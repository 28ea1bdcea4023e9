//! Markdown files of the checkout, with their headings, links and paragraphs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with Markdown, besides the top of the checkout.
const FOLDERS: [&str; 4] = ["docs", "deploy", "benches", "tests"];

/// A Markdown file, or a snippet that represents one.
#[derive(Debug)]
pub(super) struct Document {
    /// Path relative to the top of the checkout, with `/`.
    pub(super) path: String,
    pub(super) text: String,
}

impl Document {
    pub(super) fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// Lines outside of fenced blocks, with their numbers.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let mut is_fenced = false;
        self.text.lines().zip(1..).filter_map(move |(line, number)| {
            let is_fence = line.trim_start().starts_with("```");
            is_fenced ^= is_fence;
            (!is_fenced && !is_fence).then_some((number, line))
        })
    }

    /// Texts of the headings.
    pub(super) fn headings(&self) -> impl Iterator<Item = &str> {
        let headings = self.lines().filter(|(_, line)| line.starts_with('#'));
        headings.map(|(_, line)| line.trim_start_matches('#').trim())
    }

    /// Anchors of the headings as GitHub makes them, and explicit ones.
    pub(super) fn anchors(&self) -> BTreeSet<String> {
        let mut anchors = BTreeSet::new();
        for heading in self.headings() {
            let slug = slug(heading);
            let names = (0..).map(|count| match count {
                0 => slug.clone(),
                _ => format!("{slug}-{count}"),
            });
            let free = names.into_iter().find(|name| !anchors.contains(name));
            anchors.extend(free);
        }
        let explicit = self.text.split("<a id=\"").skip(1);
        anchors.extend(explicit.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        anchors
    }

    /// Targets of links outside of code, with their lines.
    pub(super) fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (number, line) in self.lines() {
            let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
            let targets = plain.split("](").skip(1);
            let targets = targets.filter_map(|rest| Some(rest.split_once(')')?.0));
            links.extend(targets.map(|target| (number, target.to_owned())));
        }
        links
    }

    /// Paragraphs with the number of the first line. A list item or a table row is one of its own.
    pub(super) fn paragraphs(&self) -> Vec<(usize, String)> {
        let mut paragraphs: Vec<(usize, String)> = Vec::new();
        let mut is_open = false;
        for (number, line) in self.lines() {
            let text = line.trim();
            let is_item = text.starts_with("- ") || text.starts_with('|') || is_numbered(text);
            if text.is_empty() || text.starts_with('#') {
                is_open = false;
            } else if is_open && !is_item {
                let last = paragraphs.last_mut().expect("an open paragraph");
                last.1.push(' ');
                last.1.push_str(text);
            } else {
                paragraphs.push((number, text.to_owned()));
                is_open = true;
            }
        }
        paragraphs
    }
}

fn is_numbered(text: &str) -> bool {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    rest.len() < text.len() && rest.starts_with(". ")
}

/// The anchor of a heading: lower case, without punctuation, with `-` for each space.
fn slug(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

pub(super) fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Markdown file of the checkout, in a stable order.
pub(super) fn read() -> Vec<Document> {
    let mut found: Vec<PathBuf> = Vec::new();
    let mut left: Vec<PathBuf> = FOLDERS.iter().map(|folder| top().join(folder)).collect();
    found.extend(files(top()).into_iter().filter(|path| path.is_file()));
    while let Some(folder) = left.pop() {
        let (folders, files): (Vec<_>, Vec<_>) =
            files(&folder).into_iter().partition(|path| path.is_dir());
        left.extend(folders);
        found.extend(files);
    }
    found.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    found.sort();
    let document = |path: &PathBuf| {
        let relative = path.strip_prefix(top()).unwrap().to_str().unwrap();
        Document::new(relative, &fs::read_to_string(path).unwrap())
    };
    found.iter().map(document).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn anchors_links_and_paragraphs_are_found() {
    let text = "# A `b` c/d\n\nOne [x](y.md#z) `[no](link)`\ntwo\n- item\n## A b cd\n\n\
                <a id=\"own\"></a>\n```\n# no [n](n)\n```\n";
    let document = Document::new("a.md", text);
    let anchors: Vec<_> = document.anchors().into_iter().collect();
    assert_eq!(anchors, ["a-b-cd", "a-b-cd-1", "own"]);
    assert_eq!(document.links(), [(3, "y.md#z".to_owned())]);
    let lines: Vec<_> = document.paragraphs().iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, [3, 5, 8]);
}
