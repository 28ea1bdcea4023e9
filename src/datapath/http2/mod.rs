//! Stage 4: HTTP/2 for CONNECT.
//!
//! [`server`] is the protocol as a state machine without I/O (sans-I/O). [`input`] and [`output`]
//! are the buffers between it and TLS. The driver of each connection is in
//! [`forward`](super::forward).

pub mod tunnel;

pub mod frame;
mod headers;
pub mod hpack;
pub mod meter;
mod receive;
pub mod request;
pub mod resets;
pub mod server;
pub mod streams;

pub mod input;
pub mod output;

#[cfg(test)]
mod tests;
