//! Threads of the HTTP ports that are not the data path's.

use std::net::TcpListener;

use axum::Router;
use tracing::error;

use crate::admin::{self, Limits};
use crate::lifecycle::Lifecycle;

/// Serves a port on a thread of its own: its clients hold up no other port, and not the control
/// path.
///
/// # Errors
/// The system lacks threads or descriptors.
pub(super) fn spawn(
    name: &str,
    (socket, router): (TcpListener, Router),
    limits: Limits,
    lifecycle: &Lifecycle,
) -> anyhow::Result<()> {
    let phases = lifecycle.phases();
    super::spawn_thread(name, async move {
        match tokio::net::TcpListener::from_std(socket) {
            Ok(listener) => admin::serve(limits, listener, router, phases).await,
            Err(error) => error!(%error, "cannot listen"),
        }
    })?;
    Ok(())
}
