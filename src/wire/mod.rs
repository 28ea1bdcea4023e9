//! Pure parsers of what peers send: no I/O, no state.
//!
//! Called by the data path and by the configuration, which must agree on what a name is.

pub mod authority;
mod identity;

pub use authority::{Authority, AuthorityError, Host};
pub use identity::parse_identity;
