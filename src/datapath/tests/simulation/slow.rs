//! A gateway of each network in a region becomes slower than the others.

use super::model::siblings;
use super::*;

/// Round trip time of the gateways that are not slow, before noise.
const RTT: Duration = Duration::from_millis(20);
/// Seconds between two comparisons, and between two PINGs.
pub(super) const COMPARISON: usize = 10;
/// Part of the time in which a gateway with an even share has a queue.
const BUSY: f64 = 0.6;
/// Part of the comparisons at which a gateway has no usable connection.
const UNUSABLE: f64 = 0.05;
/// Seconds until the shares follow a longer path: those of the window of [`MinRtt`], three
/// comparisons, and a rest.
///
/// [`MinRtt`]: crate::outer::MinRtt
const LONGER: usize = 300 + 60;

/// Returns true for the first gateway of each network in the failing region.
fn is_first(target: &Target) -> bool {
    let cluster = cluster_of(target.address);
    let is_in_region = cluster.is_some_and(|cluster| cluster % REGIONS == FAILING);
    is_in_region && target.address.ip().to_string().ends_with(".1")
}

/// Returns the part of the time in which a gateway has a queue, by the tunnels of the last seconds:
/// [`BUSY`] with an even share of its network.
fn busy(target: &Target, last: &Window) -> f64 {
    let bin = bin_of(target.address);
    let siblings = &last.opened[siblings(bin)];
    let all: u32 = siblings.iter().sum();
    let even = f64::from(all) / siblings.len() as f64;
    BUSY * f64::from(last.opened[bin]) / even.max(1.0)
}

impl Simulation {
    /// Sends a PING to the gateways that tunnels have used, and compares them. Some have no usable
    /// connection meanwhile.
    pub(super) fn compare_gateways(&mut self) {
        let (now, end) = (Instant::now(), self.windows.len());
        let last = self.sum(end.saturating_sub(COMPARISON)..end);
        let used: Vec<_> = self.used.iter().cloned().collect();
        let mut times = Vec::new();
        for target in used {
            let sample = self.sample(&target, &last);
            let rtt = self.rtts.entry(target.clone()).or_default();
            rtt.record(sample, now);
            let is_usable = fastrand::f64() >= UNUSABLE;
            times.push((target, is_usable.then(|| rtt.least())));
        }
        let shares = |simulation: &Self| -> Vec<_> {
            let used = times.iter();
            used.map(|(target, _)| simulation.ranks.weight_factor(target)).collect()
        };
        let before = shares(self);
        self.ranks.compare(&times);
        let after = shares(self);
        let firsts = times.iter().map(|(target, _)| is_first(target));
        let changed = before.iter().zip(&after).zip(firsts);
        self.changes +=
            changed.filter(|((before, after), is_first)| *is_first && before != after).count();
    }

    /// Returns the round trip time of one PING, with 10 % of noise. The first one is sent before
    /// the connection has tunnels.
    fn sample(&self, target: &Target, last: &Window) -> Duration {
        let path = self.slow_rtt.filter(|_| is_first(target)).unwrap_or(RTT);
        let path = path.mul_f64(0.9 + 0.2 * fastrand::f64());
        let is_busy = self.rtts.contains_key(target) && fastrand::f64() < busy(target, last);
        path + self.queue.filter(|_| is_busy).unwrap_or_default()
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

    simulation.tunnels = TUNNELS / 2;
    simulation.slow_rtt = Some(Duration::from_millis(100));
    simulation.run(LONGER + 40).await;
    let share = simulation.share_of_first(20 + LONGER..60 + LONGER);
    assert!((0.09..0.14).contains(&share), "{share}");
    let region = usize::from(FAILING);
    for start in (20..60 + LONGER).step_by(5) {
        let span = simulation.sum(start..start + 5);
        let counts = span.of_region(region);
        assert!(span.is_within_bound(region), "at {start}: {counts:?}");
    }
    assert_eq!(simulation.changes, gateways, "each changes once");

    // Near the threshold of a fast gateway, slow ones stay slow.
    simulation.slow_rtt = Some(Duration::from_millis(45));
    simulation.run(100).await;
    assert_eq!(simulation.changes, gateways);

    simulation.tunnels = TUNNELS;
    simulation.slow_rtt = None;
    simulation.run(80).await;
    let end = simulation.windows.len();
    simulation.assert_shares(end - 20..end);
    assert_eq!(simulation.changes, 2 * gateways, "each changes back");

    simulation.tunnels = TUNNELS / 2;
    simulation.slow_rtt = Some(Duration::from_millis(47));
    simulation.run(LONGER).await;
    let changes = simulation.changes - 2 * gateways;
    assert!((1..=gateways).contains(&changes), "{changes} of {gateways}");
    let end = simulation.windows.len();
    assert_eq!(simulation.sum(0..end).failed, 0);
}

/// A gateway with a smaller share has shorter queues, and would look fast again.
#[tokio::test(start_paused = true)]
async fn queues_that_depend_on_the_load_of_a_gateway_do_not_change_shares() {
    fastrand::seed(163);
    let mut simulation = Simulation::new(200);
    simulation.run(20).await;
    simulation.queue = Some(Duration::from_millis(100));
    simulation.tunnels = TUNNELS / 4;
    simulation.run(1200).await;
    assert_eq!(simulation.changes, 0);
    simulation.tunnels = TUNNELS;
    simulation.run(20).await;
    let end = simulation.windows.len();
    simulation.assert_shares(end - 20..end);
}
