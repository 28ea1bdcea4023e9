//! Every byte that we forward, in travel order.
//!
//! | stage | file | from | to |
//! |---|---|---|---|
//! | 1 | `accept` | a listening socket | [`Accepted`](accept::Accepted) |
//! | 2 | `handshake` | `Accepted` | [`Session`](handshake::Session) |
//! | 3 | `identity` | `Session`'s certificate | [`Peer`](identity::Peer) |
//! | 4 | `connect` | HTTP/2 over the `Session` | [`Target`](tunnel::Target) |
//! | 2 to 4 | `passthrough` | `Accepted` by a TLS listener | [`Hello`](hello::Hello) and `Target` |
//! | 5 | `route` | `Peer` × `Target` × snapshot | [`Route`](route::Route) |
//! | 6 | `policy` | `Peer` × `Route` | [`Permit`](policy::Permit) |
//! | 7 | `balance` | `Permit` | [`Pick`](balance::Pick) |
//! | 8 | `authorize` | `Peer` × `Pick` | [`Authorized`](authorize::Authorized) |
//! | 9 | `dial` | `Authorized` | [`Upstream`](dial::Upstream) |
//! | 10 | `copy` | tunnel and `Upstream` | [`Reason`](crate::reason::Reason) |
//!
//! [`serve`] is stages 1 to 4 and [`forward`] stages 5 to 10, each as one function. No other file
//! calls stages but [`explain`], which dials nobody, and a stage knows only the stages before it.
//! The data path reads snapshots; it never knows where they come from.

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
use crate::tls::Inbound;

/// What every connection of the data path shares.
#[derive(Debug)]
pub struct Gateway {
    /// The current snapshot.
    pub reader: Reader,
    /// The TLS side of HBONE listeners, swapped when certificates or trust change.
    pub tls: Inbound,
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
    /// The phases of a drain, and its tasks.
    pub lifecycle: Lifecycle,
    /// How much strangers may take.
    pub admission: admission::Admission,
    /// How much all tunnels may hold.
    pub budget: Arc<budget::Budget>,
    /// The addresses that are never dialled.
    pub deny: dial::DenyList,
}

#[cfg(test)]
mod chi_square;
#[cfg(test)]
mod shares;
#[cfg(test)]
mod tests;
