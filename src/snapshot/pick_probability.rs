//! Load of endpoints, which a pick compares, and the resulting pick probabilities, which the admin
//! pages show.

use std::cmp::Ordering;

use tokio::time::Instant;

use super::LinkFactors;
use super::endpoints::{Candidate, EndpointSet, FACTOR_ONE, Part};

/// Load of an endpoint: tunnels in flight per weight, with the factor of the weight.
///
/// The tunnels are those of all peers, so the factor of the peer's link does not count. Endpoints
/// with different factors of links are not compared, because a reduced weight then would be reduced
/// twice.
///
/// With `by_latency` it is (tunnels per weight + 1) × dial time in milliseconds. An idle nearer
/// endpoint then has less load, and each tunnel per weight adds one dial time.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    amount: u64,
    weight: u64,
    link_percent: u32,
}

impl Load {
    /// Returns the current load of an endpoint of a group.
    pub fn of(part: Part<'_>, place: usize, now: impl Fn() -> Instant) -> Option<Self> {
        let candidate = part.candidates.get(place)?;
        let state = &candidate.state;
        let weight = u64::from(candidate.weight) * u64::from(candidate.factor(now));
        // In the unit of the weight.
        let tunnels = u64::from(state.in_flight()) * u64::from(FACTOR_ONE);
        let amount = if part.by_latency {
            (tunnels + weight).saturating_mul(u64::from(state.mean_dial_millis()))
        } else {
            tunnels
        };
        Some(Self { amount, weight, link_percent: part.link_percent(place) })
    }

    /// Returns whether the second of two draws is taken, because it has less load.
    pub fn is_less_than(self, first: Self) -> bool {
        self.link_percent == first.link_percent && self.compare(first).is_lt()
    }

    fn drawn_weight(self) -> u128 {
        u128::from(self.weight) * u128::from(self.link_percent)
    }

    /// Compares two loads without division.
    fn compare(self, other: Self) -> Ordering {
        let own = u128::from(self.amount) * u128::from(other.weight);
        own.cmp(&(u128::from(other.amount) * u128::from(self.weight)))
    }
}

/// Returns, for each endpoint of a set, the probability that the next pick returns it. The pick is
/// for a tunnel that has tried no endpoint, with loads and ejections as of `now`, and with the
/// factors of its links. The sum is 1, or 0 if no endpoint can be picked.
///
/// The result is exact. A pick draws two endpoints and takes the first unless the second is less
/// loaded and has the same factor of its link. Within a group, an endpoint with a part p of the
/// weight thus has the probability p × (P(other factor) + P(same factor, load ≥ its) + P(same
/// factor, load > its)). P sums the parts p of the others and its own.
///
/// If dial latency counts as load, the second draw leaves out the first: after a first draw q, each
/// other endpoint has the part p / (1 - q). The probability of an endpoint then is p × ((P'(other
/// factor) + P'(same factor, load ≥ its)) / (1 - p) + Q(same factor, load > its)). P' leaves out
/// the endpoint itself, and Q sums q / (1 - q).
pub fn pick_probabilities(set: &EndpointSet, links: &LinkFactors, now: Instant) -> Vec<f64> {
    let is_healthy = |candidate: &Candidate| !candidate.state.is_ejected(now);
    // Ejected endpoints serve only when no other is left.
    let any_healthy = set.candidates.iter().any(is_healthy);
    let eligible = |candidate: &Candidate| !any_healthy || is_healthy(candidate);
    let mut probabilities = vec![0.0; set.candidates.len()];
    let Some(groups) = set.groups() else {
        add_probabilities((set.whole(links), now), 1.0, eligible, &mut probabilities);
        return probabilities;
    };
    for (place, group) in groups.list().iter().enumerate() {
        let takes = |part: &Part<'_>| part.candidates.iter().any(eligible);
        if let Some(part) = set.drawn(groups, place, links).find(takes) {
            add_probabilities((part, now), group.share, eligible, &mut probabilities);
        }
    }
    probabilities
}

/// Adds the share of a group to the probabilities of its endpoints.
fn add_probabilities(
    (part, now): (Part<'_>, Instant),
    share: f64,
    eligible: impl Fn(&Candidate) -> bool,
    probabilities: &mut [f64],
) {
    let candidates = part.candidates.iter().enumerate();
    let candidates = candidates.zip(probabilities.iter_mut().skip(part.start));
    let candidates = candidates.filter(|((_, candidate), _)| eligible(candidate));
    // Loads change concurrently, so each is read once.
    let mut all: Vec<_> = candidates
        .filter_map(|((place, _), probabilities)| {
            Some((Load::of(part, place, || now)?, probabilities))
        })
        .collect();
    let by_latency = part.by_latency;
    let by_link = |(load, _): &(Load, _)| load.link_percent;
    all.sort_by(|one, other| {
        let by_load = || one.0.compare(other.0);
        by_link(one).cmp(&by_link(other)).then_with(by_load)
    });
    // Sums are exact, as a quotient below has the small difference of two of them.
    let sum = |all: &[(Load, &mut f64)]| -> u128 {
        all.iter().map(|(load, _)| load.drawn_weight()).sum()
    };
    let total = sum(&all);
    let mut drawn = all.iter().filter(|(load, _)| load.drawn_weight() > 0);
    let differ = by_latency && drawn.nth(1).is_some();
    // Weights of the endpoints that a second draw may return.
    let others = |own: u128| if differ { total - own } else { total };
    let quotient = |one: u128, other: u128| one as f64 / other as f64;
    for compared in all.chunk_by_mut(|one, other| by_link(one) == by_link(other)) {
        let (apart, mut above) = (total - sum(compared), 0);
        let mut first_above = 0.0;
        let chunks = compared.chunk_by_mut(|one, other| one.0.compare(other.0).is_eq());
        for equally_loaded in chunks.rev() {
            above += sum(equally_loaded);
            let mut first = 0.0;
            for (load, probabilities) in equally_loaded {
                let own = load.drawn_weight();
                let not_less = apart + above - if differ { own } else { 0 };
                let taken = quotient(not_less, others(own)) + first_above;
                **probabilities += share * quotient(own, total) * taken;
                first += quotient(own, others(own));
            }
            first_above += first;
        }
    }
}
