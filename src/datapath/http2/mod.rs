//! HTTP/2 stage: the connection of a peer, and its CONNECT streams.
//!
//! [`connect`] is the stage. The other modules are its mechanisms, and depend on no stage.

pub mod connect;
pub mod tunnel;

pub mod buffered_tls;
pub mod hpack;
pub mod keepalive;
pub mod meter;
pub mod request;
pub mod window;
