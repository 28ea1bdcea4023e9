//! `strait conformance`: the wire contract, floods and faults of clients against any HBONE gateway.
//!
//! A `case` is a line of the table: what a client sends, and the results that conform. Cases of
//! frames begin in a `State` of stream 1 and end with an `Outcome`; the others are functions. A
//! `peer` writes the frames of `raw`. The tests of Strait run the same table, and permit only its
//! own outcomes.

mod case;
mod command;
pub mod endpoint;
mod faults;
pub mod floods;
mod outcome;
mod peer;
pub mod raw;
mod report;
mod rfc9113;
mod table;
mod tls;
mod tunnels;

pub use case::{Case, Group, Verdict};
pub use command::{Args, run};
pub use peer::{Names, Target};
pub use table::table;
pub use tls::FixedCertificate;
