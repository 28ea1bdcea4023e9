//! Possible ends of a tunnel before it opens, by the predicted results of its tries.

use std::sync::Arc;

use crate::datapath::balance::FAILED_DIALS_MAX;
use crate::datapath::forward::tries::{REJECTIONS_MAX, rejection_scope};
use crate::outer::Failure;
use crate::reason::Reason;
use crate::snapshot::Endpoint;

pub(super) struct Candidate<'a> {
    pub(super) endpoint: &'a Endpoint,
    /// Index of its group in the answer.
    pub(super) group: usize,
    pub(super) probability: f64,
    pub(super) factor: f64,
    pub(super) is_ejected: bool,
    pub(super) prediction: Prediction,
}

/// Predicted result of a try of an endpoint.
#[derive(Default)]
pub(super) struct Prediction {
    pub(super) failure: Option<Failure>,
    /// Rejection by a policy that only logs.
    pub(super) audited: Option<String>,
}

impl Candidate<'_> {
    pub(super) fn reason(&self) -> Option<Reason> {
        self.prediction.failure.as_ref().map(|failure| failure.reason)
    }
}

/// Returns the possible ends of a tunnel before it opens. `forward` tries endpoints that are not
/// ejected first, and leaves out a [`rejection_scope`] after [`REJECTIONS_MAX`] rejections or
/// [`FAILED_DIALS_MAX`] failed dials. Answers of other gateways are not predicted.
pub(super) fn possible_outcomes(
    candidates: &[Candidate<'_>],
    without: Reason,
) -> Vec<Result<(), Reason>> {
    if candidates.is_empty() {
        return vec![Err(without)];
    }
    let serves = |one: &&Candidate<'_>| one.reason().is_none();
    let is_healthy = |one: &&Candidate<'_>| !one.is_ejected;
    let all: Vec<_> = candidates.iter().collect();
    let healthy: Vec<_> = candidates.iter().filter(is_healthy).collect();
    let first_serves = healthy.iter().any(serves);
    let mut limits = reached_limits(&healthy);
    let later = outside(&all, &limits);
    if !first_serves && !later.iter().any(serves) {
        // None of the endpoints serves, and the reason is that of the last try.
        let mut last = later;
        last.retain(|one| one.is_ejected);
        return ends(if last.is_empty() { &all } else { &last }).collect();
    }
    let left = if first_serves {
        later
    } else {
        let of_later = reached_limits(&later);
        let left = outside(&later, &of_later);
        limits.extend(of_later);
        left
    };
    if left.iter().any(serves) {
        return vec![Ok(())];
    }
    // The draws may leave out all that serve.
    let mut outcomes = vec![Ok(())];
    let by_limit = limits.into_iter().map(|(_, reason)| Err(reason));
    for outcome in by_limit.chain(ends(&left)) {
        if !outcomes.contains(&outcome) {
            outcomes.push(outcome);
        }
    }
    outcomes
}

/// Scope whose endpoints are left out, and the reason for which its last try fails.
type Limit<'a> = (Option<(&'a Arc<str>, &'a Arc<str>)>, Reason);

fn reached_limits<'a>(tried: &[&'a Candidate<'a>]) -> Vec<Limit<'a>> {
    let mut counts: Vec<(Limit<'a>, usize)> = Vec::new();
    for one in tried {
        let scope = rejection_scope(one.endpoint);
        let reason = one.reason().filter(|reason| {
            *reason == Reason::PolicyDenied || *reason == Reason::DialDenied && scope.is_none()
        });
        let Some(reason) = reason else { continue };
        match counts.iter_mut().find(|(limit, _)| *limit == (scope, reason)) {
            Some((_, count)) => *count += 1,
            None => counts.push(((scope, reason), 1)),
        }
    }
    let is_reached = |((_, reason), count): &(Limit<'_>, usize)| match reason {
        Reason::DialDenied => *count >= usize::from(FAILED_DIALS_MAX),
        _ => *count >= REJECTIONS_MAX,
    };
    counts.into_iter().filter(is_reached).map(|(limit, _)| limit).collect()
}

fn outside<'a>(all: &[&'a Candidate<'a>], limits: &[Limit<'_>]) -> Vec<&'a Candidate<'a>> {
    let is_left = |one: &&&Candidate<'_>| {
        let scope = rejection_scope(one.endpoint);
        !limits.iter().any(|(left_out, _)| *left_out == scope)
    };
    all.iter().filter(is_left).copied().collect()
}

fn ends(candidates: &[&Candidate<'_>]) -> impl Iterator<Item = Result<(), Reason>> {
    let reasons = [
        Reason::PolicyDenied,
        Reason::DialDenied,
        Reason::GatewayUntrusted,
        Reason::WorkloadUntrusted,
    ];
    let is_met = |reason: &Reason| candidates.iter().any(|one| one.reason() == Some(*reason));
    reasons.into_iter().filter(is_met).map(Err)
}

#[cfg(test)]
mod tests {
    use crate::datapath::tests::endpoint;

    use super::*;

    fn candidate(network: &str, reason: Option<Reason>, is_ejected: bool) -> Candidate<'static> {
        let endpoint = endpoint("", 1, Some(network).filter(|network| !network.is_empty()));
        let detail = String::new();
        Candidate {
            endpoint: Box::leak(Box::new(endpoint)),
            group: 0,
            probability: 0.1,
            factor: 1.0,
            is_ejected,
            prediction: Prediction {
                failure: reason.map(|reason| Failure { reason, detail }),
                audited: None,
            },
        }
    }

    #[test]
    fn three_rejections_leave_out_one_network() {
        use Reason::{GatewayUntrusted, PolicyDenied};
        let (opened, denied, untrusted) = (Ok(()), Err(PolicyDenied), Err(GatewayUntrusted));
        let west = |reason| candidate("west", reason, true);
        let here = |is_ejected| candidate("", None, is_ejected);
        for (denials, others, want) in [
            (2, vec![here(false)], vec![opened]),
            (3, vec![here(false)], vec![opened, denied]),
            (3, vec![here(false), west(Some(GatewayUntrusted))], vec![opened, denied, untrusted]),
            (3, vec![here(false), west(None)], vec![opened]),
            // An ejected endpoint comes after the three.
            (3, vec![here(true)], vec![denied]),
            (3, vec![here(true), west(Some(GatewayUntrusted))], vec![untrusted]),
        ] {
            let denials = (0..denials).map(|_| candidate("", Some(PolicyDenied), false));
            let all: Vec<_> = denials.chain(others).collect();
            assert_eq!(possible_outcomes(&all, Reason::NoEndpoint), want);
        }
    }

    #[test]
    fn five_addresses_that_are_never_dialled_leave_out_the_own_network() {
        let (opened, denied) = (Ok(()), Err(Reason::DialDenied));
        for (denials, others, want) in [
            (4, vec![("", None)], vec![opened]),
            (5, vec![("", None)], vec![opened, denied]),
            (5, vec![("", None), ("west", None)], vec![opened]),
            (5, vec![], vec![denied]),
        ] {
            let denials = (0..denials).map(|_| candidate("", Some(Reason::DialDenied), false));
            let others = others.into_iter();
            let others = others.map(|(network, reason)| candidate(network, reason, false));
            let all: Vec<_> = denials.chain(others).collect();
            assert_eq!(possible_outcomes(&all, Reason::NoEndpoint), want);
        }
    }
}
