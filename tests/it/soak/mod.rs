//! Soak: two gateways under random faults, with every byte compared and every break explained by a
//! fault. `make soak MINUTES=60 SEED=7` runs it for longer.

mod control_plane;
mod faults;
mod load;
mod wan;
mod world;

use std::fmt::Write as _;
use std::time::Duration;

use tokio::time::Instant;

use crate::support::process::run_within;
use crate::support::{print_uncaptured, raise_descriptor_limit};
use faults::Faults;
use load::Load;
use world::World;

/// Duration without `STRAIT_SOAK_MINUTES`.
const MINUTES: u64 = 2;
/// Time for the start and the end of a run.
const EDGES: Duration = Duration::from_secs(180);
/// Limit of the time until everything has ended, also after a planted leak.
const SETTLE: Duration = Duration::from_secs(60);
const LEAK_SETTLE: Duration = Duration::from_secs(5);
/// Shortest run whose memory is judged: allocators grow for minutes.
const MEMORY_MIN: Duration = Duration::from_secs(30 * 60);
/// Limit of the slope of memory, in bytes per hour.
const SLOPE_MAX: f64 = 1024.0 * 1024.0;

/// Deliberate error, to prove that a run finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planted {
    Nothing,
    /// A tunnel whose sides do not agree on one byte.
    WrongByte,
    /// A tunnel that stays open.
    Leak,
}

/// Result of a run.
#[derive(Debug, Default)]
struct Findings {
    /// Errors: wrong bytes, breaks without a fault, and states that are not those of the start.
    errors: Vec<String>,
    summary: String,
}

/// Runs the load under faults, waits for quiet, and compares.
async fn soak(time: Duration, seed: u64, planted: Planted) -> Findings {
    raise_descriptor_limit();
    let mut world = World::start(seed).await;
    load::warm_up(&world).await;
    let start = world.measure().await;
    let load = Load::start(&world, seed, planted);
    let begun = Instant::now();
    let faults = Faults::run(&mut world, time, seed).await;
    let (tunnels, held) = load.end().await;
    let mut findings = Findings::default();
    let patience = if planted == Planted::Leak { LEAK_SETTLE } else { SETTLE };
    let end = world.settle(&start, patience).await;
    findings.errors.extend(start.differences(&end));
    world.compare(&tunnels, &faults, &mut findings.errors);
    drop(held);
    let whole = tunnels.iter().filter(|tunnel| tunnel.is_complete()).count();
    let bytes: u64 = tunnels.iter().map(|tunnel| tunnel.side.map_or(0, |side| side.received)).sum();
    let text = &mut findings.summary;
    let _ = writeln!(
        text,
        "soak of {} s, seed {seed}: {} tunnels, {whole} of them complete, {bytes} bytes received, \
         {} faults:",
        begun.elapsed().as_secs(),
        tunnels.len(),
        faults.done.len()
    );
    for (name, count, broken) in faults.counts(&tunnels) {
        let _ = writeln!(text, "  {name}: {count}, with {broken} broken tunnels");
    }
    for (gateway, slope) in faults.slopes() {
        let _ = writeln!(text, "  memory of {gateway}: {:.2} MiB/h", slope / SLOPE_MAX);
        if time >= MEMORY_MIN && slope > SLOPE_MAX {
            findings.errors.push(format!("memory of {gateway} grows by {slope:.0} bytes per hour"));
        }
    }
    findings
}

fn run_for(time: Duration, seed: u64, planted: Planted) -> Findings {
    run_within(time + EDGES, soak(time, seed, planted))
}

fn number(variable: &str, default: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn random_faults_cost_no_byte_and_break_only_what_they_hit() {
    let (minutes, seed) = (number("STRAIT_SOAK_MINUTES", MINUTES), number("STRAIT_SOAK_SEED", 1));
    let findings = run_for(Duration::from_secs(60 * minutes), seed, Planted::Nothing);
    print_uncaptured(&findings.summary);
    assert!(findings.errors.is_empty(), "seed {seed}:\n{}", findings.errors.join("\n"));
}

#[test]
fn a_planted_wrong_byte_and_a_planted_leak_are_found() {
    for (planted, wanted) in [(Planted::WrongByte, "Wrong"), (Planted::Leak, "strait_tunnels_open")]
    {
        let findings = run_for(Duration::from_secs(4), 1, planted);
        let is_found = findings.errors.iter().any(|error| error.contains(wanted));
        assert!(is_found, "{planted:?}: {findings:?}");
    }
}
