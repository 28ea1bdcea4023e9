//! One row of the table: a gateway, a flood, its connections, and the outcome.

use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};

use crate::attacker::{End, Outcome, attack};
use crate::attacks::{Attack, AttackKind};
use crate::common::machine::{busy, processors};
use crate::common::process::{Peak, Process};
use crate::gateway::{Kind, Running};
use crate::victim::{Latency, Victim, Way};

/// Limits of issue 3: growth of memory, as a multiple of the bytes sent plus an amount for each
/// connection; the victim's median grows by at most this factor.
const MEMORY_TIMES_MAX: u64 = 10;
const MEMORY_PER_CONNECTION_MAX: u64 = 1 << 20;
pub const MEDIAN_TIMES_MAX: u32 = 2;

/// Warm-up of the victim. Its first requests find cold caches, and are not counted.
pub const WARM_UP: Duration = Duration::from_millis(300);
/// Time in which the victim is measured at rest.
pub const REST: Duration = Duration::from_secs(2);
/// Limit of the wait for the end of a silent peer: the first CONNECT's deadline of 30 s, and a
/// margin.
const SILENCE: Duration = Duration::from_secs(33);

pub struct Row {
    pub attack: &'static Attack,
    pub connections: u32,
    pub outcomes: Vec<Outcome>,
    pub grown: u64,
    pub time: Duration,
    pub cpu: Duration,
    /// Share of all processors used by neither the gateway nor this process.
    pub others: f64,
    pub rest: Latency,
    pub under: Latency,
    pub survived: bool,
}

/// Attacks a fresh gateway, beside a victim.
pub async fn run(kind: &Kind, what: &'static Attack, connections: u32, seconds: Duration) -> Row {
    let gateway = Running::start(kind).await;
    let (process, own) = (gateway.process, Process::own());
    let time = match what.what {
        AttackKind::Silence => SILENCE,
        _ => seconds,
    };
    let victim = Victim::start(Way::hbone(gateway.address).await);
    sleep(WARM_UP).await;
    let at_rest = Instant::now();
    sleep(REST).await;
    let (memory, peak) = (process.private_dirty(), Peak::of(process));
    let clocks = || (process.cpu(), own.cpu(), busy());
    let (begun, before) = (Instant::now(), clocks());
    let outcomes = attack(gateway.address, what, connections, time);
    sleep(time).await;
    let (ended, after) = (Instant::now(), clocks());
    let cpu = after.0 - before.0;
    let known = cpu + (after.1 - before.1);
    let others = (after.2 - before.2).saturating_sub(known);
    let outcomes = timeout(Duration::from_secs(10), outcomes).await;
    let grown = peak.bytes().saturating_sub(memory);
    let requests = victim.finish().await;
    Row {
        attack: what,
        connections,
        outcomes: outcomes.expect("attackers that stop").expect("outcomes"),
        grown,
        time,
        cpu,
        others: others.div_duration_f64(time * processors()),
        rest: requests.latency(at_rest, begun),
        under: requests.latency(begun, ended),
        survived: process.lives(),
    }
}

impl Row {
    pub fn bytes(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.bytes).sum()
    }

    pub fn frames(&self) -> u64 {
        self.outcomes.iter().map(|outcome| outcome.frames).sum()
    }

    /// Returns the duration of the longest attack.
    pub fn lasted(&self) -> Duration {
        let all = self.outcomes.iter().map(|outcome| outcome.lasted);
        all.max().unwrap_or_default()
    }

    /// Returns the missed limits; empty if there are none.
    pub fn misses(&self) -> Vec<String> {
        let mut misses = Vec::new();
        let open = self.outcomes.iter().filter(|outcome| outcome.end == End::StillOpen);
        let open = open.count();
        // Streams that are opened and left are limited in number, and may stay open.
        if open > 0 && !matches!(self.attack.what, AttackKind::Leave) {
            misses.push(format!("{open} not ended"));
        }
        let allowed = MEMORY_TIMES_MAX * self.bytes()
            + MEMORY_PER_CONNECTION_MAX * u64::from(self.connections);
        if self.grown > allowed {
            misses.push("memory".to_owned());
        }
        if !self.survived {
            misses.push("the gateway died".to_owned());
        }
        misses.extend(victim_violation(self.rest, self.under));
        misses
    }
}

/// Returns the harm to the victim, if it exceeds the limit.
pub fn victim_violation(rest: Latency, under: Latency) -> Option<String> {
    if rest.lost + under.lost > 0 {
        return Some("requests lost".to_owned());
    }
    match (rest.p50, under.p50) {
        (Some(rest), Some(under)) if under <= rest * MEDIAN_TIMES_MAX => None,
        _ => Some("the victim's median".to_owned()),
    }
}
