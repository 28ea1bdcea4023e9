//! Inputs of load balancing other than the mesh: the position of this gateway, the `traffic`
//! configuration, and the overrides of an operator since the start.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::iter;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::SystemTime;

use super::mesh::{self, Locality, Mesh, Scope, UNKNOWN_NAMESPACE, Workload};
use super::remote::{RemoteGateway, gateway_network};
pub use crate::config::TrafficRule;
use crate::config::{Distribution, ProxyProtocol, RegionWeight};
use crate::wire::{DrainTarget, RegionPattern};

pub type Drains = BTreeMap<DrainTarget, Drained>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    pub since: SystemTime,
    /// True if a restart keeps it.
    pub is_persisted: bool,
}

/// Position of this gateway; its network comes with the mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Position {
    pub cluster: Arc<str>,
    /// Locality of the gateway. An unknown part is empty and matches only workloads that lack it
    /// too.
    pub locality: Locality,
    /// Source of the locality, for display; empty while it is unknown.
    pub origin: Arc<str>,
    /// Uid of the gateway's own workload. Once the mesh has it, its locality is used.
    pub own_uid: Option<Arc<str>>,
}

/// Origin of a locality received from the mesh.
const ORIGIN_MESH: &str = "istiod's record of this pod";

/// All inputs of load balancing other than the mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Balancing {
    pub position: Position,
    pub traffic: Traffic,
    /// Parts of the mesh, and listeners, that an operator has drained.
    pub evacuated: Drains,
}

/// Command of an operator to the running gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Override {
    /// Makes new tunnels avoid a part of the mesh, or closes a listener. An earlier order keeps its
    /// time.
    Drain(DrainTarget, Drained),
    /// Ends such an order.
    Restore(DrainTarget),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Rules of services that have their own, by hostname. Only rules of different namespaces share
    /// a hostname.
    services: HashMap<Arc<str>, Vec<TrafficRule>>,
    pub(super) default_rule: TrafficRule,
}

/// Threshold below which a tier leaves a part of its share to the next one. With a ratio r of its
/// endpoints ready, a tier can take r × `factor` / `of` of all tunnels, at most all of them.
#[derive(Clone, Copy, Debug, derive_more::Display, PartialEq, Eq)]
#[display("{}%", self.percent())]
pub struct Spill {
    factor: u32,
    divisor: u32,
}

/// Number of ready endpoints, and of all that are not drained.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) ready: u32,
    pub(super) all: u32,
}

impl Count {
    pub(super) fn one(is_ready: bool) -> Self {
        Self { ready: u32::from(is_ready), all: 1 }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.ready = self.ready.saturating_add(other.ready);
        self.all = self.all.saturating_add(other.all);
    }
}

impl Spill {
    /// Returns the threshold at this percentage of ready endpoints.
    pub const fn below(percent: u8) -> Self {
        Self { factor: 100, divisor: percent as u32 }
    }

    /// Returns the threshold in percent of ready endpoints.
    pub fn percent(self) -> u64 {
        u64::from(self.divisor) * 100 / u64::from(self.factor).max(1)
    }

    /// Returns the threshold of Envoy's overprovisioning factor in percent.
    pub const fn by_factor(percent: u32) -> Self {
        Self { factor: percent, divisor: 100 }
    }

    /// Returns the part of `whole` that these endpoints can take, rounded down.
    pub(super) fn capacity(self, whole: u64, count: Count) -> u64 {
        let wanted = u128::from(count.all) * u128::from(self.divisor);
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

/// Returns whether a workload or gateway belongs to a part of the mesh.
pub fn is_part_of(workload: &Workload, target: &DrainTarget) -> bool {
    match target {
        DrainTarget::Region(region) => matches_locality(region, &workload.locality),
        DrainTarget::Cluster(cluster) => **cluster == *workload.cluster,
        DrainTarget::Address(address) => workload.addresses.contains(address),
        // The record of a gateway is no endpoint: `DrainTarget::Gateway` is.
        DrainTarget::Workload(uid) => **uid == *workload.uid && gateway_network(workload).is_none(),
        DrainTarget::Gateway(_) | DrainTarget::Service(_) | DrainTarget::Listener(_) => false,
    }
}

/// Returns the region of a locality with its index, in regions that begin with the most specific.
pub(super) fn region_of<'a>(
    regions: &'a [RegionWeight],
    locality: &Locality,
) -> Option<(usize, &'a RegionWeight)> {
    regions.iter().enumerate().find(|(_, one)| matches_locality(&one.region, locality))
}

pub(super) fn matches_locality(pattern: &RegionPattern, locality: &Locality) -> bool {
    pattern.matches(&locality.region, &locality.zone, &locality.subzone)
}

impl TrafficRule {
    /// Returns the scopes in which endpoints are preferred. Weights of regions imply that near
    /// endpoints are not.
    pub(super) fn preferences(&self) -> Option<&'static [Scope]> {
        let named: Option<&[Scope]> = self.distribution.map(|named| match named {
            Distribution::Close => &[Scope::Network, Scope::Region, Scope::Zone][..],
            Distribution::Network => &[Scope::Network],
            Distribution::Region => &[Scope::Network, Scope::Region],
            Distribution::Any => &[],
        });
        named.or_else(|| has_weights(&self.regions).then_some(&[]))
    }
}

/// Returns whether weights distribute tunnels rather than only evacuate regions. Localities that no
/// pattern matches are then excluded.
pub(super) fn has_weights(regions: &[RegionWeight]) -> bool {
    regions.iter().any(|region| region.weight > 0)
}

impl Traffic {
    pub fn of(entries: &[TrafficRule]) -> Self {
        let mut traffic = Self::default();
        for entry in entries {
            let mut rule = entry.clone();
            // The most specific pattern of a locality counts.
            rule.regions.sort_by_key(|one| Reverse(one.region.part_count()));
            match &entry.service {
                Some(host) => {
                    traffic.services.entry(host.as_str().into()).or_default().push(rule);
                }
                None => traffic.default_rule = rule,
            }
        }
        traffic
    }

    /// Returns the rules of services by hostname, with the rule for every service.
    #[cfg(test)]
    pub fn new(
        services: impl IntoIterator<Item = (Arc<str>, TrafficRule)>,
        every: TrafficRule,
    ) -> Self {
        let services = services.into_iter();
        let services =
            services.map(|(host, rule)| TrafficRule { service: Some(host.to_string()), ..rule });
        Self::of(&services.chain([every]).collect::<Vec<_>>())
    }

    /// Returns the rule of the service of a namespace by its hostname, or of an alias. A service of
    /// an unknown namespace has no rule that is limited to a namespace.
    pub(super) fn rule(&self, host: &str, namespace: &str) -> Option<&TrafficRule> {
        let known = Some(namespace).filter(|of| *of != UNKNOWN_NAMESPACE);
        self.services.get(host)?.iter().find(|rule| {
            let mut namespaces = rule.namespace.iter().chain(&rule.alias_namespaces);
            rule.namespace.is_none() || namespaces.any(|only| Some(&**only) == known)
        })
    }
}

impl Balancing {
    /// Returns whether endpoints of a service get a PROXY header before the bytes of a peer of a
    /// TLS listener. The name is its hostname, or an alias.
    pub fn sends_proxy_header(&self, host: &str, namespace: &str) -> bool {
        let own = self.traffic.rule(host, namespace).and_then(|own| own.proxy_protocol);
        own.or(self.traffic.default_rule.proxy_protocol) == Some(ProxyProtocol::V2)
    }
}

pub fn is_service(service: &mesh::Service, target: &DrainTarget) -> bool {
    let DrainTarget::Service(name) = target else {
        return false;
    };
    let hostname = name.strip_prefix(&*service.namespace).and_then(|rest| rest.strip_prefix('/'));
    **name == *service.hostname || hostname == Some(&*service.hostname)
}

impl Drained {
    pub fn now(is_persisted: bool) -> Self {
        Self { since: SystemTime::now(), is_persisted }
    }
}

impl Balancing {
    /// Returns the evacuated part of the mesh that a workload or gateway belongs to.
    pub(super) fn evacuated_with(&self, workload: &Workload) -> Option<&DrainTarget> {
        self.evacuated.keys().find(|target| is_part_of(workload, target))
    }

    /// Returns the evacuated address of an endpoint, or of a gateway of another network, which has
    /// no workload with its address. One address of a dual-stack gateway is enough.
    pub(super) fn evacuated_address(
        &self,
        address: SocketAddr,
        remote: Option<&RemoteGateway>,
    ) -> Option<&DrainTarget> {
        let find = |target| self.evacuated.get_key_value(&target).map(|(target, _)| target);
        let others = remote.into_iter().flat_map(|remote| remote.other_addresses.iter().copied());
        iter::once(address).chain(others).find_map(|address| {
            let gateway = remote.map(|_| DrainTarget::Gateway(address));
            find(DrainTarget::Address(address.ip())).or_else(|| find(gateway?))
        })
    }

    pub(super) fn drained_service(&self, service: &mesh::Service) -> Option<&DrainTarget> {
        self.evacuated.keys().find(|target| is_service(service, target))
    }

    pub(super) fn with_changes(
        &self,
        position: Option<Position>,
        traffic: Option<Traffic>,
        order: Option<Override>,
    ) -> Self {
        let mut next = self.clone();
        next.position = position.unwrap_or(next.position);
        next.traffic = traffic.unwrap_or(next.traffic);
        match order {
            Some(Override::Drain(target, new)) => {
                next.evacuated.entry(target).or_insert(new).is_persisted |= new.is_persisted;
            }
            Some(Override::Restore(target)) => drop(next.evacuated.remove(&target)),
            None => {}
        }
        next
    }

    /// Returns a copy with the rules of one host alone, for those that keep it while the rules of
    /// others change.
    pub(super) fn only(&self, host: &str) -> Self {
        let own = self.traffic.services.get_key_value(host);
        let services = own.map(|(host, rules)| (Arc::clone(host), rules.clone()));
        let traffic = Traffic {
            services: services.into_iter().collect(),
            default_rule: self.traffic.default_rule.clone(),
        };
        let (position, evacuated) = (self.position.clone(), self.evacuated.clone());
        Self { position, traffic, evacuated }
    }

    /// Returns true if a host has rules of its own.
    pub(super) fn has_rules_of(&self, host: &str) -> bool {
        self.traffic.services.contains_key(host)
    }

    /// Returns a copy with the locality of the gateway's own workload, or `None` if nothing
    /// changes. Workloads of a mesh as received keep their uids. If the workload
    /// is removed, its last locality stays.
    pub(super) fn with_own_locality(&self, received: &Mesh) -> Option<Self> {
        let own = received.workloads.get(&**self.position.own_uid.as_ref()?)?;
        let is_new =
            *own.locality != self.position.locality || *self.position.origin != *ORIGIN_MESH;
        if !is_new || *own.locality == Locality::default() {
            return None;
        }
        let mut next = self.clone();
        next.position.locality = Locality::clone(&own.locality);
        next.position.origin = ORIGIN_MESH.into();
        Some(next)
    }

    /// Returns the drained parts of the mesh, without listeners, which have no endpoints.
    fn drained_parts(&self) -> impl Iterator<Item = &DrainTarget> {
        self.evacuated.keys().filter(|target| !matches!(target, DrainTarget::Listener(_)))
    }

    /// Returns whether the endpoints of a service must be rebuilt because the inputs differ from
    /// `before`.
    pub(super) fn differs(&self, before: &Self, host: &str) -> bool {
        let (now, then) = (&self.traffic, &before.traffic);
        self.position.cluster != before.position.cluster
            || self.position.locality != before.position.locality
            || !self.drained_parts().eq(before.drained_parts())
            || now.services.get(host) != then.services.get(host)
            || now.default_rule != then.default_rule
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::mesh::{Template, Workload};
    use crate::snapshot::tests::region_weights;

    #[test]
    fn a_drained_listener_rebuilds_no_service() {
        let drained = |kind, name| {
            let target = DrainTarget::parse(kind, name).expect("a target");
            Balancing { evacuated: [(target, Drained::now(false))].into(), ..Balancing::default() }
        };
        let none = Balancing::default();
        assert!(!drained("listener", "a").differs(&none, "echo.app"));
        assert!(drained("cluster", "west").differs(&none, "echo.app"));
    }

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
            assert_eq!(spill.capacity(100, count), part, "{spill} {count:?}");
        }
        assert_eq!(Spill::by_factor(140).to_string(), "71%");
        assert_eq!(Spill::default().to_string(), "70%");
    }

    #[test]
    fn a_gateway_is_drained_by_each_of_its_addresses_and_not_by_the_uid_of_its_record() {
        let [first, other]: [SocketAddr; 2] =
            ["[2001:db8::1]:15008", "192.0.2.1:15008"].map(|address| address.parse().unwrap());
        let gateway = RemoteGateway {
            network: "west".into(),
            cluster: "west".into(),
            identities: [].into(),
            other_addresses: [other].into(),
        };
        let uid = "NetworkGateway/west/192.0.2.1/15008";
        for (kind, name, is_drained) in [
            ("gateway", "[2001:db8::1]:15008", true),
            ("gateway", "192.0.2.1:15008", true),
            ("gateway", "192.0.2.1:15009", false),
            ("endpoint", "192.0.2.1", true),
            ("endpoint", uid, false),
        ] {
            let target = DrainTarget::parse(kind, name).unwrap();
            let evacuated = Drains::from([(target.clone(), Drained::now(false))]);
            let balancing = Balancing { evacuated, ..Balancing::default() };
            let found = balancing.evacuated_address(first, Some(&gateway));
            assert_eq!(found.is_some(), is_drained, "{target}");
            let record = Workload { uid: uid.into(), ..Workload::default() };
            assert!(balancing.evacuated_with(&record).is_none(), "{target}");
        }
    }

    #[test]
    fn a_rule_of_a_namespace_applies_to_its_services_only() {
        let rule = |namespace: Option<&str>, percent| TrafficRule {
            namespace: namespace.map(Into::into),
            spill_below: Some(percent),
            ..TrafficRule::default()
        };
        let rules = [
            ("a.global".into(), rule(Some("evil"), 1)),
            ("a.global".into(), rule(Some("app"), 2)),
            ("b.global".into(), rule(None, 3)),
            ("c.example.com".into(), rule(Some("unknown"), 4)),
        ];
        let traffic = Traffic::new(rules, TrafficRule::default());
        for (host, namespace, percent) in [
            ("a.global", "app", Some(2)),
            ("a.global", "evil", Some(1)),
            ("a.global", "other", None),
            ("b.global", "other", Some(3)),
            ("b.global", "unknown", Some(3)),
            ("c.example.com", "unknown", None),
        ] {
            let spill = traffic.rule(host, namespace).and_then(|rule| rule.spill_below);
            assert_eq!(spill, percent, "{host} of {namespace}");
        }
    }

    #[test]
    fn of_two_patterns_the_more_special_one_says_the_weight() {
        let weights = [("*", 1), ("us-west-2", 2), ("us-west-2/us-west-2a", 3)];
        let regions = Traffic::new([], region_weights(&weights)).default_rule.regions;
        let weight = |region: &str, zone: &str| {
            let locality =
                Locality { region: region.into(), zone: zone.into(), ..Locality::default() };
            region_of(&regions, &locality).expect("a region").1.weight
        };
        assert_eq!(weight("us-west-2", "us-west-2a"), 3);
        assert_eq!(weight("us-west-2", "us-west-2b"), 2);
        assert_eq!(weight("us-east-2", "us-west-2a"), 1);
        assert_eq!(weight("", ""), 1);
    }

    #[test]
    fn the_locality_of_the_own_workload_replaces_that_of_the_pod_and_outlives_it() {
        let at =
            |zone: &str| Locality { region: "us".into(), zone: zone.into(), ..Locality::default() };
        let mesh = |locality: Locality| {
            let own = Workload {
                uid: "own".into(),
                template: Template { locality: Arc::new(locality), ..Template::default() }.into(),
                ..Workload::default()
            };
            Mesh::new([], [own])
        };
        let mut balancing = Balancing::default();
        balancing.position.locality = at("a");
        assert_eq!(balancing.with_own_locality(&mesh(at("b"))), None, "nobody asks");
        balancing.position.own_uid = Some("own".into());
        assert_eq!(balancing.with_own_locality(&mesh(Locality::default())), None);
        assert_eq!(balancing.with_own_locality(&Mesh::default()), None);
        let located = balancing.with_own_locality(&mesh(at("b"))).expect("a locality");
        assert_eq!(located.position.locality, at("b"));
        assert_eq!(*located.position.origin, *ORIGIN_MESH);
        assert_eq!(located.with_own_locality(&mesh(at("b"))), None, "nothing changes");
        assert_eq!(located.with_own_locality(&Mesh::default()), None);
        // The same place, but from a better source.
        assert!(balancing.with_own_locality(&mesh(at("a"))).is_some());
    }
}
