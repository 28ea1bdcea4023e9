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
        UseTree::Group(group) => group.items.iter().for_each(|one| leaves(one, before, found)),
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
    let length = (1..=path.len()).rev().find(|length| modules.contains_key(&path[..*length]))?;
    let (module, rest) = path.split_at(length);
    let exported = rest.first().and_then(|name| modules.get(module)?.exported.get(name));
    exported.map_or_else(|| Some(module.to_vec()), |target| defining(target, modules))
}

/// Returns the groups of files that import each other, directly or through others.
fn cycles(sources: &[Source]) -> BTreeSet<BTreeSet<String>> {
    let mut modules: BTreeMap<Module, Imports> =
        sources.iter().map(|source| (source.module(), Imports::default())).collect();
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
            let targets = imports.used.iter().filter_map(|path| defining(path, &modules));
            targets.map(|target| (module.clone(), target))
        })
        .filter(|(from, to)| from != to)
        .collect();
    let reached: BTreeMap<_, _> =
        modules.keys().map(|module| (module, reached(module, &edges))).collect();
    let group = |module: &Module| -> BTreeSet<String> {
        let others = reached[module].iter();
        let mutual = others.filter(|other| reached[other].contains(module));
        mutual.map(|other| other.join("::")).collect()
    };
    let groups = modules.keys().map(group);
    groups.filter(|group| !group.is_empty()).collect()
}

/// Returns the files that a file imports, directly or through others.
fn reached(from: &Module, edges: &BTreeSet<(Module, Module)>) -> BTreeSet<Module> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = next.pop() {
        let targets = edges.iter().filter(|(from, _)| *from == module);
        for (_, target) in targets {
            if reached.insert(target.clone()) {
                next.push(target.clone());
            }
        }
    }
    reached
}

#[test]
fn the_imports_of_files_form_no_cycle() {
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
    let want = BTreeSet::from(["a::b", "a::c"].map(str::to_owned));
    assert_eq!(cycles(&sources), BTreeSet::from([want]));
}

#[test]
fn a_cycle_of_three_files_is_caught() {
    let sources = [
        Source::new("src/a.rs", "use crate::b::B; pub struct A(B);"),
        Source::new("src/b.rs", "use crate::c::C; pub struct B(C);"),
        Source::new("src/c.rs", "use crate::a::A; pub struct C(Box<A>);"),
        Source::new("src/d.rs", "use crate::a::A; pub struct D(A);"),
    ];
    let want = BTreeSet::from(["a", "b", "c"].map(str::to_owned));
    assert_eq!(cycles(&sources), BTreeSet::from([want]));
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
