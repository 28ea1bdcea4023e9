//! Stage 7: which endpoint, by weight, live load and passive health.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use crate::snapshot::{Endpoint, EndpointSet, InFlight};
use crate::telemetry::Metrics;

use super::policy::Permit;

/// A permit and the endpoint that it is to be dialled at. Only [`pick`] makes one.
#[derive(Debug)]
pub struct Pick {
    permit: Permit,
    endpoint: Arc<Endpoint>,
    in_flight: InFlight,
}

impl Pick {
    /// The endpoint to dial.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Gives the permit back after a failed dial, for another endpoint.
    pub fn into_permit(self) -> Permit {
        self.permit
    }

    /// Takes the pick apart after a successful dial.
    pub fn into_parts(self) -> (Permit, Arc<Endpoint>, InFlight) {
        (self.permit, self.endpoint, self.in_flight)
    }
}

/// Picks an endpoint that was not `tried` for this tunnel, or gives the permit back if none is
/// left.
pub fn pick(permit: Permit, tried: &[Arc<Endpoint>]) -> Result<Pick, Permit> {
    let Some(endpoint) = choose(permit.route().endpoints(), tried).map(Arc::clone) else {
        return Err(permit);
    };
    let in_flight = InFlight::new(&endpoint.state);
    Ok(Pick {
        permit,
        endpoint,
        in_flight,
    })
}

/// The endpoint of the set that is best for a tunnel that `tried` others in vain, if one is left.
///
/// Two weighted draws; the less loaded of the two is taken, load being tunnels in flight per
/// weight. With equal load the first draw stands, so that the shares equal the weights. Ejected
/// endpoints serve only when no other is left: a doubtful endpoint is better than none.
pub fn choose<'a>(set: &'a EndpointSet, tried: &[Arc<Endpoint>]) -> Option<&'a Arc<Endpoint>> {
    let now = Instant::now();
    let untried = |endpoint: &Endpoint| !tried.iter().any(|other| same(other, endpoint));
    let healthy = |endpoint: &Endpoint| untried(endpoint) && !endpoint.state.is_ejected(now);
    best_of_two(set, &healthy).or_else(|| best_of_two(set, &untried))
}

/// Ejects an endpoint that failed, unless that would eject more than half of its service's.
///
/// A service with one endpoint never loses it, and a failure of the network, which fails them
/// all, leaves half of them in service.
pub fn failed(set: &EndpointSet, endpoint: &Endpoint, metrics: &Metrics) {
    let now = Instant::now();
    let ejected = set
        .endpoints
        .iter()
        .filter(|other| other.state.is_ejected(now))
        .count();
    let fits = (ejected + 1) * 2 <= set.endpoints.len();
    if fits && !endpoint.state.is_ejected(now) {
        let time = endpoint.state.eject(now);
        metrics.endpoint_ejected();
        info!(
            endpoint = %endpoint.uid, address = %endpoint.address, ?time,
            "endpoint ejected after a failure"
        );
    }
}

fn same(one: &Endpoint, other: &Endpoint) -> bool {
    Arc::ptr_eq(&one.state, &other.state)
}

fn best_of_two<'a>(
    set: &'a EndpointSet,
    eligible: &impl Fn(&Endpoint) -> bool,
) -> Option<&'a Arc<Endpoint>> {
    let first = draw(set, eligible)?;
    let second = draw(set, eligible)?;
    // In flight per weight, compared without division.
    let load = |endpoint: &Endpoint| u64::from(endpoint.state.in_flight());
    let first_load = load(first) * u64::from(second.weight);
    let second_load = load(second) * u64::from(first.weight);
    Some(if second_load < first_load {
        second
    } else {
        first
    })
}

/// Draws by weight among the eligible endpoints.
fn draw<'a>(
    set: &'a EndpointSet,
    eligible: &impl Fn(&Endpoint) -> bool,
) -> Option<&'a Arc<Endpoint>> {
    /// Draws over all endpoints before the eligible ones are counted: most are eligible as a rule.
    const BLIND_DRAWS: usize = 3;
    let total = *set.cumulative.last()?;
    for _ in 0..BLIND_DRAWS {
        let at = fastrand::u64(..total);
        let index = set.cumulative.partition_point(|&sum| sum <= at);
        if let Some(endpoint) = set
            .endpoints
            .get(index)
            .filter(|endpoint| eligible(endpoint))
        {
            return Some(endpoint);
        }
    }
    let weight = |endpoint: &Arc<Endpoint>| {
        if eligible(endpoint) {
            u64::from(endpoint.weight)
        } else {
            0
        }
    };
    let total: u64 = set.endpoints.iter().map(weight).sum();
    if total == 0 {
        return None;
    }
    let mut at = fastrand::u64(..total);
    set.endpoints
        .iter()
        .find(|endpoint| match at.checked_sub(weight(endpoint)) {
            Some(left) => {
                at = left;
                false
            }
            None => true,
        })
}

#[cfg(test)]
mod tests {
    use crate::snapshot::{EndpointState, Locality, Protocol};

    use super::*;

    fn endpoints(weights: &[u32]) -> EndpointSet {
        let endpoint = |(index, &weight): (usize, &u32)| {
            Arc::new(Endpoint {
                uid: index.to_string().into(),
                address: ([10, 0, 0, 1], 15008).into(),
                protocol: Protocol::Hbone,
                weight,
                locality: Locality::default(),
                workload: Arc::default(),
                pod: "".into(),
                state: Arc::new(EndpointState::new()),
            })
        };
        EndpointSet::new(weights.iter().enumerate().map(endpoint).collect())
    }

    fn shares(set: &EndpointSet, eligible: &impl Fn(&Endpoint) -> bool) -> Vec<f64> {
        const DRAWS: u32 = 100_000;
        fastrand::seed(7);
        let mut counts = vec![0_u32; set.endpoints.len()];
        for _ in 0..DRAWS {
            let chosen = best_of_two(set, eligible).expect("an endpoint");
            let index = set.endpoints.iter().position(|other| same(other, chosen));
            counts[index.expect("one of the set")] += 1;
        }
        counts
            .iter()
            .map(|&count| f64::from(count) / f64::from(DRAWS))
            .collect()
    }

    /// Five standard deviations of a share over 100,000 draws are at most 0.008.
    fn assert_shares(got: &[f64], want: &[f64]) {
        let near = got
            .iter()
            .zip(want)
            .all(|(got, want)| (got - want).abs() < 0.008);
        assert!(
            near && got.len() == want.len(),
            "{got:?} instead of {want:?}"
        );
    }

    #[test]
    fn with_equal_load_the_shares_are_the_weights() {
        let any = |_: &Endpoint| true;
        assert_shares(&shares(&endpoints(&[1, 3, 6]), &any), &[0.1, 0.3, 0.6]);
        assert_shares(&shares(&endpoints(&[1, 1, 1, 1]), &any), &[0.25; 4]);
        assert_shares(&shares(&endpoints(&[5]), &any), &[1.0]);
        let large = u32::MAX;
        assert_shares(
            &shares(&endpoints(&[large, large, large / 2]), &any),
            &[0.4, 0.4, 0.2],
        );
    }

    #[test]
    fn what_is_not_eligible_leaves_its_share_to_the_others_by_weight() {
        let set = endpoints(&[1, 3, 96]);
        let eligible = |endpoint: &Endpoint| &*endpoint.uid != "2";
        assert_shares(&shares(&set, &eligible), &[0.25, 0.75, 0.0]);
        assert!(best_of_two(&set, &|_: &Endpoint| false).is_none());
    }

    #[test]
    fn a_weight_of_zero_is_drained() {
        let set = endpoints(&[0, 2, 0]);
        assert_eq!(set.endpoints.len(), 1);
        assert_eq!(&*set.endpoints[0].uid, "1");
        assert!(best_of_two(&EndpointSet::default(), &|_: &Endpoint| true).is_none());
    }

    #[test]
    fn of_two_draws_the_one_with_less_load_per_weight_wins() {
        let set = endpoints(&[1, 1]);
        let _busy: Vec<_> = (0..10)
            .map(|_| InFlight::new(&set.endpoints[0].state))
            .collect();
        // The busy one is taken only if both draws hit it: a quarter instead of a half.
        assert_shares(&shares(&set, &|_: &Endpoint| true), &[0.25, 0.75]);
        // Three tunnels on weight 3 are the same load as one on weight 1.
        let even = endpoints(&[1, 3]);
        let _load: Vec<_> = [0, 1, 1, 1]
            .map(|index: usize| InFlight::new(&even.endpoints[index].state))
            .into();
        assert_shares(&shares(&even, &|_: &Endpoint| true), &[0.25, 0.75]);
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_half_of_the_endpoints_are_ejected_and_never_the_only_one() {
        let metrics = Metrics::new();
        for (count, most) in [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)] {
            let set = endpoints(&vec![1; count]);
            for endpoint in &set.endpoints {
                failed(&set, endpoint, &metrics);
            }
            let now = Instant::now();
            let ejected = set
                .endpoints
                .iter()
                .filter(|e| e.state.is_ejected(now))
                .count();
            assert_eq!(ejected, most, "of {count}");
        }
    }
}
