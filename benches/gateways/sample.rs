//! Samples: one gateway, one load, one figure.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::common::machine::{TICK, busy, processors};
use crate::common::process::Process;
use crate::gateways::{BenchEnvironment, Running};
use crate::measurement::{Held, Measurement};
use crate::outcome::Outcome;
use crate::rows::{Kind, Row, Transport};

/// Duration of a load for a sample, after everything is open.
pub const SECONDS: f64 = 0.3;
/// Duration of the warm-up, which is not counted: the first load meets cold code and small buffers.
pub const SECONDS_OF_WARM_UP: f64 = 0.3;
/// Duration of a load for latencies: 600 requests at 200 per second.
pub const SECONDS_OF_LATENCY: f64 = 3.0;
/// Duration of a load over the long link: 60 round trips.
pub const SECONDS_OF_LINK: f64 = 5.0;
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
pub enum Sample {
    Load {
        /// Processor time of the gateway.
        cpu: Duration,
        outcome: Outcome,
    },
    /// Memory in KiB per tunnel.
    Memory(f64),
}

impl Sample {
    /// Returns the cost in the unit of the figure; none if nothing was done.
    pub fn cost(&self, what: Measurement) -> Option<f64> {
        match self {
            Self::Load { cpu, outcome } => outcome.cost(what, *cpu),
            Self::Memory(cost) => Some(*cost),
        }
    }

    /// Returns the negotiated cipher suite, if the gateway terminates TLS.
    pub fn cipher_suite(&self) -> Option<&str> {
        match self {
            Self::Load { outcome, .. } => outcome.cipher_suite(),
            Self::Memory(_) => None,
        }
    }
}

impl<'a> Gateways<'a> {
    pub async fn start(world: &'a BenchEnvironment, kinds: &[Kind]) -> Self {
        let mut all = Vec::new();
        for &kind in kinds {
            all.push(world.gateway(kind).await);
        }
        Self { world, all }
    }

    /// Runs the row's load once for each of these. Returns the least number of operations per
    /// second.
    pub async fn warm_up(&self, row: &Row, kinds: &[Kind]) -> f64 {
        let mut least = f64::MAX;
        for &kind in kinds {
            // A failure repeats in the first sample, which reports it.
            if let Ok((_, outcome)) = self.load(row, kind, SECONDS_OF_WARM_UP, None).await {
                least = least.min(outcome.rate());
            }
        }
        least
    }

    /// Runs the row's load once, at this rate if it has none.
    pub async fn sample(&self, row: &Row, kind: Kind, rate: Option<u64>) -> Result<Sample, String> {
        let seconds = match row.way {
            Transport::LossyLink => SECONDS_OF_LINK,
            _ if row.is_paced() => SECONDS_OF_LATENCY,
            _ => SECONDS,
        };
        let (cpu, outcome) = self.load(row, kind, seconds, rate).await?;
        Ok(Sample::Load { cpu, outcome })
    }

    /// Runs a load. The gateway's processor time is measured from the start of the load's process
    /// to its end.
    async fn load(
        &self,
        row: &Row,
        kind: Kind,
        seconds: f64,
        rate: Option<u64>,
    ) -> Result<(Duration, Outcome), String> {
        let gateway = self.all.iter().find(|one| one.kind == kind);
        let gateway = gateway.expect("a gateway of this kind");
        let before = gateway.cpu();
        let rate = rate.map(|rate| format!("--rate {rate}"));
        let more = format!("--seconds {seconds} {}", rate.unwrap_or_default());
        let load = arguments(row, gateway.transport(row), &more);
        let done = gateway.load(row).run(&authority(row), &load).await;
        let cpu = gateway.cpu() - before;
        let outcome = Outcome::read(&done.report).map_err(|why| why + &done.stderr)?;
        Ok((cpu, outcome))
    }

    /// Starts to measure the machine's use by others.
    pub fn watch(&self) -> Watch<'_> {
        Watch { gateways: self, begun: Instant::now(), busy: busy(), known: self.known() }
    }

    /// Returns the processor time of everything that belongs to the bench.
    fn known(&self) -> Duration {
        let own = self.all.iter().filter(|one| one.kind != Kind::Direct);
        let gateways: Duration = own.map(Running::cpu).sum();
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
        let Held { connections, streams } = held;
        let sockets = gateway.sockets(*held, row);
        // The load is killed after the measurement.
        let more = format!("--connections {connections} --streams {streams} --seconds 60");
        let load = gateway.load(row);
        let mut load = load.start(&authority(row), &arguments(row, row.way, &more));
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

fn arguments(row: &Row, way: Transport, more: &str) -> String {
    let key_exchange = match way {
        Transport::Hbone | Transport::LossyLink => "--key-exchange x25519",
        Transport::Sni => "",
    };
    format!("{} {key_exchange} {more}", row.load)
}

/// Returns the processor time of the loads, which are children that have ended, in ticks.
fn children() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").expect("our times");
    // `cutime` and `cstime` are words 14 and 15 of the line; the name before them may have blanks.
    let (_, words) = text.rsplit_once(") ").expect("a name");
    let words = words.split(' ').skip(13).take(2);
    TICK * words.filter_map(|word| word.parse::<u32>().ok()).sum()
}
