//! HBONE connections to the gateways of other networks, and tunnels through them.
//!
//! [`Pool`] shares connections between the tunnels of one source: `gateway` keeps those to one
//! gateway, `sources` divides them, and `connection` opens and watches one. `ranks` compares the
//! round trip times of gateways, `rtt` keeps that of a gateway. `request` asks for a tunnel,
//! [`Stream`] is an open one, and `unread` keeps what it has received. `outcome` maps a
//! rejection to the header `x-strait-outcome` and back. [`open_inner`] opens an HBONE connection
//! to a workload inside a tunnel. `verify` checks the servers of both.

mod connection;
mod gateway;
mod inner;
mod outcome;
mod pool;
mod ranks;
mod request;
mod rtt;
mod sources;
mod stream;
#[cfg(test)]
pub(crate) mod tests;
mod unread;
mod verify;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::RemoteGateway;

#[cfg(test)]
pub(crate) use gateway::{CONNECT_DEADLINE, CONNECTION_WAIT_MAX};
pub use inner::{InnerTarget, open_inner};
pub use outcome::{OUTCOME_HEADER, outcome_of};
pub use pool::Pool;
#[cfg(test)]
pub(crate) use ranks::Ranks;
pub use request::{Answer, Request, SOURCE_HEADER};
#[cfg(test)]
pub(crate) use rtt::MinRtt;
pub use stream::{Servers, Stream};
pub use verify::{ExpectedWorkloads, ServerIdentity};

/// Gateway with the addresses by which it is dialled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// First address of its HBONE port.
    pub address: SocketAddr,
    /// The gateway, as its certificate has to confirm it, with its other addresses.
    pub gateway: Arc<RemoteGateway>,
}

impl Target {
    /// Returns all addresses, in the order in which they are tried.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        let others = self.gateway.other_addresses.iter().copied();
        std::iter::once(self.address).chain(others)
    }
}

/// Addresses of gateways that are not dialled.
#[derive(Clone)]
pub struct AddressFilter(Arc<dyn Fn(SocketAddr) -> bool + Send + Sync>);

impl fmt::Debug for AddressFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AddressFilter")
    }
}

impl AddressFilter {
    /// Creates a filter of the addresses for which `is_denied` returns true.
    pub fn new(is_denied: impl Fn(SocketAddr) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(is_denied))
    }

    fn has(&self, address: SocketAddr) -> bool {
        (self.0)(address)
    }
}

/// Failure to open a tunnel. No byte of the tunnel was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Reason.
    pub reason: Reason,
    /// Explanation, with the address or the answer.
    pub detail: String,
}

impl Failure {
    /// Creates a failure.
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { reason, detail }
    }
}
