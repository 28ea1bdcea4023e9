//! Inputs of load balancing other than the mesh: the position of this gateway, the `traffic`
//! configuration, and the overrides of an operator since the start.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use super::mesh::{Locality, Mesh, Scope};
use super::tiers::Count;
use crate::wire::RegionPattern;

/// Position of this gateway; its network comes with the mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    /// Cluster of the gateway.
    pub cluster: Arc<str>,
    /// Locality of the gateway. An unknown part is empty and matches only workloads that lack it
    /// too.
    pub locality: Locality,
    /// Source of the locality, for display; empty while it is unknown.
    pub origin: Arc<str>,
    /// Uid of the gateway's own workload. Once the mesh has it, its locality is used.
    pub record: Option<Arc<str>>,
}

/// Origin of a locality received from the mesh.
const RECORD: &str = "istiod's record of this pod";

/// All inputs of load balancing other than the mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Balancing {
    /// Position of this gateway.
    pub position: Position,
    /// Traffic configuration.
    pub traffic: Traffic,
    /// Regions that an operator has evacuated.
    pub evacuated: BTreeSet<RegionPattern>,
}

/// Command of an operator to the running gateway; a restart discards it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Override {
    /// Makes new tunnels avoid a region.
    Evacuate(RegionPattern),
    /// Ends the evacuation of a region.
    Return(RegionPattern),
}

/// Traffic configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    services: HashMap<Arc<str>, Rule>,
    every: Rule,
}

/// Rule for one service, or for every service. A key that is `None` is unset.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rule {
    /// Scopes in which endpoints are preferred.
    pub preferences: Option<&'static [Scope]>,
    /// Ratio of ready endpoints below which a tier leaves some of its share to the next one.
    pub spill: Option<Spill>,
    /// Weights of regions; empty if unset.
    pub regions: Regions,
    /// True if the time of dials counts as load.
    pub latency: Option<bool>,
}

/// Weights of regions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Regions {
    /// Regions, most specific pattern first.
    list: Box<[Region]>,
    /// True if any weight is above 0. Localities that no pattern matches are then excluded.
    shares: bool,
}

/// Weight of a region.
#[derive(Clone, Debug, PartialEq)]
pub struct Region {
    /// Pattern that matches the localities of the region.
    pub pattern: RegionPattern,
    /// Text of the pattern, for display.
    pub name: Arc<str>,
    /// Weight; 0 evacuates the region.
    pub weight: u32,
}

/// Threshold below which a tier leaves a part of its share to the next one. With a ratio r of its
/// endpoints ready, a tier can take r × `factor` / `of` of all tunnels, at most all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spill {
    factor: u32,
    of: u32,
}

impl Spill {
    /// Returns the threshold at this percentage of ready endpoints.
    pub const fn below(percent: u8) -> Self {
        Self {
            factor: 100,
            of: percent as u32,
        }
    }

    /// Returns the threshold of Envoy's overprovisioning factor in percent.
    pub const fn by_factor(percent: u32) -> Self {
        Self {
            factor: percent,
            of: 100,
        }
    }

    /// Returns the part of `whole` that these endpoints can take, rounded down.
    pub(super) fn part(self, whole: u64, count: Count) -> u64 {
        let wanted = u128::from(count.all) * u128::from(self.of);
        let have = u128::from(count.ready) * u128::from(self.factor);
        match wanted {
            0 if count.ready > 0 => whole,
            0 => 0,
            _ => u64::try_from(u128::from(whole) * have / wanted).map_or(whole, |of| of.min(whole)),
        }
    }
}

impl Default for Spill {
    /// Returns 70 %, which is close to Envoy's factor of 140.
    fn default() -> Self {
        Self::below(70)
    }
}

impl fmt::Display for Spill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = u64::from(self.of) * 100 / u64::from(self.factor).max(1);
        write!(f, "{percent}%")
    }
}

impl Regions {
    /// Returns the weights of these regions.
    pub fn new(weights: impl IntoIterator<Item = (RegionPattern, u32)>) -> Self {
        let mut list: Vec<_> = weights
            .into_iter()
            .map(|(pattern, weight)| Region {
                name: pattern.to_string().into(),
                pattern,
                weight,
            })
            .collect();
        list.sort_by_key(|region| std::cmp::Reverse(region.pattern.depth()));
        Self {
            shares: list.iter().any(|region| region.weight > 0),
            list: list.into(),
        }
    }

    /// Returns whether there are no weights.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns whether the weights distribute tunnels, rather than only evacuate regions.
    pub fn shares(&self) -> bool {
        self.shares
    }

    /// Returns the regions, most specific first.
    pub fn list(&self) -> &[Region] {
        &self.list
    }

    /// Returns the most specific region of a locality, with its index in the list.
    pub(super) fn find(&self, locality: &Locality) -> Option<(usize, &Region)> {
        let mut list = self.list.iter().enumerate();
        list.find(|(_, region)| is_in(&region.pattern, locality))
    }
}

/// Returns whether a pattern matches a locality.
pub(super) fn is_in(pattern: &RegionPattern, locality: &Locality) -> bool {
    pattern.matches(&locality.region, &locality.zone, &locality.subzone)
}

impl Traffic {
    /// Returns the rules of services by hostname, with the rule for every service.
    pub fn new(services: impl IntoIterator<Item = (Arc<str>, Rule)>, every: Rule) -> Self {
        Self {
            services: services.into_iter().collect(),
            every,
        }
    }

    /// Returns the rule of a service, if it has its own.
    pub fn of(&self, host: &str) -> Option<&Rule> {
        self.services.get(host)
    }

    /// Returns the rule for every service.
    pub fn of_every(&self) -> &Rule {
        &self.every
    }
}

impl Balancing {
    /// Returns a copy with these changes applied.
    pub(super) fn changed(
        &self,
        (position, traffic, order): (Option<Position>, Option<Traffic>, Option<Override>),
    ) -> Self {
        let mut next = self.clone();
        next.position = position.unwrap_or(next.position);
        next.traffic = traffic.unwrap_or(next.traffic);
        match order {
            Some(Override::Evacuate(region)) => drop(next.evacuated.insert(region)),
            Some(Override::Return(region)) => drop(next.evacuated.remove(&region)),
            None => {}
        }
        next
    }

    /// Returns a copy with the locality of the gateway's own workload, or `None` if nothing
    /// changes. `told` is the mesh as received, in which workloads keep their uids. If the workload
    /// is removed, its last locality stays.
    pub(super) fn located(&self, told: &Mesh) -> Option<Self> {
        let own = told.workloads.get(&**self.position.record.as_ref()?)?;
        let is_new = *own.locality != self.position.locality || *self.position.origin != *RECORD;
        if !is_new || *own.locality == Locality::default() {
            return None;
        }
        let mut next = self.clone();
        next.position.locality = Locality::clone(&own.locality);
        next.position.origin = RECORD.into();
        Some(next)
    }

    /// Returns whether the endpoints of a service must be rebuilt because the inputs differ from
    /// `before`.
    pub(super) fn differs(&self, before: &Self, host: &str) -> bool {
        (
            &self.position.cluster,
            &self.position.locality,
            &self.evacuated,
            self.traffic.of(host),
            self.traffic.of_every(),
        ) != (
            &before.position.cluster,
            &before.position.locality,
            &before.evacuated,
            before.traffic.of(host),
            before.traffic.of_every(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::mesh::{Template, Workload};

    #[test]
    fn a_tier_can_take_what_is_ready_by_the_threshold() {
        for (spill, ready, all, part) in [
            (Spill::default(), 10, 10, 100),
            (Spill::default(), 7, 10, 100),
            (Spill::default(), 6, 10, 85),
            (Spill::default(), 0, 10, 0),
            (Spill::default(), 0, 0, 0),
            (Spill::by_factor(140), 1, 2, 70),
            (Spill::by_factor(140), 5, 7, 100),
            (Spill::by_factor(100), 1, 3, 33),
            (Spill::by_factor(0), 3, 3, 0),
            (Spill::below(100), 99, 100, 99),
            (Spill::below(0), 1, 100, 100),
            (Spill::below(0), 0, 100, 0),
            (Spill::by_factor(u32::MAX), u32::MAX, u32::MAX, 100),
        ] {
            let count = Count { ready, all };
            assert_eq!(spill.part(100, count), part, "{spill} {count:?}");
        }
        assert_eq!(Spill::by_factor(140).to_string(), "71%");
        assert_eq!(Spill::default().to_string(), "70%");
    }

    #[test]
    fn of_two_patterns_the_more_special_one_says_the_weight() {
        let weights = [("*", 1), ("us-west-2", 2), ("us-west-2/us-west-2a", 3)];
        let pattern = |text| RegionPattern::parse(text).expect("a pattern");
        let regions = Regions::new(weights.map(|(text, weight)| (pattern(text), weight)));
        let weight = |region: &str, zone: &str| {
            let locality = Locality {
                region: region.into(),
                zone: zone.into(),
                ..Locality::default()
            };
            regions.find(&locality).expect("a region").1.weight
        };
        assert_eq!(weight("us-west-2", "us-west-2a"), 3);
        assert_eq!(weight("us-west-2", "us-west-2b"), 2);
        assert_eq!(weight("us-east-2", "us-west-2a"), 1);
        assert_eq!(weight("", ""), 1);
    }

    #[test]
    fn istiod_6_the_locality_of_the_own_workload_replaces_that_of_the_pod_and_outlives_it() {
        let at = |zone: &str| Locality {
            region: "us".into(),
            zone: zone.into(),
            ..Locality::default()
        };
        let mesh = |locality: Locality| {
            let own = Workload {
                uid: "own".into(),
                template: Template {
                    locality: Arc::new(locality),
                    ..Template::default()
                }
                .into(),
                ..Workload::default()
            };
            Mesh::new([], [own])
        };
        let mut balancing = Balancing::default();
        balancing.position.locality = at("a");
        assert_eq!(balancing.located(&mesh(at("b"))), None, "nobody asks");
        balancing.position.record = Some("own".into());
        assert_eq!(balancing.located(&mesh(Locality::default())), None);
        assert_eq!(balancing.located(&Mesh::default()), None);
        let located = balancing.located(&mesh(at("b"))).expect("a locality");
        assert_eq!(located.position.locality, at("b"));
        assert_eq!(*located.position.origin, *RECORD);
        assert_eq!(located.located(&mesh(at("b"))), None, "nothing changes");
        assert_eq!(located.located(&Mesh::default()), None);
        // The same place, but from a better source.
        assert!(balancing.located(&mesh(at("a"))).is_some());
    }
}
