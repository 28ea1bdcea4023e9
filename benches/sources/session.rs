//! Run of the whole table: options, progress, measurement and output file.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::sleep;

use crate::attacks::{ATTACKS, Attack, Entrance, Reach};
use crate::common::machine::pin_load;
use crate::common::process::{Peak, Process};
use crate::common::table::{head, line};
use crate::common::{commit, print_uncaptured};
use crate::gateways::Program;
use crate::held::{HeldTunnels, TUNNELS};
use crate::noise::{DONE, NOISE_ROWS};
use crate::support::raise_descriptor_limit;
use crate::victim::{Latency, Victim, Way};
use crate::world::{Build, World};
use crate::{envoy, pool};

/// Warm-up of the victim, and the time in which it is measured at rest.
const WARM_UP: Duration = Duration::from_millis(500);
const REST: Duration = Duration::from_secs(2);
/// Bar of p99 beside noise: this multiple of p99 alone, or this much more.
const NOISE_FACTOR: f64 = 1.5;
const NOISE_TIME: Duration = Duration::from_millis(2);
/// Limit of sockets in TIME_WAIT, and its value in these runs.
const TIME_WAIT_MAX: &str = "/proc/sys/net/ipv4/tcp_max_tw_buckets";
const FEW: &str = "256";
/// Name of this build.
const THIS: &str = "this";
/// Columns of the table.
const COLUMNS: [&str; 9] = [
    "attack",
    "build",
    "p50 alone → beside it",
    "p99 alone → beside it",
    "the same without a gateway",
    "lost",
    "tunnels ended",
    "memory grown",
    "noise per second",
];

/// Measurements to make.
#[derive(Debug, clap::Parser)]
pub struct Options {
    /// Duration of each attack, in seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Another build of strait, measured beside this one
    #[arg(long, value_name = "PROGRAM")]
    before: Option<PathBuf>,
    /// Noise of another cluster in place of attacks
    #[arg(long)]
    noise: bool,
    /// Only attacks whose names contain this, or `pool`; nothing is written to a file then
    #[arg(long, value_name = "PART")]
    only: Option<String>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Outcome of one attack.
struct Row {
    /// Latency alone and beside the attack.
    latency: [Latency; 2],
    /// The same of requests to the endpoint itself, which share the load's processor.
    straight: [Latency; 2],
    ended: usize,
    grown: u64,
    /// Work of a noisy cluster, per second; none of an attacker.
    noise: u64,
}

/// Measures, prints and writes. Fails if the victim of this build has lost something.
pub fn run(options: &Options) -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    raise_descriptor_limit();
    // Read at the beginning, as a commit may follow meanwhile.
    let commit = commit();
    let (report, missed) = runtime.block_on(all(options, &commit));
    print_uncaptured(&report);
    if options.only.is_none() {
        let name = if options.noise { "fairness" } else { "sources" };
        let path = format!("{}/benches/results/{name}-{commit}.md", env!("CARGO_MANIFEST_DIR"));
        fs::write(&path, report).expect("a file of results");
        print_uncaptured(&format!("written to {path}\n"));
    }
    if missed > 0 {
        print_uncaptured(&format!("{missed} rows of this build harm the victim\n"));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Returns the programs to measure. The names of those with this build begin with [`THIS`].
async fn builds(before: Option<&PathBuf>) -> Vec<Build> {
    let build = |name: &str, first: &Program, next: &Program| Build {
        name: name.to_owned(),
        first: first.clone(),
        next: next.clone(),
    };
    let before = before.map(|path| Program::Strait(path.clone()));
    let this = Program::Strait(PathBuf::from(env!("CARGO_BIN_EXE_strait")));
    let mut builds: Vec<_> = before.iter().map(|it| build("before", it, it)).collect();
    builds.push(build(THIS, &this, &this));
    if let Some(path) = envoy::program("Envoy's rows") {
        let name = format!("Envoy {}", envoy::version(&path).await);
        let envoy = Program::Envoy(path);
        builds.push(build(&format!("{THIS}, then {name}"), &this, &envoy));
        builds.push(build(&name, &envoy, &envoy));
    }
    builds
}

/// Returns the report, and the number of rows of this build that harm the victim.
async fn all(options: &Options, commit: &str) -> (String, usize) {
    let builds = builds(options.before.as_ref()).await;
    let pinned = pin_load();
    let _limit = options.noise.then(TimeWaitLimit::set);
    let mut report =
        if options.noise { about_noise(options, commit) } else { about_attacks(options, commit) };
    report = report.replace("PINNED", pinned) + &head(&COLUMNS);
    let mut missed = 0;
    let wants = |name: &str| options.only.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let attacks = if options.noise { &NOISE_ROWS[..] } else { &ATTACKS };
    let time = Duration::from_secs(options.seconds);
    let rest = if options.noise { time } else { REST };
    for attack in attacks.iter().filter(|attack| wants(attack.name)) {
        for build in builds.iter().filter(|build| build.applies_to(attack.topology)) {
            let world = World::start(build, attack.topology).await;
            let row = measure(&world, attack, (rest, time)).await;
            let text = row.line(attack.name, &build.name);
            print_uncaptured(&text);
            report += &text;
            let is_missed = row.is_harmed() || options.noise && row.is_slow();
            missed += usize::from(build.name.starts_with(THIS) && is_missed);
        }
    }
    if !options.noise && wants("pool") {
        report += &pool::table(&builds).await;
    }
    (report, missed)
}

fn about_attacks(options: &Options, commit: &str) -> String {
    format!(
        "# One source beside a victim, at {commit}

Made by `make sources SECONDS={}`: PINNED, one worker each, fresh processes for each row.
The attacker has a certificate of the victim's cluster with another identity, or is a local client
of a binding. The victim opens 200 tunnels a second, and holds {TUNNELS} others. Lost are requests
without an answer; ended are held tunnels. Memory is the growth of the first gateway's private dirty
pages.

",
        options.seconds
    )
}

fn about_noise(options: &Options, commit: &str) -> String {
    format!(
        "# A quiet cluster beside a noisy one, at {commit}

Made by `make fairness SECONDS={}`: PINNED, one worker each, fresh processes for each row.
The quiet cluster opens 200 tunnels a second, and holds {TUNNELS} others. The noisy one has an
identity, a service and an endpoint of its own, and the lowest priority on the processor of the
load, where the quiet one and its endpoint have a real-time priority as root. As root, at most {FEW}
sockets are in TIME_WAIT, as the kernel ends those of two seconds at once. Lost are requests without
an answer; ended are held tunnels. A row of this build misses its bar if something is lost or ended,
or if p99 is more than 1.5 times that alone, and more than 2 ms above it. Beside it, the quiet
cluster sends the same requests to its endpoint without a gateway. If their p99 misses the bar too,
the row measures the processor of the load. Noise is what the noisy
cluster has completed: tunnels, requests, KiB, handshakes.

",
        options.seconds
    )
}

/// Measures the victim at rest and under an attack, for these times.
async fn measure(world: &World, attack: &Attack, (rest, time): (Duration, Duration)) -> Row {
    let process: Process = world.first;
    // Without the right to do so, the load waits for the kernel's network threads, too.
    let is_first = schedule("--fifo", "1");
    let way = async || match attack.victim {
        Entrance::Hbone => Way::hbone(world.address).await,
        Entrance::Binding => Way::Tcp { from: world.client, to: world.binding },
    };
    let held = HeldTunnels::open(way().await).await;
    let victim = Victim::start(way().await);
    let straight = Way::Tcp { from: world.client, to: world.endpoint };
    let straight = Victim::start(straight);
    sleep(WARM_UP).await;
    let at_rest = Instant::now();
    sleep(rest).await;
    let (memory, peak, rested) = (process.private_dirty(), Peak::of(process), Instant::now());
    let reach = Reach { gateway: world.address, binding: world.binding, noise: world.noise };
    let (stop, stopped) = oneshot::channel::<()>();
    let ((ready, is_ready), run) = (oneshot::channel(), attack.run);
    let attacker = std::thread::spawn(move || {
        // The victim shares its processor, and must not wait for it.
        run_when_idle();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::select! {
                () = run.begin(reach, ready) => {}
                _ = stopped => {}
            }
        });
    });
    is_ready.await.expect("an attacker that begins");
    let (begun, before) = (Instant::now(), DONE.load(Ordering::Relaxed));
    sleep(time).await;
    let (ended, tunnels) = (Instant::now(), held.ended());
    let noise = (DONE.load(Ordering::Relaxed) - before) / time.as_secs().max(1);
    let (victim, straight) = tokio::join!(victim.finish(), straight.finish());
    drop(stop);
    attacker.join().expect("an attacker that stops");
    if is_first {
        schedule("--other", "0");
    }
    let times = [(at_rest, rested), (begun, ended)];
    Row {
        latency: times.map(|(from, to)| victim.latency(from, to)),
        straight: times.map(|(from, to)| straight.latency(from, to)),
        ended: tunnels,
        grown: peak.bytes().saturating_sub(memory),
        noise,
    }
}

/// Lower limit of sockets in TIME_WAIT, until it is dropped. The kernel ends those of two seconds
/// at once, for which it stops everything else on the processor: 10 to 20 ms after 12,000 tunnels a
/// second.
struct TimeWaitLimit {
    before: Option<String>,
}

impl TimeWaitLimit {
    /// Sets the limit, which only root may.
    fn set() -> Self {
        let before = fs::read_to_string(TIME_WAIT_MAX).ok();
        Self { before: before.filter(|_| fs::write(TIME_WAIT_MAX, FEW).is_ok()) }
    }
}

impl Drop for TimeWaitLimit {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = fs::write(TIME_WAIT_MAX, before);
        }
    }
}

/// Lets this thread run while no other one of its processor does. A lower priority alone would
/// leave it up to 3 ms before another one that becomes ready.
fn run_when_idle() {
    assert!(schedule("--idle", "0"), "chrt fails");
}

/// Sets the scheduling policy of this thread, and of those that it starts. Returns false without
/// the right to do so.
fn schedule(policy: &str, priority: &str) -> bool {
    let thread = rustix::thread::gettid().to_string();
    // chrt is in util-linux, as taskset.
    let set = Command::new("chrt").args([policy, "--pid", priority, &thread]).output();
    set.expect("chrt").status.success()
}

impl Row {
    fn is_harmed(&self) -> bool {
        self.latency[1].lost + self.ended > 0
    }

    /// Returns whether p99 beside noise misses its bar, and that without a gateway does not.
    fn is_slow(&self) -> bool {
        is_slow(self.latency) && !is_slow(self.straight)
    }

    fn line(&self, attack: &str, build: &str) -> String {
        let [rest, under] = self.latency;
        let [straight_rest, straight_under] = self.straight;
        line(&[
            attack.to_owned(),
            build.to_owned(),
            times(rest.p50, under.p50),
            times(rest.p99, under.p99),
            times(straight_rest.p99, straight_under.p99),
            format!("{} of {}", under.lost, under.requests),
            format!("{} of {TUNNELS}", self.ended),
            format!("{} KiB", self.grown / 1024),
            if self.noise == 0 { "–".to_owned() } else { self.noise.to_string() },
        ])
    }
}

/// Returns whether p99 beside noise is worse than alone by more than its bar.
fn is_slow([rest, under]: [Latency; 2]) -> bool {
    let (Some(rest), Some(under)) = (rest.p99, under.p99) else { return true };
    under > rest.mul_f64(NOISE_FACTOR).max(rest + NOISE_TIME)
}

fn times(rest: Option<Duration>, under: Option<Duration>) -> String {
    let milliseconds = |time: Option<Duration>| {
        time.map_or_else(
            || "never".to_owned(),
            |time| format!("{:.2}", 1000.0 * time.as_secs_f64()),
        )
    };
    format!("{} → {} ms", milliseconds(rest), milliseconds(under))
}
