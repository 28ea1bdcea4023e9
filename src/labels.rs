//! Closed lists of values, each with a label for metrics, logs and the configuration; and text from
//! numbers, lists and names.

use std::io::{self, ErrorKind};

/// Defines an enum whose variants have labels, with `ALL`, `label` and `Display`. `#[with]` names a
/// function that returns the further values of each variant.
macro_rules! labelled {
    (
        #[with($of:vis $property:ident: $type:ty, $returns:literal)]
        $(#[$about:meta])*
        $vis:vis enum $name:ident {
            $( $(#[$doc:meta])* $variant:ident = ($label:literal, $($value:expr),+), )+
        }
    ) => {
        labelled! { $(#[$about])* $vis enum $name { $( $(#[$doc])* $variant = $label, )+ } }

        impl $name {
            #[doc = $returns]
            $of const fn $property(self) -> $type {
                match self {
                    $( Self::$variant => ($($value),+), )+
                }
            }
        }
    };
    (
        $(#[$about:meta])*
        $vis:vis enum $name:ident {
            $( $(#[$doc:meta])* $variant:ident = $label:literal, )+
        }
    ) => {
        $(#[$about])*
        #[derive(derive_more::Display)]
        #[display("{}", self.label())]
        $vis enum $name {
            $( $(#[$doc])* $variant, )+
        }

        impl $name {
            /// Every variant, in the order of the enum.
            $vis const ALL: [Self; [$($label),+].len()] = [$(Self::$variant),+];

            /// Returns the label.
            $vis const fn label(self) -> &'static str {
                match self {
                    $( Self::$variant => $label, )+
                }
            }
        }
    };
}

pub(crate) use labelled;

/// Returns a number of things as text: `1 tunnel`, `2 tunnels`.
pub(crate) fn count(number: impl ToString, one: &str) -> String {
    let number = number.to_string();
    let plural = if number == "1" { "" } else { "s" };
    format!("{number} {one}{plural}")
}

pub(crate) fn join<T: ToString>(values: impl IntoIterator<Item = T>, separator: &str) -> String {
    let values: Vec<_> = values.into_iter().map(|one| one.to_string()).collect();
    values.join(separator)
}

/// Joins the first `max` values by commas, with the number of the others.
pub(crate) fn join_first<T: ToString>(values: impl IntoIterator<Item = T>, max: usize) -> String {
    let mut values = values.into_iter();
    let first = join(values.by_ref().take(max), ", ");
    match values.count() {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// Returns the result of printing. A reader that closes the pipe is not an error.
pub(crate) fn printed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Escapes what a terminal would interpret: control characters, including line ends, and those that
/// change the direction of text.
pub(crate) fn escape_control(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        let is_direction = matches!(
            char,
            '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        if char.is_control() || is_direction {
            out.extend(char.escape_default());
        } else {
            out.push(char);
        }
    }
    out
}
