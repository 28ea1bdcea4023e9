//! What the data path reads: plain immutable data, swapped whole.
//!
//! The control path builds a [`Snapshot`] from the mesh, the trust set and the exposure table
//! ([`builder`]) and publishes it through the [`Publisher`]; the data path and the admin pages
//! hold a [`Reader`]. Nothing here does I/O. What lives longer than one snapshot, such as an
//! endpoint's tunnels in flight, hangs off [`EndpointState`] and is carried over.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard};
use tokio::sync::watch;

pub mod authorization;
pub mod builder;
mod derived;
mod endpoint;
mod endpoints;
mod exposure;
mod hosts;
mod identities;
mod index;
mod lookup;
mod lots;
mod members;
pub mod mesh;
#[cfg(test)]
mod model;
mod names;
mod odds;
mod opened;
mod policies;
mod precedence;
mod scope;
mod shards;
mod tiers;
pub mod traffic;
mod trust;
mod usable;
mod wanted;
mod waypoints;

pub use endpoint::{Endpoint, EndpointState, InFlight};
pub use endpoints::{Candidate, EndpointSet, Group, Groups, Part, Tier};
pub use exposure::{Audience, Caller, ExportSet, Exposure, ExposureTable, Verdict};
pub use hosts::{Answer, Doubts, Host, Hosts};
pub use lookup::{Found, Means};
pub use mesh::{Locality, Protocol};
pub use names::{Alias, NameTable, Target};
pub use odds::{Load, odds};
pub use policies::{Enforcement, Policies, Refusal, Verdict as PolicyVerdict};
pub use precedence::Collision;
pub use scope::Scope;
pub use shards::Shards;
pub use trust::{PeerCluster, TrustSet};
pub use usable::{Unused, unused};

use index::Index;
use precedence::VipClaim;
use traffic::Balancing;

/// One consistent view of the mesh and of who may reach what in it.
///
/// A copy shares everything, and the next snapshot all that has not changed.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Counts every change.
    pub version: u64,
    /// Moves only when trust, exposure, exports, scope, policies, what they select, waypoints,
    /// identities or the rules of a listener change: open tunnels are judged anew then.
    pub generation: u64,
    /// The trust domains, and the clusters that these or the issuers stand for.
    pub trust: Arc<TrustSet>,
    /// Who may reach which service under which name.
    pub exposure: Arc<ExposureTable>,
    /// The other names of services.
    pub names: Arc<NameTable>,
    /// What the control plane exports; empty where there is none.
    pub exports: Arc<ExportSet>,
    /// What is exported or kept local by objects of its own, and which clusters are linked.
    pub scope: Arc<Scope>,
    /// Istio's authorization policies.
    pub policies: Arc<Policies>,
    /// What is done about them.
    pub enforcement: Enforcement,
    /// What decides beside the mesh which endpoints are picked.
    pub balancing: Arc<Balancing>,
    /// The mesh as the source told it, for the builder and the admin pages. Workloads that it
    /// knows by a hostname stand there once for each address.
    pub mesh: mesh::Mesh,
    /// Those hostnames.
    pub hosts: Hosts,
    /// Services by hostname.
    pub services: Shards<Arc<str>, Arc<Service>>,
    /// What stands in the place of a service for aliases of several, or of a region, by what it is
    /// called.
    pub derived: Shards<Arc<str>, Arc<Service>>,
    /// The services of this network that claim each VIP, the one of the best rank first.
    vips: Shards<IpAddr, Arc<[VipClaim]>>,
    /// Whether services have endpoints for TLS listeners too, which few gateways need.
    pub direct: bool,
    index: Index,
}

impl Snapshot {
    /// The network whose endpoints are local.
    pub fn network(&self) -> &str {
        &self.index.network
    }
}

impl Snapshot {
    /// Whether tunnels from the cluster of `caller` may come here at all. One without a cluster,
    /// as on TLS listeners, is judged by other rules alone.
    pub fn is_linked(&self, caller: Caller<'_>) -> bool {
        let cluster = self.trust.cluster(caller);
        let linked = self.scope.linked.as_ref();
        cluster
            .zip(linked)
            .is_none_or(|(own, linked)| linked.contains(own))
    }
}

/// A service and the endpoints that this gateway may dial for it.
#[derive(Debug)]
pub struct Service {
    /// The service's name.
    pub name: Arc<str>,
    /// Its namespace.
    pub namespace: Arc<str>,
    /// The hostname by which peers ask for it.
    pub hostname: Arc<str>,
    /// The service as the source told of it.
    pub definition: Arc<mesh::Service>,
    /// The endpoints of each service port, as HBONE listeners dial them. Of a service behind a
    /// waypoint they are for tunnels that come from there.
    pub ports: HashMap<u16, Arc<EndpointSet>>,
    /// The same for TLS listeners, always at the target port (contract 10, Dialling); empty where
    /// there is no such listener.
    pub direct: HashMap<u16, Arc<EndpointSet>>,
}

/// The data path's handle: reads the current snapshot and learns when rights may have changed.
#[derive(Clone, Debug)]
pub struct Reader {
    current: Arc<ArcSwap<Snapshot>>,
    generation: watch::Receiver<u64>,
    doubts: Arc<Doubts>,
}

impl Reader {
    /// The current snapshot, for a look-up that ends before the next await.
    pub fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// The current snapshot, for as long as it is wanted.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Asks to look the hostname up again that `endpoint` has its address from, if it has: the
    /// address does not answer.
    pub fn doubt(&self, endpoint: &Endpoint) {
        if !endpoint.definition.hostname.is_empty() {
            self.doubts.note(&endpoint.definition.hostname);
        }
    }

    /// A receiver that changes whenever the generation does from now on.
    pub fn generation(&self) -> watch::Receiver<u64> {
        let mut receiver = self.generation.clone();
        receiver.mark_unchanged();
        receiver
    }
}

/// The control path's handle: swaps snapshots.
#[derive(Debug)]
pub struct Publisher {
    current: Arc<ArcSwap<Snapshot>>,
    generation: watch::Sender<u64>,
    hosts: watch::Sender<u64>,
    doubts: Arc<Doubts>,
    /// Of two changes at once the second is built upon the first. What the data path still reads
    /// stays here, so that it never falls to a tunnel to free what only an old snapshot had.
    old: Mutex<Vec<Arc<Snapshot>>>,
}

impl Publisher {
    /// A publisher of an empty snapshot, which exposes nothing and trusts nobody.
    pub fn new() -> Self {
        Self {
            current: Arc::new(ArcSwap::from_pointee(Snapshot::default())),
            generation: watch::Sender::new(0),
            hosts: watch::Sender::new(0),
            doubts: Arc::default(),
            old: Mutex::default(),
        }
    }

    /// A reader of what this publisher publishes.
    pub fn reader(&self) -> Reader {
        Reader {
            current: Arc::clone(&self.current),
            generation: self.generation.subscribe(),
            doubts: Arc::clone(&self.doubts),
        }
    }

    /// A receiver that changes whenever there are other hostnames to look up.
    pub fn hosts(&self) -> watch::Receiver<u64> {
        self.hosts.subscribe()
    }

    /// The hostnames that are to be looked up again.
    pub fn doubts(&self) -> &Doubts {
        &self.doubts
    }

    /// Has every open tunnel judged again, though the snapshot is the same: the certificate of a
    /// peer is not trusted any more.
    pub fn rejudge(&self) {
        self.generation.send_modify(|_| ());
    }

    /// Builds the next snapshot from the current one and swaps it in.
    ///
    /// Open tunnels are told only after the swap, so that they are judged by the new rules.
    pub fn update(&self, change: builder::Change) {
        let Ok(()) = self.update_if(change, |_, _| Ok::<_, Infallible>(()));
    }

    /// As [`Self::update`], if `judge` accepts the next snapshot. It is given the current snapshot
    /// first. No other change comes between the judgement and the swap.
    ///
    /// # Errors
    /// The error of `judge`; the current snapshot stays.
    pub fn update_if<T, E>(
        &self,
        change: builder::Change,
        judge: impl FnOnce(&Snapshot, &Snapshot) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut old = self.old.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.current.load_full();
        let next = builder::build(&current, change);
        let judged = judge(&current, &next)?;
        drop(current);
        let (generation, hosts) = (next.generation, next.hosts.version);
        old.push(self.current.swap(Arc::new(next)));
        for (told, now) in [(&self.generation, generation), (&self.hosts, hosts)] {
            told.send_if_modified(|seen| std::mem::replace(seen, now) != now);
        }
        old.retain(|snapshot| Arc::strong_count(snapshot) > 1);
        Ok(judged)
    }
}

impl Default for Publisher {
    fn default() -> Self {
        Self::new()
    }
}
