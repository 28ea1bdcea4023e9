//! HBONE from the other sides: a client that opens tunnels, and an endpoint that ends them.
//!
//! The demo, the load generator and the tests speak through it. It is as strict as a peer can
//! be: only END_STREAM is a clean end, and every reset is an error that carries its code.

mod client;
mod server;
mod tunnel;

pub use client::{Client, ConnectError};
pub use server::{Incoming, serve};
pub use tunnel::Tunnel;
