//! Floods and bombs, and a hundred readers that never read, each beside a victim, for
//! Strait and for Envoy with the same configuration. `make floods` runs it.
//!
//! Exits with 1 if a row of Strait misses its limit.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod attacker;
#[cfg(test)]
mod attacks;
#[cfg(test)]
#[expect(dead_code, reason = "shared with benches/gateways, which uses more of it")]
#[path = "../common/mod.rs"]
mod common;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/envoy, which uses more of it")]
#[path = "../../tests/envoy/process.rs"]
mod envoy;
#[cfg(test)]
mod gateway;
#[cfg(test)]
mod readers;
#[cfg(test)]
mod records;
#[cfg(test)]
mod report;
#[cfg(test)]
mod row;
#[cfg(test)]
mod session;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../../tests/it/support/mod.rs"]
mod support;
#[cfg(test)]
#[expect(dead_code, reason = "shared with benches/sources, which uses more of it")]
mod victim;

#[cfg(test)]
fn main() -> std::process::ExitCode {
    use clap::Parser as _;

    session::run(&session::Options::parse())
}
