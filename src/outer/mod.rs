//! HBONE connections to the gateways of other networks, and tunnels through them.
//!
//! [`Pool`] shares connections between tunnels: `gateway` keeps those to one gateway, `connection`
//! opens and watches one. `request` asks for a tunnel, [`Stream`] is an open one, and `outcome` is
//! what gateways tell each other about a rejection.

mod connection;
mod gateway;
mod outcome;
mod pool;
mod request;
mod stream;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;

use crate::reason::Reason;
use crate::snapshot::RemoteGateway;

pub use outcome::{OUTCOME_HEADER, outcome_of};
pub use pool::Pool;
pub use request::{Request, SOURCE_HEADER};
pub use stream::Stream;

/// Gateway with the address by which it is dialled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Address of its HBONE port.
    pub address: SocketAddr,
    /// The gateway, as its certificate has to confirm it.
    pub gateway: Arc<RemoteGateway>,
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
    fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let detail = detail.into();
        Self { reason, detail }
    }
}
