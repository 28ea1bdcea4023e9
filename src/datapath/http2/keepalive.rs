//! HTTP/2 PINGs, which detect a dead peer.

use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{sleep, timeout};

/// Pause between PINGs, the same as in ztunnel and Istio's Envoy on both sides.
const INTERVAL: Duration = Duration::from_secs(10);
/// Deadline for an answer. A peer that stops for 10 s is kept; a dead one is detected within 30 s.
const ANSWER: Duration = Duration::from_secs(20);

/// Pings the peer, and returns once it no longer answers.
///
/// Never returns without `pings`, which h2 returns once per connection.
pub async fn wait_for_dead_peer(pings: Option<PingPong>) {
    let Some(mut pings) = pings else {
        return std::future::pending().await;
    };
    loop {
        sleep(INTERVAL).await;
        match timeout(ANSWER, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) | Err(_) => return,
        }
    }
}
