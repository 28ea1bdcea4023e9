//! Endpoint set of one service port, with its groups and their shares of tunnels.

use std::ops::Range;
use std::sync::Arc;

use derive_more::Display;
use tokio::time::Instant;

use super::alias_table::AliasTable;
use super::endpoint::FACTOR_MAX;
use super::link_factors::WHOLE_PERCENT;
use super::mesh::Scope;
use super::remote_instances::NetworkShare;
use super::set_health::{DialAdmission, SetHealth};
use super::traffic::{Count, Spill};
use super::{Endpoint, EndpointState, ExclusionReason, LinkFactors, Subset};

/// Endpoints of one service port, with the tables of a weighted pick.
///
/// A set usually is one group, and a pick compares two weighted draws. Preferences and locality
/// weights make several groups, of which one is drawn by share first.
#[derive(Debug, Default)]
pub struct EndpointSet {
    /// Endpoints that may be dialled, group by group, without drained ones (weight 0).
    pub endpoints: Box<[Arc<Endpoint>]>,
    /// Candidates for the same endpoints, in the same order.
    pub candidates: Box<[Candidate]>,
    table: AliasTable,
    groups: Option<Box<Groups>>,
    /// Indices of the endpoints of other networks, whose weights have factors.
    remote: Box<[usize]>,
    weight: u32,
    /// Results of recent dials in the own network.
    health: Arc<SetHealth>,
}

/// State that a pick reads. Candidates are contiguous because the endpoints of a large set are not
/// in the processor's cache, and a pick reads two.
#[derive(Debug)]
pub struct Candidate {
    pub weight: u32,
    /// Capacity of the ready instances in the network of a gateway, as the control plane counts
    /// them; 0 for an endpoint of the own network.
    pub instances: u32,
    pub state: Arc<EndpointState>,
}

/// Factor of a weight that nothing changes, and unit of the factors.
pub const FACTOR_ONE: u32 = 256;
/// The same for factors with that of the link, whose percentages thus stay exact.
pub const LINK_FACTOR_ONE: u32 = FACTOR_ONE * WHOLE_PERCENT;

/// Distribution of the tunnels of a service port over groups of its endpoints.
#[derive(Debug)]
pub struct Groups {
    /// Groups in fallback order: by tier, then by share.
    list: Box<[Group]>,
    shares: AliasTable,
    /// Condition for a tier to leave a part of its share to the next one.
    pub spill: Spill,
    /// True if dial latency counts as load.
    pub by_latency: bool,
    /// Reasons for which ready endpoints are excluded, without duplicates.
    pub left_out: Box<[ExclusionReason]>,
}

/// Group of endpoints: a tier, or one weighted locality of a tier.
#[derive(Debug)]
pub struct Group {
    pub tier: Tier,
    /// Weighted locality of the group, in display form, with its weight.
    pub place: Option<(Arc<str>, u32)>,
    /// Number of ready endpoints; a gateway counts its part of the instances behind it.
    pub ready: u32,
    /// Number of endpoints that are not drained, counted in the same way.
    pub all: u32,
    /// Fraction of all picks while each group has an endpoint that may be picked. The sum is 1
    /// unless no endpoint is ready.
    pub share: f64,
    part: PartKey,
    range: Range<usize>,
    table: AliasTable,
}

/// Key of a part of a split subset, which has tiers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PartKey {
    /// True for endpoints of other networks that only take what the own network cannot.
    pub(super) is_failover: bool,
    /// Index of the part; `None` if nothing is split.
    pub(super) part: Option<usize>,
}

/// Attribute that the endpoints of a tier have in common.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq)]
pub enum Tier {
    /// No preference applies.
    #[display("all")]
    Any,
    /// Match of all preferences up to this one.
    #[display("same {_0}")]
    Same(Scope),
    /// Another network, with a match of all further preferences up to this one.
    #[display("other network, same {_0}")]
    OtherNetworkSame(Scope),
    #[display("other network")]
    OtherNetwork,
    /// Mismatch of the first preference.
    #[display("elsewhere")]
    Elsewhere,
    /// Priority in an Envoy assignment.
    #[display("priority {_0}")]
    Priority(u32),
    #[display("degraded of priority {_0}")]
    Degraded(u32),
}

/// Input of the builder for one group. Shares are proportional to `parts`.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) part: PartKey,
    pub(super) tier: Tier,
    pub(super) place: Option<(Arc<str>, u32)>,
    pub(super) endpoints: Vec<Arc<Endpoint>>,
    pub(super) count: Count,
    pub(super) parts: u32,
}

/// Endpoint that a set may contain, with the instances that it represents.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) count: Count,
    /// Index of the part of a subset that it belongs to.
    pub(super) part: Option<usize>,
}

/// Entries of a set. Weights and counts are multiplied by `scale`.
#[derive(Clone, Debug)]
pub(super) struct Entries {
    pub(super) list: Vec<Entry>,
    pub(super) scale: u32,
    /// True if endpoints of other networks are among them.
    pub(super) has_remote: bool,
}

impl Entries {
    /// Returns the entries of the own network, each endpoint with whether it is ready.
    pub(super) fn local<'a>(
        endpoints: impl Iterator<Item = (&'a Arc<Endpoint>, bool)>,
        subset: Option<&Subset>,
    ) -> Self {
        let entry = |(endpoint, is_ready): (&Arc<Endpoint>, bool)| Entry {
            endpoint: Arc::clone(endpoint),
            count: Count::one(is_ready),
            part: subset.and_then(|subset| subset.part_of(&endpoint.definition)),
        };
        Self { list: endpoints.map(entry).collect(), scale: 1, has_remote: false }
    }

    /// Adds other networks. The weight of a network is divided evenly among its gateways. All
    /// weights are multiplied by one factor, so that no part is a fraction.
    pub(super) fn with_networks(mut self, shares: Vec<NetworkShare>) -> Self {
        if shares.is_empty() {
            return self;
        }
        let scale = common_scale(&self.list, &shares);
        for Entry { endpoint, count, .. } in self.list.iter_mut().filter(|_| scale > 1) {
            *count = Count { ready: count.ready * scale, all: count.all * scale };
            *endpoint = Arc::new(Endpoint {
                weight: endpoint.weight.saturating_mul(scale),
                definition: Arc::clone(&endpoint.definition),
                remote: endpoint.remote.clone(),
                state: Arc::clone(&endpoint.state),
                ..**endpoint
            });
        }
        for share in shares {
            let parts = share.gateways.len() as u64;
            // A whole number, unless the weights are so large that the factor was limited.
            let part = |of: u32| {
                let part = (u64::from(of) * u64::from(scale) + parts / 2) / parts;
                u32::try_from(part).unwrap_or(u32::MAX)
            };
            let count = Count {
                ready: part(share.ready).max(u32::from(share.ready > 0)),
                all: part(share.all),
            };
            let gateways = share.gateways.into_iter().map(|gateway| Entry {
                endpoint: Arc::new(Endpoint { weight: count.ready, ..gateway }),
                count,
                part: share.part,
            });
            self.list.extend(gateways);
        }
        self.scale = scale;
        self.has_remote = true;
        self
    }
}

/// Returns the least factor by which every share is divisible by its number of gateways, limited
/// so that the sum of all weights fits 32 bits.
fn common_scale(local: &[Entry], shares: &[NetworkShare]) -> u32 {
    let gcd = |mut one: u64, mut other: u64| {
        while other > 0 {
            (one, other) = (other, one % other);
        }
        one
    };
    let factors = shares.iter().map(|share| {
        let parts = share.gateways.len() as u64;
        parts / gcd(parts, gcd(u64::from(share.ready), u64::from(share.all)))
    });
    let factor = factors.fold(1, |all: u64, one| all.saturating_mul(one / gcd(all, one)));
    let local: u64 = local.iter().map(|one| u64::from(one.endpoint.weight.max(1))).sum();
    let remote: u64 = shares.iter().map(|share| u64::from(share.all)).sum();
    let limit = u64::from(u32::MAX) / (local + remote).max(1);
    u32::try_from(factor.min(limit).max(1)).unwrap_or(u32::MAX)
}

/// Group of a set, for draws.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub candidates: &'a [Candidate],
    /// Endpoints of the group, in the same order.
    endpoints: &'a [Arc<Endpoint>],
    /// Index of the first candidate in the set.
    pub start: usize,
    /// True if dial latency counts as load.
    pub by_latency: bool,
    /// Indices in the set of its endpoints of other networks.
    remote: &'a [usize],
    links: &'a LinkFactors,
    table: &'a AliasTable,
}

impl EndpointSet {
    /// Returns a set of one group, without drained endpoints (weight 0).
    pub fn new(endpoints: impl IntoIterator<Item = Arc<Endpoint>>) -> Self {
        let endpoints: Box<[_]> = endpoints.into_iter().filter(|e| e.weight > 0).collect();
        Self {
            candidates: endpoints.iter().map(Candidate::of).collect(),
            remote: indices_of_remote(&endpoints),
            weight: sum_of_weights(&endpoints),
            table: AliasTable::new(endpoints.iter().map(|endpoint| endpoint.weight)),
            endpoints,
            groups: None,
            health: Arc::default(),
        }
    }

    /// Returns a set of these groups, in their order within and among tiers.
    pub(super) fn grouped(
        found: Vec<Found>,
        spill: Spill,
        by_latency: bool,
        left_out: Vec<ExclusionReason>,
    ) -> Self {
        let shares = AliasTable::new(found.iter().map(|group| group.parts));
        let parts: f64 = found.iter().map(|group| f64::from(group.parts)).sum();
        let mut endpoints = Vec::new();
        let mut list = Vec::with_capacity(found.len());
        for group in found {
            let start = endpoints.len();
            list.push(Group {
                tier: group.tier,
                place: group.place,
                ready: group.count.ready,
                all: group.count.all,
                share: f64::from(group.parts) / parts.max(1.0),
                part: group.part,
                range: start..start + group.endpoints.len(),
                table: AliasTable::new(group.endpoints.iter().map(|endpoint| endpoint.weight)),
            });
            endpoints.extend(group.endpoints);
        }
        Self {
            candidates: endpoints.iter().map(Candidate::of).collect(),
            remote: indices_of_remote(&endpoints),
            weight: sum_of_weights(&endpoints),
            endpoints: endpoints.into(),
            table: AliasTable::default(),
            groups: Some(Box::new(Groups {
                list: list.into(),
                shares,
                spill,
                by_latency,
                left_out: left_out.into(),
            })),
            health: Arc::default(),
        }
    }

    /// Returns the set with the results of dials of another set of the same service port.
    pub(super) fn with_health_of(self, other: Option<&Arc<Self>>) -> Self {
        Self { health: other.map_or(self.health, |other| Arc::clone(&other.health)), ..self }
    }

    /// Returns the groups, or `None` for a set of one plain group.
    pub fn groups(&self) -> Option<&Groups> {
        self.groups.as_deref()
    }

    pub fn of(&self, group: &Group) -> &[Arc<Endpoint>] {
        self.endpoints.get(group.range.clone()).unwrap_or_default()
    }

    /// Notes a failed dial of an endpoint of the own network.
    pub fn dial_failed(&self, now: Instant) {
        self.health.note_failure(now);
    }

    /// Notes a dial of an endpoint of the own network that succeeded. If all recent dials failed,
    /// it ends the ejections that they caused, as the whole set may have recovered.
    pub fn dial_succeeded(&self, endpoint: &Arc<Endpoint>, now: Instant) {
        if self.health.note_success(&endpoint.state, now) {
            for candidate in &self.candidates {
                candidate.state.end_ejection(now);
            }
        }
    }

    /// Asks whether a tunnel may dial endpoints of the own network.
    pub fn admit_dial(&self, now: Instant) -> DialAdmission {
        self.health.admit(now, self.has_remote())
    }

    /// Returns the endpoint of the own network whose dial was the last to succeed after a failed
    /// one, unless it has left the set. The cost is that of all endpoints.
    pub fn last_good(&self) -> Option<&Arc<Endpoint>> {
        let state = self.health.last_good()?;
        let place = self.candidates.iter().position(|one| Arc::ptr_eq(&one.state, &state))?;
        self.endpoints.get(place)
    }

    /// Returns the endpoints that are reached through gateways of other networks.
    pub fn remote(&self) -> impl Iterator<Item = &Candidate> {
        self.remote.iter().filter_map(|place| self.candidates.get(*place))
    }

    /// Returns true if an endpoint is reached through a gateway of another network.
    pub fn has_remote(&self) -> bool {
        !self.remote.is_empty()
    }

    /// Returns the reasons for which ready endpoints are excluded, without duplicates.
    pub fn left_out(&self) -> &[ExclusionReason] {
        self.groups().map_or(&[], |groups| &groups.left_out)
    }

    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// Returns all endpoints as one group, for draws.
    pub fn whole<'a>(&'a self, links: &'a LinkFactors) -> Part<'a> {
        Part {
            candidates: &self.candidates,
            endpoints: &self.endpoints,
            start: 0,
            by_latency: false,
            remote: &self.remote,
            links,
            table: &self.table,
        }
    }

    /// Returns the drawn group, then the groups that replace it if none of its endpoints may be
    /// picked: first those of its part of a split subset, then all others, in fallback order.
    pub fn drawn<'a>(
        &'a self,
        groups: &'a Groups,
        first: usize,
        links: &'a LinkFactors,
    ) -> impl Iterator<Item = Part<'a>> + Clone {
        let drawn = groups.list.get(first);
        let others = move |is_in_part: bool| {
            let others = groups.list.iter().enumerate().filter(move |(place, group)| {
                let is_same = drawn.is_some_and(|drawn| drawn.part == group.part);
                *place != first && is_same == is_in_part
            });
            others.map(|(_, group)| group)
        };
        drawn.into_iter().chain(others(true)).chain(others(false)).map(move |group| {
            let range = group.range.clone();
            let [start, end] = [range.start, range.end]
                .map(|bound| self.remote.partition_point(|index| *index < bound));
            Part {
                start: range.start,
                candidates: self.candidates.get(range).unwrap_or_default(),
                endpoints: self.of(group),
                by_latency: groups.by_latency,
                remote: self.remote.get(start..end).unwrap_or_default(),
                links,
                table: &group.table,
            }
        })
    }
}

fn sum_of_weights(endpoints: &[Arc<Endpoint>]) -> u32 {
    endpoints.iter().map(|one| one.weight).fold(0, u32::saturating_add)
}

fn indices_of_remote(endpoints: &[Arc<Endpoint>]) -> Box<[usize]> {
    let indices = endpoints.iter().enumerate().filter(|(_, endpoint)| endpoint.remote.is_some());
    indices.map(|(index, _)| index).collect()
}

impl Groups {
    pub fn list(&self) -> &[Group] {
        &self.list
    }

    /// Draws the index of a group by share. Returns `None` if no group has a share.
    pub fn draw(&self) -> Option<usize> {
        self.shares.draw()
    }
}

impl Part<'_> {
    /// Draws the index of an endpoint in the group by weight.
    pub fn draw(&self) -> Option<usize> {
        self.table.draw()
    }

    /// Returns the largest factor of a weight in the group. The cost is that of its endpoints of
    /// other networks.
    pub fn factor_max(&self, now: impl Fn() -> Instant) -> u32 {
        let has_local = self.remote.len() < self.candidates.len();
        let factors = self.remote.iter().map(|index| self.factor(index - self.start, &now));
        factors.chain(has_local.then_some(LINK_FACTOR_ONE)).max().unwrap_or(LINK_FACTOR_ONE)
    }

    /// Returns the factor of the weight of an endpoint of the group with that of its link, in units
    /// of [`LINK_FACTOR_ONE`].
    pub fn factor(&self, place: usize, now: impl Fn() -> Instant) -> u32 {
        let factor = self.candidates.get(place).map_or(FACTOR_ONE, |one| one.factor(now));
        factor.saturating_mul(self.link_percent(place))
    }

    /// Returns the factor of the link of an endpoint of the group, in percent. Local endpoints are
    /// recognized by their candidates alone, because a draw may ask for all.
    pub(super) fn link_percent(&self, place: usize) -> u32 {
        let is_remote = self.candidates.get(place).is_some_and(Candidate::is_remote);
        if self.links.is_empty() || !is_remote {
            return WHOLE_PERCENT;
        }
        let endpoint = self.endpoints.get(place);
        endpoint.map_or(WHOLE_PERCENT, |endpoint| self.links.percent(endpoint))
    }

    /// Returns the weight of an endpoint of the group times [`LINK_FACTOR_ONE`], with its factor.
    pub fn scaled_weight(&self, place: usize, now: impl Fn() -> Instant) -> u64 {
        let weight = self.candidates.get(place).map_or(0, |one| one.weight);
        u64::from(weight) * u64::from(self.factor(place, now))
    }
}

impl Candidate {
    /// Returns true if the endpoint is reached through a gateway of another network.
    pub fn is_remote(&self) -> bool {
        self.instances > 0
    }

    /// Returns the factor of the weight, in 256ths. The capacity that a gateway advertises replaces
    /// the count of the control plane, between a quarter and four times of it. A slow gateway has a
    /// smaller share of its network.
    pub fn factor(&self, now: impl Fn() -> Instant) -> u32 {
        if self.instances == 0 {
            return FACTOR_ONE;
        }
        let now = now();
        let by_load = self.state.free_capacity(now).map_or(FACTOR_ONE, |hundredths| {
            let factor = u64::from(hundredths) * u64::from(FACTOR_ONE);
            let factor = factor / (100 * u64::from(self.instances));
            let factor = u32::try_from(factor).unwrap_or(u32::MAX);
            factor.clamp(FACTOR_ONE / FACTOR_MAX, FACTOR_ONE * FACTOR_MAX)
        });
        let by_rtt = self.state.share(now).unwrap_or(FACTOR_ONE);
        (by_load * by_rtt / FACTOR_ONE).max(1)
    }

    fn of(endpoint: &Arc<Endpoint>) -> Self {
        let remote = endpoint.remote.as_ref();
        Self {
            weight: endpoint.weight,
            instances: remote.map_or(0, |_| endpoint.definition.capacity),
            state: Arc::clone(&endpoint.state),
        }
    }
}
