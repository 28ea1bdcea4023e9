//! Variables that are booleans or words.

use super::Builder;
use super::environment::Setting;

/// Parses a boolean, in the forms of Istio's proxies and in other common ones.
pub fn truth(text: &str) -> Option<bool> {
    let is_one_of = |words: &[&str]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if is_one_of(&["true", "t", "1", "yes", "on"]) {
        Some(true)
    } else if is_one_of(&["false", "f", "0", "no", "off"]) {
        Some(false)
    } else {
        None
    }
}

impl Builder<'_> {
    /// Returns a variable that is a boolean, and its name. Other values are ignored with a warning.
    pub(super) fn flag(&mut self, name: &str) -> Option<(bool, String)> {
        let setting = self.environment.first(&[name])?;
        let read = truth(&setting.value);
        if read.is_none() {
            let what = format!("is `{}`, and is ignored", setting.shown());
            self.warn(&setting, what, "`true` or `false`");
        }
        Some((read?, setting.by))
    }

    /// Returns `LOG_FORMAT` if it is JSON. Text is the default.
    pub(super) fn log_format(&mut self) -> Option<Setting> {
        let setting = self.environment.first(&["LOG_FORMAT"])?;
        let is = |word| setting.value.eq_ignore_ascii_case(word);
        if !is("json") && !is("text") && !is("plain") {
            let what = format!("is `{}`, and is ignored", setting.shown());
            self.warn(&setting, what, "`json` or `text`");
        }
        is("json").then_some(setting)
    }
}
