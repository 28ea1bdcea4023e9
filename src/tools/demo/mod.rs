//! `strait demo`: the gateway with real TLS, HTTP/2 and sockets, within a minute.
//!
//! Two clusters run on one machine. East has two endpoints, each of which terminates its own inner
//! mTLS, and the gateway, started as the process that users deploy. West has a client that opens
//! double HBONE through it. Every step checks its result, and the first failure ends the demo.

mod client;
mod report;
mod steps;
mod world;

pub use steps::{Args, run};
