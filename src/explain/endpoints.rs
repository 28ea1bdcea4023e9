//! Candidate endpoints of a tunnel: the groups, the pick probability of each endpoint, and the
//! workloads that cannot be picked.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::datapath::identity::Peer;
use crate::datapath::policy::Permit;
use crate::datapath::route::Route;
use crate::datapath::{authorize, balance};
use crate::labels::{join, join_first};
use crate::outer::{ExpectedWorkloads, Failure};
use crate::reason::Reason;
use crate::snapshot::mesh::{Locality, Workload};
use crate::snapshot::{
    Endpoint, EndpointSet, Enforcement, ExclusionReason, LINK_FACTOR_ONE, LinkFactors, MatchedBy,
    Protocol, Service, exclusion_reason, location_exclusion, pick_probabilities,
};
use crate::status::ReducedLink;

use super::answer::{Answer, EndpointRow, GroupRow, Outcome, RejectionForm, UnusedRow};
use super::outcomes::{Candidate, Prediction, possible_outcomes};
use super::{ExplainState, Explainer, rules, servers};

/// Limit of the held names in a note.
const HELD_SHOWN: usize = 5;

/// Endpoint set that tunnels of the route are picked from, and its share of the tunnels.
struct WeightedSet {
    waypoint: Option<String>,
    share: f64,
    set: Arc<EndpointSet>,
}

/// Adds the endpoints of this permit, with the possible outcomes of a tunnel to them, to the
/// answer.
pub(super) fn run(
    explainer: Explainer<'_>,
    peer: &Peer,
    permit: &Permit,
    form: RejectionForm,
    answer: &mut Answer,
) -> Outcome {
    let (state, route) = (explainer.state, permit.route());
    let drawn = weighted_sets(state, route);
    let mut all = Vec::new();
    let mut outcomes = Vec::new();
    for one in &drawn {
        let first = answer.groups.len();
        let groups = groups(one);
        let by_waypoint = one.waypoint.is_some();
        let candidates = candidates((state, peer), one, first, |endpoint| {
            predict(state, (peer, route), endpoint, by_waypoint)
        });
        for outcome in possible_outcomes(&candidates, route.reason_without_endpoint()) {
            if !outcomes.contains(&outcome) {
                outcomes.push(outcome);
            }
        }
        if let Some(groups) = one.set.groups() {
            answer.spill = Some(groups.spill.to_string());
            answer.spill_percent = Some(groups.spill.percent());
            answer.by_latency |= groups.by_latency;
        }
        answer.groups.extend(groups);
        all.extend(candidates);
    }
    answer.transit = rules::transit(route);
    note_reduced_links((state, peer), &all, answer);
    answer.notes.extend(held(state, route, &all));
    let unneeded = state.snapshot.scope.unneeded.get(&*route.service.hostname);
    let unneeded = unneeded.map(|rule| format!("it is not used from other clusters: {rule}"));
    answer.notes.extend(unneeded);
    answer.dropped = balance::drop_probability(route.drops());
    if answer.dropped > 0.0 {
        let dropped = Err(Reason::DropOverload);
        outcomes.retain(|_| answer.dropped < 1.0);
        outcomes.push(dropped);
        answer.notes.push(drops(route));
    }
    let outcome = outcome(outcomes, route.reason_without_endpoint(), form);
    if route.sends_proxy_header(state.snapshot) {
        let note = "the endpoint gets a PROXY header of version 2 with the address of the peer \
                    first, by `traffic`";
        answer.notes.push(note.to_owned());
    }
    let enforced = state.snapshot.enforcement != Enforcement::Off;
    if enforced && route.by_waypoint {
        let note = "authorization policies are not evaluated here: the tunnel goes to a waypoint, \
                    which evaluates the policies attached to it";
        answer.notes.push(note.to_owned());
    }
    if all.iter().any(|one| one.endpoint.protocol == Protocol::Tcp)
        && enforced
        && explainer.question.address.is_none()
    {
        let note = "policies may match the peer's address, assumed to be 0.0.0.0; give it by \
                    --address";
        answer.notes.push(note.to_owned());
    }
    list_unused(explainer, route, &all, answer);
    list_endpoints(explainer, all, expected_workloads(route), answer);
    outcome
}

/// Returns the first of the possible outcomes with the others. An open tunnel precedes failures.
fn outcome(mut outcomes: Vec<Result<(), Reason>>, without: Reason, form: RejectionForm) -> Outcome {
    outcomes.sort_by_key(|outcome| outcome.is_err());
    let mut outcomes = outcomes.into_iter().map(|outcome| match outcome {
        Ok(()) => Outcome::opened(form),
        Err(reason) => Outcome::refused(reason, form),
    });
    let first = outcomes.next();
    let mut outcome = first.unwrap_or_else(|| Outcome::refused(without, form));
    outcome.or = outcomes.collect();
    outcome
}

/// Returns the workloads of which one has to be verified at the end of the tunnel, if any.
fn expected_workloads(route: &Route) -> Option<&ExpectedWorkloads> {
    let binding = route.binding.as_ref().filter(|binding| binding.is_inner_hbone());
    binding.map(|binding| &binding.config.workloads)
}

/// Lists the candidates, the most probable first.
fn list_endpoints(
    explainer: Explainer<'_>,
    mut all: Vec<Candidate<'_>>,
    expected: Option<&ExpectedWorkloads>,
    answer: &mut Answer,
) {
    all.sort_by(|one, other| {
        let by_probability = other.probability.total_cmp(&one.probability);
        by_probability.then_with(|| one.endpoint.uid().cmp(other.endpoint.uid()))
    });
    let limit = explainer.question.limit();
    answer.more_endpoints = all.len().saturating_sub(limit);
    let rows = all.into_iter().take(limit);
    answer.endpoints = rows.map(|one| row(explainer.state, one, expected)).collect();
}

/// Predicts the result of a try of an endpoint, in the order of the stages.
fn predict(
    state: &ExplainState<'_>,
    (peer, route): (&Peer, &Route),
    endpoint: &Endpoint,
    by_waypoint: bool,
) -> Prediction {
    let callers = (peer, route.first_peer());
    let verdict = || authorize::evaluate(state.snapshot, callers, endpoint, by_waypoint);
    // Policies of the service of a binding are those of the other cluster.
    let verdict = route.binding.is_none().then(verdict).flatten();
    let (refusal, dry_run) = verdict.map_or((None, None), |of| (of.refusal, of.dry_run));
    let [refusal, dry_run] = [refusal, dry_run].map(|why| why.map(|why| why.to_string()));
    let is_enforced = state.snapshot.enforcement == Enforcement::Enforce;
    let (policy, logged) = if is_enforced { (refusal, None) } else { (None, refusal) };
    let fail = |reason| move |detail| Failure { reason, detail };
    let failure = policy.map(fail(Reason::PolicyDenied));
    Prediction {
        failure: failure.or_else(|| dial_failure(state, endpoint, expected_workloads(route))),
        audited: logged.or(dry_run),
    }
}

/// Predicts that an endpoint is not dialled, or that a server behind it cannot be verified.
fn dial_failure(
    state: &ExplainState<'_>,
    endpoint: &Endpoint,
    expected: Option<&ExpectedWorkloads>,
) -> Option<Failure> {
    let others = endpoint.remote.iter().flat_map(|remote| &remote.other_addresses);
    let addresses = std::iter::once(&endpoint.address).chain(others);
    // Others of a gateway are dialled if one is denied.
    let denied = addresses.map(|address| state.deny.denies(*address));
    let denied = denied.reduce(|one, other| one.and(other)).flatten().map(|rule| Failure {
        reason: Reason::DialDenied,
        detail: format!("its address is {rule}; see `dial.allow`"),
    });
    denied.or_else(|| servers::check(state.snapshot, endpoint, expected).err())
}

/// Returns notes if the service, its export, or workloads of these endpoints are kept although the
/// control plane or the API server has removed them.
fn held(state: &ExplainState<'_>, route: &Route, all: &[Candidate<'_>]) -> Vec<String> {
    let service = &route.service;
    let target = format!("{}:{}", service.hostname, route.port);
    let uids: BTreeSet<_> = all.iter().map(|one| one.endpoint.uid().to_string()).collect();
    let used: Vec<_> = [service.key(), target].into_iter().chain(uids).collect();
    let notes = state.held.iter().filter_map(|held| {
        let names = used.iter().filter(|name| held.names.contains(*name));
        let names: Vec<_> = names.cloned().collect();
        (!names.is_empty()).then(|| held.describe(&join_first(names, HELD_SHOWN)))
    });
    notes.collect()
}

/// Formats the drop overloads of the control plane.
fn drops(route: &Route) -> String {
    let drops = route.drops().iter();
    let drops =
        drops.map(|(category, parts)| format!("{:.2}% for {category:?}", f64::from(*parts) / 1e4));
    format!(
        "drop_overloads of the control plane reject shares of the tunnels, one after another: {}",
        join(drops, ", ")
    )
}

/// Returns the endpoint sets of the route: the service's own, or those of its waypoints.
fn weighted_sets(state: &ExplainState<'_>, route: &Route) -> Vec<WeightedSet> {
    if !route.by_waypoint {
        return vec![WeightedSet { waypoint: None, share: 1.0, set: Arc::clone(&route.endpoints) }];
    }
    if route.passthrough {
        return Vec::new();
    }
    let definition = &route.service.definition;
    let waypoints: Vec<_> = state.snapshot.usable_waypoints(definition).collect();
    let sum: f64 = waypoints.iter().map(|(waypoint, _)| f64::from(waypoint.weight)).sum();
    let drawn = waypoints.into_iter().map(|(waypoint, set)| WeightedSet {
        waypoint: Some(waypoint.gateway.place.to_string()),
        share: f64::from(waypoint.weight) / sum,
        set: Arc::clone(set),
    });
    drawn.collect()
}

fn groups(drawn: &WeightedSet) -> Vec<GroupRow> {
    let WeightedSet { waypoint, share, set } = drawn;
    let Some(groups) = set.groups() else {
        let count = u32::try_from(set.endpoints.len()).unwrap_or(u32::MAX);
        let any = (count > 0).then(|| GroupRow {
            waypoint: waypoint.clone(),
            tier: "all".to_owned(),
            share: *share,
            ready: count,
            ..GroupRow::default()
        });
        return any.into_iter().collect();
    };
    let rows = groups.list().iter().map(|group| GroupRow {
        waypoint: waypoint.clone(),
        tier: group.tier.to_string(),
        place: group.place.as_ref().map(|(place, _)| place.to_string()),
        weight: group.place.as_ref().map(|(_, weight)| *weight),
        share: share * group.share,
        ready: group.ready,
        all: Some(group.all),
    });
    rows.collect()
}

/// Adds a note for each link of the peer whose exceeded budget reduces the weight of a candidate.
fn note_reduced_links(
    (state, peer): (&ExplainState<'_>, &Peer),
    candidates: &[Candidate<'_>],
    answer: &mut Answer,
) {
    let of_peer = |link: &&ReducedLink| link.is_from(&peer.source.counted_cluster);
    for link in state.links.iter().filter(of_peer) {
        let mut remote = candidates.iter().filter_map(|one| one.endpoint.remote.as_ref());
        if remote.any(|remote| remote.cluster == link.to) {
            answer.notes.push(format!(
                "the budget of the link from {} to {} is exceeded: gateways of {} have {}% of \
                 their weight",
                link.from, link.to, link.to, link.weight_percent
            ));
        }
    }
}

fn candidates<'a>(
    (state, peer): (&ExplainState<'_>, &Peer),
    drawn: &'a WeightedSet,
    first: usize,
    predict: impl Fn(&Endpoint) -> Prediction,
) -> Vec<Candidate<'a>> {
    // Endpoints of a set are ordered by group.
    let sizes: Vec<_> = match drawn.set.groups() {
        Some(groups) => groups.list().iter().map(|group| drawn.set.of(group).len()).collect(),
        None => vec![drawn.set.endpoints.len()],
    };
    let sizes = sizes.into_iter().enumerate();
    let places = sizes.flat_map(|(place, size)| std::iter::repeat_n(first + place, size));
    let links = LinkFactors::of_peer(state.links, &peer.source.counted_cluster);
    let probability = pick_probabilities(&drawn.set, &links, state.now);
    let whole = drawn.set.whole(&links);
    let factors = 0..drawn.set.endpoints.len();
    let factors = factors.map(|place| whole.factor(place, || state.now));
    let factors = factors.map(|factor| f64::from(factor) / f64::from(LINK_FACTOR_ONE));
    let numbers = probability.into_iter().zip(factors);
    let endpoints = drawn.set.endpoints.iter().zip(numbers).zip(places);
    let candidates = endpoints.map(|((endpoint, (probability, factor)), group)| Candidate {
        endpoint,
        group,
        probability: probability * drawn.share,
        factor,
        is_ejected: endpoint.state.is_ejected(state.now),
        prediction: predict(endpoint),
    });
    candidates.collect()
}

fn row(
    state: &ExplainState<'_>,
    candidate: Candidate<'_>,
    expected: Option<&ExpectedWorkloads>,
) -> EndpointRow {
    let (endpoint, prediction) = (candidate.endpoint, candidate.prediction);
    let definition = &endpoint.definition;
    let left = endpoint.state.ejected_for(state.now);
    let ejected = left.map(|left| u64::try_from(left.as_millis().div_ceil(1000)).unwrap_or(0));
    EndpointRow {
        workload: Arc::clone(endpoint.uid()),
        address: endpoint.address.to_string(),
        protocol: endpoint.protocol.to_string(),
        network: endpoint.remote.as_ref().map(|remote| Arc::clone(&remote.network)),
        cluster: Arc::clone(&definition.cluster),
        locality: locality(&definition.locality),
        group: candidate.group,
        weight: endpoint.weight,
        factor: candidate.factor,
        tunnels: endpoint.state.in_flight(),
        probability: candidate.probability,
        ejected,
        ejected_seconds: ejected,
        gateway_certificate: endpoint.remote.as_deref().map(servers::describe_gateway),
        workload_certificate: expected
            .map(|expected| servers::describe_workload(expected, &definition.cluster)),
        refused: prediction.failure.map(|failure| failure.detail),
        audited: prediction.audited,
    }
}

fn locality(of: &Locality) -> String {
    let parts = [&*of.region, &of.zone, &of.subzone];
    parts.join("/").trim_end_matches('/').to_owned()
}

/// Lists the workloads of the service that are not candidates. A binding has gateways instead.
fn list_unused(
    Explainer { state, question, .. }: Explainer<'_>,
    route: &Route,
    candidates: &[Candidate<'_>],
    answer: &mut Answer,
) {
    if route.binding.is_some() {
        return;
    }
    let limit = question.limit();
    let used: HashSet<&str> = candidates.iter().map(|one| &**one.endpoint.uid()).collect();
    let mut list = |workload: &Workload, why: &dyn Fn() -> String| {
        if answer.unused.len() == limit {
            answer.more_unused += 1;
            return;
        }
        answer.unused.push(UnusedRow { workload: Arc::clone(&workload.uid), why: why() });
    };
    let is_out = |workload: &&Workload| !used.contains(&*workload.uid);
    if let MatchedBy::Workload(workload) = &route.matched_by {
        if is_out(&&**workload) {
            let (service, port) = (&route.service, route.port);
            list(workload, &|| why_unused(state, route, service, port, workload));
        }
        return;
    }
    let snapshot = state.snapshot;
    let services: Vec<_> = match &route.matched_by {
        MatchedBy::Alias(alias) => {
            let behind = snapshot.behind(alias, route.authority.port);
            let behind =
                behind.filter_map(|(host, port)| Some((snapshot.service_or_derived(host)?, port)));
            behind.collect()
        }
        _ => vec![(&route.service, route.port)],
    };
    let keys = services.iter().map(|(service, port)| (service.key(), *service, *port));
    let keys: Vec<_> = keys.collect();
    let workloads = snapshot.mesh.workloads.sorted().into_iter();
    for workload in workloads.map(|of| &**of).filter(is_out) {
        let found = keys.iter().find(|(key, ..)| workload.services.get(&**key).is_some());
        if let Some((_, service, port)) = found {
            list(workload, &|| why_unused(state, route, service, *port, workload));
        }
    }
}

/// Returns the reason for which a workload of a service is not a candidate.
fn why_unused(
    state: &ExplainState<'_>,
    route: &Route,
    service: &Service,
    port: u16,
    workload: &Workload,
) -> String {
    let why = exclusion_reason(state.snapshot, &service.definition, workload, port);
    let why = why.filter(|why| *why != ExclusionReason::BehindWaypoint || route.by_waypoint);
    let (region, subset) = match &route.matched_by {
        MatchedBy::Alias(alias) => (alias.region.as_deref(), alias.subset.as_ref()),
        _ => (None, None),
    };
    match (why, region) {
        (Some(ExclusionReason::OtherNetwork(network)), _) => {
            let definition = &service.definition;
            let by_location = || location_exclusion(state.snapshot, definition, workload, port);
            rules::other_network(route, &network, by_location)
        }
        (Some(why), _) => why.to_string(),
        (None, Some(region)) => format!("the alias is for region {region}"),
        (None, None) => match subset {
            Some(subset) => format!("not in subset {subset}"),
            None => "excluded by `traffic` for this name".to_owned(),
        },
    }
}
