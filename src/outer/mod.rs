//! HBONE connections to the gateways of other networks, and tunnels through them.
//!
//! [`Pool`] shares connections between the tunnels of one source: `gateway` keeps those to one
//! gateway, `sources` divides them, and `connection` opens and watches one. `probe` finds out the
//! state of gateways without connections. `ranks` compares the
//! round trip times of gateways, `rtt` keeps that of a gateway. `request` asks for a tunnel,
//! [`Stream`] is an open one, and `unread` keeps what it has received. `outcome` maps a
//! rejection to the header `x-strait-outcome` and back. [`open_inner`] opens an HBONE connection
//! to a workload inside a tunnel. `verify` checks the servers of both.

mod connection;
mod gateway;
mod inner;
mod pool;
mod probe;
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
pub(crate) use connection::CONNECT_DEADLINE;
#[cfg(test)]
pub(crate) use gateway::CONNECTION_WAIT_MAX;
pub use inner::{InnerTarget, open_inner};
pub use pool::Pool;
pub use probe::{Reached, reach, run as run_probes};
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

/// Check of the addresses of gateways before they are dialled.
#[derive(Clone, derive_more::Debug)]
#[debug("AddressFilter")]
pub struct AddressFilter(Arc<dyn Fn(SocketAddr) -> Result<(), Failure> + Send + Sync>);

impl AddressFilter {
    /// Creates a filter that admits the addresses which `check` accepts.
    pub fn new(check: impl Fn(SocketAddr) -> Result<(), Failure> + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }

    fn check(&self, address: SocketAddr) -> Result<(), Failure> {
        (self.0)(address)
    }
}

/// Failure to open a tunnel. No byte of the tunnel was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub reason: Reason,
    /// Explanation, with the address or the answer.
    pub detail: String,
}

impl Failure {
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { reason, detail }
    }

    /// Returns the failure with its place before the explanation.
    fn at(self, place: impl fmt::Display) -> Self {
        Self { detail: format!("{place}: {}", self.detail), ..self }
    }

    /// Returns true if the gateway could not be reached, is another one, or rejected us.
    fn is_of_gateway(&self) -> bool {
        matches!(
            self.reason,
            Reason::GatewayUnreachable | Reason::GatewayUntrusted | Reason::PeerRejectedUs
        )
    }
}

/// Cause for which a gateway opened no tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The gateway has failed, which the source of the tunnel alone cannot cause.
    Gateway(Failure),
    /// Any other cause.
    Tunnel(Failure),
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Gateway(failure) | OpenError::Tunnel(failure) => failure,
        }
    }
}
