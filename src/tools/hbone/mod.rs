//! HBONE client and HBONE endpoint.
//!
//! The demo, the load generator and the tests use them. They are as strict as any peer: only
//! END_STREAM is a clean end, and every reset is an error with its code.

mod client;
mod server;
mod tunnel;

pub(crate) use client::resolve;
pub use client::{Client, ConnectError};
pub use server::{IncomingTunnel, serve};
pub use tunnel::Tunnel;
