//! Costs of the gateway's own code, step by step: `make parts` runs it.
//!
//! First a table of allocations, system calls, copied bytes and processor time of the gateway's
//! thread, for a connection, a tunnel, a request and a mebibyte, which fails above limits of system
//! calls and of the time of traces; then criterion's benches of each step.
//! `-- NAME` runs the benches whose names contain NAME. `-- allocations` prints only the table.
//! `-- alike` prints the durations of rejections that a peer must not be able to
//! distinguish.

// As in tests/it: cargo builds a bench as a test, and code marked as such may use `expect`.
#![expect(unreachable_pub, reason = "a bench exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod alike;
#[cfg(test)]
mod allocations;
#[cfg(test)]
mod gateway;
#[cfg(test)]
mod handshake;
#[cfg(test)]
mod mesh;
#[cfg(test)]
mod pieces;
#[cfg(test)]
mod syscalls;
#[cfg(test)]
mod table;
#[cfg(test)]
mod traces;

#[cfg(test)]
#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;

#[cfg(test)]
use std::process::ExitCode;

#[cfg(test)]
fn main() -> ExitCode {
    // cargo itself adds `--bench`.
    let filter = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    if filter.as_deref() == Some("alike") {
        return alike::print();
    }
    let mut code = ExitCode::SUCCESS;
    if filter.as_deref().is_none_or(|name| name == "allocations") {
        code = table::print();
    }
    if filter.as_deref() == Some("allocations") {
        return code;
    }
    let mut criterion = criterion::Criterion::default().configure_from_args();
    pieces::run(&mut criterion);
    handshake::run(&mut criterion);
    criterion.final_summary();
    code
}
