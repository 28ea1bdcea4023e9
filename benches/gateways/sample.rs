//! Samples: one gateway, one load, one figure.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::common::machine::{TICK, busy, processors};
use crate::common::process::Process;
use crate::gateways::{Running, World};
use crate::outcome::{Outcome, Unit};
use crate::rows::{Held, Kind, Row, Way, What};

/// How long a load works for a sample, after everything is open.
pub const SECONDS: f64 = 0.3;
/// The same where nothing is counted: the first load meets cold code and small buffers.
pub const SECONDS_OF_WARM_UP: f64 = 0.3;
/// The same for latencies: 600 requests at 200 a second.
pub const SECONDS_OF_LATENCY: f64 = 3.0;
/// A gateway that works less than [`QUIET_MAX`] in this time has its tunnels idle and its readers
/// stalled.
const QUIET: Duration = Duration::from_millis(1500);
const QUIET_MAX: Duration = Duration::from_millis(20);

/// The gateways, up from the first round to the last.
pub struct Gateways<'a> {
    pub world: &'a World,
    pub all: Vec<Running>,
}

/// What a sample has come to.
pub struct Sample {
    /// In the row's unit.
    pub cost: f64,
    /// None where the gateway ends no TLS.
    pub cipher_suite: Option<String>,
}

impl<'a> Gateways<'a> {
    pub async fn start(world: &'a World, kinds: &[Kind]) -> Self {
        let mut all = Vec::new();
        for &kind in kinds {
            all.push(world.gateway(kind).await);
        }
        Self { world, all }
    }

    /// Runs the row's load once for each of these, and passes over what comes of it.
    pub async fn warm_up(&self, row: &Row, kinds: &[Kind]) {
        for &kind in kinds {
            let _ = self.load(row, kind, SECONDS_OF_WARM_UP).await;
        }
    }

    /// Runs the row's load once.
    pub async fn sample(&self, row: &Row, kind: Kind) -> Result<Sample, String> {
        let seconds = match row.what {
            What::P99 => SECONDS_OF_LATENCY,
            _ => SECONDS,
        };
        self.load(row, kind, seconds).await
    }

    /// The gateway's processor time is that from the start of the load's process to its end.
    async fn load(&self, row: &Row, kind: Kind, seconds: f64) -> Result<Sample, String> {
        let gateway = self.all.iter().find(|one| one.kind == kind);
        let gateway = gateway.expect("a gateway of this kind");
        let before = gateway.process.cpu();
        let load = arguments(row, &format!("--seconds {seconds}"));
        let done = gateway.load(row.way).run(&authority(row), &load).await;
        let cpu = gateway.process.cpu() - before;
        let outcome = Outcome::read(&done.report).map_err(|why| why + &done.stderr)?;
        let nothing = || "nothing was done".to_owned();
        let cost = match row.what {
            What::Cpu(unit) => {
                let units = outcome.units(unit).ok_or_else(nothing)?;
                cpu.as_secs_f64() * per_second(unit) / units
            }
            _ => outcome.p99_ms().ok_or_else(nothing)?,
        };
        Ok(Sample {
            cost,
            cipher_suite: outcome.cipher_suite().map(str::to_owned),
        })
    }

    /// Begins to watch who else uses the machine.
    pub fn watch(&self) -> Watch<'_> {
        Watch {
            gateways: self,
            begun: Instant::now(),
            busy: busy(),
            known: self.known(),
        }
    }

    /// Processor time of all that belongs to the bench.
    fn known(&self) -> Duration {
        let gateways: Duration = self.all.iter().map(|one| one.process.cpu()).sum();
        gateways + self.world.cpu() + Process::own().cpu() + children()
    }
}

/// The machine's time from some moment on.
pub struct Watch<'a> {
    gateways: &'a Gateways<'a>,
    begun: Instant,
    busy: Duration,
    known: Duration,
}

impl Watch<'_> {
    /// The share that neither the gateways nor the load had.
    pub fn foreign(&self) -> f64 {
        let known = self.gateways.known().saturating_sub(self.known);
        let foreign = busy().saturating_sub(self.busy).saturating_sub(known);
        foreign.div_duration_f64(self.begun.elapsed() * processors())
    }
}

/// Memory that the row's tunnels add to a fresh gateway, in KiB for each.
pub async fn memory(world: &World, row: &Row, held: &[Held], kind: Kind) -> f64 {
    let mut grown = Vec::new();
    for held in held {
        let gateway = world.gateway(kind).await;
        let before = gateway.process.private_dirty();
        let of_its_own = gateway.process.descriptors();
        let Held {
            connections,
            streams,
        } = held;
        // It is killed when it has been looked at.
        let more = format!("--connections {connections} --streams {streams} --seconds 60");
        let load = gateway.load(row.way);
        let mut load = load.start(&authority(row), &arguments(row, &more));
        // Each tunnel has a socket to its endpoint, beside those of the connections.
        let sockets = held.tunnels() + connections;
        gateway.holds(of_its_own + sockets as usize).await;
        quiet(&gateway).await;
        let after = gateway.process.private_dirty();
        load.kill().await.expect("a running load");
        gateway.stop().await;
        grown.push((after.saturating_sub(before) as f64 / 1024.0, held.tunnels()));
    }
    match grown[..] {
        [(less, few), (more, many)] => (more - less) / f64::from(many - few),
        [(memory, tunnels)] => memory / f64::from(tunnels),
        _ => f64::NAN,
    }
}

/// Waits until a gateway has nothing to do any more.
async fn quiet(gateway: &Running) {
    loop {
        let before = gateway.process.cpu();
        sleep(QUIET).await;
        if gateway.process.cpu().saturating_sub(before) < QUIET_MAX {
            return;
        }
    }
}

fn authority(row: &Row) -> String {
    format!("{}.bench:80", row.endpoint)
}

fn arguments(row: &Row, more: &str) -> String {
    let key_exchange = match row.way {
        Way::Hbone => "--key-exchange x25519",
        Way::Sni => "",
    };
    format!("{} {key_exchange} {more}", row.load)
}

fn per_second(unit: Unit) -> f64 {
    unit.cost().1
}

/// Processor time of children that have ended: of the loads, in ticks.
fn children() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").expect("our times");
    // After the name, which may have blanks, `cutime` and `cstime` are the words 14 and 15.
    let (_, words) = text.rsplit_once(") ").expect("a name");
    let words = words.split(' ').skip(13).take(2);
    TICK * words.filter_map(|word| word.parse::<u32>().ok()).sum()
}
