//! Command line of `strait`: argument parsing and dispatch, one file per command.
//!
//! Exit codes: 0 success; 1 failure, with a message; 2 wrong arguments, or no answer from the
//! running gateway.
#![expect(clippy::print_stderr, reason = "a command prints its messages to the terminal")]

mod ask;
mod bug_report;
mod check;
mod command;
mod doctor;
mod drain;
mod explain;
mod link;
mod proxy;
mod schema;
mod source;
mod status;
mod text;
#[cfg(feature = "tools")]
mod tools;
mod trust;

pub use command::{Cli, run};
