//! Stage 7: the pick of an endpoint by weight, live load and passive health.

use std::cell::LazyCell;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use crate::outer::Failure;
use crate::snapshot::{
    Candidate, Endpoint, EndpointSet, EndpointState, InFlight, LINK_FACTOR_ONE, LinkFactors, Load,
    Part,
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
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub fn route(&self) -> &Route {
        self.permit.route()
    }

    pub fn holders(&self) -> Option<&Holders> {
        self.permit.holders()
    }

    /// Returns the permit, for another endpoint.
    pub fn into_permit(self) -> Permit {
        self.permit
    }

    /// Ends the pick, because its endpoint rejects the tunnel or cannot be dialled.
    pub fn failed(self, failure: Failure) -> FailedTry {
        FailedTry { failure, endpoint: self.endpoint, permit: self.permit }
    }

    /// Splits the pick after a successful dial.
    pub fn into_parts(self) -> (Permit, Arc<Endpoint>, InFlight) {
        (self.permit, self.endpoint, self.in_flight)
    }
}

/// A pick that led to no connection, with the permit for another one.
#[derive(Debug)]
pub struct FailedTry {
    pub failure: Failure,
    pub endpoint: Arc<Endpoint>,
    pub permit: Permit,
}

/// Number of dials in the own network that may fail for one tunnel before it leaves that network
/// out. More would be work that a peer can cause by tunnels to a dead service.
pub const FAILED_DIALS_MAX: u8 = 5;

/// Endpoints that a tunnel does not pick again.
#[derive(Debug, Default)]
pub struct Tried {
    /// Endpoints that failed, and gateways that are left out.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// True if the endpoints of the own network are left out.
    pub is_own_network_left_out: bool,
    /// Number of failed dials in the own network.
    pub failed_dials: u8,
}

impl Tried {
    /// Returns true if the endpoint of a candidate is not picked again.
    pub fn has(&self, candidate: &Candidate) -> bool {
        self.is_own_network_left_out && !candidate.is_remote()
            || self.endpoints.iter().any(|tried| Arc::ptr_eq(&tried.state, &candidate.state))
    }
}

/// Picks an endpoint that was not tried, with the factors of the peer's links.
///
/// # Errors
/// Returns the permit if no endpoint is left.
pub fn pick(permit: Permit, tried: &Tried, links: &LinkFactors) -> Result<Pick, Permit> {
    let Some(endpoint) = choose_next(&permit.route().endpoints, tried, links) else {
        return Err(permit);
    };
    let in_flight = InFlight::new(&endpoint.state);
    Ok(Pick { permit, endpoint, in_flight })
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
    let left = drops.iter().map(|one| left(one) / f64::from(PARTS_PER_MILLION));
    1.0 - left.product::<f64>()
}

/// Returns the endpoint of the next try. The last one in the own network is that of the dial that
/// has most recently succeeded while others failed, unless it was tried or is ejected.
pub fn choose_next(set: &EndpointSet, tried: &Tried, links: &LinkFactors) -> Option<Arc<Endpoint>> {
    let is_last = tried.failed_dials + 1 == FAILED_DIALS_MAX && !tried.is_own_network_left_out;
    let known = is_last.then(|| set.last_good()).flatten().cloned();
    let is_tried = |one: &Endpoint| {
        let mut tried = tried.endpoints.iter();
        tried.any(|tried| Arc::ptr_eq(&tried.state, &one.state))
    };
    let known = known.filter(|one| !is_tried(one) && !one.state.is_ejected(Instant::now()));
    known.or_else(|| choose(set, tried, links).map(Arc::clone))
}

/// Returns the best endpoint of the set that was not tried, if one is left.
///
/// In a set with groups, one group is drawn by its share; the others replace it if it has no
/// eligible endpoint, first those of the same part of a split subset. Two weighted draws follow,
/// and the less loaded endpoint is taken. Load is the number of tunnels in flight per weight. On
/// equal load the first draw is taken, so that the shares equal the weights. Loads that gateways
/// advertise, and exceeded budgets of links, change their weights. If the budgets reduce the two by
/// different factors, the first draw is taken.
///
/// Ejected endpoints are used only if no other is left in any group. An ejected endpoint is better
/// than none, and a healthy one farther away is better than an ejected one. A tunnel that has
/// failed once prefers endpoints without an earlier ejection to those whose ejection has ended.
/// [`pick_probabilities`](crate::snapshot::pick_probabilities) computes the probabilities of this
/// pick.
pub fn choose<'a>(
    set: &'a EndpointSet,
    tried: &Tried,
    links: &LinkFactors,
) -> Option<&'a Arc<Endpoint>> {
    if tried.is_own_network_left_out && !set.has_remote() {
        return None;
    }
    let index = match set.groups() {
        None => choose_from(std::iter::once(set.whole(links)), tried),
        Some(groups) => choose_from(set.drawn(groups, groups.draw()?, links), tried),
    };
    set.endpoints.get(index?)
}

/// Returns the index in the set of the best endpoint of the first part that has one.
fn choose_from<'a>(parts: impl Iterator<Item = Part<'a>> + Clone, tried: &Tried) -> Option<usize> {
    // Usually no endpoint was ever ejected, and the clock is not read.
    let now = LazyCell::new(Instant::now);
    let now = || *now;
    let untried = |one: &Candidate| !tried.has(one);
    let healthy =
        |one: &Candidate| !(one.state.was_ejected() && one.state.is_ejected(now())) && untried(one);
    let proven = |one: &Candidate| {
        !(one.state.was_ejected() && one.state.is_on_probation(now())) && healthy(one)
    };
    let is_retry = !tried.endpoints.is_empty();
    let proven = is_retry.then(|| best_of_parts(parts.clone(), &proven, now));
    let healthy = || best_of_parts(parts.clone(), &healthy, now);
    proven.flatten().or_else(healthy).or_else(|| best_of_parts(parts.clone(), &untried, now))
}

fn best_of_parts<'a>(
    mut parts: impl Iterator<Item = Part<'a>>,
    eligible: &impl Fn(&Candidate) -> bool,
    now: impl Fn() -> Instant + Copy,
) -> Option<usize> {
    parts.find_map(|part| best_of_two(part, eligible, now))
}

/// Ejects an endpoint after a failed dial. Returns true if this call has ejected it.
///
/// All endpoints of a service may be ejected. They are then used as if none was, and
/// [`EndpointSet::admit_dial`] bounds the dials of a set in which all of them fail.
pub fn eject_after_failed_dial(endpoint: &Endpoint, metrics: &Metrics) -> bool {
    eject(endpoint, metrics, EndpointState::eject)
}

/// Ejects an endpoint after a tunnel that failed once it was dialled. Returns true if this call has
/// ejected it.
pub fn eject_after_failed_tunnel(endpoint: &Endpoint, metrics: &Metrics) -> bool {
    eject(endpoint, metrics, EndpointState::eject_for_tunnel)
}

fn eject(
    endpoint: &Endpoint,
    metrics: &Metrics,
    eject: impl Fn(&EndpointState, Instant) -> Duration,
) -> bool {
    let (now, state) = (Instant::now(), &endpoint.state);
    // A suspension is no judgement of the endpoint, and this failure is one.
    if state.is_ejected(now) && !state.is_suspended(now) {
        return false;
    }
    let time = eject(state, now);
    metrics.ejections.inc();
    info!(
        endpoint = %endpoint.uid(), address = %endpoint.address, ?time,
        "endpoint ejected after a failure"
    );
    true
}

/// Returns the index in the set of the less loaded one of two eligible endpoints drawn by weight.
///
/// If dial latency counts as load, the two differ. Of two endpoints, equal draws would otherwise
/// take the slower one with the square of its share, however slow it is.
fn best_of_two(
    part: Part<'_>,
    eligible: &impl Fn(&Candidate) -> bool,
    now: impl Fn() -> Instant + Copy,
) -> Option<usize> {
    let max = part.factor_max(now);
    let any = |_, candidate: &Candidate| eligible(candidate);
    let first = draw(part, &any, max, now)?;
    let other = |place, candidate: &Candidate| place != first && eligible(candidate);
    let second =
        if part.by_latency { draw(part, &other, max, now) } else { draw(part, &any, max, now) };
    let load = |place: usize| Load::of(part, place, now);
    let is_less = |second| Some(load(second)?.is_less_than(load(first)?));
    let second = second.filter(|second| is_less(*second) == Some(true));
    Some(part.start + second.unwrap_or(first))
}

/// Draws an eligible endpoint of a group by weight, in which the largest factor is `max`.
fn draw(
    part: Part<'_>,
    eligible: &impl Fn(usize, &Candidate) -> bool,
    max: u32,
    now: impl Fn() -> Instant + Copy,
) -> Option<usize> {
    /// Number of draws over all endpoints before the eligible ones are summed, which costs more
    /// than 16 draws from 100 endpoints. If a tenth is eligible, 4 of 5 picks need no sum.
    const BLIND_DRAWS: usize = 16;
    // A larger factor makes other draws count less often.
    let draws = BLIND_DRAWS * (max / LINK_FACTOR_ONE).max(1) as usize;
    for _ in 0..draws {
        let place = part.draw()?;
        let candidate = part.candidates.get(place)?;
        let factor = part.factor(place, now);
        // The table has no factors, so a draw counts with the probability factor / max.
        if eligible(place, candidate) && (factor >= max || fastrand::u32(..max) < factor) {
            return Some(place);
        }
    }
    let weight = |place: &usize| {
        let candidate = part.candidates.get(*place);
        match candidate.filter(|candidate| eligible(*place, candidate)) {
            Some(_) => part.scaled_weight(*place, now),
            None => 0,
        }
    };
    let mut places = 0..part.candidates.len();
    let total = places.clone().map(|place| weight(&place)).fold(0, u64::saturating_add);
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
    use std::collections::HashSet;

    use crate::datapath::tests::endpoint;
    use crate::snapshot::NO_LINK_FACTORS;

    use super::*;

    fn endpoints(weights: &[u32]) -> EndpointSet {
        let weights = weights.iter().enumerate();
        EndpointSet::new(weights.map(|(at, &weight)| endpoint(&at.to_string(), weight, None)))
    }

    fn shares(set: &EndpointSet, eligible: &impl Fn(&Candidate) -> bool) -> Vec<f64> {
        const DRAWS: u32 = 100_000;
        fastrand::seed(7);
        let mut counts = vec![0_u32; set.endpoints.len()];
        for _ in 0..DRAWS {
            counts[best_of_two(set.whole(NO_LINK_FACTORS), eligible, Instant::now)
                .expect("an endpoint")] += 1;
        }
        counts.iter().map(|&count| f64::from(count) / f64::from(DRAWS)).collect()
    }

    /// Five standard deviations of a share over 100,000 draws are at most 0.008.
    fn assert_shares(got: &[f64], want: &[f64]) {
        let near = got.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.008);
        assert!(near && got.len() == want.len(), "{got:?} instead of {want:?}");
    }

    #[test]
    fn with_equal_load_the_shares_are_the_weights() {
        let any = |_: &Candidate| true;
        assert_shares(&shares(&endpoints(&[1, 3, 6]), &any), &[0.1, 0.3, 0.6]);
        assert_shares(&shares(&endpoints(&[1, 1, 1, 1]), &any), &[0.25; 4]);
        assert_shares(&shares(&endpoints(&[5]), &any), &[1.0]);
        let large = u32::MAX;
        assert_shares(&shares(&endpoints(&[large, large, large / 2]), &any), &[0.4, 0.4, 0.2]);
    }

    #[test]
    fn what_is_not_eligible_leaves_its_share_to_the_others_by_weight() {
        let set = endpoints(&[1, 3, 96]);
        let out = Arc::clone(&set.endpoints[2].state);
        let eligible = |one: &Candidate| !Arc::ptr_eq(&one.state, &out);
        assert_shares(&shares(&set, &eligible), &[0.25, 0.75, 0.0]);
        assert!(
            best_of_two(set.whole(NO_LINK_FACTORS), &|_: &Candidate| false, Instant::now).is_none()
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
                &|_: &Candidate| true,
                Instant::now
            )
            .is_none()
        );
    }

    #[test]
    fn of_two_draws_the_one_with_less_load_per_weight_wins() {
        let set = endpoints(&[1, 1]);
        let _busy: Vec<_> = (0..10).map(|_| InFlight::new(&set.endpoints[0].state)).collect();
        // The busy endpoint is taken only if both draws hit it: a quarter instead of a half.
        assert_shares(&shares(&set, &|_: &Candidate| true), &[0.25, 0.75]);
        // Three tunnels on weight 3 are the same load as one on weight 1.
        let even = endpoints(&[1, 3]);
        let _load: Vec<_> =
            [0, 1, 1, 1].map(|index: usize| InFlight::new(&even.endpoints[index].state)).into();
        assert_shares(&shares(&even, &|_: &Candidate| true), &[0.25, 0.75]);
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
            let chosen = choose(&set, &Tried::default(), NO_LINK_FACTORS).expect("an endpoint");
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
        assert_eq!(draw_drop_category(&all).map(|category| &**category), Some("all"));
    }

    #[tokio::test(start_paused = true)]
    async fn each_endpoint_that_fails_leaves_the_draw_and_all_serve_once_none_is_left() {
        let (metrics, set) = (Metrics::new(), endpoints(&[1; 4]));
        let pick = || choose(&set, &Tried::default(), NO_LINK_FACTORS).map(Arc::clone);
        for left in (1..4).rev() {
            let failed = pick().expect("an endpoint");
            assert!(eject_after_failed_dial(&failed, &metrics));
            assert!(!eject_after_failed_dial(&failed, &metrics), "once");
            let healthy = (0..100).map(|_| pick().expect("an endpoint"));
            let healthy: HashSet<_> = healthy.map(|one| Arc::clone(one.uid())).collect();
            assert!(!healthy.contains(failed.uid()) && healthy.len() == left);
        }
        let last = pick().expect("the last one");
        eject_after_failed_dial(&last, &metrics);
        let all = (0..100).map(|_| pick().expect("an endpoint"));
        let all: HashSet<_> = all.map(|one| Arc::clone(one.uid())).collect();
        assert_eq!(all.len(), 4, "an ejected endpoint is better than none");
    }

    #[tokio::test(start_paused = true)]
    async fn one_tunnel_tries_an_endpoint_after_its_ejection_and_no_retry_does() {
        let (metrics, set) = (Metrics::new(), endpoints(&[1; 3]));
        let [good, dead, other] = [0, 1, 2].map(|place| Arc::clone(&set.endpoints[place]));
        eject_after_failed_dial(&dead, &metrics);
        tokio::time::advance(Duration::from_secs(5)).await;
        let picks = |tried: &Tried| {
            let pick = || choose(&set, tried, NO_LINK_FACTORS).expect("an endpoint");
            (0..100).filter(|_| Arc::ptr_eq(pick(), &dead)).count()
        };
        let retry = Tried { endpoints: vec![other], ..Tried::default() };
        assert!(picks(&Tried::default()) > 0, "its ejection has ended");
        assert_eq!(picks(&retry), 0, "a tunnel that has failed once");
        dead.state.begin_dial(Instant::now());
        assert_eq!(picks(&Tried::default()), 0, "one tunnel tries it");
        dead.state.record_dial(Duration::from_millis(1));
        assert!(picks(&retry) > 0, "it has recovered");
        let all = Tried {
            endpoints: vec![good, Arc::clone(&dead)],
            is_own_network_left_out: true,
            ..Tried::default()
        };
        assert!(choose(&set, &all, NO_LINK_FACTORS).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_whose_dial_was_cancelled_after_an_ejection_is_not_proven() {
        let set = endpoints(&[1; 3]);
        let [other, dead] = [0, 1].map(|place| Arc::clone(&set.endpoints[place]));
        let retry = Tried { endpoints: vec![other], ..Tried::default() };
        let picks = || {
            let pick = || choose(&set, &retry, NO_LINK_FACTORS).expect("an endpoint");
            (0..100).filter(|_| Arc::ptr_eq(pick(), &dead)).count()
        };
        for eject in [EndpointState::eject, EndpointState::eject_for_tunnel] {
            eject(&dead.state, Instant::now());
            for cancelled in 0..3 {
                tokio::time::advance(Duration::from_secs(600)).await;
                dead.state.begin_dial(Instant::now());
                // Tunnels that are cancelled again and again do not keep others from it.
                let is_alone = dead.state.is_ejected(Instant::now());
                assert_eq!(is_alone, cancelled == 0, "the first tunnel tries it alone");
                tokio::time::advance(Duration::from_secs(600)).await;
                assert_eq!(picks(), 0, "its tunnel was cancelled");
            }
            dead.state.begin_dial(Instant::now());
            dead.state.record_dial(Duration::from_millis(1));
            tokio::time::advance(Duration::from_secs(600)).await;
            assert!(picks() > 0, "it has recovered");
        }
    }
}
