//! Developer tools: load generator, conformance of gateways, demo, development certificates, HBONE
//! client and endpoint.
//!
//! The command line and the tests use them. The gateway imports nothing from here.
#![expect(clippy::print_stderr, reason = "a command prints its messages to the terminal")]

use std::io::{self, ErrorKind};

pub mod certs;
pub mod conformance;
pub mod demo;
pub mod dev;
pub mod hbone;
pub mod load;
pub mod samples;

/// Returns the result of printing. A reader that closes the pipe is not an error.
fn printed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
