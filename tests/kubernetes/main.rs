//! `discovery.kind: kubernetes` against a stub of an API server, with the gateway's process.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod effects;
#[cfg(test)]
mod server;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../it/support/mod.rs"]
mod support;
#[cfg(test)]
mod tests;
