//! Trust domains and issuers, and the cluster of each peer, which follows from the issuer of its
//! certificate or from its trust domain.

use std::collections::HashSet;
use std::sync::Arc;

use foldhash::HashMap;

use crate::wire::{SpkiHash, UNKNOWN_CLUSTER};

/// Label under which tunnels of all domains without an entry are counted. A holder of a signing key
/// under the shared roots can invent any number of domains.
const UNLISTED: &str = "unlisted";

/// Trust domains and issuers with their clusters, and the waypoint and gateway identities whose
/// `x-istio-source` is trusted. A peer of any other domain is rejected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustSet {
    clusters: HashMap<Box<str>, Arc<str>>,
    trusted_waypoints: HashSet<Box<str>>,
    gateways: HashSet<Box<str>>,
    /// Present if domains without an entry are in the set too.
    unlisted: Option<UnlistedDomains>,
    /// Present if the issuer rather than the domain determines the cluster.
    issuers: Option<Issuers>,
    /// Issuers that may sign for a domain; a domain without an entry permits every issuer. The
    /// handshake enforces them, and explanations read them.
    domain_issuers: HashMap<Box<str>, Arc<HashSet<SpkiHash>>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Issuers {
    clusters: HashMap<SpkiHash, Arc<str>>,
    /// [`UNKNOWN_CLUSTER`]; `None` if other issuers are rejected.
    unknown: Option<Arc<str>>,
}

/// Domains without an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UnlistedDomains {
    /// Clusters of the entries; a domain of one of these names is not accepted.
    listed_clusters: HashSet<Arc<str>>,
    /// [`UNLISTED`].
    counted: Arc<str>,
}

/// Verified identity of a peer, for which exposure rules and authorization policies are evaluated.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// Whole identity, `spiffe://…`.
    pub principal: &'a str,
    /// Trust domain of the peer's certificate.
    pub trust_domain: &'a str,
    /// Issuer of the peer's certificate.
    pub issuer: Option<&'a SpkiHash>,
    /// Namespace of the peer's identity.
    pub namespace: &'a str,
    /// Service account of the peer's identity.
    pub service_account: &'a str,
}

impl Caller<'_> {
    /// Client without a verified identity, as on a TLS listener.
    pub const UNKNOWN: Self = Caller {
        principal: "",
        trust_domain: "",
        issuer: None,
        namespace: "",
        service_account: "",
    };

    /// Returns whether there is no identity. A verified one always has a trust domain.
    pub fn is_unknown(self) -> bool {
        self.trust_domain.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCluster {
    /// Name for exposure and logs.
    pub name: Arc<str>,
    /// Name under which tunnels and descriptors of the peer are counted. The configuration bounds
    /// the number of these names.
    pub metric_name: Arc<str>,
}

impl TrustSet {
    /// Returns the set of these (trust domain, cluster) pairs.
    pub fn new<'a>(domains: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let entry = |(domain, cluster): (&str, &str)| (domain.into(), cluster.into());
        Self { clusters: domains.into_iter().map(entry).collect(), ..Self::default() }
    }

    /// Returns the set in which the issuer of a peer's certificate determines its cluster. Peers of
    /// other issuers are in [`UNKNOWN_CLUSTER`], or in no cluster if `rejects_unknown`. Without any
    /// issuer, trust domains determine the clusters.
    pub fn with_issuers<'a>(
        self,
        issuers: impl IntoIterator<Item = (SpkiHash, &'a str)>,
        rejects_unknown: bool,
    ) -> Self {
        let entry = |(issuer, cluster): (SpkiHash, &str)| (issuer, cluster.into());
        let clusters: HashMap<_, _> = issuers.into_iter().map(entry).collect();
        let issuers = (!clusters.is_empty()).then(|| Issuers {
            clusters,
            unknown: (!rejects_unknown).then(|| UNKNOWN_CLUSTER.into()),
        });
        Self { issuers, ..self }
    }

    /// Returns the set extended by every other domain, each with a cluster of its own name. A
    /// domain named like a cluster of an entry is not included.
    pub fn with_any_domain(self, any_domain: bool) -> Self {
        let others = any_domain.then(|| UnlistedDomains {
            listed_clusters: self.clusters.values().map(Arc::clone).collect(),
            counted: UNLISTED.into(),
        });
        Self { unlisted: others, ..self }
    }

    /// Returns the set with the issuers that may sign for each of these domains.
    pub fn with_domain_issuers<'a>(
        self,
        issuers: impl IntoIterator<Item = (&'a str, Arc<HashSet<SpkiHash>>)>,
    ) -> Self {
        let entry = |(domain, issuers): (&str, _)| (domain.into(), issuers);
        Self { domain_issuers: issuers.into_iter().map(entry).collect(), ..self }
    }

    /// Returns the set with these identities (`spiffe://…`) of waypoints and gateways.
    pub fn with_waypoints<'a>(self, waypoints: impl IntoIterator<Item = &'a str>) -> Self {
        let waypoints = waypoints.into_iter().map(Into::into).collect();
        Self { trusted_waypoints: waypoints, ..self }
    }

    /// Returns the set with these identities (`spiffe://…`) of gateways of other networks.
    pub fn with_gateways<'a>(self, gateways: impl IntoIterator<Item = &'a str>) -> Self {
        let gateways = gateways.into_iter().map(Into::into).collect();
        Self { gateways, ..self }
    }

    /// Returns whether the configuration lists this identity as that of a gateway of another
    /// network.
    pub fn is_gateway(&self, principal: &str) -> bool {
        self.gateways.contains(principal)
    }

    /// Returns whether the configuration lists this identity as a waypoint's or a gateway's.
    pub fn is_waypoint(&self, principal: &str) -> bool {
        self.trusted_waypoints.contains(principal)
    }

    /// Returns the cluster of a caller, which its issuer or its trust domain determines. Returns
    /// `None` if the trust domain is not in the set or the issuer is rejected.
    pub fn cluster<'a>(&'a self, caller: Caller<'a>) -> Option<&'a str> {
        match self.cluster_source(caller.trust_domain, caller.issuer)? {
            Origin::Named(name) => Some(name),
            Origin::Domain(_) => Some(caller.trust_domain),
        }
    }

    /// Returns the same as [`Self::cluster`], with the name under which the peer is counted.
    pub fn peer_cluster(
        &self,
        domain: &Arc<str>,
        issuer: Option<&SpkiHash>,
    ) -> Option<PeerCluster> {
        let (name, counted) = match self.cluster_source(domain, issuer)? {
            Origin::Named(name) => (name, name),
            Origin::Domain(others) => (domain, &others.counted),
        };
        Some(PeerCluster { name: Arc::clone(name), metric_name: Arc::clone(counted) })
    }

    /// Returns whether a name is that of a cluster to which other trust domains lead, or that of
    /// issuers without a cluster.
    pub fn is_other_cluster(&self, cluster: &str, domain: &str) -> bool {
        let of_domain = self.clusters.get(domain).map(|own| &**own);
        let mut clusters = self.clusters.values();
        of_domain != Some(cluster)
            && (cluster == UNKNOWN_CLUSTER || clusters.any(|other| **other == *cluster))
    }

    /// Returns whether a trust domain is in the set.
    pub fn contains(&self, domain: &str) -> bool {
        let is_named = self.clusters.contains_key(domain);
        let takes_all = || self.unlisted.is_some() && self.issuers.is_some();
        is_named || (takes_all() && !domain.is_empty()) || self.others(domain).is_some()
    }

    /// Returns the cluster of an issuer's peers. Returns `None` if issuers do not determine
    /// clusters or this one is rejected.
    pub fn issuer_cluster(&self, issuer: &SpkiHash) -> Option<&str> {
        self.issuers.as_ref()?.cluster(Some(issuer)).map(|name| &**name)
    }

    /// Returns the only issuers that may sign for a domain; `None` if every issuer may.
    pub fn domain_issuers(&self, domain: &str) -> Option<&HashSet<SpkiHash>> {
        self.domain_issuers.get(domain).map(|issuers| &**issuers)
    }

    pub fn has_issuers(&self) -> bool {
        self.issuers.is_some()
    }

    /// Returns whether clusters distinguish peers: issuers determine them, or the entries of trust
    /// domains name several. With one shared trust domain, all peers count as one cluster.
    pub fn distinguishes_clusters(&self) -> bool {
        let mut clusters = self.clusters.values();
        let first = clusters.next();
        self.has_issuers() || clusters.any(|cluster| Some(cluster) != first)
    }

    /// Returns the clusters of issuers, once for each issuer.
    pub fn issuers(&self) -> impl Iterator<Item = (&str, &SpkiHash)> {
        let issuers = self.issuers.iter().flat_map(|issuers| &issuers.clusters);
        issuers.map(|(issuer, cluster)| (&**cluster, issuer))
    }

    fn cluster_source(&self, domain: &str, issuer: Option<&SpkiHash>) -> Option<Origin<'_>> {
        let Some(issuers) = &self.issuers else {
            let named = self.clusters.get(domain).map(Origin::Named);
            return named.or_else(|| self.others(domain).map(Origin::Domain));
        };
        self.contains(domain).then(|| issuers.cluster(issuer)).flatten().map(Origin::Named)
    }

    /// Returns the domains without an entry, if `domain` is one of them and is in the set.
    fn others(&self, domain: &str) -> Option<&UnlistedDomains> {
        let others = self.unlisted.as_ref()?;
        (!domain.is_empty() && !others.listed_clusters.contains(domain)).then_some(others)
    }
}

/// Source of a peer's cluster.
enum Origin<'a> {
    Named(&'a Arc<str>),
    /// Domain without an entry, whose name is the cluster.
    Domain(&'a UnlistedDomains),
}

impl Issuers {
    fn cluster(&self, issuer: Option<&SpkiHash>) -> Option<&Arc<str>> {
        issuer.and_then(|issuer| self.clusters.get(issuer)).or(self.unknown.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EAST: SpkiHash = SpkiHash::new([1; 32]);
    const WEST: SpkiHash = SpkiHash::new([2; 32]);
    const OTHER: SpkiHash = SpkiHash::new([3; 32]);

    fn of<'a>(trust_domain: &'a str, issuer: Option<&'a SpkiHash>) -> Caller<'a> {
        Caller { trust_domain, issuer, ..Caller::UNKNOWN }
    }

    #[test]
    fn an_issuer_says_the_cluster_and_any_other_one_is_unknown_or_refused() {
        let set = TrustSet::new([("cluster.local", "east")]);
        let pairs = || [(EAST, "east"), (WEST, "west")];
        let empty = set.clone().with_issuers([], true);
        assert_eq!(empty.cluster(of("cluster.local", None)), Some("east"));
        for (rejects, others) in [(false, Some("unknown")), (true, None)] {
            let set = set.clone().with_issuers(pairs(), rejects);
            for (issuer, want) in [
                (Some(&EAST), Some("east")),
                (Some(&WEST), Some("west")),
                (Some(&OTHER), others),
                (None, others),
            ] {
                let caller = of("cluster.local", issuer);
                assert_eq!(set.cluster(caller), want, "{issuer:?}");
                let counted = set.peer_cluster(&"cluster.local".into(), issuer);
                assert_eq!(counted.map(|it| it.metric_name).as_deref(), want, "{issuer:?}");
            }
            // The trust domain must be in the set as well.
            assert_eq!(set.cluster(of("north.local", Some(&WEST))), None);
            assert_eq!(set.cluster(of("", None)), None);
            let any = set.with_any_domain(true);
            assert_eq!(any.cluster(of("north.local", Some(&WEST))), Some("west"));
            assert_eq!(any.cluster(of("east", Some(&WEST))), Some("west"));
            assert_eq!(any.cluster(of("north.local", Some(&OTHER))), others);
            assert_eq!(any.cluster(of("", Some(&WEST))), None);
        }
    }

    #[test]
    fn clusters_are_distinguished_by_issuers_or_by_several_in_the_domains() {
        let set = |domains: &[(&str, &str)]| TrustSet::new(domains.iter().copied());
        let one = set(&[("cluster.local", "east")]);
        assert!(!one.distinguishes_clusters());
        assert!(!set(&[("cluster.local", "east"), ("old.local", "east")]).distinguishes_clusters());
        // A peer of another cluster may use the one domain that is listed.
        assert!(!one.clone().with_any_domain(true).distinguishes_clusters());
        assert!(set(&[("east.local", "east"), ("west.local", "west")]).distinguishes_clusters());
        assert!(one.with_issuers([(EAST, "east")], false).distinguishes_clusters());
    }

    #[test]
    fn any_domain_is_its_own_cluster_only_where_that_is_configured() {
        let set = TrustSet::new([("west.local", "west")]);
        let north: Arc<str> = "north.local".into();
        assert_eq!(set.cluster(of(&north, None)), None);
        assert_eq!(set.peer_cluster(&north, None), None);
        let set = set.with_any_domain(true);
        let cluster = |domain| set.cluster(of(domain, None)).map(ToOwned::to_owned);
        assert_eq!(cluster("west.local").as_deref(), Some("west"));
        assert_eq!(cluster(&north).as_deref(), Some("north.local"));
        assert_eq!(cluster(""), None, "a caller without identity has no cluster");
        assert_eq!(cluster("west"), None, "that is the cluster of west.local");
    }

    #[test]
    fn domains_without_an_entry_are_counted_as_one_cluster_and_the_others_by_their_own() {
        let set = TrustSet::new([("west.local", "west")]).with_any_domain(true);
        let of = |domain: &str| {
            let cluster = set.peer_cluster(&domain.into(), None).expect("a cluster");
            (cluster.name.to_string(), cluster.metric_name.to_string())
        };
        let pair = |name: &str, counted: &str| (name.to_owned(), counted.to_owned());
        assert_eq!(of("north.local"), pair("north.local", "unlisted"));
        assert_eq!(of("south.local"), pair("south.local", "unlisted"));
        assert_eq!(of("west.local"), pair("west", "west"));
        assert_eq!(set.peer_cluster(&"west".into(), None), None);
    }
}
