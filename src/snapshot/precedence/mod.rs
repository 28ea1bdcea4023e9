//! Precedence of services that claim one hostname or one VIP.
//!
//! Tenants choose names, hostnames and addresses of their services. The order is: the operator's
//! configuration, the canonical service, the service in the namespace that owns the hostname, and
//! the oldest claim. If no rule decides, no service answers.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use derive_more::Display;

pub(super) mod claim;
#[cfg(test)]
mod tests;

use claim::{Claim, Rank, VipClaim};

use super::{Service, Snapshot, mesh};
use crate::labels::join_first;

/// Hostname or VIP of which at least one claimant does not answer.
#[derive(Debug, Display, PartialEq, Eq)]
#[display(
    "{claimed} is claimed by {}, and {} answers: {rule}",
    join_first(losers, LOSERS_SHOWN),
    winner.as_deref().unwrap_or("none")
)]
pub struct Collision {
    /// Hostname or VIP.
    claimed: String,
    /// Service that answers, as `namespace/hostname`.
    winner: Option<String>,
    /// Claimants that do not answer.
    losers: Vec<String>,
    rule: DecidingRule,
}

#[derive(Clone, Debug, Display, PartialEq, Eq)]
enum DecidingRule {
    /// An entry of `exposure.services` sets the namespace.
    #[display("`exposure.services` selects the service of namespace {_0}")]
    Namespace(String),
    /// An entry of `exposure.services` names the service.
    #[display("it has an entry in `exposure.services`")]
    Entry,
    /// A configured name takes precedence over a hostname.
    #[display("the name is configured in `names` or `exposure.services`")]
    Configured,
    /// A hostname takes precedence over an alias of objects.
    #[display("a hostname precedes names that objects give")]
    Alias,
    #[display("it is the canonical service")]
    Canonical,
    /// The hostname, or another one of its family, belongs to this namespace.
    #[display("namespace {_0} owns the name")]
    Owner(String),
    #[display("it has the oldest claim")]
    First,
    /// No rule decides about the hostname.
    #[display("no rule decides; set `namespace` in its entry of `exposure.services`")]
    Hostname,
    #[display("no rule decides; add an entry to `exposure.services` for the intended service")]
    Vip,
}

/// Maximum number of losers in the text of a collision.
const LOSERS_SHOWN: usize = 5;

/// Returns the item of the lowest rank, or `None` on a tie.
pub fn lowest_rank<R: Ord, T>(ranked: impl Iterator<Item = (R, T)>) -> Option<T> {
    let (mut least, mut is_tied) = (None::<(R, T)>, false);
    for (rank, item) in ranked {
        let order = least.as_ref().map(|(other, _)| rank.cmp(other));
        match order.unwrap_or(Ordering::Less) {
            Ordering::Less => (least, is_tied) = (Some((rank, item)), false),
            Ordering::Equal => is_tied = true,
            Ordering::Greater => {}
        }
    }
    least.filter(|_| !is_tied).map(|(_, item)| item)
}

impl Rank {
    /// Returns the first rule by which this rank precedes another.
    fn deciding_rule(&self, other: &Self, service: &mesh::Service) -> DecidingRule {
        if self.is_unconfigured != other.is_unconfigured {
            DecidingRule::Entry
        } else if self.is_not_canonical != other.is_not_canonical {
            DecidingRule::Canonical
        } else if self.is_not_owner != other.is_not_owner {
            DecidingRule::Owner(service.namespace.to_string())
        } else {
            DecidingRule::First
        }
    }
}

impl Snapshot {
    pub(super) fn answering(&self, host: &str) -> Option<&Arc<mesh::Service>> {
        let namespace = self.required_namespace(host);
        let claims = self.index.claims(host).iter();
        let claims = claims.filter(|claim| {
            namespace.is_none_or(|namespace| *claim.service.namespace == *namespace)
        });
        let ranked = claims.map(|claim| (self.rank(&claim.service, claim.since), &claim.service));
        let first = lowest_rank(ranked)?;
        let is_good = namespace.is_some() || self.family_owner(host, &first.namespace).is_none();
        is_good.then_some(first)
    }

    /// Returns whether a service of this namespace may answer to a hostname.
    pub fn may_answer(&self, host: &str, namespace: &str) -> bool {
        self.required_namespace(host).is_none_or(|only| *only == *namespace)
    }

    /// Returns the only namespace that may have a hostname, if an entry for it or for another name
    /// of its family sets one.
    pub fn required_namespace(&self, host: &str) -> Option<&str> {
        if !self.exposure.has_namespaces {
            return None;
        }
        let own = self.exposure.namespace(host);
        own.or_else(|| {
            let mut family = self.family_of(host);
            family.find_map(|name| self.exposure.namespace(&name))
        })
    }

    /// Returns the namespace that owns the family of a hostname, if it is not `namespace` and a
    /// service there claims another name of the family. No other namespace may then take a name of
    /// it.
    fn family_owner(&self, host: &str, namespace: &str) -> Option<&str> {
        let stem = self.names.stem(host)?;
        let owner = self.names.owner(host).filter(|owner| *owner != namespace)?;
        let mut others = self.names.family(stem).filter(|name| **name != *host);
        others.find_map(|name| {
            let namespaces = self.index.claims(&name).iter();
            let mut namespaces = namespaces.map(|claim| &*claim.service.namespace);
            namespaces.find(|namespace| *namespace == owner)
        })
    }

    fn rank(&self, service: &mesh::Service, since: u64) -> Rank {
        Rank {
            is_unconfigured: false,
            is_not_canonical: !service.canonical,
            is_not_owner: self.names.owner(&service.hostname) != Some(&service.namespace),
            since,
        }
    }

    /// Returns the rank of a claim to a VIP. The namespace of the hostname does not count for an
    /// address, because any tenant can choose a hostname of their own namespace.
    fn vip_rank(&self, service: &mesh::Service, since: u64) -> Rank {
        let host = &*service.hostname;
        let has_entry = |name: &str| self.exposure.has_entry(name);
        let is_of_family = || self.family_of(host).any(|name| has_entry(&name));
        Rank {
            is_unconfigured: !has_entry(host) && !is_of_family(),
            is_not_owner: false,
            ..self.rank(service, since)
        }
    }

    pub fn service_by_vip(&self, ip: IpAddr) -> Option<&Arc<Service>> {
        match &**self.vips.get(&ip)? {
            [first, second, ..] if first.rank == second.rank => None,
            [first, ..] => self.services.get(&first.host),
            [] => None,
        }
    }

    /// Ranks the claims to a VIP: those of its claimants so far, and that of the service of `host`.
    /// A claim of the same service as in `before` keeps its age.
    pub(super) fn rank_vip_claims(&mut self, before: &Self, vip: IpAddr, host: Option<&str>) {
        let known = self.vips.get(&vip).into_iter().flat_map(|claims| claims.iter());
        let hosts: BTreeSet<_> = known.map(|claim| &*claim.host).chain(host).collect();
        let services = hosts.into_iter().filter_map(|host| self.services.get(host));
        let claimants = services.filter(|of| self.index.vips(&of.definition).contains(&vip));
        let claims = claimants.map(|service| {
            let since = before.vip_claim_since(vip, service).unwrap_or(self.version);
            let rank = self.vip_rank(&service.definition, since);
            VipClaim { host: Arc::clone(&service.hostname), rank }
        });
        let mut claims: Vec<_> = claims.collect();
        claims.sort_by_key(|claim| claim.rank);
        self.vips.set(vip, (!claims.is_empty()).then(|| claims.into()));
    }

    /// Returns the age of the claim of a service to a VIP, if the same service claims it here.
    fn vip_claim_since(&self, vip: IpAddr, service: &Service) -> Option<u64> {
        let known = self.services.get(&service.hostname)?;
        let mut claims = self.vips.get(&vip)?.iter();
        let claim = claims.find(|claim| claim.host == service.hostname)?;
        (known.namespace == service.namespace).then_some(claim.rank.since)
    }

    /// Ranks contested claims to VIPs again, after a change of the configuration. A single claim is
    /// ranked when a second one is added.
    pub(super) fn rank_contested_vips(&mut self, before: &Self) {
        let contested = self.vips.iter().filter(|(_, claims)| claims.len() > 1);
        for vip in contested.map(|(vip, _)| *vip).collect::<Vec<_>>() {
            self.rank_vip_claims(before, vip, None);
        }
    }
}

impl Snapshot {
    /// Returns all hostnames and VIPs of which a claimant does not answer.
    pub fn collisions(&self) -> impl Iterator<Item = Collision> {
        let hosts = self.index.all_claimed();
        let hosts = hosts.filter_map(|host| self.collision(host));
        let vips = self.vips.iter().filter(|(_, claims)| claims.len() > 1);
        let vips = vips.filter_map(|(vip, _)| self.vip_collision(*vip));
        hosts.chain(vips)
    }

    /// Returns the collision of a hostname if any of its claimants does not answer.
    pub fn collision(&self, host: &str) -> Option<Collision> {
        let (claims, mut winner) = (self.index.claims(host), self.answering(host));
        let is_given = winner.is_some() && self.is_configured_name(host);
        winner = winner.filter(|_| !is_given);
        let is_winner = |claim: &Claim| winner.is_some_and(|won| Arc::ptr_eq(won, &claim.service));
        let losers: Vec<_> = claims.iter().filter(|claim| !is_winner(claim)).collect();
        let alias = self.overridden_alias(host);
        if losers.is_empty() && alias.is_none() {
            return None;
        }
        let decided = claims.iter().find(|claim| is_winner(claim)).and_then(|won| {
            let rank = |claim: &Claim| self.rank(&claim.service, claim.since);
            let next = losers.iter().map(|claim| rank(claim)).min()?;
            Some(rank(won).deciding_rule(&next, &won.service))
        });
        let owner = || {
            let owner = self.family_owner(host, &losers.first()?.service.namespace)?;
            Some(DecidingRule::Owner(owner.to_owned()))
        };
        let why = match (self.required_namespace(host), decided) {
            _ if is_given => DecidingRule::Configured,
            (Some(namespace), _) => DecidingRule::Namespace(namespace.to_owned()),
            (None, Some(why)) => why,
            (None, None) if losers.is_empty() => DecidingRule::Alias,
            (None, None) => owner().unwrap_or(DecidingRule::Hostname),
        };
        let losers = losers.iter().map(|claim| claim.name.to_string());
        let alias = alias.map(|of| format!("objects of namespace {of}"));
        Some(Collision {
            claimed: host.to_owned(),
            winner: winner.map(|won| format!("{}/{host}", won.namespace)),
            losers: losers.chain(alias).collect(),
            rule: why,
        })
    }

    /// Returns the collision of a VIP of this network that several services claim.
    pub fn vip_collision(&self, vip: IpAddr) -> Option<Collision> {
        let claims = self.vips.get(&vip)?;
        let [first, second, ..] = &**claims else {
            return None;
        };
        let winner = self.service_by_vip(vip);
        let why = winner.map(|won| first.rank.deciding_rule(&second.rank, &won.definition));
        let name = |host: &str| {
            let service = self.services.get(host);
            service.map_or_else(String::new, |of| format!("{}/{host}", of.namespace))
        };
        let losers = claims.iter().skip(usize::from(winner.is_some()));
        Some(Collision {
            claimed: vip.to_string(),
            winner: winner.map(|won| name(&won.hostname)),
            losers: losers.map(|claim| name(&claim.host)).collect(),
            rule: why.unwrap_or(DecidingRule::Vip),
        })
    }
}

impl Collision {
    /// Returns whether an entry's `namespace` decides the collision and the service of that
    /// namespace answers.
    pub fn is_intended(&self) -> bool {
        self.winner.is_some() && matches!(self.rule, DecidingRule::Namespace(_))
    }
}
