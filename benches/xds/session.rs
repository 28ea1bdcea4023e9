//! Run: options, order of the measurements, and output file.

use std::process::ExitCode;
use std::time::Duration;

use crate::common::page::replaced;
use crate::common::{commit, print_uncaptured};
use crate::gateway::{Running, StartCost};
use crate::load::percentile;
use crate::mesh::{Mesh, Shape};
use crate::report::{Row, report, section};
use crate::{changes, load};

/// Meshes by their number of workloads.
const MESHES: [(Shape, usize); 5] = [
    (Shape::Short, 1_000),
    (Shape::Short, 10_000),
    (Shape::Short, 100_000),
    (Shape::Istiod, 100_000),
    (Shape::Rolling, 10_000),
];

/// Measurements to make.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// Four minutes: fewer changes and pairs, and nothing is written to a file
    #[arg(long)]
    short: bool,
    /// Only meshes of so many workloads; nothing is written to a file then
    #[arg(long, value_name = "WORKLOADS")]
    only: Option<usize>,
    /// Only meshes of this kind; nothing is written to a file then
    #[arg(long, value_name = "KIND")]
    mesh: Option<Shape>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// Returns the command line.
    fn command(&self) -> String {
        let only = self.only.map(|only| format!("--only {only}"));
        let short = self.short.then(|| "--short".to_owned());
        let mesh = self.mesh.map(|shape| format!("--mesh {}", shape.name()));
        let args: Vec<_> = short.into_iter().chain(only).chain(mesh).collect();
        if args.is_empty() {
            "make bench-xds".to_owned()
        } else {
            format!("make bench-xds ARGS='{}'", args.join(" "))
        }
    }

    /// Returns the selected meshes; for a size that is not in the table, one of each kind.
    fn meshes(&self) -> Vec<Mesh> {
        let of_kind = |(shape, _): &(Shape, usize)| self.mesh.is_none_or(|only| only == *shape);
        let meshes = MESHES.into_iter().filter(of_kind);
        let mut meshes: Vec<_> = meshes
            .map(|(shape, workloads)| Mesh { shape, workloads: self.only.unwrap_or(workloads) })
            .collect();
        meshes.dedup();
        meshes
    }
}

/// Number of measurements.
struct Extent {
    changes: usize,
    pairs: usize,
    each: Duration,
    settle: Duration,
}

/// Measures, prints and writes. Fails if one of the largest meshes misses a limit.
pub fn run(options: &Options) -> ExitCode {
    let extent = if options.short {
        Extent {
            changes: 200,
            pairs: 3,
            each: Duration::from_secs(1),
            settle: Duration::from_secs(3),
        }
    } else {
        Extent {
            changes: 2_000,
            pairs: 7,
            each: Duration::from_secs(3),
            settle: Duration::from_secs(12),
        }
    };
    // Read at the beginning, as a commit may follow meanwhile.
    let commit = commit();
    let meshes = options.meshes();
    let largest = meshes.iter().map(|mesh| mesh.workloads).max();
    let rows: Vec<_> = meshes.iter().map(|&mesh| row(mesh, &extent)).collect();
    let barred = rows.iter().filter(|row| Some(row.mesh.workloads) == largest);
    let missed: Vec<_> = barred.flat_map(Row::missed).collect();
    let report = report(&options.command(), &commit, &rows, &missed);
    print_uncaptured(&report);
    if !options.short && options.only.is_none() && options.mesh.is_none() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results");
        let path = format!("{folder}/xds-{commit}.md");
        std::fs::write(path, report).expect("a file of results");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/performance.md");
        let page = std::fs::read_to_string(path).expect("a page");
        let page = replaced(&page, "bench-xds", &section(&commit, &rows));
        std::fs::write(path, page.expect("a place for the table")).expect("a page");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn row(mesh: Mesh, extent: &Extent) -> Row {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (taken, cached, restart, mut pairs) = runtime.expect("a runtime").block_on(async {
        let (running, serving) = Running::start(mesh, false).await;
        let pairs = load::run(&running, extent.pairs, extent.each).await;
        drop(running);
        let (_, StartCost { bytes: empty, .. }) =
            taken(Mesh { workloads: 1, ..mesh }, false, extent).await;
        let less =
            |taken: StartCost| StartCost { bytes: taken.bytes.saturating_sub(empty), ..taken };
        let (_, bare) = taken(mesh, false, extent).await;
        let (running, cached) = taken(mesh, true, extent).await;
        let restart = running.restarted().await;
        let bare = StartCost { serving, ..less(bare) };
        (bare, less(cached), restart, pairs)
    });
    pairs.sort_by(|one, other| one.ratio().total_cmp(&other.ratio()));
    let mut changes = changes::run(mesh, extent.changes);
    Row {
        mesh,
        taken,
        cached,
        restart,
        change: (percentile(&mut changes, 50), percentile(&mut changes, 99)),
        pair: pairs[pairs.len() / 2],
    }
}

async fn taken(mesh: Mesh, with_cache: bool, extent: &Extent) -> (Running, StartCost) {
    let (running, serving) = Running::start(mesh, with_cache).await;
    let bytes = running.memory(extent.settle).await;
    (running, StartCost { serving, bytes })
}
