//! Runtime of a thread, and errors of its sockets.

use std::net::SocketAddr;

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

/// Adds the address and the configuration key to a bind error.
pub(super) fn with_bind_context<T>(
    bound: std::io::Result<T>,
    key: &str,
    address: SocketAddr,
) -> anyhow::Result<T> {
    bound.with_context(|| {
        format!(
            "cannot listen on {address} (`{key}`); stop the process that uses it, or change \
                 `{key}`"
        )
    })
}

pub(super) fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("cannot start a runtime")
}
