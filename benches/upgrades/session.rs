//! Run of the upgrades: options, progress and output.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::common::table::{head, line};
use crate::common::{commit, print_uncaptured};
use crate::load::{self, LONG, Outcome};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, raise_descriptor_limit};

/// Pause between two upgrades.
const PAUSE: Duration = Duration::from_millis(500);
const COLUMNS: [&str; 7] = [
    "upgrades",
    "of them failed",
    "start to take-over",
    "connections",
    "lost",
    "p50, p99",
    "bytes",
];

/// Measurements to make.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// Number of upgrades; the one in the middle fails on purpose
    #[arg(long, default_value_t = 50)]
    count: u32,
    /// New connections per second
    #[arg(long, default_value_t = 500)]
    rate: u32,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Upgrades, and prints the result. Fails if anything is lost.
pub fn run(options: &Options) -> ExitCode {
    raise_descriptor_limit();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let is_lost = runtime.block_on(upgrade(options));
    if is_lost { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Returns true if a connection or a byte was lost.
async fn upgrade(options: &Options) -> bool {
    let (net, folder) = (Net::new(), tempfile::tempdir().expect("a folder"));
    let settings = settings(net, folder.path());
    let mut serving = Gateway::start(&settings).await;
    let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
    let stop = Arc::<AtomicBool>::default();
    let address = serving.address;
    let held = load::hold(address, Arc::clone(&stop)).await;
    let clients = tokio::spawn(load::connect(address, options.rate, Arc::clone(&stop)));
    let (mut drained, mut times, mut failed) = (Vec::new(), Vec::new(), 0);
    for number in 1..=options.count {
        sleep(PAUSE).await;
        if number == options.count.div_ceil(2) {
            fail(&settings).await;
            failed += 1;
            continue;
        }
        let begun = Instant::now();
        let next = Gateway::spawn(&settings, |_| {});
        next.logged("took over from the process that served").await;
        times.push(begun.elapsed());
        print_uncaptured(&format!("upgrade {number} of {}\n", options.count));
        drained.push(std::mem::replace(&mut serving, next));
    }
    sleep(PAUSE).await;
    stop.store(true, Ordering::Relaxed);
    let mut outcome = clients.await.expect("clients");
    let held = held.await.expect("tunnels");
    for process in &mut drained {
        assert!(process.exited().await.success(), "{}", process.log());
    }
    print_uncaptured(&report(options, failed, &mut times, (&mut outcome, &held)));
    !outcome.lost.is_empty() || held.is_err()
}

/// Settings of every process: drained ones keep their tunnels for as long as these last.
fn settings(net: Net, folder: &Path) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.more = "drain: {lag: 0s, deadline: 7d}\n".to_owned();
    settings.take_over = Some(folder.join("take-over"));
    settings
}

/// Starts a process with an invalid mesh.
async fn fail(settings: &Settings<'_>) {
    let mut bad = Gateway::spawn(settings, |folder| {
        std::fs::write(folder.join("mesh.yaml"), "services: 1\n").expect("a file");
    });
    assert!(!bad.exited().await.success(), "an invalid mesh was accepted");
}

fn report(
    options: &Options,
    failed: u32,
    times: &mut [Duration],
    (outcome, held): (&mut Outcome, &std::io::Result<u64>),
) -> String {
    times.sort_unstable();
    let seconds = |time: Duration| format!("{:.3} s", time.as_secs_f64());
    let middle = times.get(times.len() / 2).copied().unwrap_or_default();
    let lost: usize = outcome.lost.values().sum();
    let latency = [50, 99].map(|hundredths| seconds(outcome.quantile(hundredths)));
    let bytes = match held {
        Ok(bytes) => format!("{bytes} through {LONG} tunnels of the first process, all equal"),
        Err(error) => format!("a tunnel of the first process broke: {error}"),
    };
    let mut text = format!(
        "
# Upgrades at {}

Made by `make upgrades COUNT={} RATE={}`: each new process takes over from the one before it. Load
and gateways share the machine.

",
        commit(),
        options.count,
        options.rate
    );
    text += &head(&COLUMNS);
    text += &line(&[
        options.count.to_string(),
        failed.to_string(),
        seconds(middle),
        (outcome.latencies.len() + lost).to_string(),
        lost.to_string(),
        latency.join(", "),
        bytes,
    ]);
    for (error, count) in &outcome.lost {
        text += &format!("lost {count}: {error}\n");
    }
    text
}
