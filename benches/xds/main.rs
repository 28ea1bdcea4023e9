//! Cost of a mesh of up to 100,000 workloads from a control plane: time, memory, and the data
//! path's latency while the mesh changes. `make bench-xds` runs it.
//!
//! Exits with 1 if a limit is missed.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod changes;
#[cfg(test)]
#[expect(dead_code, reason = "shared with other benches, which use more of it")]
#[path = "../common/mod.rs"]
mod common;
#[cfg(test)]
mod gateway;
#[cfg(test)]
mod load;
#[cfg(test)]
mod mesh;
#[cfg(test)]
mod report;
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
