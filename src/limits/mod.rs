//! Ledger of sources: what each source holds of the bounded resources, and its credit.
//!
//! A source is what a resource is charged to (docs/decisions/0022-one-ledger-of-sources.md). A
//! pool divides one resource among the sources that hold some of it. A rate is credit over time.

mod places;
mod pool;
mod rate;
mod source;
pub mod turns;

use thiserror::Error;

use crate::labels::labelled;

pub use self::places::{Place, Places};
pub use self::pool::{Account, Held, OwnedPool, Pool, Terms};
pub use self::rate::{Rate, Rates};
pub use self::source::{Source, SourceMap, prefix};

labelled! {
    /// Resource that sources hold. Its label is also the metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Resource {
        /// File descriptors of connections and tunnels.
        Descriptors = "descriptors",
        /// Open tunnels, which have a limit only as descriptors.
        Tunnels = "tunnels",
        /// TLS handshakes in flight.
        Handshakes = "handshakes",
        /// Bytes that wait for slow readers.
        BufferedBytes = "buffered_bytes",
        /// TCP and TLS connections to endpoints that are not established yet.
        Dials = "dials",
        /// Connections to the gateways of other networks.
        GatewayConnections = "gateway_connections",
        /// Tunnels on the connections to one gateway of another network.
        GatewayTunnels = "gateway_tunnels",
        /// Tunnels to one service.
        ServiceTunnels = "service_tunnels",
        BindingClients = "binding_clients",
        /// TCP clients of the DNS responder.
        DnsClients = "dns_clients",
    }
}

impl Resource {
    /// Returns the amount that a cluster, an identity, a prefix, or a cluster behind a gateway may
    /// hold regardless of others.
    pub const fn floor(self) -> usize {
        match self {
            // A connection, and some tunnels.
            Self::Descriptors | Self::GatewayTunnels => 8,
            // The buffers of one tunnel in both directions.
            Self::BufferedBytes => 256 * 1024,
            Self::Dials | Self::Handshakes | Self::DnsClients => 4,
            Self::Tunnels
            | Self::GatewayConnections
            | Self::ServiceTunnels
            | Self::BindingClients => 1,
        }
    }
}

/// Cause for which no more of a resource is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LimitReached {
    /// The source, or a source above it, has used its share.
    #[error("the source has used its share of the {0}; see `strait status` for the holders")]
    Share(Resource),
    /// All sources together hold the maximum.
    #[error("the limit of the {0} is reached")]
    Full(Resource),
}

#[cfg(test)]
mod tests;
