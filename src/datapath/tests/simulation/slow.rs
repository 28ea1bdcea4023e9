//! A gateway of each network in a region becomes slower than the others.

use std::ops::Range;
use std::time::Duration;

use super::{FAILING, REGIONS, Simulation, Target, bin_of, cluster_of, region_of};

/// Round trip time of the gateways that are not slow, before noise.
const RTT: Duration = Duration::from_millis(20);
/// Seconds between two comparisons.
pub(super) const COMPARISON: usize = 10;

/// Returns true for the first gateway of each network in the failing region.
fn is_first(target: &Target) -> bool {
    let cluster = cluster_of(target.address);
    let is_in_region = cluster.is_some_and(|cluster| cluster % REGIONS == FAILING);
    is_in_region && target.address.ip().to_string().ends_with(".1")
}

impl Simulation {
    /// Compares the gateways that tunnels have used, by times with 10 % of noise.
    pub(super) fn compare_gateways(&mut self) {
        let time = |target: &Target| {
            let time = if is_first(target) {
                self.slow_rtt
            } else {
                Some(RTT)
            };
            time.unwrap_or(RTT).mul_f64(0.9 + 0.2 * fastrand::f64())
        };
        let times = self
            .used
            .iter()
            .map(|target| (target.clone(), time(target)));
        let times: Vec<_> = times.collect();
        let shares = |simulation: &Self| -> Vec<_> {
            let used = times.iter();
            used.map(|(target, _)| simulation.ranks.share(target))
                .collect()
        };
        let before = shares(self);
        self.ranks.compare(&times);
        let after = shares(self);
        let firsts = times.iter().map(|(target, _)| is_first(target));
        let changed = before.iter().zip(&after).zip(firsts);
        self.changes += changed
            .filter(|((before, after), is_first)| *is_first && before != after)
            .count();
    }

    /// Returns the part of the region's tunnels that the first gateways have.
    fn share_of_first(&self, seconds: Range<usize>) -> f64 {
        let sum = self.sum(seconds);
        let of_region = |bin: &usize| region_of(*bin) == usize::from(FAILING);
        let firsts = self.used.iter().filter(|target| is_first(target));
        let firsts: Vec<_> = firsts.map(|target| bin_of(target.address)).collect();
        let opened = |bins: &[usize]| -> f64 {
            let opened = bins.iter().map(|bin| f64::from(sum.opened[*bin]));
            opened.sum()
        };
        let all: Vec<_> = (1..sum.opened.len()).filter(of_region).collect();
        opened(&firsts) / opened(&all)
    }
}

/// A slow gateway has one of nine parts, and its network keeps its share.
#[tokio::test(start_paused = true)]
async fn a_slow_gateway_leaves_its_share_to_its_network_and_regains_it_without_oscillation() {
    fastrand::seed(162);
    let mut simulation = Simulation::new(200);
    simulation.run(20).await;
    simulation.assert_shares(0..20);
    let gateways = simulation.used.iter().filter(|one| is_first(one)).count();
    assert!(gateways >= 10, "{gateways}");

    simulation.slow_rtt = Some(Duration::from_millis(100));
    simulation.run(80).await;
    let share = simulation.share_of_first(60..100);
    assert!((0.09..0.14).contains(&share), "{share}");
    let region = usize::from(FAILING);
    for start in (20..100).step_by(5) {
        let span = simulation.sum(start..start + 5);
        let counts = span.of_region(region);
        assert!(span.is_within_bound(region), "at {start}: {counts:?}");
    }
    assert_eq!(simulation.changes, gateways, "each changes once");

    // Near the threshold of a fast gateway, slow ones stay slow.
    simulation.slow_rtt = Some(Duration::from_millis(45));
    simulation.run(100).await;
    assert_eq!(simulation.changes, gateways);

    simulation.slow_rtt = None;
    simulation.run(80).await;
    simulation.assert_shares(260..280);
    assert_eq!(simulation.changes, 2 * gateways, "each changes back");

    simulation.slow_rtt = Some(Duration::from_millis(45));
    simulation.run(100).await;
    let changes = simulation.changes - 2 * gateways;
    assert!((1..=gateways).contains(&changes), "{changes} of {gateways}");
    assert_eq!(simulation.sum(0..380).failed, 0);
}
