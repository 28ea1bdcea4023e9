//! Stage 4: the HTTP/2 server for CONNECT, and the owner of each connection with its tunnels.
//!
//! [`server`] is the protocol without input and output. [`turn`] moves bytes between the peer and
//! the endpoints. [`connection`] owns both, and handles events from outside.

pub mod connection;
pub mod turn;

pub mod tunnel;

pub mod frame;
mod headers;
pub mod hpack;
pub mod meter;
mod receive;
pub mod request;
pub mod server;
pub mod slots;
pub mod streams;

pub mod input;
pub mod output;
