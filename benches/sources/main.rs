//! One source that takes what it can, beside a victim with another identity: over one gateway, over
//! the gateways of two networks, and through a binding. `make sources` runs it. `make fairness`
//! measures a quiet cluster beside one that does more than its share.
//!
//! Exits with 1 if the victim loses a request or a tunnel of this build, or waits too long for one.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

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
mod gateways;
#[cfg(test)]
mod held;
#[cfg(test)]
mod noise;
#[cfg(test)]
mod pool;
#[cfg(test)]
mod session;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../../tests/it/support/mod.rs"]
mod support;
#[cfg(test)]
#[path = "../floods/victim.rs"]
mod victim;
#[cfg(test)]
mod world;

#[cfg(test)]
fn main() -> std::process::ExitCode {
    use clap::Parser as _;

    session::run(&session::Options::parse())
}
