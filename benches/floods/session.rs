//! Run of the whole table: options, progress, and output file.

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use crate::attacks::{ATTACKS, AttackKind};
use crate::common::machine::pin_load;
use crate::common::{commit, print_uncaptured};
use crate::envoy;
use crate::gateway::Kind;
use crate::{readers, report, row};

/// Numbers of concurrent attacking connections.
const CONNECTIONS: [u32; 2] = [1, 20];

/// Measurements to make.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// Duration of each flood, in seconds
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Also measure silence, which takes half a minute a row
    #[arg(long)]
    full: bool,
    /// Only floods whose names contain this, or `readers`; nothing is written to a file then
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    fn seconds(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    fn command(&self) -> String {
        let full = if self.full { " FULL=1" } else { "" };
        format!("make floods SECONDS={}{full}", self.seconds)
    }
}

/// Measures, prints and writes. Fails if a row of Strait misses its limit.
pub fn run(options: &Options) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Read at the beginning, as a commit may follow meanwhile.
    let commit = commit();
    let (report, missed) = runtime.block_on(all(options, &commit));
    print_uncaptured(&report);
    if options.only.is_none() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results");
        let path = format!("{folder}/floods-{commit}.md");
        fs::create_dir_all(folder).expect("a folder for results");
        fs::write(&path, report).expect("a file of results");
        print_uncaptured(&format!("written to {path}\n"));
    }
    if missed > 0 {
        print_uncaptured(&format!("{missed} of Strait's rows miss the bar\n"));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Returns the report, and the number of Strait's rows that miss their limits.
async fn all(options: &Options, commit: &str) -> (String, usize) {
    let mut kinds = vec![Kind::Strait];
    if let Some(program) = envoy::program("Envoy's table") {
        let version = envoy::version(&program).await;
        kinds.push(Kind::Envoy(program, version));
    }
    let mut report = report::heading(&options.command(), commit, pin_load());
    let mut missed = 0;
    for kind in &kinds {
        let (table, misses) = floods(kind, options).await;
        report += &table;
        missed += if *kind == Kind::Strait { misses } else { 0 };
    }
    if options.wants("readers") {
        report += &report::readers_table();
        for kind in &kinds {
            print_uncaptured(&format!("{}: readers that never read\n", kind.name()));
            let readers = readers::run(kind, options.seconds()).await;
            let line = report::readers(&kind.name(), &readers);
            print_uncaptured(&line);
            report += &line;
            missed += usize::from(*kind == Kind::Strait && !readers.misses().is_empty());
        }
    }
    (report, missed)
}

/// Returns a gateway's table of floods, and the number of its rows that miss their limits.
async fn floods(kind: &Kind, options: &Options) -> (String, usize) {
    let (mut table, mut missed) = (report::table(&kind.name()), 0);
    for attack in ATTACKS.iter() {
        for connections in CONNECTIONS {
            if !options.wants(attack.name) {
                continue;
            }
            if matches!(attack.what, AttackKind::Silence) && !options.full {
                table += &report::not_measured(attack.name, connections);
                continue;
            }
            print_uncaptured(&format!("{}: {} from {connections}\n", kind.name(), attack.name));
            let row = row::run(kind, attack, connections, options.seconds()).await;
            let line = report::row(&row);
            print_uncaptured(&line);
            table += &line;
            missed += usize::from(!row.misses().is_empty());
        }
    }
    (table, missed)
}
