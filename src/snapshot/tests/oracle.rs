//! Reference implementation of the groups of a service, from the mesh, the configuration and an
//! operator's overrides. It uses strings and floating-point numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fastrand::Rng;

use super::super::mesh::{Assignment, Locality, LocalityWeight, Scope, Service, Workload};
use super::super::traffic::{Position, Traffic, TrafficRule};
use super::super::{Endpoint, EndpointSet};
use super::region_weights;
use crate::config::Distribution;

/// Traffic rule for one service, or for every service.
#[derive(Clone, Debug, Default)]
pub(super) struct TrafficEntry {
    distribution: Option<Distribution>,
    spill: Option<u8>,
    regions: Vec<(&'static str, u32)>,
}

impl TrafficEntry {
    fn preferences(&self) -> Option<&'static [Scope]> {
        let mut all = DISTRIBUTIONS.into_iter();
        Some(all.find(|(named, _)| Some(*named) == self.distribution)?.1)
    }
}

/// All inputs of load balancing other than the mesh.
#[derive(Clone, Debug, Default)]
pub(super) struct Inputs {
    /// By hostname; `*` means every service.
    pub(super) traffic: BTreeMap<String, TrafficEntry>,
    pub(super) evacuated: BTreeSet<&'static str>,
}

/// Group: its tier, the uids of its endpoints, and its share.
pub(super) type Group = (String, Vec<String>, f64);

const DISTRIBUTIONS: [(Distribution, &[Scope]); 4] = [
    (Distribution::Any, &[]),
    (Distribution::Network, &[Scope::Network]),
    (Distribution::Region, &[Scope::Network, Scope::Region]),
    (Distribution::Close, &[Scope::Network, Scope::Region, Scope::Zone]),
];

/// Preferences of a service, of which those of a rule are the first.
fn preferences(rng: &mut Rng) -> Vec<Scope> {
    let own: &[Scope] = &[Scope::Cluster, Scope::Node, Scope::Zone];
    let all = DISTRIBUTIONS.map(|(_, scopes)| scopes).into_iter().chain([own]);
    rng.choice(all.collect::<Vec<_>>()).expect("some").to_vec()
}

pub(super) const PLACES: [&str; 6] = ["*", "r1", "r2", "r1/z1", "r1/z2", "r2/z1"];

/// Position of the gateway in the model.
pub(super) fn position() -> Position {
    Position { cluster: "c1".into(), locality: place("r1/z1"), ..Position::default() }
}

fn place(text: &str) -> Locality {
    let (region, zone) = text.split_once('/').unwrap_or((text, ""));
    Locality { region: region.into(), zone: zone.into(), ..Locality::default() }
}

/// Sets a random location of a workload.
pub(super) fn locate(rng: &mut Rng, workload: &mut Workload) {
    workload.locality = place(rng.choice(&PLACES[3..]).expect("a place")).into();
    workload.cluster = (*rng.choice(&["c1", "c2"]).expect("a cluster")).into();
    workload.priority = rng.u32(..2);
}

/// Sets random balancing keys of a service.
pub(super) fn balance(rng: &mut Rng, service: &mut Service) {
    match rng.u8(..4) {
        0 => {
            service.preferences = Some(preferences(rng));
            service.strict = rng.bool();
        }
        1 => {
            let mut localities = Vec::new();
            for priority in 0..2 {
                for text in &PLACES[3..] {
                    if rng.bool() {
                        localities.push(LocalityWeight {
                            priority,
                            locality: place(text),
                            weight: rng.u32(..3),
                        });
                    }
                }
            }
            let assignment = Arc::new(Assignment {
                overprovisioning: rng.u32(50..250),
                by_locality: rng.bool(),
                localities,
                drops: Vec::new(),
            });
            // The same assignment for each port that a service can have.
            let ports = (0..3).map(|at| (super::port(at), Arc::clone(&assignment)));
            service.assignments = ports.collect();
        }
        _ => {}
    }
}

/// Returns a random traffic rule.
pub(super) fn entry(rng: &mut Rng) -> TrafficEntry {
    let regions = PLACES.into_iter().map(|place| (place, rng.u32(..3)));
    let regions: Vec<_> = regions.filter(|(place, _)| place.len() % 3 != 1).collect();
    TrafficEntry {
        distribution: rng.bool().then(|| rng.choice(DISTRIBUTIONS).expect("some").0),
        spill: rng.bool().then(|| rng.u8(1..=100)),
        regions: if rng.u8(..3) == 0 { regions } else { Vec::new() },
    }
}

impl Inputs {
    /// Returns whether a ready workload is an endpoint.
    pub(super) fn is_endpoint(&self, service: &Service, workload: &Workload) -> bool {
        placement(service, self, workload).is_some_and(|(.., weight)| weight > 0)
    }

    /// Converts the rules to the builder's input.
    pub(super) fn traffic(&self) -> Traffic {
        let rule = |entry: &TrafficEntry| TrafficRule {
            distribution: entry.distribution,
            spill_below: entry.spill,
            ..region_weights(&entry.regions)
        };
        let services = self.traffic.iter().filter(|(host, _)| *host != "*");
        let services = services.map(|(host, entry)| (host.as_str().into(), rule(entry)));
        let every = self.traffic.get("*").map(rule);
        Traffic::new(services, every.unwrap_or_default())
    }
}

fn text(locality: &Locality) -> String {
    format!("{}/{}", locality.region, locality.zone)
}

fn is_in(place: &str, locality: &Locality) -> bool {
    place == "*" || place == text(locality) || *place == *locality.region
}

/// Tier of an endpoint, the name of the tier, the place within it, and the weight of the place.
type Placement = (usize, String, String, u32);

/// Returns `None` for an endpoint that is neither used nor counted.
fn placement(service: &Service, reported: &Inputs, workload: &Workload) -> Option<Placement> {
    let at = &*workload.locality;
    if reported.evacuated.iter().any(|place| is_in(place, at)) {
        return None;
    }
    let nothing = TrafficEntry::default();
    let own = reported.traffic.get(&*service.hostname).unwrap_or(&nothing);
    let every = reported.traffic.get("*").unwrap_or(&nothing);
    let is_split = |entry: &TrafficEntry| entry.regions.iter().any(|(_, weight)| *weight > 0);
    let by_own = own.distribution.is_some() || is_split(own);
    let assignment = service.assignments.values().next().filter(|_| !by_own);
    let (tier, name) = match assignment {
        Some(_) => (workload.priority as usize, format!("priority {}", workload.priority)),
        None => {
            let preferences = if by_own {
                own.preferences().unwrap_or_default()
            } else {
                let of_service = service.preferences.as_deref();
                of_service.or_else(|| every.preferences()).unwrap_or_default()
            };
            by_preference(preferences, service.strict && !by_own, workload)?
        }
    };
    let regions = if own.regions.is_empty() { &every.regions } else { &own.regions };
    let matching = regions.iter().filter(|(place, _)| is_in(place, at));
    let longest = matching.max_by_key(|(place, _)| if *place == "*" { 0 } else { place.len() });
    let (place, weight) = match (longest, assignment) {
        (Some((_, 0)), _) => return None,
        (Some((place, weight)), _) => ((*place).to_owned(), *weight),
        (None, _) if regions.iter().any(|(_, weight)| *weight > 0) => return None,
        (None, Some(reported)) if regions.is_empty() && reported.by_locality => {
            let of_tier =
                reported.localities.iter().filter(|one| one.priority == workload.priority);
            let mut weighed = of_tier.filter(|one| one.weight > 0).peekable();
            match weighed.peek() {
                None => (String::new(), 1),
                Some(_) => {
                    let own = weighed.find(|one| one.locality == *at);
                    (text(at), own.map_or(0, |one| one.weight))
                }
            }
        }
        (None, _) => (String::new(), 1),
    };
    Some((tier, name, place, weight))
}

fn by_preference(of: &[Scope], strict: bool, workload: &Workload) -> Option<(usize, String)> {
    let own = position();
    let at = &workload.locality;
    let of: Vec<_> = of.iter().filter(|scope| **scope != Scope::Node).collect();
    let matches = |scope: &&&Scope| match scope {
        Scope::Region => at.region == own.locality.region,
        Scope::Zone => at.zone == own.locality.zone,
        Scope::Cluster => workload.cluster == own.cluster,
        _ => true,
    };
    let matched = of.iter().take_while(matches).count();
    if strict && matched < of.len() {
        return None;
    }
    let name = match matched.checked_sub(1).map(|last| of[last]) {
        Some(scope) => format!("same {scope}"),
        None if of.is_empty() => "all".to_owned(),
        None => "elsewhere".to_owned(),
    };
    Some((of.len() - matched, name))
}

/// Returns the groups with ready endpoints. `all` has each endpoint with whether it is ready.
pub(super) fn groups(
    service: &Service,
    reported: &Inputs,
    all: &[(&Workload, bool)],
) -> Vec<Group> {
    /// Uids of ready endpoints, and the number of all.
    type Counted = (Vec<String>, usize);
    let mut tiers: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    let mut spots: BTreeMap<(usize, String), (String, u32, Counted)> = BTreeMap::new();
    for (workload, ready) in all {
        let Some((tier, name, place, weight)) = placement(service, reported, workload) else {
            continue;
        };
        let counts = tiers.entry(tier).or_default();
        *counts = (counts.0 + u64::from(*ready), counts.1 + 1);
        let found = spots.entry((tier, place));
        let (_, _, counted) = found.or_insert_with(|| (name, weight, Counted::default()));
        counted.0.extend(ready.then(|| workload.uid.to_string()));
        counted.1 += 1;
    }
    let (factor, of) = threshold(service, reported);
    let able = |(ready, all): &(u64, u64)| (100 * ready * factor / (all * of)).min(100);
    let total = tiers.values().map(able).sum::<u64>().clamp(1, 100);
    let mut left = 100;
    let mut loads: BTreeMap<usize, u64> = BTreeMap::new();
    for (tier, counts) in &tiers {
        let load = left.min(able(counts) * 100 / total);
        left -= load;
        loads.insert(*tier, load);
    }
    let first = tiers.iter().find(|(_, counts)| able(counts) > 0);
    if let Some((first, _)) = first {
        *loads.get_mut(first).expect("a load") += left;
    }
    let ratio = |(ready, all): &Counted| {
        let (ready, all) = (ready.len() as f64, *all as f64);
        (ready * factor as f64 / (all * of as f64)).min(1.0)
    };
    let weight = |weight: u32, counted: &Counted| f64::from(weight) * ratio(counted);
    let mut shares = Vec::new();
    for ((tier, _), (name, own, counted)) in &spots {
        let tiers = spots.iter().filter(|((of, _), _)| of == tier);
        let sum: f64 = tiers.map(|(_, (_, one, of))| weight(*one, of)).sum();
        let share = loads[tier] as f64 * weight(*own, counted) / sum.max(f64::MIN_POSITIVE);
        if *own > 0 && !counted.0.is_empty() {
            shares.push((name.clone(), counted.0.clone(), share));
        }
    }
    let sum: f64 = shares.iter().map(|(.., share)| share).sum();
    match shares.first_mut() {
        Some((.., first)) if sum == 0.0 => *first = 1.0,
        _ => shares.iter_mut().for_each(|(.., share)| *share /= sum),
    }
    shares
}

/// Returns whether a set has these groups and shares.
pub(super) fn has_groups(set: &EndpointSet, want: &[Group]) -> bool {
    let uids = |endpoints: &[Arc<Endpoint>]| -> Vec<_> {
        let uids = endpoints.iter().map(|one| one.uid().to_string());
        uids.collect()
    };
    let Some(groups) = set.groups() else {
        let all = uids(&set.endpoints);
        return match want {
            [] => all.is_empty(),
            [(_, want, _)] => all == *want,
            _ => false,
        };
    };
    let mut want = want.to_vec();
    let groups = groups.list().iter().filter(|group| group.ready > 0);
    let all_found = groups.clone().all(|group| {
        let found = want.iter().position(|(tier, endpoints, share)| {
            *tier == group.tier.to_string()
                && *endpoints == uids(set.of(group))
                && (share - group.share).abs() < 0.001
        });
        found.map(|place| want.remove(place)).is_some()
    });
    // Groups follow the order of tiers and, within a tier, of falling shares.
    let order: Vec<_> = groups.map(|group| (group.tier.to_string(), group.share)).collect();
    let is_falling = order.windows(2).all(|two| two[0].0 != two[1].0 || two[0].1 >= two[1].1);
    all_found && want.is_empty() && is_falling
}

/// Returns the threshold as (factor, divisor): a tier can take its ready ratio × factor / divisor.
fn threshold(service: &Service, reported: &Inputs) -> (u64, u64) {
    let own = reported.traffic.get(&*service.hostname);
    let by_own = own.is_some_and(|own| {
        own.distribution.is_some() || own.regions.iter().any(|(_, weight)| *weight > 0)
    });
    let assigned = service.assignments.values().next().filter(|_| !by_own);
    let every = reported.traffic.get("*").and_then(|every| every.spill);
    match (own.and_then(|own| own.spill), assigned, every) {
        (Some(percent), ..) | (None, None, Some(percent)) => (100, percent.into()),
        (None, Some(reported), _) => (reported.overprovisioning.into(), 100),
        (None, None, None) => (100, 70),
    }
}
