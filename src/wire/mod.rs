//! Pure parsers of what peers send: no I/O, no state, no allocation beyond the result.
//!
//! Called by the data path and by the configuration, which must agree on what a name is.

pub mod authority;

pub use authority::{Authority, AuthorityError, Host};
