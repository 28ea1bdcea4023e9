//! Run: its rounds, progress, and output files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use crate::common::machine::pin_load;
use crate::common::{commit, print_uncaptured};
use crate::envoy;
use crate::figures::{Round, Summary, Turn, ValidatedRound, Verdict};
use crate::gateways::BenchEnvironment;
use crate::report::{self, Configuration, Done};
use crate::rows::{Held, Kind, Measurement, ROWS, Row, Transport};
use crate::sample::{Gateways, Sample, memory};
use crate::{chart, readme};

/// Number of turns of a round, for processor time. Many short turns, because a virtual machine has
/// fast and slow phases of seconds, and samples of one phase are comparable.
pub const TURNS: u32 = 5;
/// Limit of the ratio of a gateway's two samples of a turn, for the median of a round's turns.
const CONTROL: RangeInclusive<f64> = 0.93..=1.07;
/// The same for quantiles of latencies, which vary more than sums: of 600 requests, six are above
/// the 99th.
const CONTROL_OF_LATENCY: RangeInclusive<f64> = 0.5..=2.0;
/// Number of rounds of memory. Fresh processes hold about the same memory each time.
const ROUNDS_OF_MEMORY: u32 = 3;
/// Number of rounds required to replace the README's table; fewer are accepted only if it has none.
const ROUNDS_OF_README: u32 = 9;
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results");
const README: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");

/// Measurements to make.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// Number of rounds of each row
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Only rows whose names contain this, in any case; nothing is written then
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Compare with this other build of strait, and with nothing else; nothing is written then
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Measures, prints and writes. Fails if a row is void or misses its limit.
pub fn run(options: &Options) -> ExitCode {
    // Read at the beginning, as a commit may follow meanwhile.
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
        let begun = Instant::now();
        let world = BenchEnvironment::start(&program, options.before.clone()).await;
        let versions = world.versions().await.join(", ");
        let (done, configurations) = measure(options, world).await;
        let heading = report::Heading {
            commit: &commit,
            rounds: options.rounds,
            versions: &versions,
            pinned,
            minutes: begun.elapsed().as_secs_f64() / 60.0,
        };
        let report = report::whole(&heading, &done, &configurations);
        (done, report)
    });
    print_uncaptured(&report);
    let all: usize = ROWS.iter().map(|row| row.peers.len()).sum();
    if done.len() == all {
        write(options, &commit, &done, &report);
    }
    let bad = |verdict| done.iter().filter(move |done| done.verdict() == verdict);
    for (verdict, what) in [
        (Verdict::Miss, "misses its bar"),
        (Verdict::Void, "is void"),
    ] {
        bad(verdict).for_each(|done| print_uncaptured(&format!("{}: {what}\n", done.name())));
    }
    match done.iter().all(|done| done.verdict() == Verdict::Ok) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Row beside each of its peers, which share Strait's samples.
type Group = Vec<Done>;

/// Returns all selected rows, and the gateways' configurations.
async fn measure(options: &Options, world: BenchEnvironment) -> (Vec<Done>, Vec<Configuration>) {
    let part = options.only.as_deref().unwrap_or_default().to_lowercase();
    let wanted = ROWS
        .iter()
        .filter(|row| row.name.to_lowercase().contains(&part));
    let mut all: Vec<Group> = wanted.map(|row| group(&world, row)).collect();
    all.retain(|group| !group.is_empty());
    // Memory first, because afterwards the gateways keep running.
    for number in 1..=options.rounds.min(ROUNDS_OF_MEMORY) {
        for group in &mut all {
            let row = group[0].row;
            if let Measurement::Memory(held) = row.what {
                progress(&format!("round {number}: {}", row.name));
                round_of_memory(&world, row, held, group).await;
            }
        }
    }
    let used = |kind: &Kind| all.iter().any(|group| kinds(group).contains(kind));
    let used: Vec<Kind> = Kind::ALL.into_iter().filter(used).collect();
    let gateways = Gateways::start(&world, &used).await;
    for number in 1..=options.rounds {
        for group in &mut all {
            let row = group[0].row;
            if !matches!(row.what, Measurement::Memory(_)) {
                progress(&format!("round {number}: {}", row.name));
                if number == 1 {
                    gateways.warm_up(row, &kinds(group)).await;
                }
                round(&gateways, group).await;
            }
        }
    }
    let configurations = gateways.all.iter().map(|one| Configuration {
        name: one.kind.name(),
        text: one.configuration(&world),
    });
    let configurations = configurations.collect();
    (all.into_iter().flatten().collect(), configurations)
}

/// Returns the row beside those of its peers that this machine has.
fn group(world: &BenchEnvironment, row: &'static Row) -> Group {
    let beside = world.beside().unwrap_or(row.peers);
    let beside = beside.iter().filter(|&&(peer, _)| world.has(peer));
    beside
        .map(|&(peer, bar)| Done {
            row,
            peer,
            bar,
            rounds: Vec::new(),
            suites: BTreeSet::new(),
        })
        .collect()
}

/// Returns Strait and the peers.
fn kinds(group: &Group) -> Vec<Kind> {
    let peers = group.iter().map(|done| done.peer);
    std::iter::once(Kind::Strait).chain(peers).collect()
}

/// Samples of a turn.
type Samples = BTreeMap<Kind, Vec<f64>>;

async fn round_of_memory(world: &BenchEnvironment, row: &Row, held: &[Held], group: &mut Group) {
    let mut samples = Samples::new();
    for kind in kinds(group) {
        samples.insert(kind, vec![memory(world, row, held, kind).await]);
    }
    print_samples(&samples, row);
    judge(group, &[samples], 0.0, &CONTROL);
}

async fn round(gateways: &Gateways<'_>, group: &mut Group) {
    let (count, control) = match group[0].row.what {
        Measurement::P99 => (1, CONTROL_OF_LATENCY),
        _ => (TURNS, CONTROL),
    };
    let (mut turns, watch) = (Vec::new(), gateways.watch());
    for _ in 0..count {
        match turn(gateways, group).await {
            Ok(samples) => {
                print_samples(&samples, group[0].row);
                turns.push(samples);
            }
            Err(why) => {
                for done in group {
                    done.rounds.push(print_round(done.peer, Err(why.clone())));
                }
                return;
            }
        }
    }
    judge(group, &turns, watch.foreign(), &control);
}

/// Samples each gateway once, and again in reverse order: A B B A.
async fn turn(gateways: &Gateways<'_>, group: &mut Group) -> Result<Samples, String> {
    let mut samples = Samples::new();
    let kinds = kinds(group);
    for &kind in kinds.iter().chain(kinds.iter().rev()) {
        let sample = gateways.sample(group[0].row, kind).await;
        let Sample { cost, cipher_suite } =
            sample.map_err(|why| format!("{}: {why}", kind.name()))?;
        let suite = cipher_suite.map(|suite| format!("{} {suite}", kind.name()));
        group[0].suites.extend(suite);
        samples.entry(kind).or_default().push(cost);
    }
    Ok(samples)
}

/// Makes a round of these turns beside each peer.
fn judge(group: &mut Group, turns: &[Samples], foreign: f64, control: &RangeInclusive<f64>) {
    for done in group {
        let turn = |samples: &Samples| Turn {
            strait: samples[&Kind::Strait].clone(),
            peer: samples[&done.peer].clone(),
        };
        let turns = turns.iter().map(turn).collect();
        let round = Round { turns, foreign }.validate(done.peer.name(), control);
        done.rounds.push(print_round(done.peer, round));
    }
}

/// Prints the samples of a turn.
fn print_samples(samples: &Samples, row: &Row) {
    let list = |(kind, costs): (&Kind, &Vec<f64>)| {
        let costs: Vec<String> = costs.iter().map(|cost| format!("{cost:.3}")).collect();
        format!("{} {}", kind.name(), costs.join(" "))
    };
    let lists: Vec<String> = samples.iter().map(list).collect();
    progress(&format!("  {} {}", lists.join(", "), row.unit()));
}

/// Prints the result of a round.
fn print_round(peer: Kind, round: ValidatedRound) -> ValidatedRound {
    let peer = peer.name();
    match &round {
        Ok(round) => progress(&format!("  beside {peer}: {:.3}", round.ratio())),
        Err(why) => progress(&format!("  beside {peer}: void: {why}")),
    }
    round
}

/// Writes the results, and the README's table and chart if there were enough rounds.
fn write(options: &Options, commit: &str, done: &[Done], report: &str) {
    fs::create_dir_all(FOLDER).expect("a folder for results");
    let path = format!("{FOLDER}/gateways-{commit}.md");
    fs::write(&path, report).expect("a file of results");
    print_uncaptured(&format!("written to {path}\n"));
    let old = fs::read_to_string(README).expect("the README");
    let section = readme::section(&old).expect("a place for the table");
    if options.rounds < ROUNDS_OF_README && !section.is_empty() {
        print_uncaptured("the README keeps its table, which is of more rounds or of another run\n");
        return;
    }
    let new = readme::replaced(&old, &report::for_readme(commit, options.rounds, done));
    fs::write(README, new.expect("a place for the table")).expect("the README");
    let title = format!("Strait at {commit} beside its peers, one core each");
    let chart = chart::svg(&title, &report::entries(done));
    fs::write(format!("{FOLDER}/gateways.svg"), chart).expect("a chart");
}

/// Prints a progress line.
fn progress(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Done {
    /// Returns the row's name, with its peer unless that is always Envoy.
    pub fn name(&self) -> String {
        match self.row.way {
            Transport::Hbone => self.row.name.to_owned(),
            Transport::Sni => format!("{}: {}", self.row.name, self.peer.name()),
        }
    }

    pub fn summary(&self) -> Summary {
        Summary::of(&self.rounds)
    }

    pub fn verdict(&self) -> Verdict {
        self.summary().verdict(self.bar)
    }
}
