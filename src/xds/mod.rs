//! Control path: readers of the discovery sources, and the mesh that they produce.
//!
//! The modules here read each source, and do not depend on the data path. [`stream`] and [`dns`]
//! publish through `snapshot::Publisher`. `app` publishes the mesh of files.

pub mod authorization;
pub mod cache;
pub mod client;
mod control_plane;
mod convert;
pub mod dns;
pub mod envoy;
pub mod file;
mod first_answers;
mod hold;
mod interner;
pub mod live;
pub mod objects;
mod push;
pub mod store;
pub mod stream;
pub mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod unknown;
pub mod wds;

use std::future::pending;

use tokio::time::{Instant, sleep_until};

/// Sleeps until a time; for ever without one.
async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
