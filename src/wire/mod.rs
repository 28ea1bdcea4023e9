//! Pure parsers of what peers send: no I/O, no state, no allocation beyond the result.
//!
//! Called by the data path and by the configuration, which must agree on what a name is; and the
//! regions and issuers that the configuration and operators name.

pub mod authority;
pub mod baggage;
pub mod hello;
mod region;
pub mod sni;
mod spki;

pub use authority::{Authority, AuthorityError, Host};
pub use region::RegionPattern;
pub use spki::{SpkiHash, UNKNOWN_CLUSTER};
