//! Source files of the tree, and the `mod` lines that connect them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use syn::{Attribute, Item, Meta};

/// Source file, or a snippet in its place.
pub(crate) struct Source {
    /// Path relative to the top of the checkout, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl Source {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    pub(crate) fn parse(&self) -> syn::File {
        syn::parse_file(&self.text)
            .unwrap_or_else(|error| panic!("{} does not parse: {error}", self.path))
    }

    /// Returns the module of a path: `src/datapath/copy.rs` is `["datapath", "copy"]`, and a root
    /// is `[]`.
    pub(crate) fn module(&self) -> Vec<String> {
        let path = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let path = path.strip_suffix(".rs").unwrap_or(path);
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        if parts.len() == 1 && ROOTS.contains(&parts[0].as_str()) {
            parts.clear();
        }
        if parts.last().is_some_and(|last| last == "mod") {
            parts.pop();
        }
        parts
    }
}

/// Folders of generated code, which is not maintained by hand; `tests/proto` checks that it is
/// generated.
const GENERATED: [&str; 2] = ["src/grpc/generated", "tests/it/support/generated"];

/// Returns every `.rs` file below the given folders, in a stable order, except for generated ones.
pub(crate) fn read(folders: &[&str]) -> Vec<Source> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = Vec::new();
    let mut left: Vec<_> = folders.iter().map(|folder| top.join(folder)).collect();
    while let Some(folder) = left.pop() {
        // A folder such as benches may be missing.
        let Ok(entries) = fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries {
            let path = entry.unwrap().path();
            if GENERATED.iter().any(|folder| path == top.join(folder)) {
                continue;
            }
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let relative = path.strip_prefix(top).unwrap().to_str().unwrap();
                sources.push(Source::new(relative, &fs::read_to_string(&path).unwrap()));
            }
        }
    }
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    assert!(!sources.is_empty(), "no source found below {folders:?}");
    sources
}

/// Returns the files under `src/` that ship, without those that only tests reach.
pub(crate) fn production() -> Vec<Source> {
    let sources = read(&["src"]);
    let reached = reach(&sources);
    let mut sources = sources;
    sources.retain(|source| reached.get(&source.path) != Some(&Reach::Tests));
    sources
}

/// Kind of code that reaches a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Production,
    Tests,
}

/// Follows `mod` lines from the roots. A file without an entry in the result is never compiled.
pub(crate) fn reach(sources: &[Source]) -> BTreeMap<String, Reach> {
    let by_path: BTreeMap<&str, &Source> =
        sources.iter().map(|source| (source.path.as_str(), source)).collect();
    let mut reached = BTreeMap::new();
    let mut left: Vec<(String, Reach)> =
        ROOTS.iter().map(|root| (format!("src/{root}.rs"), Reach::Production)).collect();
    while let Some((path, reach)) = left.pop() {
        let Some(source) = by_path.get(path.as_str()) else {
            continue;
        };
        // Production takes precedence if a file is declared twice.
        if reached.get(&path) == Some(&Reach::Production) || reached.get(&path) == Some(&reach) {
            continue;
        }
        reached.insert(path, reach);
        declared(&source.parse().items, &source.module(), reach, &mut left);
    }
    reached
}

fn declared(items: &[Item], module: &[String], reach: Reach, found: &mut Vec<(String, Reach)>) {
    for item in items {
        let Item::Mod(item) = item else { continue };
        let reach = if is_test_code(&item.attrs) { Reach::Tests } else { reach };
        let mut path = module.to_vec();
        path.push(item.ident.to_string());
        if let Some((_, items)) = &item.content {
            declared(items, &path, reach, found);
        } else {
            let path = path.join("/");
            found.push((format!("src/{path}.rs"), reach));
            found.push((format!("src/{path}/mod.rs"), reach));
        }
    }
}

/// Returns true if an item exists only in tests: `#[test]`, `#[cfg(test)]` or `#[cfg(all(test,
/// …))]`.
pub(crate) fn is_test_code(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.segments.last().is_some_and(|last| last.ident == "test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition: String =
                list.tokens.to_string().chars().filter(|c| !c.is_whitespace()).collect();
            condition == "test" || condition.starts_with("all(test,")
        }
        Meta::List(list) => list.path.segments.last().is_some_and(|last| last.ident == "test"),
        Meta::NameValue(_) => false,
    })
}

const ROOTS: &[&str] = &["lib", "main"];

#[test]
fn test_code_is_distinguished_from_the_rest() {
    let file = syn::parse_file(
        "#[cfg(test)] mod a {} #[cfg(all(test, unix))] mod b {} #[tokio::test] fn c() {}
         #[cfg(not(test))] mod d {} #[cfg(unix)] mod e {} #[derive(Debug)] struct F;",
    )
    .unwrap();
    let verdicts: Vec<bool> = file
        .items
        .iter()
        .map(|item| match item {
            Item::Mod(item) => is_test_code(&item.attrs),
            Item::Fn(item) => is_test_code(&item.attrs),
            Item::Struct(item) => is_test_code(&item.attrs),
            _ => panic!("not in the snippet"),
        })
        .collect();
    assert_eq!(verdicts, [true, true, true, false, false, false]);
}

#[test]
fn a_file_that_only_tests_reach_is_known_as_such() {
    let sources = [
        Source::new("src/lib.rs", "mod a; #[cfg(test)] mod support; mod b { mod c; }"),
        Source::new("src/a.rs", ""),
        Source::new("src/support/mod.rs", "mod deep;"),
        Source::new("src/support/deep.rs", ""),
        Source::new("src/b/c.rs", ""),
    ];
    let reached = reach(&sources);
    assert_eq!(reached["src/a.rs"], Reach::Production);
    assert_eq!(reached["src/b/c.rs"], Reach::Production);
    assert_eq!(reached["src/support/mod.rs"], Reach::Tests);
    assert_eq!(reached["src/support/deep.rs"], Reach::Tests);
}
