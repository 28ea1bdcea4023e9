//! Data path: the stages that forward every byte. ARCHITECTURE.md lists them with their outputs.
//!
//! [`serve`] runs stages 2 and 3 of an HBONE listener, and [`forward`] all later ones. Stages 2 to
//! 4 of a TLS listener run in [`passthrough`]. Connections of a binding go from stage 1 to
//! [`forward::binding`], which runs stages 2 and 3 of clients with an identity. `explain` calls
//! the functions that decide about tunnels, and dials nothing. A stage depends only on the stages
//! before it. The data path reads snapshots and does not depend on their sources.

// Stages, in travel order.
pub mod binding;
pub mod listener;

pub mod accept;
pub mod handshake;

pub mod balancer;
pub mod identity;

pub mod http2;

pub mod client_hello;
pub mod passthrough;

pub mod first_peer;
pub mod route;

pub mod transit;

pub mod policy;

pub mod balance;

pub mod authorize;
pub mod dial;

pub mod copy;

// Functions that run the stages.
pub mod forward;
pub mod serve;

// Mechanisms.
pub mod io;
pub mod limits;

use std::sync::Arc;

use crate::lifecycle::Lifecycle;
use crate::limits::turns::WorkerTime;
use crate::outer::{AddressFilter, Pool};
use crate::snapshot::{LinkFactors, Reader};
use crate::telemetry::Metrics;
use crate::tls::InboundTls;

#[derive(Debug)]
pub struct DataPath {
    pub reader: Reader,
    /// TLS configuration of HBONE listeners, replaced when certificates or trust change.
    pub tls: Arc<InboundTls>,
    /// Connections to gateways of other networks.
    pub outer: Pool,
    pub metrics: Arc<Metrics>,
    /// Phases of a drain, and its tasks.
    pub lifecycle: Lifecycle,
    /// Limits for unauthenticated clients.
    pub admission: limits::admission::Admission,
    /// Limit of bytes that all tunnels hold.
    pub budget: Arc<limits::budget::BufferBudget>,
    /// Retirement of the connections of peers; none if none are retired.
    pub aging: Option<Arc<limits::aging::Aging>>,
    /// Time of the workers that clusters have used, and their weights.
    pub turns: Arc<WorkerTime>,
    /// Addresses that are never dialled.
    pub deny: Arc<dial::DenyList>,
}

impl DataPath {
    /// Creates the state, with the pool and the byte budget that follow from its other parts.
    /// `buffers` limits the bytes that all tunnels hold.
    pub fn new(
        reader: Reader,
        tls: InboundTls,
        metrics: Arc<Metrics>,
        lifecycle: Lifecycle,
        admission: limits::admission::Admission,
        buffers: usize,
        deny: dial::DenyList,
    ) -> Self {
        let tls = Arc::new(tls);
        let limit = metrics.set_buffer_limit(buffers);
        let deny = Arc::new(deny);
        let filter = AddressFilter::new({
            let deny = Arc::clone(&deny);
            move |address| deny.check(address)
        });
        let outer = Pool::new(
            Arc::clone(&tls),
            reader.clone(),
            lifecycle.clone(),
            filter,
            Arc::clone(admission.pool.pool()),
        );
        Self {
            outer,
            budget: Arc::new(limits::budget::BufferBudget::new(buffers, limit)),
            reader,
            tls,
            metrics,
            lifecycle,
            admission,
            aging: None,
            turns: Arc::default(),
            deny,
        }
    }

    fn link_factors(&self, peer: &identity::Peer) -> LinkFactors {
        LinkFactors::of_peer(&self.metrics.budgets.reduced(), &peer.source.counted_cluster)
    }
}

#[cfg(test)]
pub(crate) mod tests;
