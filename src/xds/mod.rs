//! Control path: readers of the discovery sources, and the mesh that they produce.
//!
//! The modules here read each source. They do not depend on the data path: `app` publishes
//! their results.

pub mod authorization;
pub mod cache;
pub mod client;
mod count;
pub mod dns;
pub mod envoy;
mod exports;
pub mod file;
mod first_answers;
mod interner;
mod names;
mod node;
pub mod objects;
mod push;
pub mod source;
pub mod store;
pub mod stream;
mod unknown;
pub mod wds;
