//! Target of a CONNECT.

use crate::wire::Authority;

#[derive(Debug)]
pub struct Target {
    pub(crate) authority: Authority,
    pub(crate) origin: Origin,
    pub(crate) forwarded: Option<Box<Forwarded>>,
}

/// Headers for the gateways of other networks, as received. A comma joins the lines of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// `x-strait-via`: gateways that the tunnel has passed.
    pub via: Option<Vec<u8>>,
    /// `x-strait-source`: identity of the first peer, trusted only from `trust.gateways`.
    pub source: Option<Vec<u8>>,
    pub baggage: Option<Vec<u8>>,
    pub traceparent: Option<Vec<u8>>,
}

impl Target {
    /// Returns the headers for gateways of other networks.
    pub fn forwarded(&self) -> Option<&Forwarded> {
        self.forwarded.as_deref()
    }
}

/// Origin of a tunnel as claimed by the peer. Any peer can claim it; the route decides whether
/// it is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A workload: the header is absent or unknown.
    Workload,
    /// A waypoint, which has already applied its policies.
    Waypoint,
    Gateway,
}
