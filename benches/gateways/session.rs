//! A run: its rounds, what is said meanwhile, and what is written in the end.

use std::fs;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::time::Instant;

use crate::common::machine::pin_load;
use crate::common::{commit, say};
use crate::envoy;
use crate::figures::{Judged, Round, Summary, Turn, Verdict};
use crate::gateways::{Kind, World};
use crate::report::{self, Done};
use crate::rows::{Held, ROWS, Row, What};
use crate::sample::{Both, Sample, memory};
use crate::{chart, readme};

/// Turns of a round, for processor time: many short ones, as a virtual machine has fast and slow
/// phases of seconds, and what is in one phase can be compared.
pub const TURNS: u32 = 5;
/// The two samples of a gateway in a turn may differ by so much, in the median of a round's turns.
const CONTROL: RangeInclusive<f64> = 0.93..=1.07;
/// Quantiles of latencies vary more than sums do: of 600 requests, six are above the 99th.
const CONTROL_OF_LATENCY: RangeInclusive<f64> = 0.5..=2.0;
/// Fresh processes hold much the same memory each time.
const ROUNDS_OF_MEMORY: u32 = 3;
/// So many rounds make a table for the README; fewer only where it has none.
const ROUNDS_OF_README: u32 = 9;
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results");
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");

/// What to measure.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// How often each row is measured
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only rows whose names contain this; nothing is written then
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Cargo tells every bench that it is one
    #[arg(long, hide = true)]
    bench: bool,
}

/// Measures, prints and writes. Rows that are void or miss the bar make a failure.
pub fn run(options: &Options) -> ExitCode {
    // Of the beginning: somebody may commit meanwhile.
    let commit = commit();
    let Some(program) = envoy::program("the bench: it needs both gateways") else {
        return ExitCode::FAILURE;
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let (done, report) = runtime.block_on(async {
        let pinned = pin_load();
        let version = envoy::version(&program).await;
        let begun = Instant::now();
        let (done, configurations) = measure(options, World::start(&program).await).await;
        let heading = report::Heading {
            commit: &commit,
            rounds: options.rounds,
            envoy: &version,
            pinned,
            minutes: begun.elapsed().as_secs_f64() / 60.0,
        };
        let report = report::whole(&heading, &done, &configurations);
        (done, report)
    });
    say(&report);
    if options.only.is_none() {
        write(options, &commit, &done, &report);
    }
    let bad = |verdict| done.iter().filter(move |done| done.verdict() == verdict);
    for (verdict, what) in [
        (Verdict::Miss, "misses its bar"),
        (Verdict::Void, "is void"),
    ] {
        bad(verdict).for_each(|done| say(&format!("{}: {what}\n", done.row.name)));
    }
    match done.iter().all(|done| done.verdict() == Verdict::Ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// All rows that are wanted, and the gateways' configurations.
async fn measure(options: &Options, world: World) -> (Vec<Done>, [String; 2]) {
    let wants = |row: &&Row| {
        options
            .only
            .as_ref()
            .is_none_or(|part| row.name.contains(part))
    };
    let mut all: Vec<Done> = ROWS.iter().filter(wants).map(Done::new).collect();
    // Memory first: afterwards both gateways stay up.
    for number in 1..=options.rounds.min(ROUNDS_OF_MEMORY) {
        for done in &mut all {
            if let What::Memory(held) = done.row.what {
                progress(&format!("round {number}: {}", done.row.name));
                let round = round_of_memory(&world, done.row, held).await;
                done.rounds.push(told(round));
            }
        }
    }
    let both = Both::start(&world).await;
    for number in 1..=options.rounds {
        for done in &mut all {
            if !matches!(done.row.what, What::Memory(_)) {
                progress(&format!("round {number}: {}", done.row.name));
                if number == 1 {
                    both.warm_up(done.row).await;
                }
                let round = round(&both, done).await;
                done.rounds.push(told(round));
            }
        }
    }
    let configurations = [&both.strait, &both.envoy].map(|one| one.configuration(&world));
    (all, configurations)
}

async fn round_of_memory(world: &World, row: &Row, held: &[Held]) -> Judged {
    let turn = Turn {
        strait: vec![memory(world, row, held, Kind::Strait).await],
        envoy: vec![memory(world, row, held, Kind::Envoy).await],
    };
    tell(&turn, row);
    Round {
        turns: vec![turn],
        foreign: 0.0,
    }
    .judged(&CONTROL)
}

async fn round(both: &Both<'_>, done: &mut Done) -> Judged {
    let (count, control) = match done.row.what {
        What::P99 => (1, CONTROL_OF_LATENCY),
        _ => (TURNS, CONTROL),
    };
    let (mut turns, watch) = (Vec::new(), both.watch());
    for _ in 0..count {
        let turn = turn(both, done).await?;
        tell(&turn, done.row);
        turns.push(turn);
    }
    let foreign = watch.foreign();
    Round { turns, foreign }.judged(&control)
}

/// A B B A.
async fn turn(both: &Both<'_>, done: &mut Done) -> Result<Turn, String> {
    let (mut strait, mut envoy) = (Vec::new(), Vec::new());
    for kind in [Kind::Strait, Kind::Envoy, Kind::Envoy, Kind::Strait] {
        let Sample { cost, cipher_suite } = both.sample(done.row, kind).await?;
        done.suites
            .insert(format!("{} {cipher_suite}", kind.name()));
        match kind {
            Kind::Strait => strait.push(cost),
            Kind::Envoy => envoy.push(cost),
        }
    }
    Ok(Turn { strait, envoy })
}

/// Says the samples of a turn.
fn tell(turn: &Turn, row: &Row) {
    let list = |costs: &[f64]| {
        let costs: Vec<String> = costs.iter().map(|cost| format!("{cost:.3}")).collect();
        costs.join(" ")
    };
    let (strait, envoy) = (list(&turn.strait), list(&turn.envoy));
    progress(&format!("  Strait {strait}, Envoy {envoy} {}", row.unit()));
}

/// Says what a round has come to.
fn told(round: Judged) -> Judged {
    match &round {
        Ok(round) => progress(&format!("  ratio {:.3}", round.ratio())),
        Err(why) => progress(&format!("  void: {why}")),
    }
    round
}

/// The results, and in the README the table and the chart if there were rounds enough.
fn write(options: &Options, commit: &str, done: &[Done], report: &str) {
    fs::create_dir_all(FOLDER).expect("a folder for results");
    let path = format!("{FOLDER}/gateways-{commit}.md");
    fs::write(&path, report).expect("a file of results");
    say(&format!("written to {path}\n"));
    let old = fs::read_to_string(README).expect("the README");
    let section = readme::section(&old).expect("a place for the table");
    if options.rounds < ROUNDS_OF_README && !section.is_empty() {
        say("the README keeps its table, which is of more rounds or of another run\n");
        return;
    }
    let new = readme::replaced(&old, &report::for_readme(commit, options.rounds, done));
    fs::write(README, new.expect("a place for the table")).expect("the README");
    let title = format!("Strait at {commit} beside Envoy, one core each");
    let chart = chart::svg(&title, &report::entries(done));
    fs::write(format!("{FOLDER}/gateways.svg"), chart).expect("a chart");
}

/// A line for who waits.
fn progress(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Done {
    fn new(row: &'static Row) -> Self {
        Self {
            row,
            rounds: Vec::new(),
            suites: std::collections::BTreeSet::new(),
        }
    }

    pub fn summary(&self) -> Summary {
        Summary::of(&self.rounds)
    }

    pub fn verdict(&self) -> Verdict {
        self.summary().verdict(self.row.bar)
    }
}
