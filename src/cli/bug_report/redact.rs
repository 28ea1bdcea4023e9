//! Removal of secrets from text: known ones, private keys, and values that look like secrets by
//! their names or forms.
//!
//! Too much is removed rather than too little.

use regex_lite::{Captures, Regex};

/// Text in the place of a secret.
const HIDDEN: &str = "[removed]";
/// Least bytes of a known secret that is searched for, so that no common word is one.
const SECRET_BYTES_MIN: usize = 6;

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

/// PEM block of a private key. Without its end, all text after it is one.
const KEY: &str = r"(?s)-----BEGIN [^-]*PRIVATE KEY.*?(?:-----END .*?-----|\z)";
/// All text up to the end of such a block whose begin is missing.
const KEY_END: &str = r"(?s)\A.*-----END [^-]*PRIVATE KEY.*?(?:-----|\z)";
/// Text in quotes, up to the end of the line if the last one is missing.
const QUOTED: &str = r#""(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?"#;
/// Character of a word, and one between two words.
const IN_WORD: &str = r#"[^\s"'`,;()<>{}\[\]\\=]"#;
const BETWEEN: &str = r#"[\s"'`,;()<>{}\[\]\\=]"#;

/// Removes secrets.
pub(super) struct Redactor {
    /// Known secrets, with the longest first.
    known: Vec<String>,
    keys: [Regex; 2],
    named: Regex,
    /// Words after `Bearer` and `Basic`, JSON Web Tokens, and users of URLs, each with what stays
    /// before and after it, and with texts of which each match has one.
    forms: [(&'static [&'static str], Regex); 3],
}

pub(super) fn is_secret_name(name: &str) -> bool {
    has_part(name, &NAMES)
}

/// Returns whether a text has one of these parts, which are in lower case. All patterns together
/// take 0.3 s for each MB, and a page is one line.
fn has_part(text: &str, parts: &[&str]) -> bool {
    let text = text.to_ascii_lowercase();
    parts.iter().any(|part| text.contains(part))
}

impl Redactor {
    /// Uses each line of these secrets.
    pub(super) fn new(
        secrets: impl IntoIterator<Item = String>,
    ) -> Result<Self, regex_lite::Error> {
        let mut known = Vec::new();
        for secret in secrets {
            let lines = secret.lines().map(str::trim).filter(|line| line.len() >= SECRET_BYTES_MIN);
            known.extend(lines.filter(|line| !line.starts_with("-----")).map(str::to_owned));
        }
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        let name = format!(r"(?i:[\w.-]*(?:{})[\w.-]*)", NAMES.join("|"));
        // As in `token: x`, `"token":"x"` and `token=x`. A value without quotes ends with the line,
        // or as JSON's if its name has quotes.
        let of_json = format!(r#"(["\\][\\"' ]*[:=][ \\]*)({QUOTED}|[^,}}]*)"#);
        let plain = format!(r#"((?:[' ][\\"' ]*)?[:=][ \\]*)({QUOTED}|.*)"#);
        Ok(Self {
            known,
            keys: [Regex::new(KEY)?, Regex::new(KEY_END)?],
            named: Regex::new(&format!("({name})(?:{of_json}|{plain})"))?,
            forms: [
                (
                    &["bearer", "basic"],
                    Regex::new(&format!("((?:(?i:bearer|basic){BETWEEN}+)+){IN_WORD}+"))?,
                ),
                (&["eyj"], Regex::new(&format!("(){IN_WORD}*eyJ{IN_WORD}{{16,}}"))?),
                (&["@"], Regex::new(&format!("({IN_WORD}*?://){IN_WORD}*(@)"))?),
            ],
        })
    }

    pub(super) fn redact(&self, text: &str) -> String {
        let mut text = text.to_owned();
        if text.contains("PRIVATE KEY") {
            for key in &self.keys {
                text = key.replace_all(&text, HIDDEN).into_owned();
            }
        }
        for secret in &self.known {
            text = text.replace(secret, HIDDEN);
            // As JSON writes it.
            let escaped = serde_json::Value::from(secret.as_str()).to_string();
            let escaped = escaped.get(1..escaped.len() - 1).unwrap_or_default();
            text = text.replace(escaped, HIDDEN);
        }
        let redact = |line: &str| {
            let mut line = line.to_owned();
            if is_secret_name(&line) {
                line = self.named.replace_all(&line, hide_value).into_owned();
            }
            for (parts, form) in &self.forms {
                if has_part(&line, parts) {
                    let shown = format!("${{1}}{HIDDEN}${{2}}");
                    line = form.replace_all(&line, shown).into_owned();
                }
            }
            line + "\n"
        };
        text.lines().map(redact).collect()
    }
}

/// Returns a name with its value hidden, unless the value begins on the next line.
fn hide_value(found: &Captures<'_>) -> String {
    let part = |at| found.get(at).map_or("", |part| part.as_str());
    let (gap, value) = ([part(2), part(4)].concat(), [part(3), part(5)].concat());
    if ["", "{", "[", "|", ">"].contains(&value.trim_end()) {
        return part(0).to_owned();
    }
    let is_quoted = value.starts_with('"') || gap.starts_with('"');
    let quotes = if is_quoted { "\"" } else { "" };
    [part(1), &gap, quotes, HIDDEN, quotes].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_removed_in_every_form_and_the_rest_stays() {
        let redactor = Redactor::new(["known-\"secret\"\n".to_owned()]).expect("patterns");
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
        let redacted = |text: &str| Redactor::new([]).expect("patterns").redact(text);
        let whole = format!("a\n{begin}\nKEY\n{end}\nb\n{public}");
        assert_eq!(redacted(&whole), format!("a\n[removed]\nb\n{public}"));
        assert_eq!(redacted(&format!("a\n{begin}\nKEY")), "a\n[removed]\n");
        assert_eq!(redacted(&format!("KEY\n{end}\nb")), "[removed]\nb\n");
        let line = format!(r#"{{"a":"{begin}\nKEY\n{end}"}}"#);
        assert_eq!(redacted(&line), "{\"a\":\"[removed]\"}\n");
    }
}
