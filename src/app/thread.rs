//! Threads beside the data path, each with a runtime of its own, and errors of their sockets.

use std::net::SocketAddr;
use std::thread;

use anyhow::{Context, anyhow};
use tokio::runtime::{Builder, Handle, Runtime};

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

/// Runs a future on a thread and a runtime of its own, and returns the handle of the runtime.
pub(super) fn spawn_thread(
    name: &str,
    run: impl Future<Output = ()> + Send + 'static,
) -> anyhow::Result<Handle> {
    let runtime = runtime()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || runtime.block_on(run))
        .map_err(|error| anyhow!("cannot start the thread {name}: {error}"))?;
    Ok(handle)
}

pub(super) fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("cannot start a runtime")
}
