//! Shares of the gateways of one network by their round trip times.
//!
//! A gateway whose least round trip time is far longer than that of the fastest one gets a quarter
//! of the share of the others. The share of the network stays the same. Two thresholds and several
//! comparisons in sequence keep a gateway between them in the state that it has.

use std::collections::HashMap;
use std::time::Duration;

use tracing::info;

use crate::snapshot::FACTOR_ONE;

use super::Target;

/// Number of comparisons in sequence that change the state of a gateway.
const COMPARISONS: u32 = 3;
const SLOW_DIVISOR: u32 = 4;
/// Difference that is never slow, such as that of two zones of a region.
const TOLERANCE: Duration = Duration::from_millis(5);

/// Gateways that were compared last.
#[derive(Debug, Default)]
pub(crate) struct Ranks {
    by_gateway: HashMap<Target, Rank>,
}

#[derive(Clone, Copy, Debug)]
struct Rank {
    is_slow: bool,
    /// Number of last comparisons that contradict `is_slow`.
    contradictions: u32,
    /// Factor of its weights, in units of [`FACTOR_ONE`].
    weight_factor: u32,
}

impl Ranks {
    /// Compares gateways with those of the same network, by their round trip times. One without a
    /// time keeps the rank that it has. Others are forgotten.
    pub(crate) fn compare(&mut self, gateways: &[(Target, Option<Duration>)]) {
        let mut networks: HashMap<&str, Vec<&(Target, Option<Duration>)>> = HashMap::new();
        for one in gateways {
            let network = &*one.0.gateway.network;
            networks.entry(network).or_default().push(one);
        }
        let earlier = std::mem::take(&mut self.by_gateway);
        for gateways in networks.into_values() {
            let best = gateways.iter().filter_map(|(_, time)| *time).min();
            let ranked = gateways.into_iter().filter_map(|(target, time)| {
                let mut rank = earlier.get(target).copied();
                if let (Some(time), Some(best)) = (*time, best) {
                    rank.get_or_insert_default().compare(target, (time, best));
                }
                Some((target.clone(), rank?))
            });
            let mut ranked: Vec<_> = ranked.collect();
            distribute_share(&mut ranked);
            self.by_gateway.extend(ranked);
        }
    }

    /// Returns the factor of a gateway's weights, in units of [`FACTOR_ONE`].
    pub(crate) fn weight_factor(&self, target: &Target) -> u32 {
        self.by_gateway.get(target).map_or(FACTOR_ONE, |rank| rank.weight_factor)
    }
}

impl Default for Rank {
    fn default() -> Self {
        Self { is_slow: false, contradictions: 0, weight_factor: FACTOR_ONE }
    }
}

impl Rank {
    /// Compares a round trip time with the best one of the network.
    fn compare(&mut self, target: &Target, (time, best): (Duration, Duration)) {
        let contradicts = if self.is_slow {
            time < (3 * best + TOLERANCE) / 2
        } else {
            time > 2 * best + TOLERANCE
        };
        self.contradictions = if contradicts { self.contradictions + 1 } else { 0 };
        if self.contradictions == COMPARISONS {
            self.contradictions = 0;
            self.is_slow = !self.is_slow;
            let (address, network) = (target.address, &*target.gateway.network);
            let is_slow = self.is_slow;
            let rtt = time;
            info!(%address, network, ?rtt, ?best, is_slow, "share of a gateway changed");
        }
    }
}

/// Divides the share of a network, of one for each gateway, among its gateways.
fn distribute_share(gateways: &mut [(Target, Rank)]) {
    let parts = |rank: &Rank| if rank.is_slow { 1 } else { SLOW_DIVISOR };
    let all: u32 = gateways.iter().map(|(_, rank)| parts(rank)).sum();
    let count = u32::try_from(gateways.len()).unwrap_or(u32::MAX);
    for (_, rank) in gateways {
        rank.weight_factor =
            parts(rank).saturating_mul(count).saturating_mul(FACTOR_ONE) / all.max(1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::snapshot::RemoteGateway;

    use super::*;

    fn target(network: &str, last: u8) -> Target {
        let gateway = RemoteGateway {
            network: network.into(),
            cluster: Arc::default(),
            identities: Box::default(),
            other_addresses: Box::default(),
        };
        Target { address: ([192, 0, 2, last], 15008).into(), gateway: Arc::new(gateway) }
    }

    /// Time of a gateway without a usable connection.
    const NONE: u64 = u64::MAX;

    /// Compares gateways of network west with these times in milliseconds, and returns their
    /// shares in percent.
    fn compare<const N: usize>(ranks: &mut Ranks, millis: [u64; N]) -> [u32; N] {
        let last = |at: usize| u8::try_from(at).expect("few");
        let times = millis.iter().enumerate();
        let times = times.map(|(at, time)| {
            let time = (*time != NONE).then(|| Duration::from_millis(*time));
            (target("west", last(at)), time)
        });
        let mut times: Vec<_> = times.collect();
        times.push((target("north", 9), Some(Duration::from_micros(1))));
        ranks.compare(&times);
        assert_eq!(ranks.weight_factor(&target("north", 9)), FACTOR_ONE);
        std::array::from_fn(|at| ranks.weight_factor(&target("west", last(at))) * 100 / FACTOR_ONE)
    }

    #[test]
    fn a_gateway_is_slow_after_three_comparisons_and_even_again_after_three() {
        let mut ranks = Ranks::default();
        for _ in 0..2 {
            assert_eq!(compare(&mut ranks, [20, 46]), [100, 100]);
        }
        assert_eq!(compare(&mut ranks, [20, 45]), [100, 100], "not beyond");
        for _ in 0..2 {
            assert_eq!(compare(&mut ranks, [20, 46]), [100, 100]);
        }
        assert_eq!(compare(&mut ranks, [20, 46]), [159, 39]);
        // Between the thresholds nothing changes.
        for time in [46, 33, 45, 33, 33, 33] {
            assert_eq!(compare(&mut ranks, [20, time]), [159, 39]);
        }
        for _ in 0..2 {
            assert_eq!(compare(&mut ranks, [20, 32]), [159, 39]);
        }
        assert_eq!(compare(&mut ranks, [20, 32]), [100, 100]);
        for time in [32, 45, 45, 45, 45] {
            assert_eq!(compare(&mut ranks, [20, time]), [100, 100]);
        }
    }

    #[test]
    fn gateways_of_one_region_and_a_gateway_alone_are_not_slow() {
        let mut ranks = Ranks::default();
        for _ in 0..9 {
            assert_eq!(compare(&mut ranks, [1, 7, 2]), [100, 100, 100]);
            assert_eq!(compare(&mut Ranks::default(), [500]), [100]);
        }
        for _ in 0..3 {
            compare(&mut ranks, [1, 60, 60]);
        }
        assert_eq!(compare(&mut ranks, [1, 60, 60]), [200, 50, 50]);
        // Once the fast one is as slow, the others are not slow.
        for _ in 0..3 {
            compare(&mut ranks, [60, 60, 60]);
        }
        assert_eq!(compare(&mut ranks, [60, 60, 60]), [100, 100, 100]);
    }

    #[test]
    fn a_gateway_without_a_usable_connection_keeps_its_rank() {
        let mut ranks = Ranks::default();
        for _ in 0..3 {
            compare(&mut ranks, [20, 100]);
        }
        assert_eq!(compare(&mut ranks, [20, NONE]), [159, 39]);
        assert_eq!(compare(&mut ranks, [NONE, NONE]), [159, 39]);
        for _ in 0..2 {
            assert_eq!(compare(&mut ranks, [20, 32]), [159, 39]);
            assert_eq!(compare(&mut ranks, [20, NONE]), [159, 39]);
        }
        assert_eq!(compare(&mut ranks, [20, 32]), [100, 100]);
        // One that never had a connection has no part of the network.
        assert_eq!(compare(&mut Ranks::default(), [20, NONE]), [100, 100]);
    }
}
