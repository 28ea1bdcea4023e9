//! Age of the connections of peers.
//!
//! A connection that reaches its age is sent GOAWAY: the peer opens its next tunnels on a new
//! connection, which another worker or replica may accept, and the open tunnels continue. Peers
//! that connected at the same time do not come back at the same time: ages vary by a tenth, and at
//! most a hundredth of the connections, or one, ends per second. A peer whose tunnels last has at
//! most two connections that wait for their end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::limits::Source;

/// Maximum number of retiring connections of one peer.
const RETIRING_MAX: u32 = 2;
/// Time in which all connections could be retired, and maximum time between two of them.
const ALL: Duration = Duration::from_secs(100);
const APART_MAX: Duration = Duration::from_secs(1);
/// Part of the age by which it varies in both directions.
const JITTER: f64 = 0.1;

/// Connections with an age.
#[derive(Debug)]
pub struct Aging {
    age: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    open: u32,
    /// Time from which the next connection may be retired.
    next: Option<Instant>,
    /// Number of retiring connections by peer; without entries of 0.
    retiring: HashMap<Source, u32>,
}

/// Open connection. On drop it is no longer counted.
#[derive(Debug)]
pub struct Aged {
    aging: Arc<Aging>,
    peer: Source,
    is_retiring: bool,
}

impl Aging {
    /// Creates the state for connections of this age.
    pub fn new(age: Duration) -> Self {
        Self { age, state: Mutex::default() }
    }

    /// Counts a new connection of a peer.
    pub fn open(self: &Arc<Self>, peer: Source) -> Aged {
        self.state.lock().open += 1;
        Aged { aging: Arc::clone(self), peer, is_retiring: false }
    }

    /// Returns the time after which a connection reaches its age.
    pub fn lifetime(&self) -> Duration {
        self.age.mul_f64(1.0 - JITTER + 2.0 * JITTER * fastrand::f64())
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

    /// Begins the end of the connection. Returns false if its peer has enough such connections.
    pub fn retire(&mut self) -> bool {
        let mut state = self.aging.state.lock();
        let retiring = state.retiring.entry(self.peer.clone()).or_default();
        self.is_retiring = *retiring < RETIRING_MAX;
        *retiring += u32::from(self.is_retiring);
        self.is_retiring
    }
}

impl Drop for Aged {
    fn drop(&mut self) {
        let mut state = self.aging.state.lock();
        state.open -= 1;
        if self.is_retiring
            && let Some(retiring) = state.retiring.get_mut(&self.peer)
        {
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

    fn peer(name: &str) -> Source {
        Source::cluster(&"west".into()).identity(&name.into())
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_a_peer_retire_two_at_a_time() {
        let aging = Arc::new(Aging::new(Duration::from_secs(60)));
        let mut connections: Vec<_> = (0..3).map(|_| aging.open(peer("a"))).collect();
        let retired: Vec<_> = connections.iter_mut().map(Aged::retire).collect();
        assert_eq!(retired, [true, true, false]);
        assert!(aging.open(peer("b")).retire());
        drop(connections.remove(0));
        assert!(connections[1].retire());
        drop(connections);
        let state = aging.state.lock();
        assert_eq!((state.open, state.retiring.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundredth_of_the_connections_or_one_retires_per_second() {
        for (count, apart) in [(1, 1000), (100, 1000), (1000, 100), (10_000, 10)] {
            let aging = Arc::new(Aging::new(Duration::from_secs(60)));
            let connections: Vec<_> = (0..count).map(|_| aging.open(peer("a"))).collect();
            assert_eq!(connections[0].reserve(), Duration::ZERO);
            for turn in 1..4 {
                assert_eq!(connections[0].reserve(), Duration::from_millis(turn * apart));
            }
        }
    }

    #[test]
    fn lifetimes_vary_by_a_tenth() {
        let aging = Aging::new(Duration::from_secs(100));
        let all: Vec<_> = (0..1000).map(|_| aging.lifetime().as_secs()).collect();
        assert!(all.iter().all(|seconds| (90..=110).contains(seconds)));
        assert!(all.iter().any(|&seconds| seconds < 95) && all.iter().any(|&one| one > 105));
    }
}
