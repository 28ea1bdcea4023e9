//! Results as Markdown: the table, its explanation, and the method.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use crate::chart::{Entry, digits};
use crate::common::table::{head, line};
use crate::figures::{Costs, FOREIGN_MAX, Limit, ValidatedRound, Verdict};
use crate::rows::{Kind, README_ROWS, Row};
use crate::sample::{SECONDS, SECONDS_OF_LATENCY, SECONDS_OF_LINK};
use crate::session::TURNS;

/// Row beside one peer, with its rounds.
pub struct Done {
    pub row: &'static Row,
    pub peer: Kind,
    pub bar: Limit,
    /// Operations per second, if they follow from the capacity of the gateways.
    pub rate: Option<u64>,
    pub rounds: Vec<ValidatedRound>,
    /// Gateways, each with its negotiated cipher suites.
    pub suites: BTreeSet<String>,
}

/// Conditions of a run.
pub struct Heading<'a> {
    pub commit: &'a str,
    pub rounds: u32,
    pub versions: &'a str,
    pub pinned: &'a str,
    pub minutes: f64,
}

/// Configuration of a gateway.
pub struct Configuration {
    pub name: &'static str,
    pub text: String,
}

const COLUMNS: [&str; 9] = [
    "work",
    "Strait",
    "beside",
    "ratio [95 %]",
    "bar",
    "floor",
    "(ztunnel)",
    "verdict",
    "rounds that count",
];

/// Returns the whole file.
pub fn whole(heading: &Heading<'_>, done: &[Done], configurations: &[Configuration]) -> String {
    let mut text = opening(heading, done);
    text += &table(done);
    text += &voids(done);
    text += "\n## Configurations\n\nEnvoy is started with `--concurrency 1`.\n";
    for Configuration { name, text: own } in configurations {
        let _ = write!(text, "\n{name}:\n\n```\n{}\n```\n", own.trim_end());
    }
    text
}

fn opening(heading: &Heading<'_>, done: &[Done]) -> String {
    let Heading { commit, rounds, versions, pinned, minutes } = heading;
    let suites: BTreeSet<&str> =
        done.iter().flat_map(|done| done.suites.iter().map(String::as_str)).collect();
    let suites: Vec<&str> = suites.into_iter().collect();
    format!(
        "# Gateways, at {commit}

Made by `make bench ROUNDS={rounds}` in {minutes:.0} minutes: Strait as the same gateway as
{versions}, one worker each; {pinned}.
{machine}.
None writes an access log. Those that end TLS have the same chain (root, intermediate, P-256 leaf),
TLS 1.3 by X25519, which each load has verified ({suites}).

A cost is the gateway's processor time, to the nanosecond, from the start of a load's process to
its end, divided by what the load reports to have done in {SECONDS} s. So it includes opening and
closing the load's connections and tunnels: some milliseconds in a row that is not about them. The
gateways stay up for these rows, and each row begins with a short load that is not counted.

A turn is Strait, Envoy, Envoy, Strait, and with more peers likewise; its ratio is that of the
means. A round has {TURNS} turns of each row, or one where latency is measured. It is void if the
second sample of one gateway differs from its first one by more than 7 % (latencies: by more than
half), in the median of the turns, or if more than {foreign:.0} % of the machine's time went to
other processes. The table has medians of the turns of all rounds that count, and the 95 % interval
of the ratio by the bootstrap. A row of which fewer than half of the rounds count is void.

{rows}
ztunnel's column was measured elsewhere, in the same way beside Envoy, and is no part of this run.

",
        machine = machine(),
        suites = suites.join(", "),
        foreign = 100.0 * FOREIGN_MAX,
        rows = explained_rows(done),
    )
}

/// Explains the rows that are more than one load on one gateway.
fn explained_rows(done: &[Done]) -> String {
    let rate = done.iter().find_map(|done| done.rate);
    let rate = rate.map_or_else(|| "not measured".to_owned(), |rate| format!("{rate} a second"));
    let congestion = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    let congestion = congestion.unwrap_or_default();
    format!(
        "Churn and handshakes go to eight endpoints, as one would be out of ports.

Rows of SNI are TLS that is passed on, at a listener of its own, by the server name of a hello of
rustls; each of their connections is one tunnel. HAProxy is measured as Debian ships it, and with
`splice-request`, `splice-response` and pipes of 1 MiB; nginx by its stream module as shipped. A
connection there is TCP, hello, dial, 128 bytes each way, and a close from both sides.

Memory is what private dirty pages grow by in a fresh process that has become quiet, three rounds
without control pairs. Idle tunnels: 50 connections, the slope between 1,000 and 4,500 tunnels;
of SNI between 1,000 and 5,000 connections, of which every fourth has carried a burst of 1 MiB each
way where that is reported. Stalled
readers: 100 connections with one tunnel each, the connection included. Latencies are of requests
at 200 a second for {SECONDS_OF_LATENCY} s, from when each was due, beside a stream that echoes as
fast as it can and one that has sent 8 MiB to an echo and never reads; gateway, load and echo share
two processors, so that they are the scheduler's too. Processor time beside them is per gigabyte
that has returned to the load. These three rows are of one load. Its pair of samples of processor
time may differ by 18 %.

The floor of processor time is a copy loop of one thread: accept, dial, `recv` and `send` of at most
64 KiB, without TLS, HTTP/2, policy and log. Its load has a bare connection for each stream. The
floor of latency is a bare connection straight to the endpoint. In brackets is Strait's multiple of
the floor.

Two and four workers are threads of one process on the processor of the gateways, beside Strait with
one worker, with four connections. So the rows show what the division costs, and not what more
processors gain.

Two hops are two gateways in a row, each of a network of its own; the first forwards all tunnels to
the second, over connections of 256 streams. The processor time is that of both. Memory is that of
the first one, and contains its part of a pooled connection: 256 times the figure is such a
connection with all its tunnels.

Added latency is that of requests of 128 bytes on 64 streams, less that of the same requests on 64
direct connections in the same turn. The rate is a tenth of what the slowest gateway reaches with
the same streams in a closed loop: {rate}. It contains the load's own TLS and HTTP/2.

The long link is a relay of packets between two network namespaces: 40 ms and 1 % loss in each
direction, 10 MB/s, TCP by {congestion} in the gateway and the load. A figure is the time per
megabyte of one connection with one stream in {SECONDS_OF_LINK} s; its inverse is the goodput.
",
        congestion = congestion.trim(),
    )
}

/// Describes the processors, the memory and the kernel.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim_matches([' ', '\t', ':']).to_owned()
    };
    let processors = crate::common::machine::processors();
    let model = field(&read("/proc/cpuinfo"), "model name");
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{processors} × {model}, {memory} of memory, Linux {}", kernel.trim())
}

/// Returns the table of all rows. A floor is a cell of its row.
pub fn table(done: &[Done]) -> String {
    let peers = done.iter().filter(|done| !done.peer.is_floor());
    peers.fold(head(&COLUMNS), |text, peer| {
        let mut of_row = done.iter().filter(|done| done.row.name == peer.row.name);
        text + &row(peer, of_row.find(|done| done.peer.is_floor()))
    })
}

/// Formats a floor, and Strait's cost as its multiple.
fn floor(floor: &Done) -> Option<String> {
    let costs = floor.summary().costs?;
    let floor = cost(costs.peer, floor.row.what.unit());
    Some(format!("{floor} ({:.1})", costs.ratio.median))
}

fn row(done: &Done, of_floor: Option<&Done>) -> String {
    line(&cells(done, of_floor))
}

fn cells(done: &Done, of_floor: Option<&Done>) -> [String; COLUMNS.len()] {
    let summary = done.summary();
    let unit = done.row.what.unit();
    let or_none = |cell: &dyn Fn(&Costs) -> String| match &summary.costs {
        Some(costs) => cell(costs),
        None => "–".to_owned(),
    };
    [
        done.row.name.to_owned(),
        or_none(&|costs| cost(costs.strait, unit)),
        or_none(&|costs| format!("{} {}", done.peer.name(), cost(costs.peer, unit))),
        or_none(&|costs| {
            let ratio = costs.ratio;
            let [median, low, high] = [ratio.median, ratio.low, ratio.high].map(digits);
            format!("{median} [{low}, {high}]")
        }),
        match done.bar {
            Limit::Ratio(ratio) => digits(ratio),
            Limit::Absolute(most) => format!("{most} {unit}"),
            Limit::None => "–".to_owned(),
        },
        of_floor.and_then(floor).unwrap_or_else(|| "–".to_owned()),
        format!("({})", done.row.ztunnel),
        match summary.verdict(done.bar) {
            Verdict::Ok if done.bar == Limit::None => "–".to_owned(),
            Verdict::Ok => "ok".to_owned(),
            Verdict::Miss => "MISS".to_owned(),
            Verdict::Void => "void".to_owned(),
        },
        format!("{} of {}", summary.valid, summary.rounds),
    ]
}

/// Formats a cost with three digits.
fn cost(cost: f64, unit: &str) -> String {
    let decimals = match cost {
        ..0.1 => 4,
        ..1.0 => 3,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    format!("{cost:.decimals$} {unit}")
}

/// Lists the rounds that are void.
fn voids(done: &[Done]) -> String {
    let mut text = String::new();
    for done in done {
        for (index, round) in done.rounds.iter().enumerate() {
            if let Err(why) = round {
                let _ = writeln!(text, "- {}, round {}: {why}", done.name(), index + 1);
            }
        }
    }
    if text.is_empty() {
        return "\nNo round is void.\n".to_owned();
    }
    format!("\nVoid rounds:\n\n{text}")
}

/// Page with a table of the rows with a bar, each beside the cheapest peer with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Has [`README_ROWS`].
    Readme,
    /// Has all rows and the chart.
    Performance,
}

impl Page {
    /// Returns its section, which a run replaces.
    pub fn section(self, commit: &str, rounds: u32, done: &[Done]) -> String {
        let (chart, folder) = match self {
            Self::Readme => ("", "benches/results"),
            Self::Performance => (
                "![Strait's cost as a part of each peer's](../benches/results/gateways.svg)\n\n",
                "../benches/results",
            ),
        };
        let table = self.table(done);
        format!(
            "{chart}{table}\n{rounds} rounds at {commit}; [how, where, and the configurations]\
             ({folder}/gateways-{commit}.md)."
        )
    }

    fn table(self, done: &[Done]) -> String {
        let columns = ["work", "Strait", "beside", "ratio", "bar", "verdict"];
        let places = columns.map(|column| COLUMNS.iter().position(|one| one.starts_with(column)));
        let ratio = |done: &Done| done.summary().costs.map_or(0.0, |costs| costs.ratio.median);
        let is_wanted = |done: &&Done| {
            let is_shown = self == Self::Performance || README_ROWS.contains(&done.row.name);
            let has_bar = done.bar != Limit::None && !done.peer.is_floor();
            is_shown && has_bar && done.row.subject == Kind::Strait
        };
        let is_hardest = |one: &&Done| {
            let same = |other: &&Done| other.row.name == one.row.name;
            let mut others = done.iter().filter(is_wanted).filter(same);
            others.all(|other| ratio(other) <= ratio(one))
        };
        let rows = done.iter().filter(is_wanted).filter(is_hardest);
        rows.fold(head(&columns), |text, one| {
            let cells = cells(one, None);
            let without_interval =
                |cell: &str| cell.split(" [").next().unwrap_or_default().to_owned();
            let short = places.iter().flatten();
            let short = short.map(|&place| without_interval(&cells[place]));
            text + &line(&short.collect::<Vec<_>>())
        })
    }
}

/// Returns the bars of the chart; void rows have none.
pub fn entries(done: &[Done]) -> Vec<Entry> {
    let entry = |done: &Done| {
        if done.peer.is_floor() {
            return None;
        }
        let (summary, bar) = (done.summary(), done.bar);
        let costs = summary.costs.filter(|_| summary.verdict(bar) != Verdict::Void)?;
        Some(Entry { name: done.name(), ratio: costs.ratio, bar: bar.as_ratio(&costs) })
    };
    done.iter().filter_map(entry).collect()
}
