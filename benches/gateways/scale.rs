//! Cost of a gateway with 1, 2, 4 and more workers, each on a processor of its own, beside the
//! formula of docs/performance.md. `make scale` runs it.

use std::path::Path;

use crate::command::{Load, ended};
use crate::common::machine::processors;
use crate::common::print_uncaptured;
use crate::common::process::Process;
use crate::common::table::{head, line};
use crate::gateways::BenchEnvironment;
use crate::measurement::Unit;
use crate::outcome::Outcome;

/// Load: the name, the service, the arguments, and the unit of work.
type Row = (&'static str, &'static str, &'static str, Unit);

const LOADS: [Row; 4] = [
    ("bulk up", "sink", "up", Unit::GbSent),
    ("bulk down", "source", "down", Unit::GbReceived),
    ("request of 128 B", "echo", "rr --streams 16", Unit::Request),
    ("tunnel churn", "many", "churn --streams 4", Unit::Tunnel),
];
/// Number of connections for each worker, so that all workers have some.
const CONNECTIONS: u32 = 4;
const SECONDS: u32 = 3;
/// Part by which each doubling of the workers raises the cost. The rows of two and four workers of
/// `make bench` measure it on one processor.
const DIVISION: f64 = 0.06;
/// Multiple of the expected cost above which a row misses.
const MOST: f64 = 1.15;

/// Returns the cost that is expected with `workers`, from that with one.
pub fn expected(one: f64, workers: u32) -> f64 {
    one * (1.0 + DIVISION * f64::from(workers).log2())
}

/// Returns the numbers of workers for which half of the processors suffice.
pub fn steps(processors: u32) -> impl Iterator<Item = u32> {
    (0..processors.max(2).ilog2()).map(|power| 1 << power)
}

/// Prints the table, and returns true if no row misses. A machine of two processors has one row of
/// each load.
pub async fn run(envoy: &Path) -> bool {
    let count = processors().max(2);
    Process::own().pin(&format!("{}-{}", count / 2, count - 1));
    let world = BenchEnvironment::start(envoy, None, false).await;
    let columns = ["load", "workers", "cost", "expected", "full load", "verdict"];
    let (mut table, mut is_met) = (head(&columns), true);
    let mut of_one = [f64::NAN; LOADS.len()];
    for workers in steps(count) {
        let (gateway, process, load) = world.with_workers(workers).await;
        for (row, one) in LOADS.iter().zip(&mut of_one) {
            let before = process.cpu();
            let units = work(&load, row, workers, count / 2).await;
            let cost = (process.cpu() - before).as_secs_f64() / units;
            if workers == 1 {
                *one = cost;
            }
            let (unit, scale) = row.3.cost();
            let is_ok = cost <= MOST * expected(*one, workers);
            is_met &= is_ok;
            table += &line(&[
                row.0.to_owned(),
                workers.to_string(),
                format!("{:.3} {unit}", cost * scale),
                format!("{:.3} {unit}", expected(*one, workers) * scale),
                format!("{:.1}/s", f64::from(workers) / cost),
                if is_ok { "ok" } else { "MISS" }.to_owned(),
            ]);
        }
        drop(gateway);
    }
    print_uncaptured(&table);
    let next = 2 * steps(count).last().unwrap_or(1);
    print_uncaptured(&format!("SKIPPED {next} workers: they need {} processors\n", 2 * next));
    is_met
}

/// Runs as many loads at once as there are processors for them. Returns the units of their work.
async fn work(load: &Load, row: &Row, workers: u32, loads: u32) -> f64 {
    let &(_, service, arguments, unit) = row;
    let connections = (CONNECTIONS * workers).div_ceil(loads);
    let arguments = format!(
        "{arguments} --connections {connections} --key-exchange x25519 --seconds {SECONDS}"
    );
    let start = |_| load.start(&format!("{service}.bench:80"), &arguments);
    let running: Vec<_> = (0..loads).map(start).collect();
    let mut units = 0.0;
    for load in running {
        let done = ended(load).await;
        let outcome = Outcome::read(&done.report).unwrap_or_else(|why| panic!("{why} {done:?}"));
        units += outcome.units(unit).unwrap_or_default();
    }
    units
}
