//! Limits of the data path: handshakes, buffered bytes, descriptors, and route loops.

pub mod admission;
pub mod budget;
pub mod hellos;
pub mod pool;
