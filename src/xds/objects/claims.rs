//! Claims to addresses, and the rule that decides them (docs/decisions/0014).
//!
//! An author of EndpointSlices in one namespace can write any address into them (CVE-2021-25740),
//! and that of a ServiceImport any VIP. So each claim has evidence, and the best one has the
//! address. Of equal claims that which had it before has it, and without one none. Clusters are not
//! distinguished, because a slice names its cluster itself and the address is dialled either way.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::names::{Key, OwnedKey};
use crate::snapshot::lowest_rank;
use crate::yaml::Place;

/// Evidence for a claim, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Evidence {
    /// A ServiceImport, whose author can write any address.
    Import,
    /// A slice lists the address, with or without a pod. Its author may have invented the pod.
    Slice,
    /// Proof of another port of the same node.
    OtherPort,
    /// Kubernetes put the pod into the slice of a Service with a selector. A tenant can write the
    /// labels of such a slice too, until Kubernetes removes it.
    Managed,
    /// Kubernetes allocated the clusterIP of a Service, or a kubelet states the address of a Pod.
    Assigned,
    /// The mesh file, which an operator writes.
    File,
}

/// Claimed address: a port of a node's address, or any other address as a whole, with port 0.
pub(super) type At = (IpAddr, u16);

/// Claim of a service to a VIP, or of a namespace to the address of an endpoint. The latter has no
/// name of a service.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim<'a> {
    pub(super) at: At,
    pub(super) by: Key<'a>,
    pub(super) evidence: Evidence,
    /// Object with the evidence; none for the mesh file.
    pub(super) place: Option<&'a Place>,
}

/// Claimants that had each address by the last decision.
pub(super) type Holders = HashMap<At, OwnedKey>;

/// Decided claims.
#[derive(Default)]
pub(super) struct Claims<'a> {
    /// The best claim of each claimant to each address, in order.
    list: Vec<Claim<'a>>,
    contests: HashMap<At, Contest<'a>>,
}

/// Decision about an address.
struct Contest<'a> {
    /// Claim that has the address.
    winner: Option<Claim<'a>>,
    /// The best claims of two claimants.
    best: [Option<Claim<'a>>; 2],
}

/// Reason for which a claimant does not have an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal<'a> {
    /// Another claim has better evidence.
    Owned(Claim<'a>),
    /// Another claimant had the address before, and the evidence is equal.
    Held(Claim<'a>),
    /// Another claim has equal evidence, and neither claimant had the address before.
    Equal(Claim<'a>),
}

impl<'a> Claims<'a> {
    /// Decides claims. `held` are the holders by the last decision.
    pub(super) fn decide(mut list: Vec<Claim<'a>>, held: &Holders) -> Self {
        list.sort_by_key(|one| (one.at, one.by, Reverse(one.evidence)));
        list.dedup_by_key(|one| (one.at, one.by));
        let mut claims = Self { list, contests: HashMap::new() };
        let contests = claims.list.chunk_by(|one, next| one.at == next.at);
        let contests = contests.filter_map(|same| {
            let at = same.first()?.at;
            // An address that was not known to be that of a node had a holder as a whole.
            let holder = held.get(&at).or_else(|| held.get(&(at.0, 0)));
            Some((at, Contest::new(&claims.all_at(at), holder)))
        });
        claims.contests = contests.collect();
        claims
    }

    /// Returns the claims to an address, the best one of each claimant. One to all ports of a node
    /// is one to each of its ports.
    fn all_at(&self, (ip, port): At) -> Vec<Claim<'a>> {
        let range = |at: At| {
            let start = self.list.partition_point(|one| one.at < at);
            let same = self.list.iter().skip(start).take_while(move |one| one.at == at);
            same.copied()
        };
        let mut all: Vec<_> = range((ip, 0)).collect();
        if port != 0 {
            all.extend(range((ip, port)));
            all.sort_by_key(|one| (one.by, Reverse(one.evidence)));
            all.dedup_by_key(|one| one.by);
        }
        all
    }

    fn contest(&self, at: At) -> Option<&Contest<'a>> {
        self.contests.get(&at).or_else(|| self.contests.get(&(at.0, 0)))
    }

    /// Returns the best evidence of a claimant for an address.
    pub(super) fn evidence(&self, by: Key<'_>, (ip, port): At) -> Option<Evidence> {
        let own = |at: At| {
            let found = self.list.binary_search_by(|one| (one.at, one.by).cmp(&(at, by)));
            found.ok().and_then(|index| self.list.get(index)).map(|one| one.evidence)
        };
        own((ip, port)).max(own((ip, 0)))
    }

    /// Returns whether a claimant has an address. Claimants of the mesh file share.
    pub(super) fn has(&self, by: Key<'_>, at: At) -> bool {
        self.contest(at).is_none_or(|contest| contest.winner.is_some_and(|one| one.by == by))
            || self.evidence(by, at) == Some(Evidence::File)
    }

    /// Returns the reason why a claimant does not have an address; none if it has.
    ///
    /// Claims with equal evidence exclude each other, exposed or not. Otherwise a tenant could
    /// expose an address to more peers than its owner does.
    pub(super) fn refusal(&self, by: Key<'_>, at: At) -> Option<Refusal<'a>> {
        let contest = self.contest(at).filter(|_| !self.has(by, at))?;
        let mut others = contest.best.iter().flatten().filter(|one| one.by != by);
        let rival = *others.next()?;
        Some(if Some(rival.evidence) > self.evidence(by, at) {
            Refusal::Owned(rival)
        } else {
            contest.winner.map_or(Refusal::Equal(rival), Refusal::Held)
        })
    }

    /// Returns a claim to a whole address that no tenant can forge for long, if none of `namespace`
    /// is one.
    pub(super) fn proven_elsewhere(&self, ip: IpAddr, namespace: &str) -> Option<Claim<'a>> {
        let all = self.all_at((ip, 0)).into_iter();
        let mut proven = all.filter(|one| one.evidence > Evidence::Slice);
        let first = proven.next()?;
        let is_own = |one: Claim<'_>| one.by.0 == namespace;
        (!is_own(first) && !proven.any(is_own)).then_some(first)
    }

    /// Returns all claims, each claimant's best one to each address.
    pub(super) fn all(&self) -> impl Iterator<Item = &Claim<'a>> {
        self.list.iter()
    }

    /// Returns the holders for the next decision. Claimants of the mesh file need none.
    pub(super) fn holders(&self) -> Holders {
        let mut names: HashMap<&str, Arc<str>> = HashMap::new();
        let mut owned =
            |name: &'a str| Arc::clone(names.entry(name).or_insert_with(|| name.into()));
        let winners = self.contests.iter().filter_map(|(at, of)| Some((at, of.winner?)));
        let winners = winners
            .filter(|(_, one)| ![Evidence::File, Evidence::OtherPort].contains(&one.evidence));
        winners.map(|(at, one)| (*at, (owned(one.by.0), owned(one.by.1)))).collect()
    }
}

impl<'a> Refusal<'a> {
    /// Returns the other claim.
    pub(super) fn other(self) -> Claim<'a> {
        let (Self::Owned(of) | Self::Held(of) | Self::Equal(of)) = self;
        of
    }
}

impl<'a> Contest<'a> {
    fn new(claims: &[Claim<'a>], holder: Option<&OwnedKey>) -> Self {
        let is_holder = |one: &Claim<'_>| holder.is_some_and(|(a, b)| (&**a, &**b) == one.by);
        let ranked = claims.iter().map(|one| ((Reverse(one.evidence), !is_holder(one)), one));
        let best = claims.iter().max_by_key(|one| one.evidence);
        let others = claims.iter().filter(|one| best.is_some_and(|best| best.by != one.by));
        let second = others.max_by_key(|one| one.evidence);
        Self { winner: lowest_rank(ranked).copied(), best: [best.copied(), second.copied()] }
    }
}
