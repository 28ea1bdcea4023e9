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
    TakeOver,
    WestKilled,
    FailedTakeOver,
    Mesh,
    MeshFileGone,
    ControlPlaneCut,
    ControlPlaneGone,
    ControlPlaneEmpty,
    Config,
    Certificate,
    Hangup,
    Pause,
    PauseWest,
    /// Offset of the clock of the first gateway.
    Clock(&'static str),
    LossyLink,
    LinkResets,
    EndpointReset(usize),
    EndpointGone(usize),
    DrainEndpoint,
    DrainListener,
}

/// Offsets before and past the validity of all certificates.
const EARLY: &str = "-40d";
const LATE: &str = "+40d";

/// Faults with their names.
const ALL: [(Fault, &str); 27] = [
    (Fault::TakeOver, "take-over"),
    (Fault::WestKilled, "next gateway killed and started"),
    (Fault::FailedTakeOver, "take-over that fails"),
    (Fault::Mesh, "change of the mesh"),
    (Fault::MeshFileGone, "mesh file of the next gateway gone"),
    (Fault::ControlPlaneCut, "control plane cut"),
    (Fault::ControlPlaneGone, "control plane gone"),
    (Fault::ControlPlaneEmpty, "control plane back without its mesh"),
    (Fault::Config, "change of the configuration"),
    (Fault::Certificate, "new certificate"),
    (Fault::Hangup, "SIGHUP"),
    (Fault::Pause, "SIGSTOP"),
    (Fault::PauseWest, "SIGSTOP of the next gateway"),
    (Fault::Clock("+3h"), "clock set within validity"),
    (Fault::Clock("-30s"), "clock set within validity"),
    (Fault::Clock(LATE), "clock set past validity"),
    (Fault::Clock(EARLY), "clock set before validity"),
    (Fault::LossyLink, "lossy link between the gateways"),
    (Fault::LinkResets, "resets between the gateways"),
    (Fault::EndpointReset(0), "endpoint resets"),
    (Fault::EndpointReset(1), "endpoint resets"),
    (Fault::EndpointReset(2), "remote endpoint resets"),
    (Fault::EndpointGone(0), "endpoint gone"),
    (Fault::EndpointGone(1), "endpoint gone"),
    (Fault::EndpointGone(2), "remote endpoint gone"),
    (Fault::DrainEndpoint, "endpoint drained"),
    (Fault::DrainListener, "listener drained"),
];

/// Faults in rounds, in each of which all come once in a random order.
struct Rounds {
    rng: Rng,
    left: Vec<(Fault, &'static str)>,
}

impl Rounds {
    /// Returns the next fault that is possible.
    fn next(&mut self, is_possible: impl Fn(Fault) -> bool) -> (Fault, &'static str) {
        loop {
            match self.left.pop() {
                Some(next) if is_possible(next.0) => return next,
                Some(_) => {}
                None => {
                    self.left.extend(ALL);
                    self.rng.shuffle(&mut self.left);
                }
            }
        }
    }

    fn time(&mut self, millis_max: u64) -> Duration {
        Duration::from_millis(self.rng.u64(..millis_max))
    }
}

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
        let mut rounds = Rounds { rng: Rng::with_seed(seed), left: Vec::new() };
        let begun = Instant::now();
        let mut faults = Self { done: Vec::new(), memory: BTreeMap::new() };
        while begun.elapsed() < time {
            // deadline: the pace of the faults.
            sleep(rounds.time(PAUSE_MAX)).await;
            let elapsed = begun.elapsed();
            let (fault, name) = rounds.next(|fault| {
                let is_late = elapsed > time / 3;
                world.is_possible(fault) && !(is_late && fault.replaces())
            });
            let from = Instant::now();
            world.apply(fault, rounds.time(LENGTH_MAX)).await;
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
    /// Returns whether a process is replaced.
    fn replaces(self) -> bool {
        matches!(self, Self::TakeOver | Self::WestKilled)
    }

    /// Returns whether the fault may break such a tunnel, or keep it from opening.
    fn breaks(self, tunnel: &Ended) -> bool {
        match self {
            // Another endpoint serves new tunnels.
            Self::EndpointReset(0 | 1) | Self::EndpointGone(0 | 1) => {
                tunnel.service == ECHO && tunnel.side.is_some()
            }
            Self::EndpointReset(_)
            | Self::EndpointGone(_)
            | Self::WestKilled
            | Self::LinkResets => tunnel.service == REMOTE,
            // No certificate is valid, of clients and of the next gateway.
            Self::Clock(EARLY | LATE) => tunnel.side.is_none(),
            // Connections are refused, and GOAWAY ends new tunnels on the others.
            Self::DrainListener => tunnel.side.is_none(),
            _ => false,
        }
    }
}
