//! `strait load` against a gateway: what it counts is what the gateway counted, and what goes
//! wrong is said and exits with 1.

#![expect(
    unreachable_pub,
    reason = "a test binary exports nothing, and plain `pub` reads better"
)]

#[cfg(test)]
mod command;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod figures;
#[cfg(test)]
#[expect(
    dead_code,
    unused_imports,
    reason = "shared with tests/it, which uses more of it"
)]
#[path = "../it/support/mod.rs"]
mod support;
