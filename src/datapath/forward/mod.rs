//! Stages 5 to 10, from the target of a tunnel to its end, and the driver of stage 4.
//!
//! [`hbone`] opens the tunnels of CONNECT requests, [`passthrough`] forwards connections of a TLS
//! listener, and [`binding`] those of local clients. The first two establish a
//! [`NewTunnel`](establish::NewTunnel), which becomes an [`Open`](open::Open). A [`connection`]
//! owns the open tunnels of its streams. Its [`turn`]s move bytes between its socket and each
//! [`tunnel_copy`].

pub mod binding;
pub mod connection;
pub mod downstream;
pub mod establish;
pub mod hbone;
mod limit_timer;
pub mod open;
pub mod passthrough;
mod receive;
pub mod setup;
pub mod sni;
pub mod tries;
pub mod tunnel_copy;
pub mod turn;

#[cfg(test)]
mod tests;
