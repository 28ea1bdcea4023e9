//! Shares of the groups of a service's endpoints.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::super::endpoints::{Found, PartKey};
use super::super::traffic::{Count, Spill};
use super::{Group, Ranking, TierKey};

/// Load of a tier that takes everything: shares are whole percents, as Envoy's are.
const FULL_LOAD_PERCENT: u64 = 100;

/// Resolution at which the share of a tier is divided among its places. All parts together are at
/// most 100 × 2²⁴, which fits 32 bits.
const SHARE_RESOLUTION: u64 = 1 << 24;

impl Ranking<'_> {
    /// Returns the groups with their shares. The load is divided by the weights of the parts, that
    /// of a part among its tiers, and that of a tier by the weights of its groups. Each weight is
    /// reduced by the ratio of ready endpoints.
    pub(super) fn distribute(
        &self,
        tiers: &BTreeMap<TierKey, Count>,
        groups: impl Iterator<Item = Group>,
        scale: u32,
    ) -> Vec<Found> {
        let capacity = |count: Count, weight: u32| {
            let able = self.spill.capacity(SHARE_RESOLUTION, count);
            u128::from(able) * u128::from(weight)
        };
        let able = |group: &Group| capacity(group.count, group.placement.weight);
        let groups: Vec<_> = groups.map(|group| (able(&group), group)).collect();
        let mut parts: BTreeMap<PartKey, (Count, u32)> = BTreeMap::new();
        let mut sides: BTreeMap<bool, Count> = BTreeMap::new();
        let mut tier_sums: BTreeMap<TierKey, u128> = BTreeMap::new();
        for (able, group) in &groups {
            let (tier, weight) = (group.tier, group.placement.part_weight);
            let part = parts.entry(tier.part).or_default();
            part.0.add(group.count);
            part.1 = weight;
            let side = sides.entry(tier.part.is_failover).or_default();
            side.add(group.count);
            *tier_sums.entry(tier).or_default() += able;
        }
        let mut side_sums: BTreeMap<bool, u128> = BTreeMap::new();
        for (part, (count, weight)) in &parts {
            *side_sums.entry(part.is_failover).or_default() += capacity(*count, *weight);
        }
        let side_loads = tier_loads(self.spill, sides.values().copied());
        let side_loads: BTreeMap<_, _> = sides.keys().copied().zip(side_loads).collect();
        let mut loads = BTreeMap::new();
        for part in parts.keys() {
            // A tier of a split subset without weighted endpoints would lose the share it takes.
            let has_weight = |tier| tier_sums.get(tier).is_some_and(|sum| *sum > 0);
            let tiers = tiers.iter().filter(|(tier, _)| tier.part == *part);
            let tiers = tiers.filter(|(tier, _)| self.split.is_none() || has_weight(tier));
            let of_part = tier_loads(self.spill, tiers.clone().map(|(_, count)| *count));
            loads.extend(tiers.map(|(tier, _)| *tier).zip(of_part));
        }
        let divide = |load: u128, part: u128, sum: u128| (load * part).checked_div(sum);
        let load = |able: u128, tier: TierKey| {
            let part = tier.part;
            let load = u128::from(*loads.get(&tier)? * SHARE_RESOLUTION);
            let of_side = u128::from(*side_loads.get(&part.is_failover)?);
            let load = divide(load, of_side, FULL_LOAD_PERCENT.into())?;
            let (count, weight) = *parts.get(&part)?;
            let of_part = capacity(count, weight);
            let load = divide(load, of_part, *side_sums.get(&part.is_failover)?)?;
            divide(load, able, *tier_sums.get(&tier)?)
        };
        let found = groups.into_iter().map(|(able, group)| {
            let parts = load(able, group.tier).unwrap_or(0);
            let parts = u32::try_from(parts).unwrap_or(u32::MAX);
            let order = group.placement.order;
            (order, Reverse(parts), self.build_group(group, parts, scale))
        });
        let mut found: Vec<_> = found.collect();
        found.sort_by_key(|(order, parts, _)| (*order, *parts));
        let mut found: Vec<_> = found.into_iter().map(|(.., group)| group).collect();
        if found.iter().all(|group| group.parts == 0) {
            // So few are ready that no share is above 0. The first group with a ready endpoint
            // takes all.
            let first = found.iter_mut().find(|group| !group.endpoints.is_empty());
            first.into_iter().for_each(|group| group.parts = 1);
        }
        found
    }
}

/// Returns the load of each tier in percent, by Envoy's algorithm. A tier takes what its ratio of
/// ready endpoints allows, or what the tiers before it have left if this is less. If all together
/// cannot take 100 %, the loads are scaled up in proportion. The rounding remainder goes to the
/// first tier that can take anything.
fn tier_loads(spill: Spill, tiers: impl Iterator<Item = Count>) -> Vec<u64> {
    let able: Vec<_> = tiers.map(|count| spill.capacity(FULL_LOAD_PERCENT, count)).collect();
    let total = able.iter().sum::<u64>().clamp(1, FULL_LOAD_PERCENT);
    let mut left = FULL_LOAD_PERCENT;
    let take = |able: &u64| {
        let load = (able * FULL_LOAD_PERCENT / total).min(left);
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
