//! Limits of functions, files and lines, and the structure of files.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::references::attributes;
use crate::tree::{self, Source, is_test_code};

const FUNCTION_LINES_MAX: usize = 70;
const FILE_LINES_MAX: usize = 600;
const LINE_CHARS_MAX: usize = 100;

const CODE: &[&str] = &["src", "tests", "benches"];

fn check_functions(source: &Source) -> Vec<String> {
    let mut functions = Functions { findings: Vec::new() };
    functions.visit_file(&source.parse());
    let path = &source.path;
    functions.findings.iter().map(|finding| format!("{path}:{finding}")).collect()
}

struct Functions {
    findings: Vec<String>,
}

impl Functions {
    /// Counts from the line with `fn` to the closing brace, both included.
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let first = signature.span().start().line;
        let lines = block.span().end().line + 1 - first;
        if lines > FUNCTION_LINES_MAX {
            let name = &signature.ident;
            self.findings.push(format!("{first}: `{name}` has {lines} lines"));
        }
    }
}

impl<'ast> Visit<'ast> for Functions {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test_code(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_code(&item.attrs) {
            self.measure(&item.sig, &item.block);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

fn check_file_length(source: &Source) -> Vec<String> {
    let lines = source.text.lines().count();
    let path = &source.path;
    if lines > FILE_LINES_MAX { vec![format!("{path}: {lines} lines")] } else { Vec::new() }
}

fn check_line_width(source: &Source) -> Vec<String> {
    let mut findings = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        let chars = line.chars().count();
        // A URL cannot be broken.
        if chars > LINE_CHARS_MAX && !line.contains("://") {
            findings.push(format!("{}:{}: {chars} columns", source.path, index + 1));
        }
    }
    findings
}

fn check_opening(source: &Source) -> Vec<String> {
    if source.text.starts_with("//!") {
        return Vec::new();
    }
    let path = &source.path;
    vec![format!("{path}: begins without a `//!` that says what the file is for")]
}

fn check_folder_modules(sources: &[Source]) -> Vec<String> {
    let paths: BTreeSet<&str> = sources.iter().map(|source| source.path.as_str()).collect();
    let mut findings = Vec::new();
    for path in &paths {
        let Some((folder, _)) = path.rsplit_once('/') else {
            continue;
        };
        if folder == "src" {
            continue;
        }
        if paths.contains(format!("{folder}.rs").as_str()) {
            findings.push(format!("{folder}.rs: move it to {folder}/mod.rs"));
        } else if !paths.contains(format!("{folder}/mod.rs").as_str()) {
            findings.push(format!("{folder}: has no mod.rs"));
        }
    }
    findings.dedup();
    findings
}

fn check_reachable(sources: &[Source]) -> Vec<String> {
    let reached = tree::reach(sources);
    let unreached = sources.iter().filter(|source| !reached.contains_key(&source.path));
    unreached
        .map(|source| {
            format!("{}: no `mod` line declares it, so it is never compiled", source.path)
        })
        .collect()
}

fn check_forbids_unsafe(source: &Source) -> Vec<String> {
    if source.text.lines().any(|line| line == "#![forbid(unsafe_code)]") {
        return Vec::new();
    }
    vec![format!("{}: has no line #![forbid(unsafe_code)]", source.path)]
}

fn assert_none(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn functions_have_at_most_70_lines() {
    let findings: Vec<String> = tree::production().iter().flat_map(check_functions).collect();
    assert_none(&findings);
}

#[test]
fn files_have_at_most_600_lines() {
    let findings: Vec<String> = tree::read(CODE).iter().flat_map(check_file_length).collect();
    assert_none(&findings);
}

#[test]
fn lines_have_at_most_100_columns() {
    let findings: Vec<String> = tree::read(CODE).iter().flat_map(check_line_width).collect();
    assert_none(&findings);
}

#[test]
fn every_file_says_first_what_it_is_for() {
    let findings: Vec<String> = tree::read(&["src"]).iter().flat_map(check_opening).collect();
    assert_none(&findings);
}

#[test]
fn folder_modules_are_mod_rs() {
    assert_none(&check_folder_modules(&tree::read(&["src"])));
}

#[test]
fn every_file_is_declared_by_a_mod_line() {
    assert_none(&check_reachable(&tree::read(&["src"])));
}

#[test]
fn library_and_binary_forbid_unsafe_code() {
    let sources = tree::read(&["src"]);
    let roots: Vec<&Source> = sources.iter().filter(|source| source.module().is_empty()).collect();
    assert_eq!(roots.len(), 2, "src/lib.rs and src/main.rs");
    let findings: Vec<String> = roots.into_iter().flat_map(check_forbids_unsafe).collect();
    assert_none(&findings);
}

#[test]
fn a_function_of_71_lines_is_caught() {
    // `fn long() {`, the calls, `}`.
    let body = |calls: usize| format!("fn long() {{\n{}}}\n", "call();\n".repeat(calls));
    let long = body(FUNCTION_LINES_MAX - 1);
    for text in [
        long.clone(),
        format!("struct S;\nimpl S {{\n/// Documented.\n{long}}}"),
        format!("trait T {{\n{long}}}"),
        format!("mod inner {{\n{long}}}"),
        format!("fn outer() {{\n{long}}}").replace("outer() {", "outer() { // also too long"),
    ] {
        let findings = check_functions(&Source::new("src/a.rs", &text));
        assert!(findings.iter().any(|finding| finding.contains("`long` has 71")), "{findings:?}");
    }
    let test = format!("#[cfg(test)] mod tests {{\n{long}}}\n#[test]\n{long}");
    for text in [body(FUNCTION_LINES_MAX - 2), test] {
        assert_none(&check_functions(&Source::new("src/a.rs", &text)));
    }
}

#[test]
fn a_file_of_601_lines_is_caught() {
    let file = |lines: usize| Source::new("tests/a.rs", &"//\n".repeat(lines));
    assert_eq!(check_file_length(&file(601)), ["tests/a.rs: 601 lines"]);
    assert_none(&check_file_length(&file(600)));
}

#[test]
fn a_line_of_101_columns_is_caught() {
    let line = |columns: usize| Source::new("src/a.rs", &format!("\n{}\n", "ä".repeat(columns)));
    assert_eq!(check_line_width(&line(101)), ["src/a.rs:2: 101 columns"]);
    assert_none(&check_line_width(&line(100)));
    let url = format!("// https://example.com/{}", "a".repeat(100));
    assert_none(&check_line_width(&Source::new("src/a.rs", &url)));
}

#[test]
fn a_file_without_an_opening_is_caught() {
    assert_eq!(check_opening(&Source::new("src/a.rs", "use std::fs;\n")).len(), 1);
    assert_eq!(check_opening(&Source::new("src/a.rs", "// Not a doc comment.\n")).len(), 1);
    assert_none(&check_opening(&Source::new("src/a.rs", "//! Does a thing.\n")));
}

#[test]
fn a_folder_module_beside_its_folder_is_caught() {
    let beside = [Source::new("src/tls.rs", ""), Source::new("src/tls/dev.rs", "")];
    assert_eq!(check_folder_modules(&beside), ["src/tls.rs: move it to src/tls/mod.rs"]);
    let missing = [Source::new("src/tls/dev.rs", ""), Source::new("src/lib.rs", "")];
    assert_eq!(check_folder_modules(&missing), ["src/tls: has no mod.rs"]);
    let fine = [Source::new("src/tls/mod.rs", ""), Source::new("src/tls/dev.rs", "")];
    assert_none(&check_folder_modules(&fine));
}

#[test]
fn a_file_without_a_mod_line_is_caught() {
    let sources = [
        Source::new("src/lib.rs", "mod tls; // mod lost;"),
        Source::new("src/main.rs", ""),
        Source::new("src/tls/mod.rs", "mod dev;"),
        Source::new("src/tls/dev.rs", ""),
        Source::new("src/lost.rs", ""),
        Source::new("src/tls/stray.rs", ""),
    ];
    let findings = check_reachable(&sources);
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(findings[0].starts_with("src/lost.rs") && findings[1].starts_with("src/tls/stray.rs"));
}

#[test]
fn a_root_that_allows_unsafe_code_is_caught() {
    let lacking = "//! Docs that mention #![forbid(unsafe_code)].\n";
    assert_eq!(check_forbids_unsafe(&Source::new("src/lib.rs", lacking)).len(), 1);
    let fine = "//! Docs.\n#![forbid(unsafe_code)]\n";
    assert_none(&check_forbids_unsafe(&Source::new("src/lib.rs", fine)));
}
