//! Mesh as received from a discovery source, before it is built into a snapshot.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::{self, DerefMut};
use std::sync::{Arc, OnceLock};

use derive_more::{Deref, Display};
use serde::Serialize;

use super::shards::Shards;
pub use crate::config::Locality;
use crate::status::{PodName, WorkloadLabels};

/// Namespace of services whose source has none. A rule that is limited to a
/// namespace does not apply to them.
pub const UNKNOWN_NAMESPACE: &str = "unknown";

/// Complete state of a discovery source.
///
/// Copies are cheap. A source keeps its state and passes on a copy of it. The builder finds
/// changes by comparing the parts that two meshes do not share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mesh {
    pub services: Shards<Arc<str>, Arc<Service>>,
    /// Workloads, local and remote, by uid.
    pub workloads: Shards<Arc<str>, Arc<Workload>>,
    /// True if endpoints without HBONE are skipped, as under Istio (docs/wire-contract.md 1.8).
    /// There a peer sends bytes for a ztunnel, which the application cannot read.
    pub hbone_only: bool,
}

impl Mesh {
    /// Returns a mesh of these services and workloads, without policies.
    pub fn new(
        services: impl IntoIterator<Item = Service>,
        workloads: impl IntoIterator<Item = Workload>,
    ) -> Self {
        let services = services.into_iter();
        let services = services.map(|service| (service.key().into(), Arc::new(service)));
        let workloads = workloads.into_iter().map(|one| (Arc::clone(&one.uid), Arc::new(one)));
        Self { services: services.collect(), workloads: workloads.collect(), ..Self::default() }
    }
}

/// Map of few entries in one allocation, in the order of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sorted<K, V>(Box<[(K, V)]>);

impl<K: Ord, V> Sorted<K, V> {
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let found = self.0.binary_search_by(|(own, _)| own.borrow().cmp(key));
        self.0.get(found.ok()?).map(|(_, value)| value)
    }

    /// Returns true if there is an entry for the key.
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there is no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// Returns all values.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K, V> Default for Sorted<K, V> {
    fn default() -> Self {
        Self(Box::default())
    }
}

#[cfg(test)]
impl<K: Ord, V> ops::Index<&K> for Sorted<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        self.get(key).expect("an entry")
    }
}

/// Collects entries. The last of several entries with one key wins.
impl<K: Ord, V> FromIterator<(K, V)> for Sorted<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Vec::from_iter(entries).into()
    }
}

/// Not generic over an iterator: each instance of a sort is 7 KB of code.
impl<K: Ord, V> From<Vec<(K, V)>> for Sorted<K, V> {
    fn from(mut entries: Vec<(K, V)>) -> Self {
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

pub type PodLabels = Sorted<Arc<str>, Arc<str>>;

/// Service port to target port.
pub type Ports = Sorted<u16, u16>;

impl Ports {
    pub fn to_map(&self) -> BTreeMap<u16, u16> {
        self.0.iter().copied().collect()
    }
}

/// Service (Istio's WDS `Service`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    /// Hostname, in lower case and without a trailing dot.
    pub hostname: Arc<str>,
    /// Virtual addresses, each with its network.
    pub vips: Vec<(String, IpAddr)>,
    /// Service port to target port. Target 0 means that each workload names its own.
    pub ports: BTreeMap<u16, u16>,
    /// Identities to accept at the endpoints besides the workloads' own.
    pub subject_alt_names: Vec<String>,
    /// Waypoints that traffic has to pass, if any.
    pub waypoints: Vec<Waypoint>,
    /// True if traffic from an ingress gateway has to pass the waypoints, too.
    pub ingress_use_waypoint: bool,
    /// Preferences for endpoints, in order; `None` if the source states none. An empty list is the
    /// statement that there are none (`Any` of Kubernetes objects).
    pub preferences: Option<Vec<Scope>>,
    /// True if endpoints that miss a preference are never used (mode STRICT). Otherwise they are
    /// the fallback.
    pub strict: bool,
    /// True if unhealthy endpoints may be used (`healthPolicy: AllowAll`).
    pub allow_unhealthy: bool,
    /// True if the service only passes original destinations through.
    pub passthrough: bool,
    /// True if this definition wins over others of the same hostname.
    pub canonical: bool,
    /// True if only clients of its namespace see it.
    pub private: bool,
    /// Load balancing of each port, from an Envoy control plane.
    pub assignments: BTreeMap<u16, Arc<Assignment>>,
}

impl Service {
    /// Returns `namespace/hostname`, by which workloads refer to the service.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.hostname)
    }
}

/// Load balancing of a service port from an Envoy control plane, beyond the fields of WDS
/// (`ClusterLoadAssignment` and its cluster).
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// `policy.overprovisioning_factor` in percent. A priority, or a locality with a weight,
    /// spills over to the next if its ready part times this factor is below the whole. Envoy's
    /// default is 140.
    pub overprovisioning: u32,
    /// True if locality weights apply (`locality_weighted_lb_config`). Otherwise endpoints of a
    /// priority are weighted individually.
    pub by_locality: bool,
    /// Weight of each locality of each priority. A locality that is not listed gets no traffic if
    /// locality weights apply.
    pub localities: Vec<LocalityWeight>,
    /// Categories of dropped tunnels (`policy.drop_overloads`), each with its rate per million
    /// tunnels that earlier categories have left.
    pub drops: Vec<(Arc<str>, u32)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct LocalityWeight {
    pub priority: u32,
    pub locality: Locality,
    /// Weight among the localities of the priority.
    pub weight: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waypoint {
    pub gateway: GatewayAddress,
    /// Weight among all waypoints of the service; 0 is never picked.
    pub weight: u32,
}

/// Location of a gateway or a waypoint, with its HBONE port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GatewayAddress {
    pub place: Place,
    pub port: u16,
}

#[derive(Clone, Debug, Display, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// `namespace/hostname` of a service, or of a workload with a DNS name.
    Name(String),
    #[display("{_0}/{_1}")]
    Address(String, IpAddr),
}

/// Attribute that a gateway and an endpoint can have in common.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, PartialOrd, Ord)]
#[display(rename_all = "lowercase")]
pub enum Scope {
    Region,
    Zone,
    Subzone,
    Node,
    Cluster,
    Network,
}

/// Workload (Istio's WDS `Workload`).
///
/// A mesh has many workloads. Fields that the pods of one Deployment have in common are in its
/// [`Template`], which a workload dereferences to.
#[derive(Clone, Debug, Default, Deref, PartialEq)]
pub struct Workload {
    /// Unique id within the mesh.
    pub uid: Arc<str>,
    /// Name, or `None` if it is the part of the uid after the last slash.
    pub own_name: Option<Arc<str>>,
    pub node: Arc<str>,
    pub addresses: Addresses,
    pub healthy: bool,
    /// Weight; 0 drains it.
    pub capacity: u32,
    /// Priority in an Envoy assignment, 0 being the first to be used; 0 everywhere else.
    pub priority: u32,
    /// True if it is used only when no better endpoint can take a tunnel (Envoy's DEGRADED).
    pub degraded: bool,
    /// Gateway of the remote network through which it is reached.
    pub network_gateway: Option<Arc<GatewayAddress>>,
    /// For each `namespace/hostname`, service port to target port.
    pub services: Services,
    /// Fields that it may have in common with workloads of other services, too.
    #[deref(forward)]
    pub template: Arc<Template>,
}

const _: () = assert!(size_of::<Workload>() <= 112, "with two counts, a size class of jemalloc");

/// Addresses of a workload. A single one takes no allocation.
#[derive(Clone, derive_more::Debug, PartialEq, Eq)]
#[debug("{:?}", &**self)]
pub struct Addresses(AddressList);

#[derive(Clone, PartialEq, Eq)]
enum AddressList {
    One(IpAddr),
    /// None, or several.
    Other(Box<[IpAddr]>),
}

impl ops::Deref for Addresses {
    type Target = [IpAddr];

    fn deref(&self) -> &[IpAddr] {
        match &self.0 {
            AddressList::One(address) => std::slice::from_ref(address),
            AddressList::Other(addresses) => addresses,
        }
    }
}

impl From<&[IpAddr]> for Addresses {
    fn from(addresses: &[IpAddr]) -> Self {
        Self(match addresses {
            [address] => AddressList::One(*address),
            addresses => AddressList::Other(addresses.into()),
        })
    }
}

impl<const N: usize> From<[IpAddr; N]> for Addresses {
    fn from(addresses: [IpAddr; N]) -> Self {
        addresses[..].into()
    }
}

impl FromIterator<IpAddr> for Addresses {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        addresses.into_iter().collect::<Vec<_>>()[..].into()
    }
}

impl Default for Addresses {
    fn default() -> Self {
        Self(AddressList::Other(Box::default()))
    }
}

/// Services of a workload, shared by workloads with equal ones: for each `namespace/hostname`,
/// service port to target port.
#[derive(Clone, Debug, Default, Deref, PartialEq, Eq)]
pub struct Services(#[deref(forward)] pub Arc<Sorted<Arc<str>, Ports>>);

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
    pub namespace: Arc<str>,
    pub service_account: Arc<str>,
    pub trust_domain: Arc<str>,
    pub cluster: Arc<str>,
    /// Network of its addresses; empty means ours.
    pub network: Arc<str>,
    /// DNS name instead of an address.
    pub hostname: Arc<str>,
    pub protocol: Protocol,
    /// Region, zone and subzone that it runs in.
    pub locality: Arc<Locality>,
    /// Name of the Deployment, Job or other owner.
    pub workload_name: Arc<str>,
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
    /// Labels of its pods, of sources that give them. Subsets select by them.
    pub pod_labels: PodLabels,
    /// Labels of its workloads in metrics and logs.
    pub labels: Derived<WorkloadLabels>,
}

/// Value derived from the fields beside it and computed on first use. Comparisons and copies
/// ignore it.
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

impl PodName for Workload {
    fn pod_name(&self) -> &str {
        self.name()
    }
}

/// Gives a workload a template of its own on write, so other workloads keep theirs.
impl DerefMut for Workload {
    fn deref_mut(&mut self) -> &mut Template {
        let template = Arc::make_mut(&mut self.template);
        template.labels = Derived::default();
        template
    }
}

impl Workload {
    pub fn name(&self) -> &str {
        let last = || self.uid.rsplit('/').next();
        self.own_name.as_deref().or_else(last).unwrap_or_default()
    }

    /// Returns the value of `own_name` for a name. It is `None`, and takes no memory, if the uid
    /// ends in the name.
    pub fn own_name(uid: &Arc<str>, name: &str) -> Option<Arc<str>> {
        if uid.rsplit('/').next() == Some(name) {
            return None;
        }
        // A split-horizon record is named by its uid.
        Some(if **uid == *name { Arc::clone(uid) } else { name.into() })
    }
}

impl Template {
    /// Returns the labels in metrics and logs.
    pub fn labels(&self) -> &Arc<WorkloadLabels> {
        let labels = || WorkloadLabels {
            workload: self.workload_name.to_string(),
            namespace: self.namespace.to_string(),
            principal: if self.service_account.is_empty() {
                // EDS does not send the service account.
                String::new()
            } else {
                self.principal().concat()
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

#[derive(Clone, Copy, Debug, Default, Display, PartialEq, Eq, Hash, Serialize)]
#[display(rename_all = "UPPERCASE")]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// Plain TCP at the target port.
    #[default]
    Tcp,
    /// HBONE at port 15008. The inner CONNECT, which we do not see, names the target port.
    Hbone,
}

impl Template {
    /// Returns the parts of its identity, `spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT`.
    pub fn principal(&self) -> [&str; 6] {
        let (domain, namespace) = (&self.trust_domain, &self.namespace);
        ["spiffe://", domain, "/ns/", namespace, "/sa/", &self.service_account]
    }
}
