//! Removal of secrets from text: known ones, private keys, and values that look like secrets by
//! their names or forms.
//!
//! Too much is removed rather than too little.

/// Text in the place of a secret.
const HIDDEN: &str = "[removed]";
/// Least bytes of a known secret that is searched for, so that no common word is one.
const SECRET_BYTES_MIN: usize = 6;
/// Least bytes of a JSON Web Token.
const JWT_BYTES_MIN: usize = 20;

/// Parts of the names of secrets.
const NAMES: [&str; 12] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "api_key",
    "api-key",
    "apikey",
    "authorization",
    "credential",
    "private_key",
    "cookie",
];

const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";

/// Removes secrets.
pub(super) struct Redactor {
    /// Known secrets, with the longest first.
    known: Vec<String>,
}

pub(super) fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|part| name.contains(part))
}

impl Redactor {
    /// Uses each line of these secrets.
    pub(super) fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        let mut known = Vec::new();
        for secret in secrets {
            let lines = secret.lines().map(str::trim).filter(|line| line.len() >= SECRET_BYTES_MIN);
            known.extend(lines.filter(|line| !line.starts_with(DASHES)).map(str::to_owned));
        }
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self { known }
    }

    pub(super) fn redact(&self, text: &str) -> String {
        let mut text = without_private_keys(text);
        for secret in &self.known {
            text = text.replace(secret, HIDDEN);
            // As JSON writes it.
            let escaped = serde_json::Value::from(secret.as_str()).to_string();
            let escaped = escaped.get(1..escaped.len() - 1).unwrap_or_default();
            text = text.replace(escaped, HIDDEN);
        }
        text.lines().map(|line| without_forms(&without_named(line)) + "\n").collect()
    }
}

/// Removes PEM blocks of private keys. Of a block whose begin or end is missing, all text before or
/// after it is removed.
fn without_private_keys(text: &str) -> String {
    let is_key =
        |marked: &str| marked.split(DASHES).nth(1).unwrap_or_default().contains("PRIVATE KEY");
    let (mut out, mut rest) = (String::new(), text);
    loop {
        let next = rest.match_indices(DASHES).find(|(at, _)| {
            let marked = rest.get(*at..).unwrap_or_default();
            (marked.starts_with(BEGIN) || marked.starts_with(END)) && is_key(marked)
        });
        let Some((at, _)) = next else {
            return out + rest;
        };
        let (before, marked) = rest.split_at(at);
        if marked.starts_with(BEGIN) {
            out += before;
        } else {
            out.clear();
        }
        out += HIDDEN;
        let end = marked.find(END).and_then(|end| marked.get(end + END.len()..));
        let Some((_, after)) = end.and_then(|end| end.split_once(DASHES)) else {
            return out;
        };
        rest = after;
    }
}

/// Removes values after names of secrets, as in `token: x`, `"token":"x"` and `token=x`. A value
/// ends with its quotes; one without quotes ends with the line, or as JSON's.
fn without_named(line: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let (mut out, mut rest) = (String::new(), line);
    while let Some(start) = rest.find(is_name) {
        let (before, from) = rest.split_at(start);
        let (name, after) = from.split_at(from.find(|c| !is_name(c)).unwrap_or(from.len()));
        out += before;
        out += name;
        rest = after;
        let value = after.trim_start_matches(['\\', '"', '\'', ' ']);
        let Some(value) = value.strip_prefix([':', '=']).filter(|_| is_secret_name(name)) else {
            continue;
        };
        let value = value.trim_start_matches([' ', '\\']);
        if ["", "{", "[", "|", ">"].contains(&value.trim_end()) {
            continue;
        }
        let gap = after.len() - value.len();
        out += after.get(..gap).unwrap_or_default();
        let is_quoted = value.starts_with('"') || after.starts_with('"');
        let quotes = if is_quoted { "\"" } else { "" };
        out += &[quotes, HIDDEN, quotes].concat();
        let length = match value.chars().next().filter(|first| "\"'".contains(*first)) {
            Some(quote) => quoted_length(value, quote),
            None if after.starts_with(['"', '\\']) => value.find([',', '}']).unwrap_or(value.len()),
            None => value.len(),
        };
        rest = value.get(length..).unwrap_or_default();
    }
    out + rest
}

/// Returns the bytes of a value up to its closing quote.
fn quoted_length(value: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in value.char_indices().skip(1) {
        match c {
            c if c == quote && !is_escaped => return at + c.len_utf8(),
            '\\' if !is_escaped => is_escaped = true,
            _ => is_escaped = false,
        }
    }
    value.len()
}

/// Removes words after `Bearer` and `Basic`, JSON Web Tokens, and users of URLs.
fn without_forms(line: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || "\"'`,;()<>{}[]\\=".contains(c);
    let (mut out, mut is_credential) = (String::new(), false);
    for part in line.split_inclusive(is_end) {
        let word = part.trim_end_matches(is_end);
        let end = part.get(word.len()..).unwrap_or_default();
        let is_jwt = word.contains("eyJ") && word.len() >= JWT_BYTES_MIN;
        let user = word.split_once("://").and_then(|(scheme, rest)| {
            let (_, host) = rest.rsplit_once('@')?;
            Some(format!("{scheme}://{HIDDEN}@{host}"))
        });
        match user {
            _ if word.is_empty() => {}
            _ if is_credential || is_jwt => out += HIDDEN,
            Some(url) => out += &url,
            None => out += word,
        }
        out += end;
        if !word.is_empty() {
            let word = word.to_ascii_lowercase();
            is_credential = word.ends_with("bearer") || word.ends_with("basic");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_in_every_form_and_the_rest_stays() {
        let redactor = Redactor::new(["known-\"secret\"\n".to_owned()]);
        for (text, want) in [
            ("a: b # c", "a: b # c"),
            ("token: abc # place", "token: [removed]"),
            (r#"{"password":"a\"b","n":1}"#, r#"{"password":"[removed]","n":1}"#),
            (r#"{"my_token":12,"n":1}"#, r#"{"my_token":"[removed]","n":1}"#),
            ("x API_KEY=abc", "x API_KEY=[removed]"),
            (r#"m{secret="abc"} 1"#, r#"m{secret="[removed]"} 1"#),
            ("sent Bearer abc now", "sent [removed] now"),
            ("jwt eyJhbGciOiJub25lIn0.e30.c2ln end", "jwt [removed] end"),
            ("https://me:pw@host/path", "https://[removed]@host/path"),
            (r#"is known-"secret" here"#, "is [removed] here"),
            (r#"{"x":"known-\"secret\""}"#, r#"{"x":"[removed]"}"#),
        ] {
            let want = want.replace("sent [removed]", "sent Bearer [removed]");
            assert_eq!(redactor.redact(text), want + "\n", "{text}");
        }
    }

    #[test]
    fn private_keys_are_removed_even_if_a_part_is_missing() {
        let begin = "-----BEGIN EC PRIVATE KEY-----";
        let end = "-----END EC PRIVATE KEY-----";
        let public = "-----BEGIN CERTIFICATE-----\nAAA\n-----END CERTIFICATE-----\n";
        let redacted = |text: &str| Redactor::new([]).redact(text);
        let whole = format!("a\n{begin}\nKEY\n{end}\nb\n{public}");
        assert_eq!(redacted(&whole), format!("a\n[removed]\nb\n{public}"));
        assert_eq!(redacted(&format!("a\n{begin}\nKEY")), "a\n[removed]\n");
        assert_eq!(redacted(&format!("KEY\n{end}\nb")), "[removed]\nb\n");
        let line = format!(r#"{{"a":"{begin}\nKEY\n{end}"}}"#);
        assert_eq!(redacted(&line), "{\"a\":\"[removed]\"}\n");
    }
}
