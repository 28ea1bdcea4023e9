//! Macros of model tests.

/// Declares the kinds of events of a model test, and a list of all of them.
macro_rules! events {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        enum Event {
            $($(#[$doc])* $name,)*
        }

        impl Event {
            const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

pub(crate) use events;
