//! Pure parsers of data from peers: no I/O, no state, no allocation beyond the result.
//!
//! The data path and the configuration share them, so that both agree on the syntax of names.
//! Regions and issuer hashes come from the configuration and from operators.

pub mod authority;
pub mod baggage;
pub mod client_hello;
mod drain;
pub mod label;
mod load;
pub mod proxy_protocol;
mod region;
mod server_hello;
pub mod sni;
mod spki;
pub mod trace;
mod transit;
mod via;

pub use authority::{Authority, AuthorityError, Host};
pub use drain::DrainTarget;
pub use load::{LOAD_HEADER, ServiceLoad};
pub use region::RegionPattern;
pub use server_hello::ServerAnswer;
pub use spki::{SpkiHash, UNKNOWN_CLUSTER};
pub use transit::Transit;
pub use via::{GatewayHash, HOPS_MAX, VIA_HEADER, Via};

/// HBONE port (docs/wire-contract.md 1.8), at which HBONE endpoints are dialled.
pub const HBONE_PORT: u16 = 15008;
