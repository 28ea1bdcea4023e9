//! Data path: the stages that forward every byte, in travel order.
//!
//! | stage | file | from | to |
//! |---|---|---|---|
//! | 1 | `accept` | a listening socket | [`AcceptedConnection`](accept::AcceptedConnection) |
//! | 2 | `handshake` | `Accepted` | [`Session`](handshake::Session) |
//! | 3 | `identity` | `Session`'s certificate | [`Peer`](identity::Peer) |
//! | 4 | `connect` | HTTP/2 over the `Session` | [`Target`](tunnel::Target) |
//! | 2 to 4 | `passthrough` | `Accepted` by a TLS listener | [`ClientHello`](hello::ClientHello)
//! and `Target` |
//! | 5 | `route` | `Peer` × `Target` × snapshot | [`Route`](route::Route) |
//! | 6 | `policy` | `Peer` × `Route` | [`Permit`](policy::Permit) |
//! | 7 | `balance` | `Permit` | [`Pick`](balance::Pick) |
//! | 8 | `authorize` | `Peer` × `Pick` | [`Authorized`](authorize::Authorized) |
//! | 9 | `dial` | `Authorized` | [`Upstream`](dial::Upstream) |
//! | 10 | `copy` | tunnel and `Upstream` | [`Reason`](crate::reason::Reason) |
//!
//! [`serve`] runs stages 2 to 4 and [`forward`] stages 5 to 10, each as one function. Only they
//! and [`explain`], which dials nothing, call these stages. A stage depends only on the stages
//! before it. The data path reads snapshots and does not depend on their sources.

pub mod accept;
pub mod admission;
pub mod authorize;
pub mod balance;
pub mod budget;
pub mod buffer;
pub mod connect;
pub mod copy;
pub mod dial;
pub mod explain;
pub mod forward;
pub mod gate;
pub mod handshake;
pub mod hello;
pub mod hellos;
pub mod identity;
pub mod keepalive;
pub mod linger;
pub mod listener;
pub mod meter;
pub mod passthrough;
pub mod pipe;
pub mod policy;
pub mod pool;
pub mod readahead;
pub mod route;
pub mod seal;
pub mod seam;
pub mod serve;
pub mod tunnel;
pub mod unsent;
pub mod window;

use std::sync::Arc;

use crate::lifecycle::Lifecycle;
use crate::snapshot::Reader;
use crate::telemetry::Metrics;
use crate::tls::InboundTls;

/// State that all connections of the data path share.
#[derive(Debug)]
pub struct DataPath {
    /// Reader of the current snapshot.
    pub reader: Reader,
    /// TLS configuration of HBONE listeners, replaced when certificates or trust change.
    pub tls: InboundTls,
    /// Metrics of the process.
    pub metrics: Arc<Metrics>,
    /// Phases of a drain, and its tasks.
    pub lifecycle: Lifecycle,
    /// Limits for unauthenticated clients.
    pub admission: admission::Admission,
    /// Limit of bytes that all tunnels hold.
    pub budget: Arc<budget::BufferBudget>,
    /// Addresses that are never dialled.
    pub deny: dial::DenyList,
}

#[cfg(test)]
mod chi_square;
#[cfg(test)]
mod shares;
#[cfg(test)]
mod tests;
