//! Run: its rounds, progress, and output files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use crate::common::machine::pin_load;
use crate::common::page::{replaced, section};
use crate::common::{commit, print_uncaptured};
use crate::copy_loop::{self, Forward};
use crate::envoy;
use crate::figures::{Limit, Round, Summary, Turn, ValidatedRound, Verdict};
use crate::gateways::BenchEnvironment;
use crate::measurement::{Held, Measurement};
use crate::report::{self, Configuration, Done, Page};
use crate::rows::{Kind, ROWS, Row, Transport};
use crate::sample::{Gateways, Sample, memory};
use crate::{chart, scale};

/// Number of turns of a round, for processor time. Many short turns, because a virtual machine has
/// fast and slow phases of seconds, and samples of one phase are comparable.
pub const TURNS: u32 = 5;
/// Limit of the ratio of a gateway's two samples of a turn, for the median of a round's turns.
const CONTROL: RangeInclusive<f64> = 0.93..=1.07;
/// The same for a single turn: one pair of samples varies √5 times as much as the median of five.
const CONTROL_OF_ONE: RangeInclusive<f64> = 0.85..=1.18;
/// The same for quantiles of latencies, which vary more than sums: of 600 requests, six are above
/// the 99th. It holds for goodput too, which depends on few losses.
const CONTROL_OF_LATENCY: RangeInclusive<f64> = 0.5..=2.0;
/// Number of rounds of memory. Fresh processes hold about the same memory each time.
const ROUNDS_OF_MEMORY: u32 = 3;
/// Part of the least capacity of a row's gateways at which the added latency is measured.
const RATE_OF_CAPACITY: f64 = 0.1;
/// Number of rounds required to replace a page's table; fewer are accepted only if it has none.
const ROUNDS_OF_PAGES: u32 = 9;
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results");
const PAGES: [(Page, &str); 2] = [
    (Page::Readme, concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")),
    (Page::Performance, concat!(env!("CARGO_MANIFEST_DIR"), "/docs/performance.md")),
];

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
    /// Measure 1, 2, 4 and more workers, and nothing else; nothing is written then
    #[arg(long)]
    scale: bool,
    /// Run as the copy loop, which is a process of the bench
    #[arg(long, hide = true, value_name = "LISTEN=TO,TO", num_args = 1..)]
    copy_loop: Vec<Forward>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Measures, prints and writes. Fails if a row is void or misses its limit.
pub fn run(options: &Options) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    if !options.copy_loop.is_empty() {
        runtime.block_on(copy_loop::run(&options.copy_loop));
    }
    // Read at the beginning, as a commit may follow meanwhile.
    let commit = commit();
    let Some(program) = envoy::program("the bench: it needs both gateways") else {
        return ExitCode::FAILURE;
    };
    if options.scale {
        let is_met = runtime.block_on(scale::run(&program));
        return if is_met { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let (done, report) = runtime.block_on(async {
        let pinned = pin_load();
        let begun = Instant::now();
        let needs_link = wanted(options).any(|row| row.way == Transport::LossyLink);
        let before = options.before.clone();
        let world = BenchEnvironment::start(&program, before, needs_link).await;
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
    for (verdict, what) in [(Verdict::Miss, "misses its bar"), (Verdict::Void, "is void")] {
        bad(verdict).for_each(|done| print_uncaptured(&format!("{}: {what}\n", done.name())));
    }
    if done.iter().all(|done| done.verdict() == Verdict::Ok) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Rows of one load beside each of their peers. They share the samples.
type Group = Vec<Done>;

/// Returns the selected rows.
fn wanted(options: &Options) -> impl Iterator<Item = &'static Row> {
    let part = options.only.as_deref().unwrap_or_default().to_lowercase();
    let compares_builds = options.before.is_some();
    ROWS.iter().filter(move |row| {
        row.name.to_lowercase().contains(&part) && (!compares_builds || row.compares_builds())
    })
}

/// Returns all selected rows, and the gateways' configurations.
async fn measure(options: &Options, world: BenchEnvironment) -> (Vec<Done>, Vec<Configuration>) {
    let mut all = groups(&world, wanted(options));
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
                    let least = gateways.warm_up(row, &gateways_of(group)).await;
                    set_rate(group, least);
                }
                round(&gateways, group).await;
            }
        }
    }
    let configurations = gateways
        .all
        .iter()
        .map(|one| Configuration { name: one.kind.name(), text: one.configuration(&world) });
    let configurations = configurations.collect();
    (all.into_iter().flatten().collect(), configurations)
}

/// Returns the rows beside those of their peers that this machine has, grouped by their loads.
fn groups(world: &BenchEnvironment, rows: impl Iterator<Item = &'static Row>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for row in rows.filter(|row| world.carries(row.way)) {
        let beside = world.beside().unwrap_or(row.peers);
        let beside = beside.iter().filter(|&&(peer, _)| world.has(peer));
        let done: Group = beside.map(|&(peer, bar)| Done::new(row, peer, bar)).collect();
        match groups.last_mut() {
            Some(group) if group[0].row.shares_load(row) => group.extend(done),
            _ if done.is_empty() => {}
            _ => groups.push(done),
        }
    }
    groups
}

/// Returns Strait, or its variant, and the peers.
fn kinds(group: &Group) -> Vec<Kind> {
    let mut kinds = vec![group[0].row.subject];
    for done in group {
        if !kinds.contains(&done.peer) {
            kinds.push(done.peer);
        }
    }
    kinds
}

/// Returns Strait, or its variant, and the peers that are gateways.
fn gateways_of(group: &Group) -> Vec<Kind> {
    let all = kinds(group).into_iter();
    all.filter(|kind| *kind != Kind::Direct).collect()
}

/// Sets the rate of a row of added latency, by the least capacity of its gateways.
fn set_rate(group: &mut Group, capacity: f64) {
    for done in group.iter_mut().filter(|done| done.row.adds_latency()) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate is positive, and far below 2^53"
        )]
        let rate = (capacity * RATE_OF_CAPACITY) as u64;
        done.rate = Some(rate.max(1));
    }
}

/// Samples of a turn.
type Samples = BTreeMap<Kind, Vec<Sample>>;

async fn round_of_memory(world: &BenchEnvironment, row: &Row, held: &[Held], group: &mut Group) {
    let mut samples = Samples::new();
    for kind in kinds(group) {
        let cost = memory(world, row, held, kind).await;
        samples.insert(kind, vec![Sample::Memory(cost)]);
    }
    judge(group, &[samples], 0.0);
}

async fn round(gateways: &Gateways<'_>, group: &mut Group) {
    let (mut turns, watch) = (Vec::new(), gateways.watch());
    for _ in 0..group[0].row.turns() {
        match turn(gateways, group).await {
            Ok(samples) => turns.push(samples),
            Err(why) => {
                for done in group {
                    done.rounds.push(print_round(done.peer, Err(why.clone())));
                }
                return;
            }
        }
    }
    judge(group, &turns, watch.foreign());
}

/// Samples each gateway once, and again in reverse order: A B B A.
async fn turn(gateways: &Gateways<'_>, group: &mut Group) -> Result<Samples, String> {
    let mut samples = Samples::new();
    let kinds = kinds(group);
    for &kind in kinds.iter().chain(kinds.iter().rev()) {
        let sample = gateways.sample(group[0].row, kind, group[0].rate).await;
        let sample = sample.map_err(|why| format!("{}: {why}", kind.name()))?;
        let suite = sample.cipher_suite();
        let suite = suite.map(|suite| format!("{} {suite}", kind.name()));
        group[0].suites.extend(suite);
        samples.entry(kind).or_default().push(sample);
    }
    Ok(samples)
}

/// Makes a round of these turns for each row beside each peer.
fn judge(group: &mut Group, turns: &[Samples], foreign: f64) {
    for done in group {
        print_samples(done, turns);
        let round = judged(done, turns, foreign);
        done.rounds.push(print_round(done.peer, round));
    }
}

fn judged(done: &Done, turns: &[Samples], foreign: f64) -> ValidatedRound {
    let names = [done.row.subject, done.peer];
    let [strait, peer] = names.map(|kind| costs(kind, done.row, turns));
    let pairs = strait?.into_iter().zip(peer?);
    let turns_of_pair = pairs.map(|(strait, peer)| Turn { strait, peer });
    let round = Round { turns: turns_of_pair.collect(), foreign };
    let round = round.validate(names.map(Kind::name), &control(done.row))?;
    if done.row.adds_latency() && done.peer != Kind::Direct {
        return round.above(&costs(Kind::Direct, done.row, turns)?);
    }
    Ok(round)
}

/// Returns the costs of a gateway in each turn.
fn costs(kind: Kind, row: &Row, turns: &[Samples]) -> Result<Vec<Vec<f64>>, String> {
    let cost = |sample: &Sample| {
        let cost = sample.cost(row.what);
        cost.ok_or_else(|| format!("{}: nothing was done", kind.name()))
    };
    let of_turn = |samples: &Samples| samples[&kind].iter().map(cost).collect();
    turns.iter().map(of_turn).collect()
}

fn control(row: &Row) -> RangeInclusive<f64> {
    match row.what {
        Measurement::Cpu(_) if row.turns() == 1 => CONTROL_OF_ONE,
        Measurement::Cpu(_) | Measurement::Memory(_) => CONTROL,
        _ => CONTROL_OF_LATENCY,
    }
}

/// Prints the samples of a row beside a peer.
fn print_samples(done: &Done, turns: &[Samples]) {
    let row = done.row;
    let list = |kind: Kind| {
        let costs = costs(kind, row, turns).unwrap_or_default();
        let costs: Vec<String> = costs.iter().flatten().map(|cost| format!("{cost:.3}")).collect();
        format!("{} {}", kind.name(), costs.join(" "))
    };
    let lists = [row.subject, done.peer].map(list).join(", ");
    progress(&format!("  {}: {lists} {}", row.name, row.what.unit()));
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

/// Writes the results, and the tables of pages and the chart if there were enough rounds.
fn write(options: &Options, commit: &str, done: &[Done], report: &str) {
    fs::create_dir_all(FOLDER).expect("a folder for results");
    let path = format!("{FOLDER}/gateways-{commit}.md");
    fs::write(&path, report).expect("a file of results");
    print_uncaptured(&format!("written to {path}\n"));
    for (page, path) in PAGES {
        let old = fs::read_to_string(path).expect("a page");
        let table = section(&old, "bench").expect("a place for the table");
        if options.rounds < ROUNDS_OF_PAGES && !table.is_empty() {
            print_uncaptured(&format!("{path} keeps its table, which is of another run\n"));
            continue;
        }
        let new = replaced(&old, "bench", &page.section(commit, options.rounds, done));
        fs::write(path, new.expect("a place for the table")).expect("a page");
        if page == Page::Performance {
            let title = format!("Strait at {commit} beside its peers, one core each");
            let chart = chart::svg(&title, &report::entries(done));
            fs::write(format!("{FOLDER}/gateways.svg"), chart).expect("a chart");
        }
    }
}

/// Prints a progress line.
fn progress(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

impl Row {
    /// Returns the number of turns of a round. Latencies and goodput need one long sample of each
    /// gateway.
    fn turns(&self) -> u32 {
        match self.way {
            Transport::LossyLink => 1,
            _ if self.is_paced() => 1,
            _ => TURNS,
        }
    }
}

impl Done {
    fn new(row: &'static Row, peer: Kind, bar: Limit) -> Self {
        Self { row, peer, bar, rate: None, rounds: Vec::new(), suites: BTreeSet::new() }
    }

    /// Returns the row's name, with its peer if there may be others.
    pub fn name(&self) -> String {
        let is_envoy = self.peer == Kind::Envoy && self.row.way != Transport::Sni;
        if is_envoy {
            self.row.name.to_owned()
        } else {
            format!("{}: {}", self.row.name, self.peer.name())
        }
    }

    pub fn summary(&self) -> Summary {
        Summary::of(&self.rounds)
    }

    pub fn verdict(&self) -> Verdict {
        self.summary().verdict(self.bar)
    }
}
