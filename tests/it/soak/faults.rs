//! Random faults, and which breaks they explain.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use tokio::time::{Instant, sleep};

use crate::support::ECHO;

use super::load::Ended;
use super::world::{REMOTE, World};

/// Limit of the pause between two faults, and of the length of one.
const PAUSE_MAX: u64 = 3000;
const LENGTH_MAX: u64 = 2000;
/// Time for which the effects of a fault last.
const EFFECT: Duration = Duration::from_secs(5);
/// Kind of fault that every connection through the link may have.
const LINK: &str = "cut link";

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Mesh,
    Config,
    Certificate,
    Hangup,
    TakeOver,
    FailedTakeOver,
    Pause,
    PauseWest,
    EndpointReset(usize),
    EndpointGone(usize),
    WestKilled,
    DrainEndpoint,
    DrainListener,
}

/// Faults with their names. Those that replace a process come first.
const ALL: [(Fault, &str); 17] = [
    (Fault::TakeOver, "take-over"),
    (Fault::WestKilled, "next gateway killed and started"),
    (Fault::FailedTakeOver, "take-over that fails"),
    (Fault::Mesh, "change of the mesh"),
    (Fault::Config, "change of the configuration"),
    (Fault::Certificate, "new certificate"),
    (Fault::Hangup, "SIGHUP"),
    (Fault::Pause, "SIGSTOP"),
    (Fault::PauseWest, "SIGSTOP of the next gateway"),
    (Fault::EndpointReset(0), "endpoint resets"),
    (Fault::EndpointReset(1), "endpoint resets"),
    (Fault::EndpointReset(2), "remote endpoint resets"),
    (Fault::EndpointGone(0), "endpoint gone"),
    (Fault::EndpointGone(1), "endpoint gone"),
    (Fault::EndpointGone(2), "remote endpoint gone"),
    (Fault::DrainEndpoint, "endpoint drained"),
    (Fault::DrainListener, "listener drained"),
];
const REPLACING: usize = 2;

/// Fault that is over.
pub struct Done {
    fault: Fault,
    name: &'static str,
    from: Instant,
    to: Instant,
}

/// Faults of a run, and the memory of the gateways beside them.
pub struct Faults {
    pub done: Vec<Done>,
    /// Seconds and bytes, from when no process is replaced any more.
    memory: BTreeMap<&'static str, Vec<(f64, f64)>>,
}

impl Faults {
    /// Causes faults for a time. Processes are replaced in its first third only, so that the memory
    /// of one process is measured over the rest.
    pub async fn run(world: &mut World, time: Duration, seed: u64) -> Self {
        let (mut rng, begun) = (Rng::with_seed(seed), Instant::now());
        let mut faults = Self { done: Vec::new(), memory: BTreeMap::new() };
        while begun.elapsed() < time {
            // deadline: the pace of the faults.
            sleep(Duration::from_millis(rng.u64(..PAUSE_MAX))).await;
            let elapsed = begun.elapsed();
            let first = if elapsed > time / 3 { REPLACING } else { 0 };
            let (fault, name) = ALL[rng.usize(first..ALL.len())];
            let from = Instant::now();
            world.apply(fault, Duration::from_millis(rng.u64(..LENGTH_MAX))).await;
            faults.done.push(Done { fault, name, from, to: Instant::now() });
            if elapsed > time / 2 {
                for (name, gateway) in [("east", &world.east), ("west", &world.west)] {
                    let sample = (elapsed.as_secs_f64(), gateway.private_dirty() as f64);
                    faults.memory.entry(name).or_default().push(sample);
                }
            }
        }
        faults
    }

    /// Returns the name of the fault behind the break of a tunnel.
    pub fn explain(&self, tunnel: &Ended) -> Option<&'static str> {
        if tunnel.is_linked {
            return Some(LINK);
        }
        let is_cause = |done: &&Done| {
            // A client that rests notices a break by its second write after it.
            let effect = EFFECT + 3 * tunnel.plan.rest;
            // The last bytes of a client may still be on their way when it has ended.
            let early = if tunnel.is_complete() { EFFECT } else { Duration::ZERO };
            let is_near = (done.from..=done.to + effect + early).contains(&(tunnel.at + early));
            is_near && done.fault.breaks(tunnel)
        };
        self.done.iter().rev().find(is_cause).map(|done| done.name)
    }

    /// Returns the number of faults of each kind, and of the broken tunnels that it explains.
    pub fn counts(&self, tunnels: &[Ended]) -> Vec<(&'static str, usize, usize)> {
        let mut counts = BTreeMap::from([(LINK, (0, 0))]);
        for done in &self.done {
            counts.entry(done.name).or_insert((0, 0)).0 += 1;
        }
        for tunnel in tunnels.iter().filter(|tunnel| !tunnel.is_complete()) {
            if let Some(name) = self.explain(tunnel) {
                counts.entry(name).or_insert((0, 0)).1 += 1;
            }
        }
        counts.into_iter().map(|(name, (count, broken))| (name, count, broken)).collect()
    }

    /// Returns the slope of the memory of each gateway, in bytes per hour, by least squares.
    pub fn slopes(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.memory.iter().map(|(name, samples)| {
            let count = samples.len() as f64;
            let middle =
                |part: fn(&(f64, f64)) -> f64| samples.iter().map(part).sum::<f64>() / count;
            let (time, bytes) = (middle(|sample| sample.0), middle(|sample| sample.1));
            let common = samples.iter().map(|one| (one.0 - time) * (one.1 - bytes)).sum::<f64>();
            let spread = samples.iter().map(|one| (one.0 - time).powi(2)).sum::<f64>();
            (*name, if spread > 0.0 { 3600.0 * common / spread } else { 0.0 })
        })
    }
}

impl Fault {
    /// Returns whether the fault may break such a tunnel, or keep it from opening.
    fn breaks(self, tunnel: &Ended) -> bool {
        match self {
            // Another endpoint serves new tunnels.
            Self::EndpointReset(0 | 1) | Self::EndpointGone(0 | 1) => {
                tunnel.service == ECHO && tunnel.side.is_some()
            }
            Self::EndpointReset(_) | Self::EndpointGone(_) | Self::WestKilled => {
                tunnel.service == REMOTE
            }
            // Connections are refused, and GOAWAY ends new tunnels on the others.
            Self::DrainListener => tunnel.side.is_none(),
            _ => false,
        }
    }
}
