//! Sources: what resources are charged to.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, LazyLock};

use foldhash::fast::FixedState;

/// Secret of the hashes of sources: peers choose a part of their names.
static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// Map by source. The hash in each source is secret, so a fixed hash of that is enough.
pub type SourceMap<V> = HashMap<Source, V, FixedState>;

/// Node of the tree of sources. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source(Arc<Node>);

#[derive(Debug, PartialEq, Eq)]
struct Node {
    /// Hash of the other fields. A connection looks its sources up a dozen times.
    hash: u64,
    parent: Option<Source>,
    name: Name,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum Name {
    Cluster(Arc<str>),
    Identity(Arc<str>),
    Prefix(IpAddr),
    Binding(Arc<str>),
    Balancers,
}

impl Hash for Source {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl Source {
    fn new(parent: Option<&Self>, name: Name) -> Self {
        let parent = parent.cloned();
        let hash = HASHES.hash_one((&parent, &name));
        Self(Arc::new(Node { hash, parent, name }))
    }

    /// Returns the source of all identities of a cluster.
    pub fn cluster(cluster: &Arc<str>) -> Self {
        Self::new(None, Name::Cluster(Arc::clone(cluster)))
    }

    /// Returns the source of one identity: a verified peer of a cluster, a first peer of a cluster
    /// behind a gateway, or a client of a binding.
    pub fn identity(&self, principal: &Arc<str>) -> Self {
        Self::new(Some(self), Name::Identity(Arc::clone(principal)))
    }

    /// Returns the source of all first peers of a cluster that the gateway with this identity
    /// forwards.
    pub fn behind(&self, cluster: &Arc<str>) -> Self {
        Self::new(Some(self), Name::Cluster(Arc::clone(cluster)))
    }

    /// Returns the source of a client without an identity: one IPv4 address, or one IPv6 /64.
    pub fn prefix(address: IpAddr) -> Self {
        Self::new(None, Name::Prefix(prefix(address)))
    }

    /// Returns the source of all clients of a binding.
    pub fn binding(name: &Arc<str>) -> Self {
        Self::new(None, Name::Binding(Arc::clone(name)))
    }

    /// Returns the source of all load balancers, for connections whose peer they have not stated.
    pub fn balancers() -> Self {
        Self::new(None, Name::Balancers)
    }

    /// Returns the source of a client of a binding without an identity.
    pub fn client(&self, address: IpAddr) -> Self {
        Self::new(Some(self), Name::Prefix(prefix(address)))
    }

    pub fn parent(&self) -> Option<&Self> {
        self.0.parent.as_ref()
    }

    /// Returns the outermost source that this one is a part of, or itself.
    pub fn root(&self) -> &Self {
        self.parent().map_or(self, Self::root)
    }

    /// Returns the part whose certificate or address was verified: a gateway for the first peers
    /// that it forwards, which it could invent, otherwise the source itself.
    pub fn verified(&self) -> &Self {
        match self.parent() {
            Some(parent) if parent.parent().is_some() => parent.verified(),
            _ => self,
        }
    }

    pub fn cluster_name(&self) -> Option<&Arc<str>> {
        match &self.0.name {
            Name::Cluster(name) => Some(name),
            _ => None,
        }
    }

    pub fn principal(&self) -> Option<&Arc<str>> {
        match &self.0.name {
            Name::Identity(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the address of [`Self::prefix`] or [`Self::client`].
    pub fn address(&self) -> Option<IpAddr> {
        match &self.0.name {
            Name::Prefix(address) => Some(*address),
            _ => None,
        }
    }

    /// Returns the `cluster` label of what the source holds. Only clusters of peers have one each,
    /// because the configuration bounds their number. None if it is counted with its parent.
    pub(super) fn metric_cluster(&self) -> Option<&str> {
        match (&self.0.name, self.parent()) {
            (Name::Cluster(name), None) => Some(name),
            (Name::Cluster(_), Some(_)) => Some("first_peers"),
            (Name::Prefix(_), None) => Some("prefixes"),
            (Name::Binding(_), None) => Some("bindings"),
            (Name::Balancers, _) => Some("balancers"),
            (Name::Identity(_) | Name::Prefix(_) | Name::Binding(_), _) => None,
        }
    }

    /// Returns whether the source is all clients of a binding.
    pub fn is_binding(&self) -> bool {
        matches!(self.0.name, Name::Binding(_))
    }

    /// Returns whether the source is all load balancers.
    pub fn is_balancers(&self) -> bool {
        matches!(self.0.name, Name::Balancers)
    }

    /// Returns whether the source consists of others.
    pub(super) fn is_group(&self) -> bool {
        matches!(self.0.name, Name::Cluster(_) | Name::Binding(_) | Name::Balancers)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.name {
            Name::Cluster(name) => write!(f, "cluster {name}")?,
            Name::Identity(name) => write!(f, "identity {name}")?,
            Name::Prefix(address) if address.is_ipv6() => write!(f, "source {address}/64")?,
            Name::Prefix(address) => write!(f, "source {address}")?,
            Name::Binding(name) => write!(f, "binding {name}")?,
            Name::Balancers => write!(f, "load balancers without a PROXY header yet")?,
        }
        match self.parent() {
            Some(binding) if binding.is_binding() => {
                write!(f, " of {binding}")
            }
            Some(gateway) if !gateway.is_group() => write!(f, " behind {gateway}"),
            // The name of the cluster is in the identity.
            Some(cluster) => match cluster.parent() {
                Some(gateway) => write!(f, " behind {gateway}"),
                None => Ok(()),
            },
            None => Ok(()),
        }
    }
}

/// Returns the prefix that stands for a host: one IPv4 address, or an IPv6 /64, as a host has a
/// whole /64.
pub fn prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
    }
}
