//! The control path: from a discovery source to the mesh that snapshots are built of.
//!
//! Owns how each source is read. It never knows the data path: `app` publishes what it returns.

pub mod authorization;
pub mod cache;
pub mod client;
mod count;
pub mod dns;
pub mod envoy;
mod exports;
pub mod file;
mod first_answers;
mod names;
mod node;
pub mod objects;
mod push;
pub mod source;
pub mod store;
pub mod stream;
mod unknown;
pub mod wds;
mod words;
