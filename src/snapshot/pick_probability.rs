//! Load of endpoints, which a pick compares, and the resulting pick probabilities, which the admin
//! pages show.

use std::cmp::Ordering;

use tokio::time::Instant;

use super::LinkFactors;
use super::endpoints::{Candidate, EndpointSet, LINK_FACTOR_ONE, Part};

/// Load of an endpoint: tunnels in flight per weight, with the factor of the weight.
///
/// With `by_latency` it is (tunnels per weight + 1) × dial time in milliseconds. An idle nearer
/// endpoint then has less load, and each tunnel per weight adds one dial time.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    amount: u64,
    weight: u64,
}

impl Load {
    /// Returns the current load of an endpoint of a group.
    pub fn of(part: Part<'_>, place: usize, now: impl Fn() -> Instant) -> Option<Self> {
        let state = &part.candidates.get(place)?.state;
        let weight = part.scaled_weight(place, now);
        // In the unit of the weight.
        let tunnels = u64::from(state.in_flight()) * u64::from(LINK_FACTOR_ONE);
        let amount = if part.by_latency {
            (tunnels + weight).saturating_mul(u64::from(state.mean_dial_millis()))
        } else {
            tunnels
        };
        Some(Self { amount, weight })
    }

    /// Compares two loads without division.
    pub fn compare(self, other: Self) -> Ordering {
        let own = u128::from(self.amount) * u128::from(other.weight);
        own.cmp(&(u128::from(other.amount) * u128::from(self.weight)))
    }
}

/// Returns, for each endpoint of a set, the probability that the next pick returns it. The pick is
/// for a tunnel that has tried no endpoint, with loads and ejections as of `now`, and with the
/// factors of its links. The sum is 1, or 0 if no endpoint can be picked.
///
/// The result is exact. A pick draws two endpoints and takes the first unless the second is less
/// loaded. Within a group, an endpoint with a part p of the weight thus has the probability p ×
/// (P(load ≥ its) + P(load > its)).
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
    let total: f64 = all.iter().map(|(load, _)| load.weight as f64).sum();
    all.sort_by(|(one, _), (other, _)| one.compare(*other));
    let mut above = total;
    for equally_loaded in all.chunk_by_mut(|(one, _), (other, _)| one.compare(*other).is_eq()) {
        let at_least = above;
        above -= equally_loaded
            .iter()
            .map(|(load, _)| load.weight as f64)
            .sum::<f64>();
        for (load, probabilities) in equally_loaded {
            let part = load.weight as f64 / total;
            **probabilities += share * part * (at_least + above) / total;
        }
    }
}
