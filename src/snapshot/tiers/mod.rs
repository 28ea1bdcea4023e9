//! Ranking of a service's endpoints into tiers, and the share of tunnels that each group gets, as
//! seen from this gateway.
//!
//! Each balancing key comes from the first source that sets it. Sources are the configuration for
//! the service, its definition in the mesh, and the configuration for every service.

mod shares;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use super::endpoints::{Entries, Entry, Found, PartKey, Tier};
use super::exclusion::remote_network;
use super::mesh::{Assignment, LocalityWeight, Scope, Service, Workload};
use super::remote_gateways::Rank;
use super::traffic::{Balancing, Count, Spill, TrafficRule, has_weights, region_of};
use super::{Endpoint, EndpointSet, ExclusionReason, Subset};
use crate::config::RegionWeight;
use crate::wire::DrainTarget;

/// Ranking of the endpoints of one service port.
#[derive(Debug)]
pub(super) struct Ranking<'a> {
    network: &'a str,
    balancing: &'a Balancing,
    /// Scopes in which endpoints are preferred, most important first.
    preferences: &'a [Scope],
    /// True if endpoints of other networks are used only when those of the own network cannot
    /// serve.
    is_own_network_first: bool,
    strict: bool,
    /// Present if the tiers are the priorities of an Envoy assignment.
    assignment: Option<&'a Assignment>,
    /// True if an Envoy assignment has the instances, and their locality matters.
    ranks_localities: bool,
    /// Subset of several parts. Each part has its own share of tunnels, which its tiers divide.
    split: Option<&'a Subset>,
    /// True if other networks only take what the own network cannot, whatever the parts are.
    is_failover: bool,
    localities: WeightedLocalities<'a>,
    spill: Spill,
    by_latency: bool,
}

/// Source of the weights of regions or localities within a tier.
#[derive(Debug)]
enum WeightedLocalities<'a> {
    None,
    /// The most specific ones first.
    Regions(&'a [RegionWeight]),
    Localities(&'a [LocalityWeight]),
}

/// Tier, part of a split subset, and weighted region or locality of an endpoint.
#[derive(Clone, Copy, Debug)]
struct Placement {
    /// Order of the tier; lower ones are used first.
    order: u32,
    tier: Tier,
    /// Index of the part of a split subset.
    part: Option<usize>,
    part_weight: u32,
    /// Index of the region or locality in the list of weights; `None` if it has no weight of its
    /// own.
    place: Option<usize>,
    /// Weight of that region or locality. An endpoint of weight 0 counts in its tier but gets no
    /// tunnels.
    weight: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct TierKey {
    part: PartKey,
    order: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKey {
    tier: TierKey,
    place: Option<usize>,
}

/// Endpoints with one tier, subset and locality.
#[derive(Debug)]
struct Group {
    tier: TierKey,
    placement: Placement,
    count: Count,
    ready: Vec<Arc<Endpoint>>,
}

/// Offset of the tiers of degraded endpoints. Envoy's priorities end at 128.
const DEGRADED_FROM: u32 = 1 << 16;

/// Offset of the tiers of other networks, if the own network comes first.
const OTHER_NETWORKS_FROM: u32 = 1 << 20;

impl<'a> Ranking<'a> {
    /// Returns the ranking of a service port for a gateway in `network`. `host` is the service's
    /// name in the configuration.
    pub(super) fn new(
        service: &'a Service,
        port: u16,
        host: &str,
        network: &'a str,
        balancing: &'a Balancing,
    ) -> Self {
        let every = &balancing.traffic.default_rule;
        let own = balancing.traffic.rule(host, &service.namespace);
        let own_regions = own.map(|own| &own.regions).filter(|own| !own.is_empty());
        let configured_preferences = own.and_then(TrafficRule::preferences);
        let assignment = service.assignments.get(&port).map(|one| &**one);
        let by_priority = assignment.filter(|_| configured_preferences.is_none());
        let of_source = service.preferences.as_deref();
        let preferences = match by_priority {
            Some(_) => None,
            None => configured_preferences.or(of_source).or_else(|| every.preferences()),
        };
        let regions = own_regions.unwrap_or(&every.regions);
        let localities = match by_priority {
            _ if !regions.is_empty() => WeightedLocalities::Regions(regions),
            Some(assignment) if assignment.by_locality => {
                WeightedLocalities::Localities(&assignment.localities)
            }
            _ => WeightedLocalities::None,
        };
        let has_places = !matches!(localities, WeightedLocalities::None);
        let ranks_localities =
            assignment.is_some() && (has_places || !balancing.evacuated.is_empty());
        let factor = by_priority.map(|stated| Spill::by_factor(stated.overprovisioning));
        let below = |rule: &TrafficRule| rule.spill_below.map(Spill::below);
        let spill = own.and_then(below).or(factor).or_else(|| below(every));
        let is_own_network_first = match preferences {
            Some(preferences) => preferences.first() == Some(&Scope::Network),
            // Shares of regions or priorities distribute over networks, too.
            None => by_priority.is_none(),
        };
        Self {
            network,
            balancing,
            preferences: preferences.unwrap_or_default(),
            is_own_network_first,
            strict: service.strict && configured_preferences.is_none(),
            assignment: by_priority,
            ranks_localities,
            split: None,
            is_failover: false,
            localities,
            spill: spill.unwrap_or_default(),
            by_latency: own.and_then(|own| own.latency).or(every.latency) == Some(true),
        }
    }

    /// Returns the ranking with the weights of the parts of a subset, if it has several.
    pub(super) fn with_subset(self, subset: Option<&'a Subset>) -> Self {
        Self { split: subset.filter(|subset| subset.parts.len() > 1), ..self }
    }

    /// Returns the ranking of failover: other networks only take tunnels that the endpoints of the
    /// own network cannot take.
    pub(super) fn with_own_network_first(self) -> Self {
        Self { is_own_network_first: true, is_failover: true, ..self }
    }

    /// Returns whether other networks are used for failover only, by the rules of the service. The
    /// parts of a split subset come before them.
    pub(super) fn is_own_network_first(&self) -> bool {
        self.is_own_network_first && self.split.is_none()
    }

    /// Returns the attributes of an instance of another network that decide its tier and place, if
    /// these are those of an Envoy assignment. Other instances have the locality of their gateway.
    pub(super) fn rank<'w>(&self, instance: &'w Workload) -> Rank<'w> {
        let of_assignment = (instance.priority, instance.degraded);
        let (priority, degraded) = self.assignment.map_or((0, false), |_| of_assignment);
        Rank { priority, degraded, locality: self.ranks_localities.then_some(&*instance.locality) }
    }

    /// Returns whether all endpoints form one group without a tier, place or special rule.
    fn is_single_group(&self, entries: &Entries) -> bool {
        self.preferences.is_empty()
            && !(self.is_own_network_first && entries.has_remote)
            && self.assignment.is_none()
            && self.split.is_none()
            && matches!(self.localities, WeightedLocalities::None)
            && self.balancing.evacuated.is_empty()
            && !self.by_latency
    }

    pub(super) fn evacuated_address(&self, endpoint: &Endpoint) -> Option<&DrainTarget> {
        self.balancing.evacuated_address(endpoint.address, endpoint.remote.as_deref())
    }

    /// Returns the reason for which the location of a workload excludes it, if it does.
    pub(super) fn exclusion(&self, workload: &Workload) -> Option<ExclusionReason> {
        match self.placement(workload, None) {
            Ok(placement) => (!placement.has_weight()).then_some(ExclusionReason::NoLocality),
            Err(why) => Some(why),
        }
    }

    /// Returns the set of these endpoints. One without a ready instance is only counted.
    pub(super) fn build_set(&self, entries: Entries) -> EndpointSet {
        if self.is_single_group(&entries) {
            let ready = entries.list.into_iter().filter(|one| one.count.ready > 0);
            return EndpointSet::new(ready.map(|one| one.endpoint));
        }
        let ranks_networks = self.is_own_network_first && entries.has_remote;
        let mut tiers: BTreeMap<TierKey, Count> = BTreeMap::new();
        let mut groups: BTreeMap<GroupKey, Group> = BTreeMap::new();
        let mut left_out = BTreeSet::new();
        for Entry { endpoint, count, part } in entries.list {
            let is_ready = count.ready > 0;
            let placement = match self.evacuated_address(&endpoint) {
                Some(target) => Err(ExclusionReason::Evacuated(target.clone())),
                None => self.placement(&endpoint.definition, part),
            };
            let placement = match placement {
                Ok(placement) if ranks_networks && placement.tier == Tier::Any => {
                    Placement { tier: Tier::Same(Scope::Network), ..placement }
                }
                Ok(placement) => placement,
                Err(why) => {
                    left_out.extend(is_ready.then_some(why));
                    continue;
                }
            };
            let tier = self.tier_key(&placement);
            tiers.entry(tier).or_default().add(count);
            if !placement.has_weight() {
                left_out.extend(is_ready.then_some(ExclusionReason::NoLocality));
                continue;
            }
            let place = placement.place;
            let group = groups.entry(GroupKey { tier, place });
            let group = group.or_insert_with(|| Group {
                tier,
                placement,
                count: Count::default(),
                ready: Vec::new(),
            });
            group.count.add(count);
            group.ready.extend(is_ready.then_some(endpoint));
        }
        if self.assignment.is_some() {
            let degraded = |tier: &TierKey| TierKey { order: degraded_order(tier.order), ..*tier };
            merge_degraded_counts(&mut tiers, degraded, |count| count);
            merge_degraded_counts(
                &mut groups,
                |key| GroupKey { tier: degraded(&key.tier), ..*key },
                |group| &mut group.count,
            );
        }
        let found = self.distribute(&tiers, groups.into_values(), entries.scale.max(1));
        match &found[..] {
            [one] if left_out.is_empty() && !self.by_latency && one.is_plain() => {
                EndpointSet::new(one.endpoints.iter().cloned())
            }
            _ => {
                let left_out = left_out.into_iter().collect();
                EndpointSet::grouped(found, self.spill, self.by_latency, left_out)
            }
        }
    }

    fn build_group(&self, group: Group, parts: u32, scale: u32) -> Found {
        let instances = |units: u32| units.div_ceil(scale);
        Found {
            part: group.tier.part,
            tier: group.placement.tier,
            place: self.name(group.placement),
            endpoints: group.ready,
            count: Count { ready: instances(group.count.ready), all: instances(group.count.all) },
            parts,
        }
    }

    fn tier_key(&self, placement: &Placement) -> TierKey {
        let is_last = placement.order >= OTHER_NETWORKS_FROM;
        TierKey {
            part: PartKey {
                is_failover: self.split.is_some() && self.is_failover && is_last,
                part: placement.part,
            },
            order: placement.order,
        }
    }

    /// Returns the tier and place of a workload, which belongs to `part` of a subset.
    fn placement(
        &self,
        workload: &Workload,
        part: Option<usize>,
    ) -> Result<Placement, ExclusionReason> {
        let locality = &workload.locality;
        if let Some(target) = self.balancing.evacuated_with(workload) {
            return Err(ExclusionReason::Evacuated(target.clone()));
        }
        let (order, tier) = self.tier(workload)?;
        let (place, weight) = match self.localities {
            WeightedLocalities::None => (None, 1),
            WeightedLocalities::Regions(regions) => match region_of(regions, locality) {
                None if has_weights(regions) => {
                    return Err(ExclusionReason::NoRegion(Arc::clone(&locality.region)));
                }
                None => (None, 1),
                Some((_, one)) if one.weight == 0 => {
                    return Err(ExclusionReason::NoWeight(one.region.to_string().into()));
                }
                Some((place, one)) => (Some(place), one.weight),
            },
            WeightedLocalities::Localities(list) => {
                let priority = workload.priority;
                let of_tier = || {
                    let all = list.iter().enumerate();
                    all.filter(|(_, one)| one.priority == priority)
                };
                match of_tier().find(|(_, one)| one.locality == **locality) {
                    _ if of_tier().all(|(_, one)| one.weight == 0) => (None, 1),
                    Some((place, one)) => (Some(place), one.weight),
                    None => (None, 0),
                }
            }
        };
        let part = self.split.and(part);
        let part_weight = self.split.map_or(1, |split| {
            let part = part.and_then(|part| split.parts.get(part));
            part.map_or(0, |part| part.weight)
        });
        Ok(Placement { order, tier, part, part_weight, place, weight })
    }

    /// Returns the tier of a workload, by its priority or by the number of preferences that it
    /// matches. As in ztunnel's ranking, the first mismatch ends the count
    /// (docs/wire-contract.md 7). NODE has no rank, because the node of a gateway is arbitrary.
    /// If the own network comes first, other networks are ranked among themselves by the other
    /// preferences.
    fn tier(&self, workload: &Workload) -> Result<(u32, Tier), ExclusionReason> {
        let is_remote = remote_network(workload, self.network).is_some();
        let is_last = is_remote && self.is_own_network_first;
        let offset = if is_last { OTHER_NETWORKS_FROM } else { 0 };
        if self.assignment.is_some() {
            let priority = workload.priority;
            return Ok(match (is_last, workload.degraded) {
                (true, true) => (offset + degraded_order(priority), Tier::OtherNetwork),
                (true, false) => (offset + priority, Tier::OtherNetwork),
                (false, true) => (degraded_order(priority), Tier::Degraded(priority)),
                (false, false) => (priority, Tier::Priority(priority)),
            });
        }
        let preferences = self.preferences.iter().filter(|of| **of != Scope::Node);
        let preferences = preferences.filter(|of| !(is_last && **of == Scope::Network));
        let (mut tier, mut order) = (Tier::Any, 0);
        let mut missed = None;
        for scope in preferences {
            if missed.is_none() && self.is_same(*scope, workload) {
                tier = Tier::Same(*scope);
            } else {
                missed = missed.or(Some(*scope));
                order += 1;
            }
        }
        if self.strict && is_last && self.preferences.contains(&Scope::Network) {
            return Err(ExclusionReason::MissesPreference(Scope::Network));
        }
        match missed {
            Some(scope) if self.strict => Err(ExclusionReason::MissesPreference(scope)),
            _ if is_last => Ok((
                offset + order,
                match tier {
                    Tier::Same(scope) => Tier::OtherNetworkSame(scope),
                    _ => Tier::OtherNetwork,
                },
            )),
            Some(_) if tier == Tier::Any => Ok((order, Tier::Elsewhere)),
            _ => Ok((order, tier)),
        }
    }

    fn is_same(&self, scope: Scope, workload: &Workload) -> bool {
        let (own, its) = (&self.balancing.position, &workload.locality);
        match scope {
            Scope::Region => own.locality.region == its.region,
            Scope::Zone => own.locality.zone == its.zone,
            Scope::Subzone => own.locality.subzone == its.subzone,
            Scope::Cluster => own.cluster == workload.cluster,
            Scope::Network => workload.network.is_empty() || *workload.network == *self.network,
            Scope::Node => true,
        }
    }

    /// Returns the name and weight of the place of a group, which is that of its part if it has no
    /// other.
    fn name(&self, placement: Placement) -> Option<(Arc<str>, u32)> {
        let place = placement.place.and_then(|place| self.place_name(place));
        let part = placement.part.zip(self.split);
        let part = part.and_then(|(part, split)| split.parts.get(part));
        match (part, place) {
            (None, place) => place.map(|name| (name, placement.weight)),
            (Some(part), None) => Some((Arc::clone(&part.name), part.weight)),
            (Some(part), Some(place)) => {
                let name = format!("{}, {place}", part.name);
                Some((name.into(), placement.weight))
            }
        }
    }

    fn place_name(&self, place: usize) -> Option<Arc<str>> {
        match self.localities {
            WeightedLocalities::None => None,
            WeightedLocalities::Regions(regions) => {
                Some(regions.get(place)?.region.to_string().into())
            }
            WeightedLocalities::Localities(list) => {
                let of = &list.get(place)?.locality;
                let parts = [&*of.region, &of.zone, &of.subzone];
                Some(parts.join("/").trim_end_matches('/').into())
            }
        }
    }
}

impl Placement {
    /// Returns whether the endpoint may get tunnels.
    fn has_weight(&self) -> bool {
        self.weight > 0 && self.part_weight > 0
    }
}

/// Returns the order of a priority's degraded endpoints: after all tiers that are not degraded.
fn degraded_order(priority: u32) -> u32 {
    priority.saturating_add(DEGRADED_FROM)
}

/// Counts the healthy and the degraded endpoints of a priority together, as Envoy does. In the
/// total of either tier, the endpoints of the other one count as not ready.
fn merge_degraded_counts<K: Ord + Clone, V>(
    all: &mut BTreeMap<K, V>,
    twin: impl Fn(&K) -> K,
    count: impl Fn(&mut V) -> &mut Count,
) {
    let keys: Vec<_> = all.keys().cloned().collect();
    for key in keys {
        let other = twin(&key);
        let Some(its) = all.get_mut(&other).map(|of| count(of).all) else {
            continue;
        };
        let own = all.get_mut(&key).map_or(0, |of| {
            let count = count(of);
            let both = count.all.saturating_add(its);
            mem::replace(&mut count.all, both)
        });
        if let Some(of) = all.get_mut(&other) {
            let count = count(of);
            count.all = count.all.saturating_add(own);
        }
    }
}

impl Found {
    /// Returns whether the group needs no description if it is the only one.
    fn is_plain(&self) -> bool {
        matches!(self.tier, Tier::Any | Tier::Priority(0)) && self.place.is_none()
    }
}
