//! Strait and its peers with the same configuration and loads: processor time per unit of work,
//! memory of fresh processes, and latency beside busy streams. `make bench` runs it.
//!
//! Exits with 1 if a row is void or misses its limit. tests/bench tests the arithmetic.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod apart;
#[cfg(test)]
mod chart;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/load, which uses more of it")]
#[path = "../../tests/load/command.rs"]
mod command;
#[cfg(test)]
#[expect(dead_code, reason = "shared with benches/floods, which uses more of it")]
#[path = "../common/mod.rs"]
mod common;
#[cfg(test)]
mod copy_loop;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/envoy, which uses more of it")]
#[path = "../../tests/envoy/process.rs"]
mod envoy;
#[cfg(test)]
mod figures;
#[cfg(test)]
mod gateways;
#[cfg(test)]
mod link;
#[cfg(test)]
mod measurement;
#[cfg(test)]
mod outcome;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod report;
#[cfg(test)]
mod rows;
#[cfg(test)]
mod sample;
#[cfg(test)]
mod scale;
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
