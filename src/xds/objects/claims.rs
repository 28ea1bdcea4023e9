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

/// Claims to addresses, which are decided when they are asked for.
pub(super) struct Claims<'a> {
    /// The best claim of each claimant to each address, in order.
    list: Vec<Claim<'a>>,
    /// Holders by the last decision.
    held: &'a Holders,
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
    /// Returns these claims. `held` are the holders by the last decision.
    pub(super) fn new(mut list: Vec<Claim<'a>>, held: &'a Holders) -> Self {
        list.sort_by_key(|one| (one.at, one.by, Reverse(one.evidence)));
        list.dedup_by_key(|one| (one.at, one.by));
        Self { list, held }
    }

    fn exactly_at(&self, at: At) -> impl Iterator<Item = Claim<'a>> {
        let start = self.list.partition_point(|one| one.at < at);
        self.list.iter().skip(start).take_while(move |one| one.at == at).copied()
    }

    /// Returns the claims to an address, the best one of each claimant. One to all ports of a node
    /// is one to each of its ports.
    fn all_at(&self, at @ (ip, port): At) -> Vec<Claim<'a>> {
        let mut all: Vec<_> = self.exactly_at((ip, 0)).collect();
        if port != 0 {
            all.extend(self.exactly_at(at));
            all.sort_by_key(|one| (one.by, Reverse(one.evidence)));
            all.dedup_by_key(|one| one.by);
        }
        all
    }

    /// Returns which of the claims to an address has it, if one has.
    fn winner(&self, (ip, port): At, claims: &[Claim<'a>]) -> Option<Claim<'a>> {
        // A port that nobody claims alone is decided with the address. An address that was not
        // known to be that of a node had a holder as a whole.
        let is_claimed = self.exactly_at((ip, port)).next().is_some();
        let holder = self.held.get(&(ip, port)).filter(|_| is_claimed);
        let holder = holder.or_else(|| self.held.get(&(ip, 0)));
        let is_holder = |one: &Claim<'_>| holder.is_some_and(|(a, b)| (&**a, &**b) == one.by);
        let ranked = claims.iter().map(|one| ((Reverse(one.evidence), !is_holder(one)), *one));
        lowest_rank(ranked)
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
        self.refusal(by, at).is_none()
    }

    /// Returns the reason why a claimant does not have an address; none if it has.
    ///
    /// Claims with equal evidence exclude each other, exposed or not. Otherwise a tenant could
    /// expose an address to more peers than its owner does.
    pub(super) fn refusal(&self, by: Key<'_>, at: At) -> Option<Refusal<'a>> {
        let (claims, own) = (self.all_at(at), self.evidence(by, at));
        let winner = self.winner(at, &claims);
        if own == Some(Evidence::File) || winner.is_some_and(|one| one.by == by) {
            return None;
        }
        let others = claims.iter().filter(|one| one.by != by);
        let rival = *others.max_by_key(|one| one.evidence)?;
        Some(if Some(rival.evidence) > own {
            Refusal::Owned(rival)
        } else {
            winner.map_or(Refusal::Equal(rival), Refusal::Held)
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
        let places = self.list.chunk_by(|one, next| one.at == next.at);
        let places = places.filter_map(|same| Some(same.first()?.at));
        let winners = places.filter_map(|at| self.winner(at, &self.all_at(at)).map(|of| (at, of)));
        let winners = winners
            .filter(|(_, one)| ![Evidence::File, Evidence::OtherPort].contains(&one.evidence));
        winners.map(|(at, one)| (at, (owned(one.by.0), owned(one.by.1)))).collect()
    }
}

impl<'a> Refusal<'a> {
    /// Returns the other claim.
    pub(super) fn other(self) -> Claim<'a> {
        let (Self::Owned(of) | Self::Held(of) | Self::Equal(of)) = self;
        of
    }
}
