//! Retirement of the connections of peers, by age and by the load of their worker.
//!
//! A connection that is retired is sent GOAWAY: the peer opens its next tunnels on a new
//! connection, which another worker or replica may accept, and the open tunnels continue. Peers
//! that connected at the same time do not come back at the same time: ages vary by a tenth, and at
//! most a hundredth of the connections, or one, ends per second. A peer whose tunnels last has at
//! most two connections that wait for their end.
//!
//! Workers get new connections by load, and become unequal when other connections end. A worker
//! with too much load retires a connection only if the worker with the least load, which the peer
//! gets next, would not have more than this one then.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::limits::{Source, SourceMap};
use crate::reason::RetirementReason;

use super::load::{LoadGuard, WorkerLoad};

/// Maximum number of retiring connections of one peer.
const RETIRING_MAX: u32 = 2;
/// Time in which all connections could be retired, and maximum time between two of them.
const ALL: Duration = Duration::from_secs(100);
const APART_MAX: Duration = Duration::from_secs(1);
/// Part of the age by which it varies in both directions.
const JITTER: f64 = 0.1;

/// Connections that may be retired.
#[derive(Debug)]
pub struct Aging {
    /// Age of connections, if they have one.
    age: Option<Duration>,
    /// Maximum load of a worker in percent of the mean, if it has one.
    worker_load: Option<u32>,
    /// Loads of all workers, once they are started.
    workers: OnceLock<Vec<WorkerLoad>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: u32,
    /// Time from which the next connection may be retired.
    next: Option<Instant>,
    /// Number of retiring connections by peer; without entries of 0.
    retiring: SourceMap<u32>,
}

/// Open connection. On drop it is no longer counted.
#[derive(Debug)]
pub struct Aged {
    aging: Arc<Aging>,
    peer: Source,
    worker: Option<WorkerLoad>,
    /// Time reserved to retire it because of its worker's load.
    is_leaving: bool,
    retiring: Option<usize>,
}

impl Aging {
    /// Creates the state for connections of this age, on workers with this load. Returns none
    /// without either.
    pub fn new(age: Option<Duration>, worker_load: Option<u32>) -> Option<Self> {
        let is_used = age.is_some() || worker_load.is_some();
        let (workers, state) = (OnceLock::new(), Mutex::default());
        is_used.then_some(Self { age, worker_load, workers, state })
    }

    /// Sets the loads of all workers, once.
    pub fn set_workers(&self, workers: Vec<WorkerLoad>) {
        let _ = self.workers.set(workers);
    }

    /// Counts a new connection of a peer, which has this guard in the load of its worker.
    pub fn open(self: &Arc<Self>, peer: Source, guard: &LoadGuard) -> Aged {
        self.state.lock().open += 1;
        let worker = self.workers.get().into_iter().flatten().find(|one| one.is_of(guard)).cloned();
        Aged { aging: Arc::clone(self), peer, worker, is_leaving: false, retiring: None }
    }

    /// Returns the time after which a connection reaches its age, if it has one.
    pub fn lifetime(&self) -> Option<Duration> {
        Some(self.age?.mul_f64(1.0 - JITTER + 2.0 * JITTER * fastrand::f64()))
    }

    /// Returns whether a worker has too much load, and less with this part of it elsewhere. What is
    /// leaving it counts no more, and elsewhere it still does.
    fn is_overloaded(&self, worker: Option<&WorkerLoad>, load: usize) -> bool {
        let limit = self.worker_load.zip(self.workers.get());
        let (Some((percent, workers)), Some(worker)) = (limit, worker) else {
            return false;
        };
        let (staying, mut sum, mut least) = (worker.staying(), 0, usize::MAX);
        for count in workers.iter().map(WorkerLoad::count) {
            (sum, least) = (sum + count, least.min(count));
        }
        let is_above = staying * workers.len() * 100 > sum * percent as usize;
        is_above && least + 2 * load <= staying
    }
}

impl Aged {
    /// Reserves the next time at which a connection may be retired. Returns the time until then.
    pub fn reserve(&self) -> Duration {
        let mut state = self.aging.state.lock();
        let now = Instant::now();
        let time = state.next.map_or(now, |next| next.max(now));
        state.next = Some(time + (ALL / state.open.max(1)).min(APART_MAX));
        time - now
    }

    /// Reserves such a time if the worker should lose the connection, which has this load. Returns
    /// the time until then. If it is retiring, its tunnels that have ended since no longer count.
    pub fn leave(&mut self, load: usize) -> Option<Duration> {
        if let (Some(retiring), Some(worker)) = (&mut self.retiring, &self.worker)
            && load < *retiring
        {
            worker.end_leaving(*retiring - load);
            *retiring = load;
        }
        let is_due = !self.is_leaving && self.retiring.is_none();
        self.is_leaving |= is_due && self.aging.is_overloaded(self.worker.as_ref(), load);
        (is_due && self.is_leaving).then(|| self.reserve())
    }

    /// Begins the end of the connection, which has this load. Returns false if its peer has enough
    /// such connections, the load of its worker is no reason any more, or it has begun before.
    pub fn retire(&mut self, reason: RetirementReason, load: usize) -> bool {
        if reason == RetirementReason::WorkerLoad {
            self.is_leaving = false;
            if !self.aging.is_overloaded(self.worker.as_ref(), load) {
                return false;
            }
        }
        let mut state = self.aging.state.lock();
        let retiring = state.retiring.entry(self.peer.clone()).or_default();
        if self.retiring.is_some() || *retiring >= RETIRING_MAX {
            return false;
        }
        *retiring += 1;
        self.retiring = Some(load);
        if let Some(worker) = &self.worker {
            worker.begin_leaving(load);
        }
        true
    }
}

impl Drop for Aged {
    fn drop(&mut self) {
        let mut state = self.aging.state.lock();
        state.open -= 1;
        let Some(load) = self.retiring else { return };
        if let Some(worker) = &self.worker {
            worker.end_leaving(load);
        }
        if let Some(retiring) = state.retiring.get_mut(&self.peer) {
            *retiring -= 1;
            if *retiring == 0 {
                state.retiring.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RetirementReason::{Age, WorkerLoad as ByLoad};

    fn peer(name: &str) -> Source {
        Source::cluster(&"west".into()).identity(&name.into())
    }

    fn aging(age: u64) -> Arc<Aging> {
        Arc::new(Aging::new(Some(Duration::from_secs(age)), Some(150)).expect("an age"))
    }

    fn open(aging: &Arc<Aging>, name: &str) -> Aged {
        aging.open(peer(name), &LoadGuard::default())
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_a_peer_retire_two_at_a_time() {
        let aging = aging(60);
        let mut connections: Vec<_> = (0..3).map(|_| open(&aging, "a")).collect();
        let retired = connections.iter_mut().map(|one| one.retire(Age, 1));
        assert_eq!(retired.collect::<Vec<_>>(), [true, true, false]);
        assert!(!connections[0].retire(Age, 1), "it has begun before");
        assert!(open(&aging, "b").retire(Age, 1));
        drop(connections.remove(0));
        assert!(connections[1].retire(Age, 1));
        drop(connections);
        let state = aging.state.lock();
        assert_eq!((state.open, state.retiring.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundredth_of_the_connections_or_one_retires_per_second() {
        for (count, apart) in [(1, 1000), (100, 1000), (1000, 100), (10_000, 10)] {
            let aging = aging(60);
            let connections: Vec<_> = (0..count).map(|_| open(&aging, "a")).collect();
            assert_eq!(connections[0].reserve(), Duration::ZERO);
            for turn in 1..4 {
                assert_eq!(connections[0].reserve(), Duration::from_millis(turn * apart));
            }
        }
    }

    #[test]
    fn lifetimes_vary_by_a_tenth() {
        let aging = aging(100);
        let all: Vec<_> =
            (0..1000).filter_map(|_| aging.lifetime()).map(|it| it.as_secs()).collect();
        assert!(all.iter().all(|seconds| (90..=110).contains(seconds)));
        assert!(all.iter().any(|&seconds| seconds < 95) && all.iter().any(|&one| one > 105));
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_with_too_much_load_loses_connections_until_it_has_less() {
        // Loads of both workers, that of each connection, and how many retire.
        for (first, second, load, want) in [
            (0, 0, 1, 0),
            (1, 0, 1, 0),
            (2, 0, 1, 1),
            (3, 1, 1, 0),
            (30, 10, 1, 0),
            (31, 9, 1, 1),
            // 34 of 46: those that are leaving still count in the mean.
            (40, 0, 1, 6),
            (40, 0, 10, 1),
            // One connection with most of the load would only move it.
            (40, 0, 30, 0),
        ] {
            let aging = aging(60);
            let loads = [WorkerLoad::default(), WorkerLoad::default()];
            aging.set_workers(loads.to_vec());
            let mut held: Vec<_> = (0..first).map(|_| loads[0].guard()).collect();
            held.extend((0..second).map(|_| loads[1].guard()));
            let mut retired = Vec::new();
            for name in 0..first / load {
                let mut one = aging.open(peer(&name.to_string()), &held[0]);
                if one.leave(load).is_some() && one.retire(ByLoad, load) {
                    // The peer comes back, to the worker with less, and its tunnels stay.
                    held.extend((0..load).map(|_| loads[1].guard()));
                    retired.push(one);
                }
            }
            assert_eq!(retired.len(), want, "{first} {second} {load}");
            drop(retired);
            assert_eq!(loads[0].staying(), first);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn tunnels_that_end_on_a_retired_connection_hide_no_load() {
        let aging = aging(60);
        let loads = [WorkerLoad::default(), WorkerLoad::default()];
        aging.set_workers(loads.to_vec());
        let mut held: Vec<_> = (0..40).map(|_| loads[0].guard()).collect();
        let mut one = aging.open(peer("a"), &held[0]);
        assert!(one.leave(10).is_some() && one.retire(ByLoad, 10));
        assert_eq!(loads[0].staying(), 30);
        held.truncate(31);
        assert_eq!(one.leave(1), None);
        assert_eq!(loads[0].staying(), 30);
        drop(one);
        assert_eq!(loads[0].staying(), 31);
    }
}
