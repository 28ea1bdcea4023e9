//! Mechanisms of sockets and memory: borrowed buffers, splice pipes, sides of a copied tunnel,
//! shared sockets, sides that have vanished, closing a socket without losing its last bytes, and
//! gated polls.

pub mod acks;
pub mod buffer;
pub mod copied;
pub mod endpoint;
pub mod gate;
pub mod linger;
pub mod pipe;
pub mod shared_socket;
pub mod side;
