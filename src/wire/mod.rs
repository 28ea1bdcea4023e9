//! Pure parsers of what peers send: no I/O, no state, no allocation beyond the result.
//!
//! Called by the data path and by the configuration, which must agree on what a name is; and the
//! regions that the configuration and operators name.

pub mod authority;
pub mod hello;
mod region;
pub mod sni;

pub use authority::{Authority, AuthorityError, Host};
pub use region::RegionPattern;
