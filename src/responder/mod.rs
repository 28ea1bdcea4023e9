//! DNS responder for local clients: the names of bindings, with their addresses.
//!
//! `names` is the table of names, `answer` the answer to one query, and `serve` the sockets. The
//! answers are those of the configuration in use, which may change.

mod answer;
mod names;
mod serve;

pub use serve::{Responder, Sockets, run};
