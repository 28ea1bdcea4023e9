//! Strait and its peers as the same gateway, under the same loads: processor time for each unit of
//! work, memory of fresh processes, and latency beside busy streams. `make bench` runs it.
//!
//! Exits with 1 if a row is void or misses its bar. Its arithmetic is tested by tests/bench.

// As in tests/it: cargo builds a bench as a test, and what is marked so may end by `expect`.
#![expect(
    unreachable_pub,
    reason = "a bench exports nothing, and plain `pub` reads better"
)]

#[cfg(test)]
mod chart;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/load, which uses more of it")]
#[path = "../../tests/load/command.rs"]
mod command;
#[cfg(test)]
#[expect(
    dead_code,
    reason = "shared with benches/floods, which uses more of it"
)]
#[path = "../common/mod.rs"]
mod common;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/envoy, which uses more of it")]
#[path = "../../tests/envoy/process.rs"]
mod envoy;
#[cfg(test)]
mod figures;
#[cfg(test)]
mod gateways;
#[cfg(test)]
mod outcome;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod readme;
#[cfg(test)]
mod report;
#[cfg(test)]
mod rows;
#[cfg(test)]
mod sample;
#[cfg(test)]
mod session;
#[cfg(test)]
#[expect(
    dead_code,
    unused_imports,
    reason = "shared with tests/it, which uses more of it"
)]
#[path = "../../tests/it/support/mod.rs"]
mod support;

#[cfg(test)]
fn main() -> std::process::ExitCode {
    use clap::Parser as _;

    session::run(&session::Options::parse())
}
