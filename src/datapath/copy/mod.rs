//! Stage 10: copying of both directions of a tunnel, with exact TCP semantics.
//!
//! [`tcp`] copies the tunnels of TLS listeners, and [`local`] those of bindings. Those of streams
//! are copied by [`tunnel_copy`](super::forward::tunnel_copy), which uses [`backlog`] and
//! [`progress`].

pub mod backlog;
pub mod local;
pub mod progress;
pub mod tcp;

use std::time::Duration;

use tokio::time::Instant;

use crate::reason::Reason;

/// End of a tunnel.
#[derive(Debug)]
pub struct CopyOutcome {
    /// Clean end, or the reason for which the tunnel broke. The caller then resets both sides.
    pub result: Result<(), Reason>,
    /// Deadline for the endpoint to take what it was sent. `None` unless it was sent FIN and
    /// everything that the peer sent.
    pub delivery_deadline: Option<Instant>,
}

impl CopyOutcome {
    /// Returns the outcome of a tunnel that neither side ended.
    pub fn broken(reason: Reason) -> Self {
        Self { result: Err(reason), delivery_deadline: None }
    }
}

/// Time for an endpoint to take what a peer sent before it disconnected, until the endpoint's
/// kernel has acknowledged FIN.
pub const DELIVERY_DEADLINE: Duration = Duration::from_secs(30);

/// Deadline for the first byte of an endpoint that was sent a ClientHello. A TLS server answers at
/// once; later bytes may take any time.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// Detail of a tunnel whose endpoint has missed [`ANSWER_DEADLINE`].
pub const SILENT: &str = "the endpoint sent no byte within 5 s of the ClientHello";
