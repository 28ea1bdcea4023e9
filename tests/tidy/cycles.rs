//! Absence of import cycles between files.
//!
//! An import of a re-exported name counts for the file that defines it. Re-exports themselves do
//! not count: a `mod.rs` lists its children, and a child may import from its siblings.

use std::collections::{BTreeMap, BTreeSet};

use syn::{Item, UseTree, Visibility};

use crate::tree::{self, Source, is_test_code};

type Module = Vec<String>;

/// Imports of one file.
#[derive(Default)]
struct Imports {
    /// Absolute paths, without `crate`.
    used: Vec<Module>,
    /// Re-exported names, with their absolute paths.
    exported: BTreeMap<String, Module>,
}

/// Returns the names of a `use` item, each as a whole path and the name that it gets.
fn leaves(tree: &UseTree, before: &[String], found: &mut Vec<(Module, String)>) {
    let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(&path.ident), found),
        UseTree::Group(group) => group
            .items
            .iter()
            .for_each(|one| leaves(one, before, found)),
        UseTree::Name(name) if name.ident == "self" => found.push((before.to_vec(), String::new())),
        UseTree::Name(name) => found.push((with(&name.ident), name.ident.to_string())),
        UseTree::Rename(name) => found.push((with(&name.ident), name.rename.to_string())),
        UseTree::Glob(_) => found.push((before.to_vec(), String::new())),
    }
}

/// Returns a path without `crate`, `self` and `super`; none for other crates.
fn absolute(
    module: &[String],
    path: &[String],
    modules: &BTreeMap<Module, Imports>,
) -> Option<Module> {
    let mut base = module.to_vec();
    let (first, others) = path.split_first()?;
    match first.as_str() {
        "crate" | "strait" => return Some(others.to_vec()),
        "self" => return Some([module, others].concat()),
        "super" => {}
        child => {
            let own = [module, &[child.to_owned()]].concat();
            return modules.contains_key(&own).then(|| [module, path].concat());
        }
    }
    let supers = path.iter().take_while(|part| *part == "super").count();
    base.truncate(base.len().saturating_sub(supers));
    Some([&base, &path[supers..]].concat())
}

/// Returns the file that defines the name of a path.
fn defining(path: &[String], modules: &BTreeMap<Module, Imports>) -> Option<Module> {
    let length = (1..=path.len())
        .rev()
        .find(|length| modules.contains_key(&path[..*length]))?;
    let (module, rest) = path.split_at(length);
    let exported = rest
        .first()
        .and_then(|name| modules.get(module)?.exported.get(name));
    exported.map_or_else(|| Some(module.to_vec()), |target| defining(target, modules))
}

/// Returns the pairs of files that import each other.
fn cycles(sources: &[Source]) -> BTreeSet<(String, String)> {
    let mut modules: BTreeMap<Module, Imports> = sources
        .iter()
        .map(|source| (source.module(), Imports::default()))
        .collect();
    for source in sources {
        let module = source.module();
        for item in source.parse().items {
            let Item::Use(item) = item else { continue };
            if is_test_code(&item.attrs) {
                continue;
            }
            let mut found = Vec::new();
            leaves(&item.tree, &[], &mut found);
            for (path, name) in found {
                let Some(path) = absolute(&module, &path, &modules) else {
                    continue;
                };
                let imports = modules.get_mut(&module).unwrap();
                if matches!(item.vis, Visibility::Inherited) {
                    imports.used.push(path);
                } else {
                    imports.exported.insert(name, path);
                }
            }
        }
    }
    let edges: BTreeSet<(Module, Module)> = modules
        .iter()
        .flat_map(|(module, imports)| {
            let targets = imports
                .used
                .iter()
                .filter_map(|path| defining(path, &modules));
            targets.map(|target| (module.clone(), target))
        })
        .filter(|(from, to)| from != to)
        .collect();
    let mutual = edges
        .iter()
        .filter(|(from, to)| from < to && edges.contains(&(to.clone(), from.clone())));
    mutual
        .map(|(from, to)| (from.join("::"), to.join("::")))
        .collect()
}

#[test]
fn no_two_files_import_each_other() {
    let found = cycles(&tree::production());
    assert!(found.is_empty(), "files that import each other: {found:#?}");
}

#[test]
fn a_cycle_through_a_re_export_is_caught() {
    let sources = [
        Source::new("src/a/mod.rs", "mod b; mod c; pub use b::B; pub use c::C;"),
        Source::new("src/a/b.rs", "use super::C; pub struct B(C);"),
        Source::new("src/a/c.rs", "use super::B; pub struct C(Box<B>);"),
    ];
    let found: Vec<_> = cycles(&sources).into_iter().collect();
    assert_eq!(found, [("a::b".to_owned(), "a::c".to_owned())]);
}

#[test]
fn imports_in_one_direction_and_in_tests_pass() {
    let sources = [
        Source::new("src/a/mod.rs", "mod b; mod c; pub use b::B;"),
        Source::new("src/a/b.rs", "pub struct B; #[cfg(test)] use super::c::C;"),
        Source::new("src/a/c.rs", "use super::B; pub struct C(B);"),
    ];
    assert!(cycles(&sources).is_empty());
}
