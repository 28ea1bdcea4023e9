//! Limits of the data path: handshakes, retirement of connections, buffered bytes, connections of
//! bindings, route loops, descriptors, and tunnels to exposed services.

pub mod admission;
pub mod aging;
pub mod budget;
pub mod clients;
pub mod descriptors;
pub mod load;
pub mod loop_detection;
pub mod service;
