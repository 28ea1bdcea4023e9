//! Threads of the HTTP ports that do not belong to the data path.

use std::net::TcpListener;

use axum::Router;
use tracing::error;

use crate::admin::{self, Limits};
use crate::lifecycle::Lifecycle;

/// Serves a port on a dedicated thread, so that its clients delay neither other ports nor the
/// control path.
///
/// # Errors
/// The system lacks threads or descriptors.
pub(super) fn spawn(
    name: &str,
    socket: TcpListener,
    router: Router,
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
