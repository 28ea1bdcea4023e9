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

impl Evidence {
    const ALL: [Self; Self::File as usize + 1] =
        [Self::Import, Self::Slice, Self::OtherPort, Self::Managed, Self::Assigned, Self::File];
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

impl<'a> Claim<'a> {
    /// Returns its order among the claims to an address.
    fn rank(&self) -> (Reverse<Evidence>, Key<'a>) {
        #[cfg(test)]
        tests::RANKED.set(tests::RANKED.get() + 1);
        (Reverse(self.evidence), self.by)
    }
}

/// Claimants that had each address by the last decision.
pub(super) type Holders = HashMap<At, OwnedKey>;

/// Claims to addresses, which are decided when they are asked for.
pub(super) struct Claims<'a> {
    /// The best claim of each claimant to each address. Those to an address are in the order of
    /// their ranks, because the first two decide about it, however many there are.
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
        list.sort_by_key(|one| (one.at, one.rank()));
        Self { list, held }
    }

    fn exactly_at(&self, at: At) -> &[Claim<'a>] {
        let (_, rest) = self.list.split_at(self.list.partition_point(|one| one.at < at));
        rest.split_at(rest.partition_point(|one| one.at == at)).0
    }

    /// Returns the claims to an address. One to all ports of a node is one to each of its ports.
    fn all_at(&self, at @ (ip, port): At) -> [&[Claim<'a>]; 2] {
        [self.exactly_at((ip, 0)), if port == 0 { &[] } else { self.exactly_at(at) }]
    }

    /// Returns the best claim to an address, and the best one of another claimant.
    fn best(&self, at: At) -> [Option<Claim<'a>>; 2] {
        let all = self.all_at(at);
        let all = || all.iter().flat_map(|claims| claims.iter().take(2));
        let first = all().min_by_key(|one| one.rank());
        let others = all().filter(|one| first.is_some_and(|first| first.by != one.by));
        [first, others.min_by_key(|one| one.rank())].map(|one| one.copied())
    }

    /// Returns which of the best claims to an address has it, or the holder's claim if it is equal
    /// to them.
    fn winner(&self, at: At, best: [Option<Claim<'a>>; 2]) -> Option<Claim<'a>> {
        let [first, second] = best;
        let evidence = first?.evidence;
        if second.is_none_or(|second| second.evidence < evidence) {
            return first;
        }
        // A port that nobody claims alone is decided with the address. An address that was not
        // known to be that of a node had a holder as a whole.
        let is_claimed = !self.exactly_at(at).is_empty();
        let holder = self.held.get(&at).filter(|_| is_claimed);
        let (namespace, name) = holder.or_else(|| self.held.get(&(at.0, 0)))?;
        self.claim((namespace, name), at).filter(|one| one.evidence == evidence)
    }

    /// Returns the best claim of a claimant to an address.
    fn claim(&self, by: Key<'_>, at: At) -> Option<Claim<'a>> {
        let own = self.all_at(at).into_iter().filter_map(|claims| {
            Evidence::ALL.into_iter().find_map(|evidence| {
                let found = claims.binary_search_by(|one| one.rank().cmp(&(Reverse(evidence), by)));
                claims.get(found.ok()?).copied()
            })
        });
        own.min_by_key(Claim::rank)
    }

    /// Returns the best evidence of a claimant for an address.
    pub(super) fn evidence(&self, by: Key<'_>, at: At) -> Option<Evidence> {
        self.claim(by, at).map(|one| one.evidence)
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
        let best @ [first, second] = self.best(at);
        let winner = self.winner(at, best);
        if winner.is_some_and(|one| one.by == by) {
            return None;
        }
        let own = self.evidence(by, at);
        if own == Some(Evidence::File) {
            return None;
        }
        let rival = first.filter(|one| one.by != by).or(second)?;
        Some(if Some(rival.evidence) > own {
            Refusal::Owned(rival)
        } else {
            winner.map_or(Refusal::Equal(rival), Refusal::Held)
        })
    }

    /// Returns a claim to a whole address that no tenant can forge for long, if none of `namespace`
    /// is one.
    pub(super) fn proven_elsewhere(&self, ip: IpAddr, namespace: &str) -> Option<Claim<'a>> {
        let [first, _] = self.best((ip, 0));
        let is_own = self.evidence((namespace, ""), (ip, 0)) > Some(Evidence::Slice);
        first.filter(|first| first.evidence > Evidence::Slice && !is_own)
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
        let winners = places.filter_map(|at| Some((at, self.winner(at, self.best(at))?)));
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Number of ranks that were compared.
        pub(super) static RANKED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn any_number_of_claims_to_an_address_is_decided_by_few_of_them() {
        const COUNT: usize = 5000;
        let names: Vec<_> = (0..COUNT).map(|index| format!("n{index}")).collect();
        let at = ([10, 9, 0, 1].into(), 0);
        let by = names.iter().map(|name| (name.as_str(), "a"));
        let list = by.map(|by| Claim { at, by, evidence: Evidence::Import, place: None });
        let held = Holders::from([(at, ("n7".into(), "a".into()))]);
        for (held, winner) in [(&Holders::new(), None), (&held, Some("n7"))] {
            let claims = Claims::new(list.clone().collect(), held);
            RANKED.set(0);
            let winners = claims.all().filter(|one| claims.has(one.by, at));
            let winners: Vec<_> = winners.map(|one| one.by.0).collect();
            assert_eq!(winners, Vec::from_iter(winner));
            assert_eq!(claims.holders().len(), winners.len());
            // For each claim the two best ones, the holder, and its own by a search.
            assert!(RANKED.get() < COUNT * 400, "{} ranks", RANKED.get());
        }
    }
}
