//! The `strait` binary. Parses the arguments and returns the exit code; everything else is in the
//! library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use tikv_jemallocator::Jemalloc;

/// jemalloc returns memory after a burst, by the options in .cargo/config.toml. With many threads
/// glibc's allocator does not.
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    strait::cli::run(strait::cli::Cli::parse())
}
