//! Mechanisms of sockets and memory: borrowed buffers, pipes, read-ahead, the end of a socket, and
//! polls without effect that are skipped.

pub mod buffer;
pub mod copied;
pub mod gate;
pub mod linger;
pub mod pipe;
pub mod unsent;
