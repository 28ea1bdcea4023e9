//! Developer tools: load generator, conformance of gateways, demo, development certificates, HBONE
//! client and endpoint.
//!
//! The command line and the tests use them. The gateway imports nothing from here.
#![expect(clippy::print_stderr, reason = "a command prints its messages to the terminal")]

pub mod certs;
pub mod conformance;
pub mod demo;
pub mod dev;
pub mod hbone;
pub mod load;
pub mod samples;
