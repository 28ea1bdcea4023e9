//! Candidate endpoints of a tunnel: the groups, the pick probability of each endpoint, and the
//! workloads that cannot be picked.

use std::collections::HashSet;
use std::sync::Arc;

use crate::datapath::first_peer::FirstPeer;
use crate::datapath::forward::establish::POLICY_REFUSALS_MAX;
use crate::datapath::identity::Peer;
use crate::datapath::policy::Permit;
use crate::datapath::route::{self, Route};
use crate::datapath::{authorize, balance};
use crate::reason::Reason;
use crate::snapshot::mesh::{Locality, Workload};
use crate::snapshot::{
    Endpoint, EndpointSet, Enforcement, ExclusionReason, FACTOR_ONE, MatchedBy, PolicyVerdict,
    Protocol, Service, exclusion_reason, pick_probabilities,
};

use super::answer::{Answer, EndpointRow, GroupRow, Outcome, RejectionForm, UnusedRow};
use super::{ExplainState, Explainer, why};

/// Endpoint set that tunnels of the route are picked from, and its share of the tunnels.
struct WeightedSet {
    waypoint: Option<String>,
    share: f64,
    set: Arc<EndpointSet>,
}

/// Endpoint that can be picked.
struct Candidate<'a> {
    endpoint: &'a Endpoint,
    group: usize,
    probability: f64,
    factor: f64,
    is_ejected: bool,
    verdict: Option<PolicyVerdict>,
    denied: Option<&'static str>,
    /// Reason for which a try of the endpoint fails, if it is known.
    refusal: Option<Reason>,
}

/// Adds the endpoints of this permit, with the possible outcomes of a tunnel to them, to the
/// answer.
pub(super) fn run(
    asking: Explainer<'_>,
    peer: &Peer,
    permit: &Permit,
    form: RejectionForm,
    answer: &mut Answer,
) -> Outcome {
    let (world, route, limit) = (asking.world, permit.route(), asking.question.limit());
    let drawn = weighted_sets(world, route);
    let mut all = Vec::new();
    let mut outcomes = Vec::new();
    for one in &drawn {
        let first = answer.groups.len();
        let groups = groups(one);
        let candidates = candidates(world, (peer, route.first_peer()), one, first);
        for outcome in possible_outcomes(&candidates, route.reason_without_endpoint()) {
            if !outcomes.contains(&outcome) {
                outcomes.push(outcome);
            }
        }
        if let Some(groups) = one.set.groups() {
            answer.spill = Some(groups.spill.to_string());
            answer.by_latency |= groups.by_latency;
        }
        answer.groups.extend(groups);
        all.extend(candidates);
    }
    answer.transit = why::transit(route);
    answer.dropped = balance::drop_probability(route);
    if answer.dropped > 0.0 {
        let dropped = Err(Reason::DropOverload);
        outcomes.retain(|_| answer.dropped < 1.0);
        outcomes.push(dropped);
        answer.notes.push(drops(route));
    }
    outcomes.sort_by_key(|outcome| outcome.is_err());
    let mut outcomes = outcomes.into_iter().map(|outcome| match outcome {
        Ok(()) => Outcome::opened(form),
        Err(reason) => Outcome::refused(reason, form),
    });
    let without = || Outcome::refused(route.reason_without_endpoint(), form);
    let mut outcome = outcomes.next().unwrap_or_else(without);
    outcome.or = outcomes.collect();
    let enforced = world.snapshot.enforcement != Enforcement::Off;
    if enforced && route.is_by_waypoint() {
        let note = "authorization policies are not evaluated here: the tunnel goes to a waypoint, \
                    which evaluates the policies attached to it";
        answer.notes.push(note.to_owned());
    }
    if all.iter().any(|one| one.endpoint.protocol == Protocol::Tcp)
        && enforced
        && asking.question.address.is_none()
    {
        let note = "policies may match the peer's address, assumed to be 0.0.0.0; give it by \
                    --address";
        answer.notes.push(note.to_owned());
    }
    list_unused(world, route, &all, limit, answer);
    all.sort_by(|one, other| {
        let by_probability = other.probability.total_cmp(&one.probability);
        by_probability.then_with(|| one.endpoint.uid().cmp(other.endpoint.uid()))
    });
    answer.more_endpoints = all.len().saturating_sub(limit);
    let rows = all.iter().take(limit);
    answer.endpoints = rows.map(|one| row(world, one)).collect();
    outcome
}

/// Formats the drop overloads of the control plane.
fn drops(route: &Route) -> String {
    let drops = route.drops().iter();
    let drops =
        drops.map(|(category, parts)| format!("{:.2}% for {category:?}", f64::from(*parts) / 1e4));
    let drops: Vec<_> = drops.collect();
    format!(
        "drop_overloads of the control plane reject shares of the tunnels, one after another: {}",
        drops.join(", ")
    )
}

/// Returns the endpoint sets of the route: the service's own, or those of its waypoints.
fn weighted_sets(world: &ExplainState<'_>, route: &Route) -> Vec<WeightedSet> {
    if !route.is_by_waypoint() {
        return vec![WeightedSet {
            waypoint: None,
            share: 1.0,
            set: Arc::clone(route.endpoints()),
        }];
    }
    if route.is_passthrough() {
        return Vec::new();
    }
    let definition = &route.service().definition;
    let waypoints: Vec<_> = route::usable_waypoints(world.snapshot, definition).collect();
    let weights = waypoints.iter();
    let sum: f64 = weights
        .map(|(waypoint, _)| f64::from(waypoint.weight))
        .sum();
    let drawn = waypoints.into_iter().map(|(waypoint, set)| WeightedSet {
        waypoint: Some(waypoint.gateway.place.to_string()),
        share: f64::from(waypoint.weight) / sum,
        set: Arc::clone(set),
    });
    drawn.collect()
}

fn groups(drawn: &WeightedSet) -> Vec<GroupRow> {
    let WeightedSet {
        waypoint,
        share,
        set,
    } = drawn;
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

fn candidates<'a>(
    world: &ExplainState<'_>,
    callers: (&Peer, Option<&FirstPeer>),
    drawn: &'a WeightedSet,
    first: usize,
) -> Vec<Candidate<'a>> {
    // Endpoints of a set are ordered by group.
    let sizes: Vec<_> = match drawn.set.groups() {
        Some(groups) => {
            let groups = groups.list().iter();
            groups.map(|group| drawn.set.of(group).len()).collect()
        }
        None => vec![drawn.set.endpoints.len()],
    };
    let sizes = sizes.into_iter().enumerate();
    let places = sizes.flat_map(|(place, size)| std::iter::repeat_n(first + place, size));
    let probability = pick_probabilities(&drawn.set, world.now);
    let factors = drawn.set.candidates.iter();
    let factors = factors.map(|one| f64::from(one.factor(|| world.now)) / f64::from(FACTOR_ONE));
    let numbers = probability.into_iter().zip(factors);
    let endpoints = drawn.set.endpoints.iter().zip(numbers).zip(places);
    let enforces = world.snapshot.enforcement == Enforcement::Enforce;
    let candidates = endpoints.map(|((endpoint, (probability, factor)), group)| {
        let by_waypoint = drawn.waypoint.is_some();
        let verdict = authorize::evaluate(world.snapshot, callers, endpoint, by_waypoint);
        let refuses = |verdict: &PolicyVerdict| enforces && verdict.refusal.is_some();
        let others = endpoint
            .remote
            .iter()
            .flat_map(|remote| &remote.other_addresses);
        let mut addresses = std::iter::once(&endpoint.address).chain(others);
        let denied = addresses.find_map(|address| world.deny.denies(*address));
        let policy = verdict.as_ref().filter(|verdict| refuses(verdict));
        let policy = policy.map(|_| Reason::PolicyDenied);
        Candidate {
            endpoint,
            group,
            probability: probability * drawn.share,
            factor,
            is_ejected: endpoint.state.is_ejected(world.now),
            refusal: policy.or_else(|| denied.map(|_| Reason::DialDenied)),
            verdict,
            denied,
        }
    });
    candidates.collect()
}

/// Returns the possible ends of a tunnel before it opens. `forward` tries endpoints that are not
/// ejected first, and gives up after [`POLICY_REFUSALS_MAX`] refusals.
fn possible_outcomes(candidates: &[Candidate<'_>], without: Reason) -> Vec<Result<(), Reason>> {
    let count = |is_ejected: bool, refusal: Option<Reason>| {
        let of = candidates.iter().filter(|one| one.is_ejected == is_ejected);
        of.filter(|one| one.refusal == refusal).count()
    };
    let policy = Some(Reason::PolicyDenied);
    let refused = count(false, policy);
    let all_refused = refused + count(true, policy);
    let opened = |refused: usize| -> Vec<Result<(), Reason>> {
        let denied = (refused >= POLICY_REFUSALS_MAX).then_some(Err(Reason::PolicyDenied));
        std::iter::once(Ok(())).chain(denied).collect()
    };
    // If none of the endpoints serves, the reason is that of the last try.
    let last_try = |is_ejected: bool| {
        let reasons = [Reason::PolicyDenied, Reason::DialDenied].into_iter();
        let reasons = reasons.filter(|reason| count(is_ejected, Some(*reason)) > 0);
        reasons.map(Err).collect::<Vec<_>>()
    };
    if candidates.is_empty() {
        vec![Err(without)]
    } else if count(false, None) > 0 {
        opened(refused)
    } else if refused >= POLICY_REFUSALS_MAX {
        vec![Err(Reason::PolicyDenied)]
    } else if count(true, None) > 0 {
        opened(all_refused)
    } else if all_refused >= POLICY_REFUSALS_MAX {
        vec![Err(Reason::PolicyDenied)]
    } else {
        let of_ejected = last_try(true);
        if of_ejected.is_empty() {
            last_try(false)
        } else {
            of_ejected
        }
    }
}

fn row(world: &ExplainState<'_>, candidate: &Candidate<'_>) -> EndpointRow {
    let endpoint = candidate.endpoint;
    let definition = &endpoint.definition;
    let enforcement = world.snapshot.enforcement;
    let verdict = candidate.verdict.as_ref();
    let refusal = verdict.and_then(|verdict| verdict.refusal.as_ref());
    let policy = refusal.filter(|_| enforcement == Enforcement::Enforce);
    let denied = candidate.denied;
    let denied = denied.map(|rule| format!("its address is {rule}; see dial.allow"));
    let dry_run = verdict.and_then(|verdict| verdict.dry_run.as_ref());
    let logged = refusal.filter(|_| enforcement == Enforcement::Audit);
    let left = endpoint.state.ejected_for(world.now);
    EndpointRow {
        workload: Arc::clone(endpoint.uid()),
        address: endpoint.address.to_string(),
        protocol: match endpoint.protocol {
            Protocol::Hbone => "HBONE".to_owned(),
            Protocol::Tcp => "TCP".to_owned(),
        },
        network: endpoint
            .remote
            .as_ref()
            .map(|remote| Arc::clone(&remote.network)),
        cluster: Arc::clone(&definition.cluster),
        locality: locality(&definition.locality),
        group: candidate.group,
        weight: endpoint.weight,
        factor: candidate.factor,
        tunnels: endpoint.state.in_flight(),
        probability: candidate.probability,
        ejected: left.map(|left| u64::try_from(left.as_millis().div_ceil(1000)).unwrap_or(0)),
        refused: policy.map(ToString::to_string).or(denied),
        audited: logged.or(dry_run).map(ToString::to_string),
    }
}

fn locality(of: &Locality) -> String {
    let parts = [&*of.region, &of.zone, &of.subzone];
    parts.join("/").trim_end_matches('/').to_owned()
}

/// Lists the workloads of the service that are not candidates.
fn list_unused(
    world: &ExplainState<'_>,
    route: &Route,
    candidates: &[Candidate<'_>],
    limit: usize,
    answer: &mut Answer,
) {
    let used: HashSet<&str> = candidates.iter().map(|one| &**one.endpoint.uid()).collect();
    let mut list = |workload: &Workload, why: &dyn Fn() -> String| {
        if answer.unused.len() == limit {
            answer.more_unused += 1;
            return;
        }
        answer.unused.push(UnusedRow {
            workload: Arc::clone(&workload.uid),
            why: why(),
        });
    };
    let is_out = |workload: &&Workload| !used.contains(&*workload.uid);
    if let MatchedBy::Workload(workload) = route.means() {
        if is_out(&&**workload) {
            let (service, port) = (route.service(), route.port());
            list(workload, &|| {
                why_unused(world, route, service, port, workload)
            });
        }
        return;
    }
    let snapshot = world.snapshot;
    let services: Vec<_> = match route.means() {
        MatchedBy::Alias(alias) => {
            let behind = snapshot.behind(alias, route.asked().port);
            let behind =
                behind.filter_map(|(host, port)| Some((snapshot.service_or_derived(host)?, port)));
            behind.collect()
        }
        _ => vec![(route.service(), route.port())],
    };
    let keys = services.iter().map(|(service, port)| {
        let key = format!("{}/{}", service.namespace, service.hostname);
        (key, *service, *port)
    });
    let keys: Vec<_> = keys.collect();
    let workloads = snapshot.mesh.workloads.sorted().into_iter();
    for workload in workloads.map(|of| &**of).filter(is_out) {
        let mut keys = keys.iter();
        let found = keys.find(|(key, ..)| workload.services.get(&**key).is_some());
        if let Some((_, service, port)) = found {
            list(workload, &|| {
                why_unused(world, route, service, *port, workload)
            });
        }
    }
}

/// Returns the reason for which a workload of a service is not a candidate.
fn why_unused(
    world: &ExplainState<'_>,
    route: &Route,
    service: &Service,
    port: u16,
    workload: &Workload,
) -> String {
    let why = exclusion_reason(world.snapshot, &service.definition, workload, port);
    let why = why.filter(|why| *why != ExclusionReason::BehindWaypoint || route.is_by_waypoint());
    let (region, subset) = match route.means() {
        MatchedBy::Alias(alias) => (alias.region.as_deref(), alias.subset.as_ref()),
        _ => (None, None),
    };
    match (why, region) {
        (Some(ExclusionReason::OtherNetwork(network)), _) => why::other_network(route, &network),
        (Some(why), _) => why.to_string(),
        (None, Some(region)) => format!("the alias is for region {region}"),
        (None, None) => match subset {
            Some(subset) => format!("not in subset {subset}"),
            None => "excluded by `traffic` for this name".to_owned(),
        },
    }
}
