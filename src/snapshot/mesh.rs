//! The mesh as a discovery source tells it, before it is turned into what the data path reads.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use serde::Serialize;

use super::shards::Shards;
use crate::status::{PodName, WorkloadLabels};

/// Everything that a discovery source knows.
///
/// A copy costs next to nothing: a source that tells of changes keeps what it knows beside each
/// mesh, and what has changed from one to the next is found by what they do not share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mesh {
    /// The services, by `namespace/hostname`.
    pub services: Shards<Arc<str>, Arc<Service>>,
    /// The workloads, local and remote, by uid.
    pub workloads: Shards<Arc<str>, Arc<Workload>>,
    /// Whether endpoints without HBONE are passed over, as under Istio (docs/wire-contract.md 1.8):
    /// there a peer's bytes are for a ztunnel and mean nothing to the application.
    pub hbone_only: bool,
}

impl Mesh {
    /// A mesh of these services and workloads, without policies.
    pub fn new(
        services: impl IntoIterator<Item = Service>,
        workloads: impl IntoIterator<Item = Workload>,
    ) -> Self {
        let services = services.into_iter().map(|service| {
            let name = format!("{}/{}", service.namespace, service.hostname);
            (name.into(), Arc::new(service))
        });
        let workloads = workloads.into_iter();
        let workloads = workloads.map(|one| (Arc::clone(&one.uid), Arc::new(one)));
        Self {
            services: services.collect(),
            workloads: workloads.collect(),
            ..Self::default()
        }
    }
}

/// A map of few entries, side by side in the order of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sorted<K, V>(Box<[(K, V)]>);

impl<K: Ord, V> Sorted<K, V> {
    /// What stands under a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let found = self.0.binary_search_by(|(own, _)| own.borrow().cmp(key));
        self.0.get(found.ok()?).map(|(_, value)| value)
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All entries.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// All keys.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K, V> Default for Sorted<K, V> {
    fn default() -> Self {
        Self(Box::default())
    }
}

/// Of several entries with one key the last one counts.
impl<K: Ord, V> FromIterator<(K, V)> for Sorted<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut entries: Vec<(K, V)> = entries.into_iter().collect();
        entries.sort_by(|(one, _), (other, _)| one.cmp(other));
        entries.dedup_by(|later, kept| {
            let is_same = later.0 == kept.0;
            if is_same {
                std::mem::swap(later, kept);
            }
            is_same
        });
        Self(entries.into())
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for Sorted<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

/// Service port to target port.
pub type Ports = Sorted<u16, u16>;

/// A service (Istio's WDS `Service`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    /// The service's name.
    pub name: Arc<str>,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// Its hostname, in lower case and without a last dot.
    pub hostname: Arc<str>,
    /// Its virtual addresses by network.
    pub vips: Vec<(String, IpAddr)>,
    /// Service port to target port; target 0 means that each workload names its own.
    pub ports: BTreeMap<u16, u16>,
    /// Identities to accept at the endpoints besides the workloads' own.
    pub subject_alt_names: Vec<String>,
    /// The waypoints that traffic has to go through, if there are any.
    pub waypoints: Vec<Waypoint>,
    /// Whether traffic that comes from an ingress gateway has to do so too.
    pub ingress_use_waypoint: bool,
    /// What endpoints are preferred for, the first preference first; empty where the mode of
    /// balancing ranks nothing.
    pub preferences: Vec<Scope>,
    /// Whether endpoints that miss a preference are not used at all (mode STRICT), instead of
    /// only when there is no other.
    pub strict: bool,
    /// Whether unhealthy endpoints may be used (`healthPolicy: AllowAll`).
    pub allow_unhealthy: bool,
    /// Whether the service only passes original destinations through.
    pub passthrough: bool,
    /// Whether this definition wins over others of the same hostname.
    pub canonical: bool,
    /// Whether only clients of its namespace see it.
    pub private: bool,
    /// How the endpoints of a port are balanced, where an Envoy control plane says so.
    pub assignments: BTreeMap<u16, Arc<Assignment>>,
}

/// What an Envoy control plane says of the balancing of a service's port and WDS does not
/// (`ClusterLoadAssignment` and its cluster).
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// `policy.overprovisioning_factor` in percent: a priority, or a locality with a weight, whose
    /// ready part times this is below the whole leaves the rest to the next ones. Envoy's default
    /// is 140.
    pub overprovisioning: u32,
    /// Whether the weights of localities count (`locality_weighted_lb_config`). Otherwise each
    /// endpoint of a priority has its own weight of it.
    pub by_locality: bool,
    /// The weight of each locality of each priority. One that is not named has none, and gets
    /// nothing where weights count.
    pub localities: Vec<(u32, Locality, u32)>,
    /// Why tunnels are refused, and how many of a million of those that the reasons before have
    /// left (`policy.drop_overloads`).
    pub drops: Vec<(Arc<str>, u32)>,
}

/// A waypoint of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waypoint {
    /// Where it is.
    pub gateway: GatewayAddress,
    /// Its share of the sum of all; 0 is never picked.
    pub weight: u32,
}

/// A gateway or a waypoint: where it is, and its port of HBONE.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayAddress {
    /// Where it is.
    pub place: Place,
    /// Its port of HBONE.
    pub port: u16,
}

/// Where a gateway is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// At a service or at a workload with a DNS name: `namespace/hostname`.
    Name(String),
    /// At an address in a network.
    Address(String, IpAddr),
}

/// What a gateway and an endpoint can have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The region.
    Region,
    /// The zone.
    Zone,
    /// The subzone.
    Subzone,
    /// The node.
    Node,
    /// The cluster.
    Cluster,
    /// The network.
    Network,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Region => "region",
            Self::Zone => "zone",
            Self::Subzone => "subzone",
            Self::Node => "node",
            Self::Cluster => "cluster",
            Self::Network => "network",
        })
    }
}

/// Workload (Istio's WDS `Workload`).
///
/// A mesh has many of them. Fields that the pods of one Deployment have in common are those of its
/// [`Template`], which can be read as fields of the workload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// Unique id within the mesh.
    pub uid: Arc<str>,
    /// Name, or none if it is the part of the uid after the last slash.
    pub own_name: Option<Arc<str>>,
    /// Node that it runs on.
    pub node: Arc<str>,
    /// Addresses.
    pub addresses: Box<[IpAddr]>,
    /// True if it is ready.
    pub healthy: bool,
    /// Weight; 0 drains it.
    pub capacity: u32,
    /// Priority in an Envoy assignment, 0 being the first to be used; 0 everywhere else.
    pub priority: u32,
    /// True if it is used only where no better endpoint can take a tunnel (Envoy's DEGRADED).
    pub degraded: bool,
    /// Gateway of another network through which it is reached.
    pub network_gateway: Option<Arc<GatewayAddress>>,
    /// For each `namespace/hostname`, service port to target port.
    pub services: Services,
    /// Fields that it may have in common with workloads of other services, too.
    pub template: Arc<Template>,
}

/// Services of a workload, shared by all workloads of the same: for each `namespace/hostname`,
/// service port to target port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Services(pub Arc<Sorted<Arc<str>, Ports>>);

impl Deref for Services {
    type Target = Sorted<Arc<str>, Ports>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl FromIterator<(Arc<str>, Ports)> for Services {
    fn from_iter<I: IntoIterator<Item = (Arc<str>, Ports)>>(entries: I) -> Self {
        Self(Arc::new(entries.into_iter().collect()))
    }
}

impl<const N: usize> From<[(Arc<str>, Ports); N]> for Services {
    fn from(entries: [(Arc<str>, Ports); N]) -> Self {
        entries.into_iter().collect()
    }
}

/// Fields that the pods of one Deployment in one zone have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Service account.
    pub service_account: Arc<str>,
    /// Trust domain.
    pub trust_domain: Arc<str>,
    /// Cluster that it runs in.
    pub cluster: Arc<str>,
    /// Network that its addresses belong to; empty means ours.
    pub network: Arc<str>,
    /// DNS name instead of an address.
    pub hostname: Arc<str>,
    /// Protocol by which it is dialled.
    pub protocol: Protocol,
    /// Region, zone and subzone that it runs in.
    pub locality: Arc<Locality>,
    /// Name of the Deployment, Job or the like that made it.
    pub workload_name: Arc<str>,
    /// Kind of what made it.
    pub workload_type: Arc<str>,
    /// `service.istio.io/canonical-name`.
    pub canonical_name: Arc<str>,
    /// `service.istio.io/canonical-revision`.
    pub canonical_revision: Arc<str>,
    /// True if it shares its node's address.
    pub host_network: bool,
    /// True if traffic to its own address has to go through a waypoint.
    pub has_waypoint: bool,
    /// Names, `namespace/name`, of the policies that select it.
    pub policies: Box<[Arc<str>]>,
    /// Labels of its workloads.
    pub labels: Derived<WorkloadLabels>,
}

/// Value that follows from the fields beside it, computed when it is first read. It counts neither
/// in comparisons nor in copies.
#[derive(Debug)]
pub struct Derived<T>(OnceLock<Arc<T>>);

impl<T> Default for Derived<T> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<T> Clone for Derived<T> {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl<T> PartialEq for Derived<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T> Eq for Derived<T> {}

impl Deref for Workload {
    type Target = Template;

    fn deref(&self) -> &Template {
        &self.template
    }
}

impl PodName for Workload {
    fn pod_name(&self) -> &str {
        self.name()
    }
}

/// Changes a template of its own: other workloads keep theirs.
impl DerefMut for Workload {
    fn deref_mut(&mut self) -> &mut Template {
        let template = Arc::make_mut(&mut self.template);
        template.labels = Derived::default();
        template
    }
}

impl Workload {
    /// Returns the name.
    pub fn name(&self) -> &str {
        let last = || self.uid.rsplit('/').next();
        self.own_name.as_deref().or_else(last).unwrap_or_default()
    }

    /// Returns `own_name` for a name: none, and so no memory, if the uid ends in it.
    pub fn own_name(uid: &Arc<str>, name: &str) -> Option<Arc<str>> {
        if uid.rsplit('/').next() == Some(name) {
            return None;
        }
        // The name of a split-horizon record is its uid.
        Some(match **uid == *name {
            true => Arc::clone(uid),
            false => name.into(),
        })
    }
}

impl Template {
    /// Returns the labels in metrics and logs.
    pub fn labels(&self) -> &Arc<WorkloadLabels> {
        let labels = || WorkloadLabels {
            workload: self.workload_name.to_string(),
            namespace: self.namespace.to_string(),
            principal: match self.service_account.is_empty() {
                // EDS does not send it.
                true => String::new(),
                false => self.principal().concat(),
            },
            cluster: self.cluster.to_string(),
            canonical_name: self.canonical_name.to_string(),
            canonical_revision: self.canonical_revision.to_string(),
            region: self.locality.region.to_string(),
            zone: self.locality.zone.to_string(),
        };
        self.labels.0.get_or_init(|| Arc::new(labels()))
    }
}

/// How an endpoint is dialled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// Plain TCP at the target port.
    #[default]
    Tcp,
    /// HBONE at port 15008; the inner CONNECT, which we do not see, names the target port.
    Hbone,
}

/// Where something runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Locality {
    /// The region, such as `us-east-2`.
    pub region: Arc<str>,
    /// The zone, such as `us-east-2a`.
    pub zone: Arc<str>,
    /// The subzone, such as a rack.
    pub subzone: Arc<str>,
}

impl Template {
    /// The parts of its identity, `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub fn principal(&self) -> [&str; 6] {
        let (domain, namespace) = (&self.trust_domain, &self.namespace);
        [
            "spiffe://",
            domain,
            "/ns/",
            namespace,
            "/sa/",
            &self.service_account,
        ]
    }
}
