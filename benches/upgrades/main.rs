//! Upgrades of a gateway under load: each new process takes over from the one before it.
//! `make upgrades` runs it.
//!
//! Exits with 1 if a connection or a byte is lost.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

#[cfg(test)]
#[expect(dead_code, reason = "shared with benches/gateways, which uses more of it")]
#[path = "../common/mod.rs"]
mod common;
#[cfg(test)]
mod load;
#[cfg(test)]
mod session;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../../tests/it/support/mod.rs"]
mod support;

#[cfg(test)]
fn main() -> std::process::ExitCode {
    use clap::Parser as _;

    session::run(&session::Options::parse())
}
