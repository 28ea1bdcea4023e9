//! Samples: one gateway, one load, one figure.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::common::machine::{TICK, busy, processors};
use crate::common::process::Process;
use crate::gateways::{BenchEnvironment, Running};
use crate::outcome::{Outcome, Unit};
use crate::rows::{Held, Kind, Measurement, Row, Transport};

/// Duration of a load for a sample, after everything is open.
pub const SECONDS: f64 = 0.3;
/// Duration of the warm-up, which is not counted: the first load meets cold code and small buffers.
pub const SECONDS_OF_WARM_UP: f64 = 0.3;
/// Duration of a load for latencies: 600 requests at 200 per second.
pub const SECONDS_OF_LATENCY: f64 = 3.0;
/// Period in which a gateway that works less than [`QUIET_MAX`] counts as quiet: its tunnels are
/// idle and its readers stalled.
const QUIET: Duration = Duration::from_millis(1500);
const QUIET_MAX: Duration = Duration::from_millis(20);

/// Gateways that run from the first round to the last.
pub struct Gateways<'a> {
    pub world: &'a BenchEnvironment,
    pub all: Vec<Running>,
}

/// Result of a sample.
pub struct Sample {
    /// Cost in the row's unit.
    pub cost: f64,
    /// None if the gateway terminates no TLS.
    pub cipher_suite: Option<String>,
}

impl<'a> Gateways<'a> {
    pub async fn start(world: &'a BenchEnvironment, kinds: &[Kind]) -> Self {
        let mut all = Vec::new();
        for &kind in kinds {
            all.push(world.gateway(kind).await);
        }
        Self { world, all }
    }

    /// Runs the row's load once for each of these, and ignores the results.
    pub async fn warm_up(&self, row: &Row, kinds: &[Kind]) {
        for &kind in kinds {
            let _ = self.load(row, kind, SECONDS_OF_WARM_UP).await;
        }
    }

    /// Runs the row's load once.
    pub async fn sample(&self, row: &Row, kind: Kind) -> Result<Sample, String> {
        let seconds = match row.what {
            Measurement::P99 => SECONDS_OF_LATENCY,
            _ => SECONDS,
        };
        self.load(row, kind, seconds).await
    }

    /// Runs a load. The gateway's processor time is measured from the start of the load's process
    /// to its end.
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
            Measurement::Cpu(unit) => {
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

    /// Starts to measure the machine's use by others.
    pub fn watch(&self) -> Watch<'_> {
        Watch {
            gateways: self,
            begun: Instant::now(),
            busy: busy(),
            known: self.known(),
        }
    }

    /// Returns the processor time of everything that belongs to the bench.
    fn known(&self) -> Duration {
        let gateways: Duration = self.all.iter().map(|one| one.process.cpu()).sum();
        gateways + self.world.cpu() + Process::own().cpu() + children()
    }
}

/// Measurement of the machine's time since its start.
pub struct Watch<'a> {
    gateways: &'a Gateways<'a>,
    begun: Instant,
    busy: Duration,
    known: Duration,
}

impl Watch<'_> {
    /// Returns the share used by neither the gateways nor the load.
    pub fn foreign(&self) -> f64 {
        let known = self.gateways.known().saturating_sub(self.known);
        let foreign = busy().saturating_sub(self.busy).saturating_sub(known);
        foreign.div_duration_f64(self.begun.elapsed() * processors())
    }
}

/// Returns the memory that the row's tunnels add to a fresh gateway, in KiB per tunnel.
pub async fn memory(world: &BenchEnvironment, row: &Row, held: &[Held], kind: Kind) -> f64 {
    let mut grown = Vec::new();
    for held in held {
        let gateway = world.gateway(kind).await;
        let before = gateway.process.private_dirty();
        let of_its_own = gateway.process.descriptors();
        let Held {
            connections,
            streams,
        } = held;
        // The load is killed after the measurement.
        let more = format!("--connections {connections} --streams {streams} --seconds 60");
        let load = gateway.load(row.way);
        let mut load = load.start(&authority(row), &arguments(row, &more));
        // Each tunnel has a socket to its endpoint, besides those of the connections.
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

/// Waits until a gateway is quiet.
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
        Transport::Hbone => "--key-exchange x25519",
        Transport::Sni => "",
    };
    format!("{} {key_exchange} {more}", row.load)
}

fn per_second(unit: Unit) -> f64 {
    unit.cost().1
}

/// Returns the processor time of the loads, which are children that have ended, in ticks.
fn children() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").expect("our times");
    // `cutime` and `cstime` are words 14 and 15 of the line; the name before them may have blanks.
    let (_, words) = text.rsplit_once(") ").expect("a name");
    let words = words.split(' ').skip(13).take(2);
    TICK * words.filter_map(|word| word.parse::<u32>().ok()).sum()
}
