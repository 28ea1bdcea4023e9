//! The table of messages in `docs/log.md`, from the tracing macros of the source.

use std::collections::BTreeSet;
use std::fs;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::markdown::top;
use super::page::{assert_generated, table};
use crate::references::attributes;
use crate::tree::{self, is_test_code};

/// Macros of the access log, whose messages are in a table that is written by hand.
const ACCESS: [&str; 3] = ["access", "ended", "event"];
const PAGE: &str = "docs/log.md";
const LEVELS: [&str; 4] = ["error", "warn", "info", "debug"];

/// Messages of the source, each with its level, its fields and the module.
#[derive(Default)]
struct Messages {
    module: String,
    found: BTreeSet<Vec<String>>,
    /// Messages of the access log.
    access: BTreeSet<String>,
}

impl Messages {
    /// Adds the message of a macro call, unless it is a variable.
    fn add(&mut self, level: &str, tokens: TokenStream) {
        let mut parts: Vec<Vec<TokenTree>> = vec![Vec::new()];
        for token in tokens {
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == ',' => parts.push(Vec::new()),
                _ => parts.last_mut().unwrap().push(token),
            }
        }
        parts.retain(|part| !part.is_empty());
        let literal = |part: &Vec<TokenTree>| match &part[..] {
            [TokenTree::Literal(literal)] => {
                let literal = syn::parse_str::<syn::LitStr>(&literal.to_string());
                literal.ok().map(|literal| literal.value())
            }
            _ => None,
        };
        let Some(at) = parts.iter().position(|part| literal(part).is_some()) else {
            return;
        };
        let message = literal(&parts[at]).unwrap();
        if message.starts_with('{') {
            return;
        }
        if ACCESS.contains(&level) {
            self.access.insert(message);
            return;
        }
        let fields: Vec<_> = parts[..at].iter().filter_map(|part| field(part)).collect();
        let fields = fields.join(", ");
        let row = [message, level.to_uppercase(), fields, format!("`{}`", self.module)];
        self.found.insert(row.into());
    }

    /// Looks for macro calls in the tokens of another macro.
    fn scan(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        for three in tokens.windows(3) {
            if let [TokenTree::Ident(name), TokenTree::Punct(mark), TokenTree::Group(group)] = three
                && mark.as_char() == '!'
                && is_log(&name.to_string())
            {
                self.add(&name.to_string(), group.stream());
            }
        }
        for token in tokens {
            if let TokenTree::Group(group) = token {
                self.scan(group.stream());
            }
        }
    }
}

impl<'ast> Visit<'ast> for Messages {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_test_code(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let name = call.path.segments.last().map(|last| last.ident.to_string());
        match name.filter(|name| is_log(name)) {
            Some(level) => self.add(&level, call.tokens.clone()),
            None => self.scan(call.tokens.clone()),
        }
    }
}

fn is_log(name: &str) -> bool {
    LEVELS.contains(&name) || ACCESS.contains(&name)
}

fn is(token: &TokenTree, wanted: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == wanted)
}

/// The name of a field: `name = value`, `%name`, `?path.name` or `name`.
fn field(part: &[TokenTree]) -> Option<String> {
    let name = |token: &TokenTree| match token {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        TokenTree::Literal(literal) => Some(literal.to_string().trim_matches('"').to_owned()),
        _ => None,
    };
    if part.get(1).is_some_and(|token| is(token, ':')) {
        return None;
    }
    let before: Vec<_> = part.iter().take_while(|token| !is(token, '=')).collect();
    // `path.call()` ends in a group.
    let is_group = |token: &&&TokenTree| matches!(token, TokenTree::Group(_));
    let last = before.iter().rev().find(|token| !is_group(token))?;
    name(last).map(|name| format!("`{name}`"))
}

#[test]
fn the_page_of_the_log_lists_every_message() {
    let mut messages = Messages::default();
    for source in tree::production() {
        let module: Vec<_> = source.module().into_iter().take(2).collect();
        messages.module = module.join("::");
        messages.visit_file(&source.parse());
    }
    assert!(messages.found.len() > 30, "the messages are found");
    let rows: Vec<_> = messages.found.into_iter().collect();
    let text = table(&["message", "level", "fields", "module"], &rows);
    assert_generated(PAGE, "messages", &text);

    assert!(messages.access.len() > 3, "the access log is found");
    let page = fs::read_to_string(top().join(PAGE)).unwrap();
    for message in messages.access {
        let cell = format!("| `{message}` |");
        assert!(page.contains(&cell), "{message} is not in the table of the access log");
    }
}

#[test]
fn a_message_is_found_with_its_fields_wherever_it_stands() {
    let text = "fn f() { warn!(target: \"x\", %error, \"a.b\" = 1, age = ?c.d(), \"one\"); }
                fn g() { select! { _ = a => tracing::info!(self.name, \"two\"), } }
                fn h() { warn!(\"{text}\"); }
                #[cfg(test)] mod tests { fn i() { info!(\"three\"); } }";
    let mut messages = Messages { module: "m".to_owned(), ..Messages::default() };
    messages.visit_file(&syn::parse_file(text).unwrap());
    let rows: Vec<_> = messages.found.iter().map(|row| row.join(" ")).collect();
    assert_eq!(rows, ["one WARN `error`, `a.b`, `age` `m`", "two INFO `name` `m`"]);
}
