//! `strait load`: load generator for gateways, measured at the client, and its endpoints.
//!
//! `args` parses the arguments into a plan. `drive` opens connections and tunnels, runs a `slot`
//! for each stream until the time is over, and makes a `report` from the `tally`. `pace` schedules
//! operations. A `flow` carries bytes. Everything runs in one thread, so that the cost of the load
//! stays on one processor.

mod alert;
mod args;
mod command;
mod drive;
mod flow;
mod ops;
mod pace;
mod progress;
mod report;
mod run;
mod serve;
mod slot;
mod streams;
mod tally;
mod target;
mod units;
mod watchdog;

pub use command::{Args, run};
