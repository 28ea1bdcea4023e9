//! End of an endpoint's side of a tunnel.

use tokio::time::Instant;

use crate::datapath::copy::CopyOutcome;
use crate::datapath::dial::Upstream;
use crate::datapath::{DataPath, balance};
use crate::reason::{Fault, Reason};

/// Updates the endpoint's health by the end of its tunnel.
///
/// `early` means that the tunnel was short and the endpoint sent nothing; `unprovoked` that the
/// peer sent nothing either, not even FIN. With both, a reset counts as a failed dial. No other
/// end does: a peer can provoke it by its bytes, and would eject the endpoint for all other
/// peers.
///
/// Provoked ends are not kept for the peer's own picks either. Envoy's outlier detection for TCP
/// and ztunnel have no such memory, and it would take a table of peers and endpoints.
pub(super) fn update_endpoint_health(
    gateway: &DataPath,
    upstream: &Upstream,
    outcome: &CopyOutcome,
    early: bool,
    unprovoked: bool,
) {
    let endpoint = upstream.grant.endpoint();
    if outcome.result == Err(Reason::UpstreamReset) {
        if early && unprovoked {
            balance::eject_after_failure(&upstream.endpoints, endpoint, &gateway.metrics);
        }
    } else if !early && !matches!(outcome.result, Err(why) if why.blame() == Fault::Upstream) {
        endpoint.state.restore(Instant::now());
    }
}

/// Closes the endpoint's side: by RST, unless the endpoint was sent everything.
pub(super) async fn close(upstream: Upstream, outcome: &CopyOutcome) {
    // The socket was dialled with zero linger, so every other close is an RST.
    if let Some(deadline) = outcome.delivery_deadline {
        match outcome.result {
            Ok(()) => upstream.stream.close(),
            // Data that the endpoint still sends has no reader. Closing at once would send RST,
            // and revoke what the endpoint has not acknowledged yet.
            Err(_) => upstream.stream.deliver(deadline).await,
        }
    }
}
