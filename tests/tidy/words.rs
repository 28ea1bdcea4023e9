//! Words that mark unfinished, unbounded or unsound code.

use crate::tree::{self, Source};

/// Words banned everywhere, in comments too. Each is written in two halves, so that this file
/// passes.
const UNFINISHED: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("unimplemented", "!"),
    concat!("todo", "!("),
    concat!("dbg", "!("),
];

/// Words banned in code; a comment may explain why they are not used.
const UNBOUNDED: &[&str] = &[
    concat!("unbounded", "_channel"),
    concat!("thread::", "sleep"),
    concat!("env::", "set_var"),
    concat!("copy_", "bidirectional"),
];

const ALLOW: [&str; 2] = [concat!("#[", "allow("), concat!("#![", "allow(")];
const IGNORE: &str = concat!("#[", "ignore");
const SLEEP: &str = concat!("sleep", "(");

const CODE: &[&str] = &["src", "tests", "benches"];

fn check_lines(source: &Source, objection: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut findings = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        if let Some(objection) = objection(line) {
            findings.push(format!("{}:{}: {objection}", source.path, index + 1));
        }
    }
    findings
}

fn check_unfinished(source: &Source) -> Vec<String> {
    check_lines(source, |line| {
        let word = UNFINISHED.iter().find(|word| has_word(line, word))?;
        Some(format!("`{word}`: finish it, or open an issue"))
    })
}

fn check_unbounded(source: &Source) -> Vec<String> {
    check_lines(source, |line| {
        let word = UNBOUNDED.iter().find(|word| has_word(code(line), word))?;
        Some(format!("`{word}`: see .clippy.toml for what to use in its place"))
    })
}

fn check_allow(source: &Source) -> Vec<String> {
    check_lines(source, |line| {
        ALLOW.iter().any(|allow| code(line).contains(allow)).then(|| {
            "write #[expect(LINT, reason = \"…\")], which says why and ends when it is over".into()
        })
    })
}

fn check_ignore(source: &Source) -> Vec<String> {
    check_lines(source, |line| {
        let (_, rest) = code(line).split_once(IGNORE)?;
        let reason = rest.trim_start().strip_prefix('=')?.trim_start();
        Some(reason).filter(|reason| reason.len() <= 3).map(|_| NO_REASON.to_owned())
    })
    .into_iter()
    .chain(check_lines(source, |line| {
        let (_, rest) = code(line).split_once(IGNORE)?;
        rest.trim_start().starts_with(']').then(|| NO_REASON.to_owned())
    }))
    .collect()
}

const NO_REASON: &str = "say why: #[ignore = \"…\"]";

/// Rejects sleeps in tests. A fixed sleep is too long on an idle machine and too short on a loaded
/// one, so a test waits for an event under a deadline. If time itself is tested, a comment explains
/// it.
fn check_sleep(source: &Source) -> Vec<String> {
    let mut findings = Vec::new();
    let mut above = "";
    for (index, line) in source.text.lines().enumerate() {
        let explained = [above, line].iter().any(|line| line.contains("// deadline: "));
        if has_word(code(line), SLEEP) && !explained {
            findings.push(format!(
                "{}:{}: wait for the event with a deadline, or explain by `// deadline: …`",
                source.path,
                index + 1
            ));
        }
        above = line;
    }
    findings
}

/// Returns the part of a line that is not a whole-line comment.
fn code(line: &str) -> &str {
    if line.trim_start().starts_with("//") { "" } else { line }
}

/// Returns true if the line has the word by itself, not as a part of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        let open = word.ends_with(|last: char| !part(last));
        !before.is_some_and(part) && (open || !after.is_some_and(part))
    })
}

fn assert_none(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn nothing_is_left_unfinished() {
    assert_none(&tree::read(CODE).iter().flat_map(check_unfinished).collect::<Vec<_>>());
}

#[test]
fn nothing_grows_without_bound_or_blocks_a_worker() {
    assert_none(&tree::read(CODE).iter().flat_map(check_unbounded).collect::<Vec<_>>());
}

#[test]
fn lints_are_expected_with_a_reason_and_never_allowed() {
    assert_none(&tree::read(CODE).iter().flat_map(check_allow).collect::<Vec<_>>());
}

#[test]
fn an_ignored_test_says_why() {
    assert_none(&tree::read(CODE).iter().flat_map(check_ignore).collect::<Vec<_>>());
}

#[test]
fn tests_wait_under_a_deadline_and_do_not_sleep() {
    assert_none(&tree::read(&["tests"]).iter().flat_map(check_sleep).collect::<Vec<_>>());
}

#[test]
fn an_unfinished_piece_is_caught() {
    for word in UNFINISHED {
        for text in [format!("// {word} later"), format!("    {word}")] {
            assert_eq!(check_unfinished(&Source::new("src/a.rs", &text)).len(), 1, "{text}");
        }
    }
    // Letters inside of something longer, as in base64.
    let longer = format!("\"a{}b\"", UNFINISHED[2]);
    assert_none(&check_unfinished(&Source::new("src/a.rs", &longer)));
}

#[test]
fn an_unbounded_call_is_caught() {
    for word in UNBOUNDED {
        let call = format!("    std::{word}(1);");
        assert_eq!(check_unbounded(&Source::new("src/a.rs", &call)).len(), 1, "{call}");
        let remark = format!("    // We do not use {word} because it hides errors.");
        assert_none(&check_unbounded(&Source::new("src/a.rs", &remark)));
    }
}

#[test]
fn an_allowed_lint_is_caught() {
    for allow in ALLOW {
        let text = format!("{allow}dead_code)]");
        assert_eq!(check_allow(&Source::new("src/a.rs", &text)).len(), 1, "{text}");
    }
    let expect = "#[expect(dead_code, reason = \"read by Debug\")]";
    assert_none(&check_allow(&Source::new("src/a.rs", expect)));
}

#[test]
fn an_ignored_test_without_a_reason_is_caught() {
    for rest in ["]", " ]", " = \"\"]"] {
        let text = format!("{IGNORE}{rest}\nfn f() {{}}");
        assert_eq!(check_ignore(&Source::new("tests/a.rs", &text)).len(), 1, "{text}");
    }
    let text = format!("{IGNORE} = \"needs root\"]");
    assert_none(&check_ignore(&Source::new("tests/a.rs", &text)));
}

#[test]
fn a_sleep_without_an_explanation_is_caught() {
    for start in ["    tokio::time::", "    "] {
        let call = format!("{start}{SLEEP}d).await;");
        assert_eq!(check_sleep(&Source::new("tests/a.rs", &call)).len(), 1, "{call}");
        let above = format!("    // deadline: the drain's own lag is what is tested\n{call}");
        assert_none(&check_sleep(&Source::new("tests/a.rs", &above)));
        let beside = format!("{call} // deadline: the drain's own lag");
        assert_none(&check_sleep(&Source::new("tests/a.rs", &beside)));
    }
    let other = format!("    over{SLEEP}d).await;");
    assert_none(&check_sleep(&Source::new("tests/a.rs", &other)));
}
