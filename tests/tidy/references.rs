//! References of a file: imports, paths in code, and paths inside macros and attributes.

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::tree::{Source, is_test_code};

/// Path that a file's production code mentions.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) line: usize,
    /// Absolute path, such as `["crate", "wire", "authority"]` for any form in the code; for other
    /// crates as written, such as `["std", "io"]`.
    pub(crate) path: Vec<String>,
}

/// Returns all references of a file, except for those in test code.
pub(crate) fn references(source: &Source) -> Vec<Reference> {
    let mut collector = Collector { module: source.module(), found: Vec::new() };
    collector.visit_file(&source.parse());
    collector.found
}

struct Collector {
    /// Module of the current code, including inline modules.
    module: Vec<String>,
    found: Vec<Reference>,
}

impl Collector {
    fn add(&mut self, line: usize, written: &[String]) {
        let mut rest = written;
        let mut module = self.module.clone();
        let mut relative = false;
        while let Some((first, others)) = rest.split_first() {
            match first.as_str() {
                "self" => {}
                "super" => drop(module.pop()),
                _ => break,
            }
            relative = true;
            rest = others;
        }
        let path = match (relative, rest.split_first()) {
            (true, _) => [vec!["crate".to_owned()], module, rest.to_vec()].concat(),
            // A path with one segment is a local name, and `use` of one is a whole crate.
            (false, Some((first, others))) if first == "crate" || first == "strait" => {
                [&["crate".to_owned()], others].concat()
            }
            (false, _) => rest.to_vec(),
        };
        self.found.push(Reference { line, path });
    }

    fn add_use(&mut self, tree: &syn::UseTree, before: &[String]) {
        let line = tree.span().start().line;
        match tree {
            syn::UseTree::Path(path) => {
                let before = [before, &[path.ident.to_string()]].concat();
                self.add_use(&path.tree, &before);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_use(tree, before);
                }
            }
            syn::UseTree::Name(name) if name.ident == "self" => self.add(line, before),
            syn::UseTree::Rename(name) if name.ident == "self" => self.add(line, before),
            syn::UseTree::Name(name) => self.add_leaf(line, before, &name.ident.to_string()),
            syn::UseTree::Rename(name) => self.add_leaf(line, before, &name.ident.to_string()),
            syn::UseTree::Glob(_) => self.add_leaf(line, before, "*"),
        }
    }

    fn add_leaf(&mut self, line: usize, before: &[String], name: &str) {
        self.add(line, &[before, &[name.to_owned()]].concat());
    }

    /// Collects paths from macros and attributes, which are tokens to syn.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut line, mut colons) = (0, 0);
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add_if_path(line, &mut path);
                        line = ident.span().start().line;
                    }
                    path.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => self.add_tokens(group.stream()),
                // `#[serde(with = "crate::config::duration")]`
                TokenTree::Literal(literal) => {
                    let text = literal.to_string();
                    let text = text.trim_matches('"');
                    if text.starts_with("crate::") || text.starts_with("super::") {
                        let written: Vec<String> = text.split("::").map(str::to_owned).collect();
                        self.add(literal.span().start().line, &written);
                    }
                }
                TokenTree::Punct(_) => {}
            }
            self.add_if_path(line, &mut path);
            colons = 0;
        }
        self.add_if_path(line, &mut path);
    }

    fn add_if_path(&mut self, line: usize, path: &mut Vec<String>) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.add(line, &path);
        }
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test_code(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test_code(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.module.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            let written: Vec<String> =
                path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.add(path.span().start().line, &written);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.add_tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    fn visit_meta_list(&mut self, list: &'ast syn::MetaList) {
        self.add_tokens(list.tokens.clone());
        visit::visit_meta_list(self, list);
    }
}

pub(crate) fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
fn paths(path: &str, text: &str) -> Vec<String> {
    let references = references(&Source::new(path, text));
    references.iter().map(|reference| reference.path.join("::")).collect()
}

#[test]
fn every_way_to_name_a_module_is_seen() {
    for snippet in [
        "use crate::xds::Client;",
        "use crate::{wire::Authority, xds::Client};",
        "use super::super::xds::Client;",
        "use ::strait::xds::Client as Other;",
        "fn f() { use crate::xds::Client; }",
        "fn f() { crate::xds::Client::new(); }",
        "fn f(client: &crate::xds::Client) {}",
        "fn f() { tracing::info!(x = 1, y = crate::xds::Client::new()); }",
        "mod inner { use super::super::super::xds::Client; }",
        "pub(in crate::xds::Client) fn f() {}",
        "#[serde(with = \"crate::xds::Client\")] struct S;",
        "struct S { #[serde(default = \"crate::xds::Client\")] field: u8 }",
        "#[cfg(not(test))] use crate::xds::Client;",
    ] {
        let found = paths("src/datapath/copy.rs", snippet);
        let expected = |path: &String| path.starts_with("crate::xds::Client");
        assert!(found.iter().any(expected), "{snippet} gave {found:?}");
    }
}

#[test]
fn test_code_refers_to_what_it_likes() {
    let text = "#[cfg(test)] mod tests { use crate::xds::Client; }
                #[cfg(test)] use crate::xds::Client;
                struct S; impl S { #[cfg(test)] fn f() { crate::xds::Client::new(); } }";
    assert_eq!(paths("src/datapath/copy.rs", text), [""; 0]);
}

#[test]
fn a_relative_path_in_a_folder_module_is_resolved() {
    assert_eq!(paths("src/tls/mod.rs", "use super::xds::A;"), ["crate::xds::A"]);
    assert_eq!(paths("src/tls/mod.rs", "use self::dev::A;"), ["crate::tls::dev::A"]);
    assert_eq!(paths("src/tls/dev.rs", "use super::A;"), ["crate::tls::A"]);
}
