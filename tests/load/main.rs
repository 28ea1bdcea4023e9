//! `strait load` against a gateway: its counts match those of the gateway, and failures are
//! reported with exit code 1.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod command;
#[cfg(test)]
mod failures;
#[cfg(test)]
mod figures;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../it/support/mod.rs"]
mod support;
