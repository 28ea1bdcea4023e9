//! The binary: arguments in, exit code out. Everything else is in the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tikv_jemallocator::Jemalloc;

/// jemalloc gives memory back after a burst, which glibc's allocator does not with many threads.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    strait::cli::run(strait::cli::Cli::parse())
}
