//! Clusters that advertise their loads, which follow from the tunnels that they hold.

use std::collections::VecDeque;

use super::model::{BINS, CLUSTERS, first_bin, siblings};
use super::*;
use crate::snapshot::InFlight;
use crate::wire::ServiceLoad;

/// Time for which a tunnel is open.
const OPEN: Duration = Duration::from_secs(5);
/// Services that tunnels ask for, so that gateways answer often.
const REQUESTED: usize = 200;
/// Open tunnels at which a cluster outside the failing region has no free capacity.
const PLACES: u32 = 40;
/// Seconds until the shares follow a change of loads: those of the moving mean and of [`OPEN`].
const SETTLED: usize = 15;
/// Seconds over which shares are compared.
const ROUND: usize = 10;
/// Seconds after each change.
const PHASE: usize = SETTLED + 2 * ROUND;
/// Limit of the part of the tunnels that are in another cluster than expected. By chance it is
/// 0.02, and without the loads 0.12.
const MISPLACED_MAX: f64 = 0.04;
/// Limit of the part of the tunnels that are in other clusters than in the round before. By chance
/// it is 0.04, and 0.07 if weights jump between two values.
const MOVED_MAX: f64 = 0.055;

/// Tunnels that clusters hold, and what clusters advertise. A full one accepts more tunnels.
pub(super) struct Loads {
    /// Open tunnels at which a cluster of the failing region has no free capacity.
    places: u32,
    /// Ready instances in the failing region for each one that the control plane reports.
    ready: u32,
    /// Open tunnels with their ends and clusters.
    open: VecDeque<(Instant, u8, InFlight)>,
    /// Number of open tunnels by cluster.
    counts: Vec<u32>,
}

impl Loads {
    /// Opens a tunnel. Only its answer carries the load of its cluster.
    pub(super) fn open(&mut self, pick: Pick, now: Instant) {
        let (_, endpoint, in_flight) = pick.into_parts();
        let cluster = cluster_of(endpoint.address).unwrap_or(0);
        let count = self.counts[usize::from(cluster)];
        if cluster > 0 {
            let (places, ready) = self.of(cluster);
            let load = ServiceLoad {
                ready: ready * endpoint.definition.capacity,
                free_percent: 100 * places.saturating_sub(count) / places,
            };
            endpoint.state.record_load(load, now);
        }
        self.counts[usize::from(cluster)] += 1;
        self.open.push_back((now + OPEN, cluster, in_flight));
    }

    /// Ends the tunnels that are due.
    pub(super) fn end_tunnels(&mut self, now: Instant) {
        while let Some((end, cluster, _)) = self.open.front()
            && *end <= now
        {
            self.counts[usize::from(*cluster)] -= 1;
            self.open.pop_front();
        }
    }

    /// Returns the places of a cluster, and its ready instances for each one that is reported.
    fn of(&self, cluster: u8) -> (u32, u32) {
        if cluster % REGIONS == FAILING { (self.places, self.ready) } else { (PLACES, 1) }
    }

    /// Returns the factor of the weights of a cluster that holds this number of tunnels.
    fn factor(&self, cluster: u8, open: f64) -> f64 {
        let (places, ready) = self.of(cluster);
        let free = 1.0 - open / f64::from(places);
        (f64::from(ready) * free).clamp(0.25, 4.0)
    }
}

impl Simulation {
    /// Sets the expected factors to those at which shares and loads agree.
    fn expect_equilibrium(&mut self) {
        // Each step is small enough to converge.
        const STEPS: usize = 200;
        const STEP: f64 = 0.1;
        let loads = self.loads.as_ref().expect("loads");
        let open = (TUNNELS * TICKS_PER_SECOND) as f64 * OPEN.as_secs_f64();
        for _ in 0..STEPS {
            let mut bins = vec![0.0; BINS];
            for service in 0..self.model.requested {
                self.model.add_shares(service, true, &mut bins);
            }
            for cluster in 1..CLUSTERS {
                let share: f64 = bins[siblings(first_bin(cluster))].iter().sum();
                let open = open * share / self.model.requested as f64;
                let factor = &mut self.model.factors[usize::from(cluster)];
                *factor += STEP * (loads.factor(cluster, open) - *factor);
            }
        }
    }

    /// Returns the opened and the expected tunnels of each cluster.
    fn by_cluster(&self, seconds: Range<usize>) -> Vec<(f64, f64)> {
        let sum = self.sum(seconds);
        let of_bins = |bins: Range<usize>| {
            let opened: u32 = sum.opened[bins.clone()].iter().sum();
            (f64::from(opened), sum.expected[bins].iter().sum())
        };
        let others = (1..CLUSTERS).map(|cluster| of_bins(siblings(first_bin(cluster))));
        std::iter::once(of_bins(0..1)).chain(others).collect()
    }

    /// Asserts that the shares of clusters are the expected ones, and do not change.
    #[track_caller]
    fn assert_settled(&self, start: usize) {
        let rounds = [start, start + ROUND].map(|at| at..at + ROUND);
        let all = self.by_cluster(rounds[0].start..rounds[1].end);
        let misplaced = distance(&all);
        assert!(misplaced < MISPLACED_MAX, "{misplaced} from {start}");
        let [one, next] = rounds.map(|seconds| self.by_cluster(seconds));
        let changes: Vec<_> = one.iter().zip(&next).map(|(one, next)| (one.0, next.0)).collect();
        let moved = distance(&changes);
        assert!(moved < MOVED_MAX, "{moved} from {start}");
        for (cluster, (one, next)) in changes.into_iter().enumerate() {
            let bound = DEVIATIONS_MAX * (one + next).sqrt();
            assert!((one - next).abs() <= bound, "{cluster}: {one}, {next}");
        }
    }
}

/// Returns the part of the first counts that is in other places than the second ones.
fn distance(pairs: &[(f64, f64)]) -> f64 {
    let (apart, all) = pairs
        .iter()
        .fold((0.0, 0.0), |sum, (one, other)| (sum.0 + (one - other).abs(), sum.1 + one));
    apart / 2.0 / all
}

/// The clusters of a region lose three quarters of their places, then regain them and double their
/// instances, which the control plane does not report.
#[tokio::test(start_paused = true)]
async fn shares_follow_advertised_loads_within_seconds_and_without_oscillation() {
    fastrand::seed(164);
    let mut simulation = Simulation::new(SERVICES);
    simulation.model.requested = REQUESTED;
    simulation.loads = Some(Loads {
        places: 0,
        ready: 0,
        open: VecDeque::new(),
        counts: vec![0; CLUSTERS.into()],
    });
    for (places, ready) in [(100, 1), (25, 1), (100, 2)] {
        let loads = simulation.loads.as_mut().expect("loads");
        (loads.places, loads.ready) = (places, ready);
        simulation.expect_equilibrium();
        let start = simulation.windows.len();
        simulation.run(PHASE).await;
        simulation.assert_settled(start + SETTLED);
    }
}
