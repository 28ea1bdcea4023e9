//! The tables of `docs/reasons.md`, and the reasons that an alert counts, from
//! `src/reason/mod.rs`.

use std::collections::BTreeMap;
use std::fs;

use strait::reason::{HandshakeRefusal, Reason};

use super::markdown::top;
use super::page::{assert_generated, table};

const PAGE: &str = "docs/reasons.md";

/// The comments of the variants of an enum, as one line each.
fn comments(name: &str) -> BTreeMap<String, String> {
    let text = fs::read_to_string(top().join("src/reason/mod.rs")).unwrap();
    let file = syn::parse_file(&text).unwrap();
    let found = file.items.into_iter().find_map(|item| match item {
        syn::Item::Macro(item) => {
            let item = syn::parse2::<syn::ItemEnum>(item.mac.tokens).ok();
            item.filter(|item| item.ident == name)
        }
        _ => None,
    });
    let variants = found.unwrap().variants.into_iter();
    variants.map(|variant| (variant.ident.to_string(), comment(&variant.attrs))).collect()
}

fn comment(attributes: &[syn::Attribute]) -> String {
    let lines = attributes.iter().filter_map(|attribute| {
        let syn::Meta::NameValue(value) = &attribute.meta else {
            return None;
        };
        let syn::Expr::Lit(literal) = &value.value else {
            return None;
        };
        match &literal.lit {
            syn::Lit::Str(text) => Some(text.value().trim().to_owned()),
            _ => None,
        }
    });
    let text = lines.collect::<Vec<_>>().join(" ");
    text.trim_end_matches('.').to_owned()
}

fn code(text: impl std::fmt::Display) -> String {
    format!("`{text}`")
}

fn alert(number: u8) -> String {
    match number {
        112 => "unrecognized_name".to_owned(),
        40 => "handshake_failure".to_owned(),
        other => other.to_string(),
    }
}

#[test]
fn the_page_of_reasons_lists_every_reason_of_a_tunnel() {
    let comments = comments("Reason");
    let row = |reason: Reason| {
        vec![
            format!("[`{reason}`](operations.md#{reason})"),
            comments[&format!("{reason:?}")].clone(),
            format!("{:?}", reason.blame()).to_lowercase(),
            reason.status().as_u16().to_string(),
            alert(reason.alert()),
            format!("{:?}", reason.reset_code()),
            code(reason.response_flags()),
            reason.level().to_string(),
            if reason.is_retriable() { "yes" } else { "" }.to_owned(),
        ]
    };
    let head =
        ["reason", "meaning", "fault", "answer", "alert", "reset", "flags", "level", "retry"];
    let rows: Vec<_> = Reason::ALL.into_iter().map(row).collect();
    assert_generated(PAGE, "tunnels", &table(&head, &rows));
}

#[test]
fn the_page_of_alerts_counts_every_reason_that_is_a_failure() {
    // With the text around them, lines of 100 columns.
    const COLUMNS: usize = 42;
    let mut lines: Vec<String> = Vec::new();
    for reason in Reason::ALL.into_iter().filter(|reason| reason.is_failure()) {
        match lines.last_mut() {
            Some(line) if line.len() + reason.label().len() < COLUMNS => {
                line.push_str(&format!("|{reason}"));
            }
            _ => lines.push(reason.to_string()),
        }
    }
    let rate = |line| format!("rate(strait_tunnels_total{{reason=~\"{line}\"}}[5m])\n");
    let rates: Vec<_> = lines.into_iter().map(rate).collect();
    let text = format!("{:12}{}", "", rates.join(&format!("{:12}or ", "")));
    assert_generated("deploy/prometheus/alerts.yaml", "failures", &text);
}

#[test]
fn the_page_of_reasons_lists_every_refusal_of_a_handshake() {
    let comments = comments("HandshakeRefusal");
    let row = |refusal: HandshakeRefusal| {
        vec![
            format!("[`{refusal}`](operations.md#handshake-{refusal})"),
            comments[&format!("{refusal:?}")].clone(),
        ]
    };
    let rows: Vec<_> = HandshakeRefusal::ALL.into_iter().map(row).collect();
    assert_generated(PAGE, "handshakes", &table(&["reason", "meaning"], &rows));
}
