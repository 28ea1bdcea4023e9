//! The endpoints of one service port, and how they share its tunnels.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::lots::Lots;
use super::mesh::Scope;
use super::traffic::Spill;
use super::{Endpoint, EndpointState, ExclusionReason};

/// The endpoints of one service port, with what a weighted pick needs.
///
/// As a rule all are one group, of which two draws by weight decide. Where some are preferred, or
/// places have weights, there are several, and a group is drawn by its share first.
#[derive(Debug, Default)]
pub struct EndpointSet {
    /// Every endpoint that may be dialled, group by group, the drained ones (weight 0) left out.
    pub endpoints: Box<[Arc<Endpoint>]>,
    /// The same, as a pick looks at them.
    pub candidates: Box<[Candidate]>,
    /// Of a set that is one group.
    lots: Lots,
    groups: Option<Box<Groups>>,
}

/// What a pick looks at, side by side: of a large set no endpoint itself is in the processor's
/// cache, and a pick looks at two.
#[derive(Debug)]
pub struct Candidate {
    /// The endpoint's weight.
    pub weight: u32,
    /// The endpoint's live state.
    pub state: Arc<EndpointState>,
}

/// How the tunnels of a service port are shared among groups of its endpoints.
#[derive(Debug)]
pub struct Groups {
    /// In the order in which they stand in for each other: by tier, then by share.
    list: Box<[Group]>,
    shares: Lots,
    /// When a tier leaves a part of its share to the next one.
    pub spill: Spill,
    /// Whether the time that dials take counts as load.
    pub by_latency: bool,
    /// Why ready endpoints are left out, each reason once.
    pub left_out: Box<[ExclusionReason]>,
}

/// A group: a tier, or one place of a tier where places have weights.
#[derive(Debug)]
pub struct Group {
    /// What its endpoints have in common.
    pub tier: Tier,
    /// The place that has a weight of its own in the tier, as people write it, with that weight.
    pub place: Option<(Arc<str>, u32)>,
    /// How many of its endpoints are ready,
    pub ready: u32,
    /// of how many that are not drained.
    pub all: u32,
    /// Its part of all picks while each group has an endpoint that may be picked; all together are
    /// 1 unless no endpoint is ready.
    pub share: f64,
    range: Range<usize>,
    lots: Lots,
}

/// What the endpoints of a tier have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Nothing is preferred.
    Any,
    /// They match the preferences up to this one.
    Same(Scope),
    /// They miss the first preference.
    Elsewhere,
    /// Their priority in an Envoy assignment.
    Priority(u32),
    /// They are degraded, and of this priority.
    Degraded(u32),
}

/// A group as the builder finds it. The shares of a set are in proportion to `parts`.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) tier: Tier,
    pub(super) place: Option<(Arc<str>, u32)>,
    pub(super) endpoints: Vec<Arc<Endpoint>>,
    pub(super) all: u32,
    pub(super) parts: u32,
}

/// One group of a set, to draw from.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The candidates of the group.
    pub candidates: &'a [Candidate],
    /// The place of the first one in the set.
    pub start: usize,
    /// Whether the time that dials take counts as load.
    pub by_latency: bool,
    lots: &'a Lots,
}

impl EndpointSet {
    /// A set of one group; endpoints of weight 0 are drained and left out.
    pub fn new(endpoints: impl IntoIterator<Item = Arc<Endpoint>>) -> Self {
        let endpoints = endpoints.into_iter().filter(|e| e.weight > 0);
        let endpoints: Box<[_]> = endpoints.collect();
        Self {
            candidates: endpoints.iter().map(Candidate::of).collect(),
            lots: Lots::new(endpoints.iter().map(|endpoint| endpoint.weight)),
            endpoints,
            groups: None,
        }
    }

    /// A set of these groups, in their order within and among tiers.
    pub(super) fn grouped(
        found: Vec<Found>,
        spill: Spill,
        by_latency: bool,
        left_out: Vec<ExclusionReason>,
    ) -> Self {
        let shares = Lots::new(found.iter().map(|group| group.parts));
        let parts: f64 = found.iter().map(|group| f64::from(group.parts)).sum();
        let mut endpoints = Vec::new();
        let mut list = Vec::with_capacity(found.len());
        for group in found {
            let start = endpoints.len();
            list.push(Group {
                tier: group.tier,
                place: group.place,
                ready: u32::try_from(group.endpoints.len()).unwrap_or(u32::MAX),
                all: group.all,
                share: f64::from(group.parts) / parts.max(1.0),
                range: start..start + group.endpoints.len(),
                lots: Lots::new(group.endpoints.iter().map(|endpoint| endpoint.weight)),
            });
            endpoints.extend(group.endpoints);
        }
        Self {
            candidates: endpoints.iter().map(Candidate::of).collect(),
            endpoints: endpoints.into(),
            lots: Lots::default(),
            groups: Some(Box::new(Groups {
                list: list.into(),
                shares,
                spill,
                by_latency,
                left_out: left_out.into(),
            })),
        }
    }

    /// The groups, unless all endpoints are one of which nothing is to be said.
    pub fn groups(&self) -> Option<&Groups> {
        self.groups.as_deref()
    }

    /// The endpoints of one of its groups.
    pub fn of(&self, group: &Group) -> &[Arc<Endpoint>] {
        self.endpoints.get(group.range.clone()).unwrap_or_default()
    }

    /// Why ready endpoints are left out, each reason once.
    pub fn left_out(&self) -> &[ExclusionReason] {
        self.groups().map_or(&[], |groups| &groups.left_out)
    }

    /// All endpoints, to draw from where they are one group.
    pub fn whole(&self) -> Part<'_> {
        Part {
            candidates: &self.candidates,
            start: 0,
            by_latency: false,
            lots: &self.lots,
        }
    }

    /// The group that was drawn, and those that stand in for it where none of its endpoints may
    /// be picked, in their order.
    pub fn drawn<'a>(
        &'a self,
        groups: &'a Groups,
        first: usize,
    ) -> impl Iterator<Item = Part<'a>> + Clone {
        let others = (0..groups.list.len()).filter(move |other| *other != first);
        let order = std::iter::once(first).chain(others);
        let parts = order.filter_map(move |place| groups.list.get(place));
        parts.map(move |group| Part {
            candidates: self.candidates.get(group.range.clone()).unwrap_or_default(),
            start: group.range.start,
            by_latency: groups.by_latency,
            lots: &group.lots,
        })
    }
}

impl Groups {
    /// All groups, in the order in which they stand in for each other.
    pub fn list(&self) -> &[Group] {
        &self.list
    }

    /// The place of a group, drawn by share, if any has one.
    pub fn draw(&self) -> Option<usize> {
        self.shares.draw()
    }
}

impl Part<'_> {
    /// The place in the group of one of its endpoints, drawn by weight, if there is any.
    pub fn draw(&self) -> Option<usize> {
        self.lots.draw()
    }
}

impl Candidate {
    fn of(endpoint: &Arc<Endpoint>) -> Self {
        Self {
            weight: endpoint.weight,
            state: Arc::clone(&endpoint.state),
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("all"),
            Self::Same(scope) => write!(f, "same {scope}"),
            Self::Elsewhere => f.write_str("elsewhere"),
            Self::Priority(priority) => write!(f, "priority {priority}"),
            Self::Degraded(priority) => write!(f, "degraded of priority {priority}"),
        }
    }
}
