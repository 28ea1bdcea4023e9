//! Definition of configuration keys: name, type, default, first version and description, once.
//!
//! [`section!`] defines a map with fixed keys and [`words!`] a closed list of words. They generate
//! the Rust type, its reader, its JSON form and its [`Shape`]. [`super::reference`] turns shapes
//! into the JSON Schema and `docs/configuration.md`.

mod kinds;

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use crate::yaml::Value;

pub(super) use kinds::*;

/// First version of every key that names no other.
pub(super) const FIRST_VERSION: &str = "0.1.0";

/// A type of values: reader, JSON form and shape.
pub(super) trait Type {
    /// The Rust type of a value.
    type Out;

    /// Reads a value. Reports why before it returns `None`.
    fn read(value: Value<'_>) -> Option<Self::Out>;

    /// Returns the JSON form, for dumps and for defaults in the reference.
    fn show(out: &Self::Out) -> Json;

    /// Describes the values that [`Self::read`] accepts.
    fn shape() -> Shape;

    /// Reports entries of a list that contradict each other. Unreadable entries are left out.
    fn compare(_list: Value<'_>, _read: &[(Self::Out, Value<'_>)]) {}
}

/// Description of the values of a type.
#[derive(Clone, Debug)]
pub(super) enum Shape {
    /// A scalar: format and unit in words, and its JSON Schema.
    Scalar(String, Json),
    /// A list of values.
    List {
        /// The shape of each entry.
        of: Box<Self>,
        /// True if an empty list is an error.
        needs_entry: bool,
        /// True if one entry may stand without a list.
        or_one: bool,
    },
    /// One of two shapes.
    Either(Box<[Self; 2]>),
    /// A map whose keys are data.
    Pairs(Box<Self>),
    /// A map with fixed keys.
    Map(Vec<Key>),
    /// A map whose keys depend on the word under `kind`.
    Kinds(Vec<(&'static str, Vec<Key>)>),
}

impl Shape {
    /// Makes the shape of a scalar of these JSON types, or of this JSON Schema.
    pub(super) fn scalar(format: &str, types: Json) -> Self {
        let schema = if types.is_object() { types } else { json!({"type": types}) };
        Self::Scalar(format.to_owned(), schema)
    }

    pub(super) fn list(of: Self, needs_entry: bool, or_one: bool) -> Self {
        Self::List { of: Box::new(of), needs_entry, or_one }
    }
}

/// Definition of one key.
#[derive(Clone, Debug)]
pub(super) struct Key {
    /// The name.
    pub name: &'static str,
    /// The description, in Markdown.
    pub about: String,
    /// The first version with this key.
    pub since: &'static str,
    /// The values.
    pub shape: Shape,
    /// The meaning of its absence.
    pub absent: Absent,
    /// JSON Schema of the maps that may lack the key; the reader requires it in all others.
    pub unless: Option<Json>,
}

/// Meaning of a key's absence.
#[derive(Clone, Debug)]
pub(super) enum Absent {
    /// An error.
    Error,
    /// This value.
    Value(Json),
    /// A behaviour, in words.
    Otherwise(&'static str),
    /// The defaults of the keys below.
    Nested,
}

/// Joins the lines of a doc comment.
pub(super) fn joined(lines: &[&str]) -> String {
    let lines: Vec<_> = lines.iter().map(|line| line.trim()).collect();
    lines.join(" ")
}

/// Reports every entry whose name an earlier one has.
pub(super) fn repeated<T>(entries: &[(T, Value<'_>)], name: impl Fn(&T) -> String) {
    let mut first = HashMap::new();
    for (entry, value) in entries {
        let name = name(entry);
        if let Some(line) = first.get(&name) {
            let what = format!("has `{name}` twice, first on line {line}");
            value.error(what, "each name once");
        } else {
            first.insert(name, value.line());
        }
    }
}

/// Defines a map with fixed keys.
///
/// After `at` stands the path, as findings name it, or several of them (`A | B`). The options, in
/// this order:
/// - `or default`: the section may be absent, and implements `Default`;
/// - `parts NAME`: a further type has the values of the readable keys, for checks that find all
///   mistakes;
/// - `derive(…)`: further derives;
/// - `planned(…)`: keys of the design that this version lacks;
/// - `check(f)`: `f(read, value)` checks what several keys mean together;
/// - `compare(f)`: `f(list, entries)` checks the entries of a list of such maps.
///
/// A key is `name: TYPE = PRESENCE;`, or `name: TYPE as KIND = PRESENCE;` where a Rust type has
/// several forms. Its presence is one of:
/// - `required("EXAMPLE")`;
/// - `default(VALUE)`, or `default(VALUE, "description")`, whose value may use the keys above it;
/// - `nested()`: a section with defaults of its own;
/// - `flatten(READER)`: the keys of another section, in this map;
/// - `aside(f)`: no key, but a fact about the map such as its line; `fact(f)` is shown in dumps.
///
/// `since "VERSION"` after the presence names the first version, if it is not
/// [`FIRST_VERSION`]. `unless JSON` after that describes the maps that may lack the key.
macro_rules! section {
    (@kind $ty:ty) => { $ty };
    (@kind $ty:ty, $kind:ty) => { $kind };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    (@since) => { $crate::config::define::FIRST_VERSION };
    (@since $since:literal) => { $since };

    (@unless) => { None };
    (@unless $unless:expr) => { Some($unless) };

    // `None` is an absent key, and `Some(None)` a wrong value, which has been reported.
    (@read required($example:expr) $fields:ident [$($name:tt)*] [$($kind:tt)*]) => {
        Some($fields.need(section!(@name $($name)*), $example).and_then(
            <section!(@kind $($kind)*) as $crate::config::define::Type>::read))
    };
    (@read flatten($read:path) $fields:ident [$($name:tt)*] [$($kind:tt)*]) => {
        Some($read($fields))
    };
    (@read aside($fact:expr) $fields:ident [$($name:tt)*] [$($kind:tt)*]) => {
        Some(Some(($fact)(&*$fields)))
    };
    (@read fact($fact:expr) $fields:ident [$($name:tt)*] [$($kind:tt)*]) => {
        Some(Some(($fact)(&*$fields)))
    };
    (@read $mode:ident($($arg:tt)*) $fields:ident [$($name:tt)*] [$($kind:tt)*]) => {
        $fields.get(section!(@name $($name)*)).map(
            <section!(@kind $($kind)*) as $crate::config::define::Type>::read)
    };

    (@default default($value:expr $(, $described:literal)?)) => { $value };
    (@default nested()) => { Default::default() };
    (@default $mode:ident($($arg:tt)*)) => { return None };

    (@absent required($example:expr) [$($kind:tt)*]) => {
        $crate::config::define::Absent::Error
    };
    (@absent default($value:expr) [$($kind:tt)*]) => {
        $crate::config::define::Absent::Value(
            <section!(@kind $($kind)*) as $crate::config::define::Type>::show(&$value))
    };
    (@absent default($value:expr, $described:literal) [$($kind:tt)*]) => {
        $crate::config::define::Absent::Otherwise($described)
    };
    (@absent nested() [$($kind:tt)*]) => { $crate::config::define::Absent::Nested };

    (@describe flatten($read:path) $keys:ident [$($name:tt)*] [$($kind:tt)*] [$($doc:literal)*]
        [$($unless:expr)?] $($since:literal)?) => {
        $keys.extend(<section!(@kind $($kind)*)>::keys());
    };
    (@describe aside($fact:expr) $keys:ident [$($name:tt)*] [$($kind:tt)*] [$($doc:literal)*]
        [$($unless:expr)?] $($since:literal)?) => {};
    (@describe fact($fact:expr) $keys:ident [$($name:tt)*] [$($kind:tt)*] [$($doc:literal)*]
        [$($unless:expr)?] $($since:literal)?) => {};
    (@describe $mode:ident($($arg:tt)*) $keys:ident [$($name:tt)*] [$($kind:tt)*]
        [$($doc:literal)*] [$($unless:expr)?] $($since:literal)?) => {
        $keys.push($crate::config::define::Key {
            name: section!(@name $($name)*),
            about: $crate::config::define::joined(&[$($doc),*]),
            since: section!(@since $($since)?),
            shape: <section!(@kind $($kind)*) as $crate::config::define::Type>::shape(),
            absent: section!(@absent $mode($($arg)*) [$($kind)*]),
            unless: section!(@unless $($unless)?),
        });
    };

    (@show aside $map:ident $out:expr, [$($name:tt)*] [$($kind:tt)*]) => {};
    (@show flatten $map:ident $out:expr, [$($name:tt)*] [$($kind:tt)*]) => {
        if let serde_json::Value::Object(keys) =
            <section!(@kind $($kind)*) as $crate::config::define::Type>::show($out)
        {
            $map.extend(keys);
        }
    };
    (@show $mode:ident $map:ident $out:expr, [$($name:tt)*] [$($kind:tt)*]) => {
        let shown = <section!(@kind $($kind)*) as $crate::config::define::Type>::show($out);
        $map.insert(section!(@name $($name)*).to_owned(), shown);
    };

    (@implement $name:ident {
        $(
            $(#[doc = $doc:literal])*
            $field:ident $([$rename:literal])? : $ty:ty $(as $kind:ty)?
                = $mode:ident($($arg:tt)*) $(since $since:literal)? $(unless $unless:expr)? ;
        )*
    }) => {
        impl Default for $name {
            fn default() -> Self {
                $( let $field: $ty = section!(@default $mode($($arg)*)); )*
                Self { $($field),* }
            }
        }
    };

    (@parts $parts:ident of $name:ident {
        $(
            $(#[doc = $doc:literal])*
            $field:ident $([$rename:literal])? : $ty:ty $(as $kind:ty)?
                = $mode:ident($($arg:tt)*) $(since $since:literal)? $(unless $unless:expr)? ;
        )*
    }) => {
        /// Values of the keys, each if it is readable.
        #[derive(Debug)]
        struct $parts {
            $( $field: Option<$ty>, )*
        }

        impl $parts {
            /// Reads each key once.
            fn read(fields: &mut $crate::yaml::Fields<'_>) -> Self {
                $(
                    let $field = section!(@read $mode($($arg)*) fields
                        [$field $($rename)?] [$ty $(, $kind)?]);
                    let known = || Some(match $field {
                        Some(Some(read)) => read,
                        None => section!(@default $mode($($arg)*)),
                        Some(None) => return None,
                    });
                    let $field: Option<$ty> = known();
                )*
                Self { $($field),* }
            }

            /// Returns the whole, if every key is readable.
            fn complete(self) -> Option<$name> {
                Some($name { $( $field: self.$field?, )* })
            }
        }
    };

    (
        $(#[doc = $about:literal])*
        $vis:vis struct $name:ident at $place:literal parts $parts:ident { $($body:tt)* }
    ) => {
        section! {
            $(#[doc = $about])*
            $vis struct $name at $place { $($body)* }
        }
        section! { @parts $parts of $name { $($body)* } }
    };

    (
        $(#[doc = $about:literal])*
        $vis:vis struct $name:ident at $place:literal $(| $other:literal)* or default
            $(, $option:ident($($value:tt)*))*
        { $($body:tt)* }
    ) => {
        section! {
            $(#[doc = $about])*
            $vis struct $name at $place $(| $other)* $(, $option($($value)*))* { $($body)* }
        }
        section! { @implement $name { $($body)* } }
    };

    (
        $(#[doc = $about:literal])*
        $vis:vis struct $name:ident at $place:literal $(| $other:literal)*
            $(, derive($($derive:ident),+))?
            $(, planned($($planned:literal),+))?
            $(, check($check:path))?
            $(, compare($compare:expr))?
        {
            $(
                $(#[doc = $doc:literal])*
                $field:ident $([$rename:literal])? : $ty:ty $(as $kind:ty)?
                    = $mode:ident($($arg:tt)*) $(since $since:literal)? $(unless $unless:expr)? ;
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, Debug, PartialEq $($(, $derive)+)?)]
        $vis struct $name {
            $( $(#[doc = $doc])* pub $field: $ty, )*
        }

        impl $name {
            /// Paths, as findings name them.
            const PATHS: &[&str] = &[$place $(, $other)*];

            /// Reads the keys. All of them are read before the first one that is wrong ends it.
            pub(in crate::config) fn read_keys(
                fields: &mut $crate::yaml::Fields<'_>,
            ) -> Option<Self> {
                fields.later(&[$($($planned),+)?]);
                $(
                    let $field = section!(@read $mode($($arg)*) fields
                        [$field $($rename)?] [$ty $(, $kind)?]);
                )*
                $(
                    let $field: $ty = match $field {
                        Some(Some(read)) => read,
                        None => section!(@default $mode($($arg)*)),
                        Some(None) => return None,
                    };
                )*
                Some(Self { $($field),* })
            }

            /// Describes the keys.
            pub(in crate::config) fn keys() -> Vec<$crate::config::define::Key> {
                let mut keys = Vec::new();
                Self::describe(&mut keys);
                keys
            }

            fn describe(keys: &mut Vec<$crate::config::define::Key>) {
                $(
                    section!(@describe $mode($($arg)*) keys [$field $($rename)?]
                        [$ty $(, $kind)?] [$($doc)*] [$($unless)?] $($since)?);
                )*
            }
        }

        impl $crate::config::define::Type for $name {
            type Out = Self;

            fn read(value: $crate::yaml::Value<'_>) -> Option<Self> {
                let mut fields = value.fields(value.path_among(Self::PATHS))?;
                let read = Self::read_keys(&mut fields);
                drop(fields);
                $( let read = read.and_then(|read| $check(read, value)); )?
                read
            }

            fn show(out: &Self) -> serde_json::Value {
                let mut map = serde_json::Map::new();
                $( section!(@show $mode map &out.$field, [$field $($rename)?] [$ty $(, $kind)?]); )*
                serde_json::Value::Object(map)
            }

            fn shape() -> $crate::config::define::Shape {
                $crate::config::define::Shape::Map(Self::keys())
            }

            $(
                fn compare(
                    list: $crate::yaml::Value<'_>,
                    read: &[(Self, $crate::yaml::Value<'_>)],
                ) {
                    let compare: fn($crate::yaml::Value<'_>, &[(Self, $crate::yaml::Value<'_>)]) =
                        $compare;
                    compare(list, read);
                }
            )?
        }

        $crate::config::define::serialized!($name);
    };
}

/// Serializes a type by [`Type::show`].
macro_rules! serialized {
    ($name:ident) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let shown = <Self as $crate::config::define::Type>::show(self);
                serde::Serialize::serialize(&shown, serializer)
            }
        }
    };
}

/// Defines an enum whose values are words. The first word of a variant is written, the others are
/// read too.
macro_rules! words {
    (
        $(#[doc = $about:literal])*
        $vis:vis enum $name:ident $(or $default:ident)? {
            $(
                $(#[doc = $doc:literal])*
                $variant:ident = $word:literal $(| $alias:literal)*
            ),* $(,)?
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $( $(#[doc = $doc])* $variant, )*
        }

        impl $name {
            const WORDS: &[(&str, Self)] = &[
                $( ($word, Self::$variant), )*
                $( $( ($alias, Self::$variant), )* )*
            ];
        }

        $(
            impl Default for $name {
                fn default() -> Self {
                    Self::$default
                }
            }
        )?

        $crate::config::define::choice! {
            $name, Self::WORDS, &[
                $( ($word, &[$($doc),*]), )*
                $( $( ($alias, &[]), )* )*
            ];
        }
        $crate::config::define::serialized!($name);
    };
}

/// Implements [`Type`] for enums: their words, and the words with their descriptions.
macro_rules! choice {
    ($( $name:ty, $words:expr, $described:expr; )*) => { $(
        impl $crate::config::define::Type for $name {
            type Out = Self;

            fn read(value: $crate::yaml::Value<'_>) -> Option<Self> {
                value.choice($words)
            }

            fn show(out: &Self) -> serde_json::Value {
                $crate::config::define::word(out, $words)
            }

            fn shape() -> $crate::config::define::Shape {
                $crate::config::define::one_of($described)
            }
        }
    )* };
}

/// Implements [`Type`] for scalars: format in words, JSON types or JSON Schema, reader and JSON
/// form.
macro_rules! scalar {
    ($(
        $kind:ty => $out:ty, $format:expr, $types:expr, $read:expr, $show:expr;
    )*) => { $(
        impl $crate::config::define::Type for $kind {
            type Out = $out;

            fn read(value: $crate::yaml::Value<'_>) -> Option<$out> {
                let read: fn($crate::yaml::Value<'_>, &str) -> Option<$out> = $read;
                read(value, $format)
            }

            fn show(out: &$out) -> serde_json::Value {
                let show: fn(&$out) -> serde_json::Value = $show;
                show(out)
            }

            fn shape() -> $crate::config::define::Shape {
                $crate::config::define::Shape::scalar($format, serde_json::json!($types))
            }
        }
    )* };
}

/// Defines a type that only names a form of values, for Rust types with several forms.
macro_rules! form {
    ($($(#[$doc:meta])* $name:ident => $out:ty, $($scalar:expr),+;)*) => { $(
        $(#[$doc])*
        pub(in crate::config) enum $name {}

        $crate::config::define::scalar! { $name => $out, $($scalar),+; }
    )* };
}

pub(super) use {choice, form, scalar, section, serialized, words};
