//! Order of the stages: a stage uses only earlier ones, and only `serve` and `forward` use all.

use std::collections::BTreeSet;

use crate::references::references;
use crate::tree::{self, Source};

/// Stages in travel order.
const STAGES: &[&str] = &[
    "listener",
    "accept",
    "handshake",
    "balancer",
    "identity",
    "http2",
    "passthrough",
    "first_peer",
    "route",
    "transit",
    "policy",
    "balance",
    "authorize",
    "dial",
    "copy",
];

/// Modules that call the stages, and may use any of them. The folder's `mod.rs` names them all.
const CALLERS: &[&str] = &["serve", "forward"];

/// Callers of `forward`.
const CALLERS_OF_FORWARD: &[&str] = &["serve", "passthrough"];

fn check(source: &Source, helpers: &BTreeSet<String>) -> Vec<String> {
    let module = source.module();
    let [folder, inside @ ..] = module.as_slice() else {
        return Vec::new();
    };
    let Some(own) = unit(inside) else {
        return Vec::new();
    };
    if folder != "datapath" || CALLERS.contains(&own) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for reference in references(source) {
        let [root, folder, rest @ ..] = reference.path.as_slice() else {
            continue;
        };
        if root != "crate" || folder != "datapath" {
            continue;
        }
        let target = unit(rest).unwrap_or("*");
        if let Some(why) = objection(own, target, helpers) {
            let (path, line) = (&source.path, reference.line);
            findings
                .push(format!("{path}:{line}: `{own}` may not use `datapath::{target}`: {why}"));
        }
    }
    findings
}

/// Returns the stage or mechanism of a path inside `datapath`: its first name.
fn unit(path: &[String]) -> Option<&str> {
    path.first().map(String::as_str)
}

fn objection(own: &str, target: &str, helpers: &BTreeSet<String>) -> Option<&'static str> {
    let place = |name: &str| STAGES.iter().position(|&stage| stage == name);
    if target == own || helpers.contains(target) {
        return None;
    }
    if target == "forward" && CALLERS_OF_FORWARD.contains(&own) {
        return None;
    }
    match (place(own), place(target)) {
        (Some(own), Some(target)) if target < own => None,
        (Some(_), Some(_)) => Some("it is a later stage"),
        (None, Some(_)) => Some("modules that all stages share import no stage"),
        (_, None) if CALLERS.contains(&target) => Some("only serve and forward call stages"),
        (_, None) => Some("name the module itself, so that the order can be checked"),
    }
}

/// Returns the names that all stages may use: modules that are neither stages nor callers, such as
/// `io`, and definitions of the folder's `mod.rs`. A name that this file only re-exports, by `use`
/// or by `type`, would hide its stage.
fn helpers(sources: &[Source]) -> BTreeSet<String> {
    let mut helpers = BTreeSet::new();
    for source in sources {
        match source.module().as_slice() {
            [folder] if folder == "datapath" => {
                helpers.extend(source.parse().items.iter().filter_map(defined));
            }
            [folder, inside @ ..] if folder == "datapath" => {
                helpers.extend(unit(inside).map(str::to_owned));
            }
            _ => {}
        }
    }
    helpers.retain(|name| !STAGES.contains(&name.as_str()) && !CALLERS.contains(&name.as_str()));
    helpers
}

fn defined(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

#[test]
fn a_stage_uses_only_earlier_stages() {
    let sources = tree::production();
    let helpers = helpers(&sources);
    let findings: Vec<String> = sources.iter().flat_map(|source| check(source, &helpers)).collect();
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn a_stage_that_uses_a_later_one_is_caught() {
    let helpers = BTreeSet::from(["io".to_owned()]);
    for (path, text) in [
        ("src/datapath/route.rs", "use super::copy::Outcome;"),
        ("src/datapath/route.rs", "use crate::datapath::dial::Upstream;"),
        ("src/datapath/route.rs", "fn f() { super::policy::judge(); }"),
        ("src/datapath/route.rs", "use super::forward::forward;"),
        ("src/datapath/accept.rs", "use super::serve::serve;"),
        // Names that the folder re-exports would hide their stage.
        ("src/datapath/route.rs", "use super::Outcome;"),
        ("src/datapath/route.rs", "use crate::datapath;"),
        ("src/datapath/route.rs", "use super::*;"),
        ("src/datapath/io/buffer.rs", "use crate::datapath::identity::Peer;"),
        ("src/datapath/copy/pool.rs", "use super::super::forward::forward;"),
    ] {
        let findings = check(&Source::new(path, text), &helpers);
        assert_eq!(findings.len(), 1, "{path}: {text}: {findings:?}");
    }
}

#[test]
fn stages_in_their_order_pass() {
    let helpers = BTreeSet::from(["io".to_owned()]);
    for (path, text) in [
        ("src/datapath/copy.rs", "use super::dial::Upstream; use super::io::buffer::Buffer;"),
        ("src/datapath/http2/server.rs", "use crate::datapath::identity::Peer;"),
        ("src/datapath/passthrough.rs", "use super::forward::forward;"),
        ("src/datapath/forward.rs", "use super::{balance, copy, dial, policy, route};"),
        ("src/datapath/mod.rs", "pub use serve::serve; pub use self::copy::Outcome;"),
        ("src/datapath/copy/mod.rs", "mod pool; use self::pool::Pool;"),
        ("src/datapath/copy/pool.rs", "use super::Pool;"),
        ("src/snapshot/mod.rs", "use super::snapshot::Reader;"),
    ] {
        let findings = check(&Source::new(path, text), &helpers);
        assert!(findings.is_empty(), "{path}: {text}: {findings:?}");
    }
}

#[test]
fn helpers_are_what_is_no_stage() {
    let page = "pub mod copy; pub use copy::Outcome; pub type Same = copy::Outcome;
                pub struct Gateway;";
    let sources = [
        Source::new("src/datapath/mod.rs", page),
        Source::new("src/datapath/copy/pool.rs", "struct Pool;"),
        Source::new("src/datapath/serve.rs", ""),
        Source::new("src/datapath/io/mod.rs", ""),
        Source::new("src/tls/verify.rs", "struct Verifier;"),
    ];
    let expected = BTreeSet::from(["Gateway".to_owned(), "io".to_owned()]);
    assert_eq!(helpers(&sources), expected);
}
