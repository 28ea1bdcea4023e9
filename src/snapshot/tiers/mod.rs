//! Which endpoints of a service are preferred, and how much of its tunnels each group of them
//! gets: what the service, the configuration and the operator say, seen from this gateway.
//!
//! Of a key of balancing what the configuration says of the service itself counts first, then what
//! the source says of it, then what the configuration says of every service.

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use super::endpoints::{Found, Tier};
use super::mesh::{Assignment, Locality, Scope, Service, Workload};
use super::traffic::{Balancing, Regions, Spill, is_in};
use super::{Endpoint, EndpointSet, Unused};

/// How the endpoints of one service are ranked.
#[derive(Debug)]
pub(super) struct Ranking<'a> {
    network: &'a str,
    balancing: &'a Balancing,
    /// What endpoints are preferred for, the first preference first.
    preferences: &'a [Scope],
    strict: bool,
    /// Where the tiers are those of an Envoy assignment.
    assignment: Option<&'a Assignment>,
    places: Places<'a>,
    spill: Spill,
    by_latency: bool,
}

/// What the places within a tier have weights by.
#[derive(Debug)]
enum Places<'a> {
    None,
    Regions(&'a Regions),
    Localities(&'a [(u32, Locality, u32)]),
}

/// Where an endpoint stands.
#[derive(Clone, Copy, Debug)]
struct Spot {
    /// Tiers are used in this order,
    order: u32,
    tier: Tier,
    /// and of a tier the places that have weights, by their place in the list of these.
    place: Option<usize>,
    /// The weight of the place. With 0 it counts in its tier, and gets nothing.
    weight: u32,
}

/// The endpoints of one spot.
#[derive(Debug)]
struct Group {
    spot: Spot,
    count: Count,
    ready: Vec<Arc<Endpoint>>,
}

/// How many endpoints are ready, and how many there are that are not drained.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) ready: u32,
    pub(super) all: u32,
}

impl Count {
    fn add(&mut self, is_ready: bool) {
        self.ready += u32::from(is_ready);
        self.all += 1;
    }
}

/// Where the tiers of degraded endpoints begin. Envoy's priorities end at 128.
const DEGRADED_FROM: u32 = 1 << 16;

/// All of a tier: shares are whole percents, as Envoy's are.
const WHOLE: u64 = 100;

/// How finely the share of a tier is divided among its places. With 100 of them at the most, all
/// parts together fit 32 bits.
const FINE: u64 = 1 << 24;

impl<'a> Ranking<'a> {
    /// How a port of a service is ranked by a gateway in `network`; `host` is what the
    /// configuration calls the service.
    pub(super) fn new(
        (service, port): (&'a Service, u16),
        host: &str,
        network: &'a str,
        balancing: &'a Balancing,
    ) -> Self {
        let every = balancing.traffic.of_every();
        let own = balancing.traffic.of(host);
        let own_regions = own.map(|own| &own.regions).filter(|own| !own.is_empty());
        // Who writes weights for regions wants these and not the nearest one.
        let shares = |regions: &Regions| regions.shares().then_some(&[][..]);
        let said = own.and_then(|own| own.preferences.or_else(|| shares(&own.regions)));
        let assignment = service.assignments.get(&port).map(|one| &**one);
        let by_priority = assignment.filter(|_| said.is_none());
        let of_source = (!service.preferences.is_empty()).then_some(&*service.preferences);
        let of_every = || every.preferences.or_else(|| shares(&every.regions));
        let preferences = match by_priority {
            Some(_) => None,
            None => said.or(of_source).or_else(of_every),
        };
        let regions = own_regions.unwrap_or(&every.regions);
        let places = match by_priority {
            _ if !regions.is_empty() => Places::Regions(regions),
            Some(assignment) if assignment.by_locality => {
                Places::Localities(&assignment.localities)
            }
            _ => Places::None,
        };
        let factor = by_priority.map(|said| Spill::by_factor(said.overprovisioning));
        let spill = own.and_then(|own| own.spill).or(factor).or(every.spill);
        Self {
            network,
            balancing,
            preferences: preferences.unwrap_or_default(),
            strict: service.strict && said.is_none(),
            assignment: by_priority,
            places,
            spill: spill.unwrap_or_default(),
            by_latency: own.and_then(|own| own.latency).or(every.latency) == Some(true),
        }
    }

    /// Whether all endpoints are one group of which nothing is to be said.
    fn is_plain(&self) -> bool {
        self.preferences.is_empty()
            && self.assignment.is_none()
            && matches!(self.places, Places::None)
            && self.balancing.evacuated.is_empty()
            && !self.by_latency
    }

    /// Why a workload is no endpoint because of where it runs, if it is not.
    pub(super) fn excludes(&self, workload: &Workload) -> Option<Unused> {
        match self.spot(workload) {
            Ok(spot) => (spot.weight == 0).then_some(Unused::NoLocality),
            Err(why) => Some(why),
        }
    }

    /// The set of these endpoints, each with whether it is ready.
    pub(super) fn set<'e>(
        &self,
        endpoints: impl Iterator<Item = (&'e Arc<Endpoint>, bool)>,
    ) -> EndpointSet {
        if self.is_plain() {
            let ready = endpoints.filter(|(_, is_ready)| *is_ready);
            return EndpointSet::new(ready.map(|(endpoint, _)| Arc::clone(endpoint)));
        }
        let mut tiers: BTreeMap<u32, Count> = BTreeMap::new();
        let mut groups: BTreeMap<(u32, Option<usize>), Group> = BTreeMap::new();
        let mut left_out = BTreeSet::new();
        for (endpoint, is_ready) in endpoints {
            let spot = match self.spot(&endpoint.definition) {
                Ok(spot) => spot,
                Err(why) => {
                    left_out.extend(is_ready.then_some(why));
                    continue;
                }
            };
            tiers.entry(spot.order).or_default().add(is_ready);
            if spot.weight == 0 {
                left_out.extend(is_ready.then_some(Unused::NoLocality));
                continue;
            }
            let group = groups.entry((spot.order, spot.place));
            let group = group.or_insert_with(|| Group {
                spot,
                count: Count::default(),
                ready: Vec::new(),
            });
            group.count.add(is_ready);
            group.ready.extend(is_ready.then(|| Arc::clone(endpoint)));
        }
        if self.assignment.is_some() {
            join(&mut tiers, |order| twin(*order), |count| count);
            join(
                &mut groups,
                |(order, place)| (twin(*order), *place),
                |group| &mut group.count,
            );
        }
        let found = self.shared(&tiers, groups.into_values());
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

    /// The groups with what they get: of the load of their tier by weight, as far as they are
    /// ready themselves.
    fn shared(
        &self,
        tiers: &BTreeMap<u32, Count>,
        groups: impl Iterator<Item = Group>,
    ) -> Vec<Found> {
        let loads = loads(self.spill, tiers.values().copied());
        let loads: BTreeMap<_, _> = tiers.keys().copied().zip(loads).collect();
        let able = |group: &Group| {
            let part = self.spill.part(FINE, group.count);
            u128::from(part) * u128::from(group.spot.weight)
        };
        let groups: Vec<_> = groups.map(|group| (able(&group), group)).collect();
        let mut sums: BTreeMap<u32, u128> = BTreeMap::new();
        for (able, group) in &groups {
            *sums.entry(group.spot.order).or_default() += able;
        }
        let found = groups.into_iter().map(|(able, group)| {
            let order = group.spot.order;
            let load = loads.get(&order).map_or(0, |load| u128::from(load * FINE));
            let sum = sums.get(&order).copied().unwrap_or(0);
            let parts = (load * able).checked_div(sum).unwrap_or(0);
            let parts = u32::try_from(parts).unwrap_or(u32::MAX);
            (order, Reverse(parts), self.found(group, parts))
        });
        let mut found: Vec<_> = found.collect();
        found.sort_by_key(|(order, parts, _)| (*order, *parts));
        let mut found: Vec<_> = found.into_iter().map(|(.., group)| group).collect();
        if found.iter().all(|group| group.parts == 0) {
            // So few are ready that no tier can take anything. They serve before nobody does.
            let first = found.iter_mut().find(|group| !group.endpoints.is_empty());
            first.into_iter().for_each(|group| group.parts = 1);
        }
        found
    }

    fn found(&self, group: Group, parts: u32) -> Found {
        let place = group.spot.place.and_then(|place| self.name(place));
        Found {
            tier: group.spot.tier,
            place: place.map(|name| (name, group.spot.weight)),
            endpoints: group.ready,
            all: group.count.all,
            parts,
        }
    }

    /// Where a workload stands.
    ///
    /// # Errors
    /// Why it is not used at all, nor counted.
    fn spot(&self, workload: &Workload) -> Result<Spot, Unused> {
        let locality = &workload.locality;
        let mut evacuated = self.balancing.evacuated.iter();
        if let Some(region) = evacuated.find(|region| is_in(region, locality)) {
            return Err(Unused::Evacuated(region.to_string().into()));
        }
        let (order, tier) = self.tier(workload)?;
        let (place, weight) = match self.places {
            Places::None => (None, 1),
            Places::Regions(regions) => match regions.find(locality) {
                None if regions.shares() => {
                    return Err(Unused::NoRegion(Arc::clone(&locality.region)));
                }
                None => (None, 1),
                Some((_, region)) if region.weight == 0 => {
                    return Err(Unused::NoWeight(Arc::clone(&region.name)));
                }
                Some((place, region)) => (Some(place), region.weight),
            },
            Places::Localities(list) => {
                let priority = workload.priority;
                let of_tier = || list.iter().enumerate().filter(|(_, one)| one.0 == priority);
                match of_tier().find(|(_, (_, of, _))| *of == **locality) {
                    _ if of_tier().all(|(_, (.., weight))| *weight == 0) => (None, 1),
                    Some((place, (.., weight))) => (Some(place), *weight),
                    None => (None, 0),
                }
            }
        };
        Ok(Spot {
            order,
            tier,
            place,
            weight,
        })
    }

    /// The tier of a workload: by its priority, or by how many of the preferences it matches, up to
    /// the first that it misses, as ztunnel ranks (contract 7). There is no rank for NODE: a
    /// gateway is on a node by chance. All that is dialled is in our network, so what ztunnel makes
    /// of others changes nothing here.
    fn tier(&self, workload: &Workload) -> Result<(u32, Tier), Unused> {
        if self.assignment.is_some() {
            let priority = workload.priority;
            return Ok(match workload.degraded {
                false => (priority, Tier::Priority(priority)),
                true => (twin(priority), Tier::Degraded(priority)),
            });
        }
        let preferences = self.preferences.iter().filter(|of| **of != Scope::Node);
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
        match missed {
            Some(scope) if self.strict => Err(Unused::NotSame(scope)),
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

    /// The name of a place that has a weight.
    fn name(&self, place: usize) -> Option<Arc<str>> {
        match self.places {
            Places::None => None,
            Places::Regions(regions) => Some(Arc::clone(&regions.list().get(place)?.name)),
            Places::Localities(list) => {
                let (_, of, _) = list.get(place)?;
                let parts = [&*of.region, &of.zone, &of.subzone];
                Some(parts.join("/").trim_end_matches('/').into())
            }
        }
    }
}

/// The place in the order of the degraded endpoints of a priority: after all that are not.
fn twin(priority: u32) -> u32 {
    priority.saturating_add(DEGRADED_FROM)
}

/// Counts the endpoints of a priority together, as Envoy does: those that are degraded are none
/// of its ready ones, and the other way round.
fn join<K: Ord + Clone, V>(
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
            let both = count.all + its;
            mem::replace(&mut count.all, both)
        });
        if let Some(of) = all.get_mut(&other) {
            count(of).all += own;
        }
    }
}

impl Found {
    /// Whether nothing is to be said of it if it is the only one.
    fn is_plain(&self) -> bool {
        matches!(self.tier, Tier::Any | Tier::Priority(0)) && self.place.is_none()
    }
}

/// How much each tier gets, in percent, as Envoy does it: what it can take by its ready part, of
/// what those before it have left. Where all together cannot take all, in proportion to what they
/// can; what rounding leaves is the first one's that can take anything.
fn loads(spill: Spill, tiers: impl Iterator<Item = Count>) -> Vec<u64> {
    let able: Vec<_> = tiers.map(|count| spill.part(WHOLE, count)).collect();
    let total = able.iter().sum::<u64>().clamp(1, WHOLE);
    let mut left = WHOLE;
    let take = |able: &u64| {
        let load = (able * WHOLE / total).min(left);
        left -= load;
        load
    };
    let mut loads: Vec<_> = able.iter().map(take).collect();
    let first = able.iter().position(|able| *able > 0);
    if let Some(first) = first.and_then(|first| loads.get_mut(first)) {
        *first += left;
    }
    loads
}
