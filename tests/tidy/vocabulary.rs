//! Retired words in comments, documents and identifiers, and doc comments that open with an
//! interrogative.
//!
//! Strings are not checked: they include keys, metric names and JSON fields, which stay.

use std::fs;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};

use crate::tree::{self, Source};

/// Retired words, each with its replacement. Words of an identifier count too: `is_told`, `ToldBy`.
const RETIRED: &[(&str, &str)] = &[
    ("believed", "trusted"),
    ("doubt", "request a refresh"),
    ("doubts", "refresh requests"),
    ("fat", "large"),
    ("fattest", "largest"),
    ("foretold", "predicted"),
    ("gently", "without a reset"),
    ("house", "limit"),
    ("lots", "alias table, many"),
    ("newcomer", "contributor, new connection"),
    ("newcomers", "contributors, new connections"),
    ("odds", "pick probability"),
    ("said", "reported, received, configured"),
    ("seam", "boundary, interface"),
    ("speaker", "waypoint identity"),
    ("speakers", "waypoint identities"),
    ("stranger", "unverified client, foreign"),
    ("strangers", "unverified clients"),
    ("told", "received, reported, distinguished"),
];

const INTERROGATIVES: &[&str] =
    &["How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"];

const CODE: &[&str] = &["src", "tests", "benches"];

/// File of this test, which lists the words.
const THIS: &str = "tests/tidy/vocabulary.rs";

/// Retired word in a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    path: String,
    line: usize,
    word: &'static str,
}

/// Returns the retired words of `text`; `isToldBy` has the words `is`, `told` and `by`.
fn retired(text: &str) -> Vec<&'static str> {
    let mut words = vec![String::new()];
    let mut is_lower = false;
    for c in text.chars() {
        if !c.is_alphabetic() || (c.is_uppercase() && is_lower) {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
        is_lower = c.is_lowercase();
    }
    let find = |word: String| RETIRED.iter().find(|(retired, _)| *retired == word);
    words.into_iter().filter_map(find).map(|&(word, _)| word).collect()
}

/// Returns the text without its code spans.
fn without_code_spans(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// Returns the comment of a line, also one after code, where a space follows `//`.
fn comment(line: &str) -> Option<&str> {
    let start = line.trim_start();
    if start.starts_with("//") {
        return Some(start);
    }
    line.split_once(" // ").map(|(_, comment)| comment)
}

fn identifiers(tokens: TokenStream, found: &mut Vec<(usize, String)>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => identifiers(group.stream(), found),
            TokenTree::Ident(name) => found.push((name.span().start().line, name.to_string())),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn check_code(source: &Source) -> Vec<Finding> {
    let mut texts = Vec::new();
    identifiers(source.text.parse().unwrap(), &mut texts);
    for (index, line) in source.text.lines().enumerate() {
        texts.extend(comment(line).map(|text| (index + 1, without_code_spans(text))));
    }
    findings(&source.path, &texts)
}

/// Checks the prose of a document, without code blocks and code spans.
fn check_document(source: &Source) -> Vec<Finding> {
    let mut texts = Vec::new();
    let mut is_code = false;
    for (index, line) in source.text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        if !is_code {
            texts.push((index + 1, without_code_spans(line)));
        }
    }
    findings(&source.path, &texts)
}

fn findings(path: &str, texts: &[(usize, String)]) -> Vec<Finding> {
    let finding = |line: usize, word| Finding { path: path.to_owned(), line, word };
    texts
        .iter()
        .flat_map(|(line, text)| retired(text).into_iter().map(|word| finding(*line, word)))
        .collect()
}

/// Rejects doc comments whose first word is an interrogative, such as "What a peer sends".
fn check_openings(source: &Source) -> Vec<String> {
    let doc = |line: &str| {
        let line = line.trim_start();
        let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
        text.split_whitespace().next().map(str::to_owned)
    };
    let mut found = Vec::new();
    let mut is_inside = false;
    for (index, line) in source.text.lines().enumerate() {
        let first = doc(line);
        if let Some(word) = first.as_ref().filter(|_| !is_inside)
            && INTERROGATIVES.contains(&word.as_str())
        {
            found.push(format!(
                "{}:{}: opens with `{word}`: begin with a noun or a verb",
                source.path,
                index + 1
            ));
        }
        is_inside = first.is_some();
    }
    found
}

fn documents() -> Vec<Source> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut documents = Vec::new();
    for folder in ["", "docs", "docs/decisions"] {
        for entry in fs::read_dir(top.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.strip_prefix(top).unwrap().to_str().unwrap();
                documents.push(Source::new(name, &fs::read_to_string(&path).unwrap()));
            }
        }
    }
    documents
}

#[test]
fn retired_words_are_not_used() {
    let mut found: Vec<Finding> =
        tree::read(CODE).iter().filter(|source| source.path != THIS).flat_map(check_code).collect();
    found.extend(documents().iter().flat_map(check_document));
    let lines: Vec<String> = found
        .iter()
        .map(|Finding { path, line, word }| {
            let (_, replacement) = RETIRED.iter().find(|(retired, _)| retired == word).unwrap();
            format!("{path}:{line}: `{word}`: write {replacement}")
        })
        .collect();
    assert!(lines.is_empty(), "\n{}\n", lines.join("\n"));
}

#[test]
fn doc_comments_open_with_a_noun_or_a_verb() {
    let found: Vec<String> = tree::read(CODE).iter().flat_map(check_openings).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_retired_word_is_caught_in_comments_documents_and_identifiers() {
    let words =
        |findings: Vec<Finding>| findings.iter().map(|f| (f.line, f.word)).collect::<Vec<_>>();
    let code =
        "/// Was told.\nfn is_told(saidBy: ToldBy) {} // a stranger\nfn good() { f(\"told\") }";
    let found = words(check_code(&Source::new("src/a.rs", code)));
    assert_eq!(found, [(2, "told"), (2, "said"), (2, "told"), (1, "told"), (2, "stranger")]);
    let text = "# Odds\n`odds`\n```\nodds\n```\nWhat was told.\n";
    let found = words(check_document(&Source::new("a.md", text)));
    assert_eq!(found, [(1, "odds"), (6, "told")]);
}

#[test]
fn a_doc_comment_that_opens_with_an_interrogative_is_caught() {
    let found = |text: &str| check_openings(&Source::new("src/a.rs", text)).len();
    for word in INTERROGATIVES {
        assert_eq!(found(&format!("fn f() {{}}\n    /// {word} a peer sends.\n")), 1, "{word}");
    }
    assert_eq!(found("/// Fields of a message.\n/// Which ones, the peer decides.\n// How\n"), 0);
}
