//! Immutable view of the mesh and its rules, read by the data path and replaced as a whole.
//!
//! The control path builds a [`Snapshot`] from the mesh, the trust set and the exposure table
//! ([`builder`]) and publishes it through the [`Publisher`]. The data path and the admin pages hold
//! a [`Reader`]. Nothing here does I/O. State that outlives a snapshot, such as the number of
//! tunnels in flight to an endpoint, is in [`EndpointState`], which the next snapshot takes over.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use tokio::sync::watch;

mod alias_table;
pub mod authorization;
mod bindings;
pub mod builder;
mod clusters_behind;
mod endpoint;
mod endpoints;
mod exclusion;
mod expiring;
mod exposure;
mod hosts;
mod index;
mod link_factors;
mod lookup;
mod members;
pub mod mesh;
mod names;
mod networks;
mod pick_probability;
mod policies;
mod precedence;
mod recent_sources;
mod remote;
mod remote_gateways;
mod remote_instances;
mod required_hosts;
mod service;
mod service_limits;
mod services;
mod set_health;
mod shards;
mod subset;
#[cfg(test)]
pub(crate) mod tests;
mod tiers;
pub mod traffic;
mod trust;
mod update;

pub use bindings::BoundEndpoints;
pub use endpoint::{Endpoint, EndpointState, InFlight};
pub use endpoints::{
    Candidate, EndpointSet, FACTOR_ONE, Group, Groups, LINK_FACTOR_ONE, Part, Tier,
};
pub use exclusion::ExclusionReason;
pub use exposure::{
    Audience, ExportSet, ExposedBy, Exposure, ExposureTable, ServiceVisibility, TransitRule,
};
pub use hosts::{Answer, Host, Hosts, RefreshRequests};
pub use link_factors::{LinkFactors, NO_LINK_FACTORS};
pub use lookup::{
    LookupResult, MatchedBy, Requested, ServicePort, exclusion_reason, location_exclusion,
};
pub use mesh::{Locality, Protocol};
pub use names::{Alias, NameTable};
pub use networks::{Network, NetworkTable, gateway_record};
pub use pick_probability::{Load, pick_probabilities};
pub use policies::{Enforcement, Policies, PolicyRejection, Verdict as PolicyVerdict};
pub use precedence::{Collision, lowest_rank};
pub use recent_sources::SourceHash;
pub use remote::{ExpectedWorkloads, RemoteGateway};
pub use required_hosts::WantedHost;
pub use service::{LazySet, Service, TransitSets};
pub use service_limits::{ServiceLimits, TunnelCount};
pub use set_health::{DialAdmission, Probe};
pub use shards::Shards;
pub use subset::{Subset, SubsetPart};
pub use trust::{Caller, PeerCluster, TrustSet};

use index::Index;
use precedence::claim::VipClaim;
use traffic::Balancing;

/// Consistent view of the mesh and of the peers that may reach its services.
///
/// A clone shares all data. The next snapshot shares everything that has not changed.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Number of changes so far.
    pub version: u64,
    /// Number of changes that can revoke the permit of an open tunnel. These are changes of trust,
    /// exposure, names, exports, scope, policies, their enforcement or selection, waypoints,
    /// identities, the visibility of services, gateways of other networks, and listener rules.
    /// Each one makes open tunnels be evaluated again.
    pub generation: u64,
    /// Trust domains and issuers, with their clusters.
    pub trust: Arc<TrustSet>,
    /// Peers that may reach each service, and the names that they may use.
    pub exposure: Arc<ExposureTable>,
    pub names: Arc<NameTable>,
    /// Services exported by the control plane; empty if there is none.
    pub exports: Arc<ExportSet>,
    /// Services that are exported or kept local by separate objects, and the linked clusters.
    pub scope: Arc<ServiceVisibility>,
    pub policies: Arc<Policies>,
    /// Enforcement mode of `policies`.
    pub enforcement: Enforcement,
    /// Inputs of load balancing other than the mesh.
    pub balancing: Arc<Balancing>,
    /// The same without the rules of single services.
    common_balancing: Arc<Balancing>,
    /// Other networks by the configuration.
    pub networks: Arc<NetworkTable>,
    /// Mesh for the builder and the admin pages, as received except that a workload with a hostname
    /// appears once per resolved address.
    pub mesh: mesh::Mesh,
    /// Hostnames of workloads, with their addresses.
    pub hosts: Hosts,
    pub services: Shards<Arc<str>, Arc<Service>>,
    /// Services derived from aliases with several targets or a region, by label.
    pub derived_services: Shards<Arc<str>, Arc<Service>>,
    /// Services of this network that claim each VIP, in order of rank.
    vips: Shards<IpAddr, Arc<[VipClaim]>>,
    /// True if services also have endpoints for TLS listeners, which few gateways need.
    pub has_passthrough: bool,
    index: Index,
}

impl Snapshot {
    /// Returns the network whose endpoints are local.
    pub fn network(&self) -> &str {
        &self.index.network
    }

    /// Returns whether the cluster of `caller` is linked. A caller without a cluster, as on TLS
    /// listeners, passes: other rules decide about it.
    pub fn is_linked(&self, caller: Caller<'_>) -> bool {
        let cluster = self.trust.cluster(caller);
        let linked = self.scope.linked.as_ref();
        cluster.zip(linked).is_none_or(|(own, linked)| linked.contains(own))
    }
}

/// Read handle of the data path: the current snapshot and notifications of a new generation.
#[derive(Clone, Debug)]
pub struct Reader {
    current: Arc<ArcSwap<Snapshot>>,
    generation: watch::Receiver<u64>,
    refresh_requests: Arc<RefreshRequests>,
}

impl Reader {
    /// Returns the current snapshot for a lookup that ends before the next await.
    pub fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// Returns an owned reference to the current snapshot.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Requests a refresh of the hostname from which `endpoint` has its address, because the
    /// address does not answer. Does nothing for an endpoint without a hostname.
    pub fn request_refresh(&self, endpoint: &Endpoint) {
        if !endpoint.definition.hostname.is_empty() {
            self.refresh_requests.push(&endpoint.definition.hostname);
        }
    }

    /// Returns a receiver that reports changes of the generation from now on.
    pub fn generation(&self) -> watch::Receiver<u64> {
        let mut receiver = self.generation.clone();
        receiver.mark_unchanged();
        receiver
    }
}

/// Write handle of the control path: builds and swaps snapshots, from an empty one, which exposes
/// nothing and trusts no peer.
#[derive(Debug, Default)]
pub struct Publisher {
    current: Arc<ArcSwap<Snapshot>>,
    generation: watch::Sender<u64>,
    hosts: watch::Sender<u64>,
    refresh_requests: Arc<RefreshRequests>,
    /// Replaced snapshots that the data path still reads. Holding them here keeps the cost of
    /// freeing them off the tunnels. The lock serializes updates, so that each one builds on the
    /// one before.
    retired: Mutex<Vec<Arc<Snapshot>>>,
}

impl Publisher {
    pub fn reader(&self) -> Reader {
        Reader {
            current: Arc::clone(&self.current),
            generation: self.generation.subscribe(),
            refresh_requests: Arc::clone(&self.refresh_requests),
        }
    }

    /// Returns a receiver that reports changes of the hostnames to resolve.
    pub fn hosts_version(&self) -> watch::Receiver<u64> {
        self.hosts.subscribe()
    }

    pub fn refresh_requests(&self) -> &RefreshRequests {
        &self.refresh_requests
    }

    /// Makes every open tunnel be evaluated again although the snapshot is the same. Used when the
    /// certificate of a peer is no longer trusted.
    pub fn reevaluate_tunnels(&self) {
        self.generation.send_modify(|_| ());
    }

    /// Builds the next snapshot from the current one and swaps it in.
    ///
    /// Notifies open tunnels only after the swap, so that they are evaluated by the new rules.
    pub fn update(&self, change: builder::Change) {
        let Ok(()) = self.update_if(change, |_, _| Ok::<_, Infallible>(()));
    }

    /// Updates as [`Self::update`] does, but only if `check` accepts the next snapshot. `check`
    /// gets the current snapshot and the next one. No other change can come between `check` and the
    /// swap.
    ///
    /// # Errors
    /// Returns the error of `check`; the current snapshot stays.
    pub fn update_if<T, E>(
        &self,
        change: builder::Change,
        check: impl FnOnce(&Snapshot, &Snapshot) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut old = self.retired.lock();
        let current = self.current.load_full();
        let next = builder::build(&current, change);
        let checked = check(&current, &next)?;
        drop(current);
        let (generation, hosts) = (next.generation, next.hosts.version);
        old.push(self.current.swap(Arc::new(next)));
        for (channel, now) in [(&self.generation, generation), (&self.hosts, hosts)] {
            channel.send_if_modified(|seen| std::mem::replace(seen, now) != now);
        }
        old.retain(|snapshot| Arc::strong_count(snapshot) > 1);
        Ok(checked)
    }
}
