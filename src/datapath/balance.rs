//! Stage 7: the pick of an endpoint by weight, live load and passive health.

use std::cell::LazyCell;
use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;

use crate::reason::Reason;
use crate::snapshot::{
    Endpoint, EndpointSet, EndpointState, InFlight, LINK_FACTOR_ONE, LinkFactors, Load, Part,
};
use crate::telemetry::Metrics;

use super::limits::descriptors::Holders;
use super::policy::Permit;
use super::route::Route;

/// Denominator of drop overloads, which are parts per million.
const PARTS_PER_MILLION: u32 = 1_000_000;

/// A permit and the endpoint to dial. Only [`pick`] creates one.
#[derive(Debug)]
pub struct Pick {
    permit: Permit,
    endpoint: Arc<Endpoint>,
    in_flight: InFlight,
}

impl Pick {
    /// Returns the endpoint to dial.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Returns the route of the permit.
    pub fn route(&self) -> &Route {
        self.permit.route()
    }

    /// Returns the holders that the tunnel is counted for.
    pub fn holders(&self) -> Option<&Holders> {
        self.permit.holders()
    }

    /// Returns the permit, for another endpoint.
    pub fn into_permit(self) -> Permit {
        self.permit
    }

    /// Ends the pick, because its endpoint rejects the tunnel or cannot be dialled.
    pub fn failed(self, reason: Reason, detail: String) -> FailedTry {
        FailedTry {
            reason,
            detail,
            endpoint: self.endpoint,
            permit: self.permit,
        }
    }

    /// Splits the pick after a successful dial.
    pub fn into_parts(self) -> (Permit, Arc<Endpoint>, InFlight) {
        (self.permit, self.endpoint, self.in_flight)
    }
}

/// A pick that led to no connection, with the permit for another one.
#[derive(Debug)]
pub struct FailedTry {
    /// Reason for the failure.
    pub reason: Reason,
    /// Explanation of the failure, such as the error of the operating system.
    pub detail: String,
    /// Endpoint that failed.
    pub endpoint: Arc<Endpoint>,
    /// Permit for another endpoint.
    pub permit: Permit,
}

/// Picks an endpoint that is not in `tried`, with the factors of the peer's links.
///
/// # Errors
/// Returns the permit if no endpoint is left.
pub fn pick(permit: Permit, tried: &[Arc<Endpoint>], links: &LinkFactors) -> Result<Pick, Permit> {
    let Some(endpoint) = choose(permit.route().endpoints(), tried, links).map(Arc::clone) else {
        return Err(permit);
    };
    let in_flight = InFlight::new(&endpoint.state);
    Ok(Pick {
        permit,
        endpoint,
        in_flight,
    })
}

/// Draws whether a drop overload of the control plane rejects a tunnel, and returns its category.
/// Each category drops its part of the tunnels that the categories before it leave.
pub fn draw_drop_category(drops: &[(Arc<str>, u32)]) -> Option<&Arc<str>> {
    let mut drops = drops.iter();
    let is_drawn = |(_, parts): &&(Arc<str>, u32)| fastrand::u32(..PARTS_PER_MILLION) < *parts;
    drops.find(is_drawn).map(|(category, _)| category)
}

/// Returns the probability that [`draw_drop_category`] rejects a tunnel.
pub fn drop_probability(drops: &[(Arc<str>, u32)]) -> f64 {
    let left = |(_, parts): &(Arc<str>, u32)| f64::from(PARTS_PER_MILLION.saturating_sub(*parts));
    let left = drops
        .iter()
        .map(|one| left(one) / f64::from(PARTS_PER_MILLION));
    1.0 - left.product::<f64>()
}

/// Returns the best endpoint of the set that is not in `tried`, if one is left.
///
/// In a set with groups, one group is drawn by its share; the others replace it if it has no
/// eligible endpoint, first those of the same part of a split subset. Two weighted draws follow,
/// and the less loaded endpoint is taken. Load is the number of tunnels in flight per weight. On
/// equal load the first draw is taken, so that the shares equal the weights. Loads that gateways
/// advertise, and exceeded budgets of links, change their weights. If the budgets reduce the two by
/// different factors, the first draw is taken.
///
/// Ejected endpoints are used only if no other is left in any group. An ejected endpoint is better
/// than none, and a healthy one farther away is better than an ejected one.
/// [`pick_probabilities`](crate::snapshot::pick_probabilities) computes the probabilities of this
/// pick.
pub fn choose<'a>(
    set: &'a EndpointSet,
    tried: &[Arc<Endpoint>],
    links: &LinkFactors,
) -> Option<&'a Arc<Endpoint>> {
    // Usually no endpoint was ever ejected, and the clock is not read.
    let now = LazyCell::new(Instant::now);
    let now = || *now;
    let is_ejected = |state: &EndpointState| state.was_ejected() && state.is_ejected(now());
    let untried = |state: &Arc<EndpointState>| !tried.iter().any(|e| Arc::ptr_eq(&e.state, state));
    let healthy = |state: &Arc<EndpointState>| untried(state) && !is_ejected(state);
    let index = match set.groups() {
        None => {
            let whole = set.whole(links);
            best_of_two(whole, &healthy, now).or_else(|| best_of_two(whole, &untried, now))
        }
        Some(groups) => {
            let mut parts = set.drawn(groups, groups.draw()?, links);
            let again = parts.clone();
            let found = parts.find_map(|part| best_of_two(part, &healthy, now));
            found.or_else(|| {
                again
                    .into_iter()
                    .find_map(|part| best_of_two(part, &untried, now))
            })
        }
    };
    set.endpoints.get(index?)
}

/// Ejects an endpoint after a failure, unless more than half of the set would then be ejected.
/// Returns true if this call has ejected it.
///
/// The only endpoint of a service is never ejected. A failure of the network, which affects all
/// endpoints, leaves half of them in service.
pub fn eject_after_failure(set: &EndpointSet, endpoint: &Endpoint, metrics: &Metrics) -> bool {
    let now = Instant::now();
    // A gateway may be an endpoint of several groups, with one state.
    let others = set.endpoints.iter().map(|other| &other.state);
    let others = others.filter(|other| !Arc::ptr_eq(other, &endpoint.state));
    let ejected = others.clone().filter(|other| other.is_ejected(now)).count();
    // A suspension is no judgement of the endpoint, and this failure is one.
    let is_old = endpoint.state.is_ejected(now) && !endpoint.state.is_suspended(now);
    if (ejected + 1) * 2 > others.count() + 1 || is_old {
        return false;
    }
    let time = endpoint.state.eject(now);
    metrics.endpoint_ejected();
    info!(
        endpoint = %endpoint.uid(), address = %endpoint.address, ?time,
        "endpoint ejected after a failure"
    );
    true
}

/// Returns the index in the set of the less loaded one of two eligible endpoints drawn by weight.
fn best_of_two(
    part: Part<'_>,
    eligible: &impl Fn(&Arc<EndpointState>) -> bool,
    now: impl Fn() -> Instant + Copy,
) -> Option<usize> {
    let max = part.factor_max(now);
    let draw = || draw(part, eligible, max, now);
    let (first, second) = (draw()?, draw()?);
    let load = |place: usize| Load::of(part, place, now);
    let is_less = load(second)?.is_less_than(load(first)?);
    Some(part.start + if is_less { second } else { first })
}

/// Draws an eligible endpoint of a group by weight, in which the largest factor is `max`.
fn draw(
    part: Part<'_>,
    eligible: &impl Fn(&Arc<EndpointState>) -> bool,
    max: u32,
    now: impl Fn() -> Instant + Copy,
) -> Option<usize> {
    /// Number of draws over all endpoints before the eligible ones are summed: most are eligible.
    const BLIND_DRAWS: usize = 3;
    // A larger factor makes other draws count less often.
    let draws = BLIND_DRAWS * (max / LINK_FACTOR_ONE).max(1) as usize;
    for _ in 0..draws {
        let place = part.draw()?;
        let candidate = part.candidates.get(place)?;
        let factor = part.factor(place, now);
        // The table has no factors, so a draw counts with the probability factor / max.
        if eligible(&candidate.state) && (factor >= max || fastrand::u32(..max) < factor) {
            return Some(place);
        }
    }
    let weight = |place: &usize| {
        let candidate = part.candidates.get(*place);
        match candidate.filter(|candidate| eligible(&candidate.state)) {
            Some(_) => part.scaled_weight(*place, now),
            None => 0,
        }
    };
    let mut places = 0..part.candidates.len();
    let weights = places.clone().map(|place| weight(&place));
    let total = weights.fold(0, u64::saturating_add);
    if total == 0 {
        return None;
    }
    let mut at = fastrand::u64(..total);
    places.find(|place| match at.checked_sub(weight(place)) {
        Some(left) => {
            at = left;
            false
        }
        None => true,
    })
}

#[cfg(test)]
mod tests {
    use crate::snapshot::mesh::Workload;
    use crate::snapshot::{NO_LINK_FACTORS, Protocol};

    use super::*;

    fn endpoints(weights: &[u32]) -> EndpointSet {
        let endpoint = |(index, &weight): (usize, &u32)| {
            let of = Workload {
                uid: index.to_string().into(),
                ..Workload::default()
            };
            Arc::new(Endpoint {
                definition: Arc::new(of),
                address: ([10, 0, 0, 1], 15008).into(),
                protocol: Protocol::Hbone,
                remote: None,
                weight,
                state: Arc::new(EndpointState::default()),
            })
        };
        EndpointSet::new(weights.iter().enumerate().map(endpoint))
    }

    fn shares(set: &EndpointSet, eligible: &impl Fn(&Arc<EndpointState>) -> bool) -> Vec<f64> {
        const DRAWS: u32 = 100_000;
        fastrand::seed(7);
        let mut counts = vec![0_u32; set.endpoints.len()];
        for _ in 0..DRAWS {
            counts[best_of_two(set.whole(NO_LINK_FACTORS), eligible, Instant::now)
                .expect("an endpoint")] += 1;
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
        let any = |_: &Arc<EndpointState>| true;
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
        let out = Arc::clone(&set.endpoints[2].state);
        let eligible = |state: &Arc<EndpointState>| !Arc::ptr_eq(state, &out);
        assert_shares(&shares(&set, &eligible), &[0.25, 0.75, 0.0]);
        assert!(
            best_of_two(
                set.whole(NO_LINK_FACTORS),
                &|_: &Arc<EndpointState>| false,
                Instant::now
            )
            .is_none()
        );
    }

    #[test]
    fn a_weight_of_zero_is_drained() {
        let set = endpoints(&[0, 2, 0]);
        assert_eq!(set.endpoints.len(), 1);
        assert_eq!(&**set.endpoints[0].uid(), "1");
        assert!(
            best_of_two(
                EndpointSet::default().whole(NO_LINK_FACTORS),
                &|_: &Arc<EndpointState>| true,
                Instant::now
            )
            .is_none()
        );
    }

    #[test]
    fn of_two_draws_the_one_with_less_load_per_weight_wins() {
        let set = endpoints(&[1, 1]);
        let _busy: Vec<_> = (0..10)
            .map(|_| InFlight::new(&set.endpoints[0].state))
            .collect();
        // The busy endpoint is taken only if both draws hit it: a quarter instead of a half.
        assert_shares(&shares(&set, &|_: &Arc<EndpointState>| true), &[0.25, 0.75]);
        // Three tunnels on weight 3 are the same load as one on weight 1.
        let even = endpoints(&[1, 3]);
        let _load: Vec<_> = [0, 1, 1, 1]
            .map(|index: usize| InFlight::new(&even.endpoints[index].state))
            .into();
        assert_shares(
            &shares(&even, &|_: &Arc<EndpointState>| true),
            &[0.25, 0.75],
        );
    }

    /// Returns the shares over 100,000 tunnels. At any time `open` of them are open; a random one
    /// ends for each new one.
    fn shares_with_open(weights: &[u32], open: usize) -> Vec<f64> {
        const TUNNELS: u32 = 100_000;
        fastrand::seed(7);
        let set = endpoints(weights);
        let mut counts = vec![0_u32; weights.len()];
        let mut tunnels = Vec::new();
        for _ in 0..TUNNELS {
            let chosen = choose(&set, &[], NO_LINK_FACTORS).expect("an endpoint");
            counts[chosen.uid().parse::<usize>().expect("its place")] += 1;
            tunnels.push(InFlight::new(&chosen.state));
            if tunnels.len() > open {
                drop(tunnels.swap_remove(fastrand::usize(..tunnels.len())));
            }
        }
        let share = |&count: &u32| f64::from(count) / f64::from(TUNNELS);
        counts.iter().map(share).collect()
    }

    /// Comparing the load including the new tunnel, (in flight + 1) / weight, was tried. The
    /// heavier of two draws then wins at rest. Weight 1 of 1:3 has a share of 0.06 there, 0.06
    /// with one open tunnel, and 0.19 with four.
    #[test]
    fn the_shares_stay_near_the_weights_whatever_is_open() {
        for open in [0, 1, 4, 64] {
            assert_shares(&shares_with_open(&[1, 1, 1, 1], open), &[0.25; 4]);
            // With one open tunnel the share is 7/22: that tunnel drives the next one to the other
            // endpoint.
            let light = if open == 1 { 7.0 / 22.0 } else { 0.25 };
            assert_shares(&shares_with_open(&[1, 3], open), &[light, 1.0 - light]);
        }
    }

    #[test]
    fn each_reason_drops_its_part_of_what_the_others_have_left() {
        const DRAWS: u32 = 100_000;
        fastrand::seed(7);
        let drops = [("a", 200_000), ("b", 500_000), ("c", 0)];
        let drops = drops.map(|(category, parts)| (Arc::from(category), parts));
        let mut counts = [0_u32; 3];
        for _ in 0..DRAWS {
            if let Some(category) = draw_drop_category(&drops) {
                counts["abc".find(&**category).expect("a category")] += 1;
            }
        }
        let shares = counts.map(|count| f64::from(count) / f64::from(DRAWS));
        assert_shares(&shares, &[0.2, 0.4, 0.0]);
        assert!((drop_probability(&drops) - 0.6).abs() < 1e-9 && drop_probability(&[]) == 0.0);
        assert_eq!(draw_drop_category(&[]), None);
        let all = [(Arc::from("all"), PARTS_PER_MILLION)];
        assert_eq!(
            draw_drop_category(&all).map(|category| &**category),
            Some("all")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_half_of_the_endpoints_are_ejected_and_never_the_only_one() {
        let metrics = Metrics::new();
        for (count, most) in [(1, 0), (2, 1), (3, 1), (4, 2), (9, 4)] {
            let set = endpoints(&vec![1; count]);
            for endpoint in &set.endpoints {
                eject_after_failure(&set, endpoint, &metrics);
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

    #[tokio::test(start_paused = true)]
    async fn the_only_gateway_of_several_groups_is_never_ejected() {
        let one = &endpoints(&[1]).endpoints[0];
        let set = EndpointSet::new([Arc::clone(one), Arc::clone(one)]);
        assert!(!eject_after_failure(&set, one, &Metrics::new()));
    }
}
