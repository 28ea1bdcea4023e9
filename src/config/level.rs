//! Level of the log, in `log.level` and on the admin page `/logging`, and mode of the access log.

use super::define::words;

/// Words for levels.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

const BYTES_MAX: usize = 4096;

words! {
    /// The tunnels with a line in the access log. Lines about tunnels that never opened, and about
    /// handshakes, are limited besides.
    pub enum Access or All {
        /// Every tunnel.
        All = "all",
        /// Tunnels and handshakes that ended by an error, and one of 100 of the other tunnels.
        Sampled = "sampled",
        /// Tunnels and handshakes that ended by an error.
        Errors = "errors",
        /// Nothing.
        Off = "off",
    }
}

/// A level, `target=level`, or several of them with commas between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directives {
    /// The directives without blanks around them.
    pub text: String,
    /// True if one of them has no target; it applies to every target without a level.
    pub has_default: bool,
}

impl Directives {
    /// Parses directives. `Targets` is less strict: it takes a misspelt level for the name of a
    /// target, and then logs nothing else.
    ///
    /// # Errors
    /// The mistake, and the text to write instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("longer than {BYTES_MAX} bytes"));
        }
        let mut has_default = false;
        let mut directives = Vec::new();
        for directive in text.split(',').map(str::trim) {
            let (target, level) = match directive.split_once('=') {
                Some((target, level)) => (Some(target), level),
                None => (None, directive),
            };
            if target.is_some_and(|target| target.is_empty() || !target.bytes().all(in_name)) {
                return Err(format!("{directive:?} is not target=level"));
            }
            if !LEVELS.iter().any(|word| word.eq_ignore_ascii_case(level)) {
                let words = LEVELS.join(", ");
                return Err(format!("{level:?} is not a level; write one of {words}"));
            }
            has_default |= target.is_none();
            directives.push(directive);
        }
        Ok(Self { text: directives.join(","), has_default })
    }
}

fn in_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b':' | b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_targets_with_one_are_read_without_the_blanks_around_them() {
        let cases = [
            ("info", "info", true),
            ("INFO", "INFO", true),
            (" debug, h2=warn ", "debug,h2=warn", true),
            ("strait::datapath=debug", "strait::datapath=debug", false),
            ("a-b.c=off", "a-b.c=off", false),
        ];
        for (text, want, has_default) in cases {
            let read = Directives::parse(text).unwrap();
            assert_eq!((read.text.as_str(), read.has_default), (want, has_default));
        }
    }

    #[test]
    fn what_is_neither_a_level_nor_a_target_with_one_is_refused() {
        let bad = "|inof|info,|,|h2=|=info|h2=loud|a=b=info|a b=info|h2 = warn|strait[span]=info";
        for text in bad.split('|') {
            assert!(Directives::parse(text).is_err(), "{text:?}");
        }
        assert!(Directives::parse(&"a".repeat(BYTES_MAX + 1)).is_err());
    }
}
