//! Target of a CONNECT, and the reset of a tunnel that is rejected after its answer.

use crate::wire::Authority;

/// Reset code of a tunnel that was answered and then rejected. It is the same for all reasons, to
/// disclose nothing to the peer (RFC 9113 section 8.5, docs/wire-contract.md 1.5).
pub const REJECTED_TUNNEL_RESET: h2::Reason = h2::Reason::CONNECT_ERROR;

/// Target of a tunnel.
#[derive(Debug)]
pub struct Target {
    pub(crate) authority: Authority,
    pub(crate) origin: Origin,
    pub(crate) forwarded: Option<Box<Forwarded>>,
}

/// Headers for the gateways of other networks, as received.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    /// `x-strait-via`: gateways that the tunnel has passed.
    pub via: Option<Box<[u8]>>,
    /// `x-strait-source`: identity of the first peer, trusted only from `trust.gateways`.
    pub source: Option<Box<[u8]>>,
    /// `baggage`.
    pub baggage: Option<Box<[u8]>>,
    /// `traceparent`.
    pub traceparent: Option<Box<[u8]>>,
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
    /// An ingress gateway.
    Gateway,
}
