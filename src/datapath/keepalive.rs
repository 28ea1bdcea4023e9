//! HTTP/2 PINGs: how a peer that has gone without a word is noticed.

use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::time::{sleep, timeout};

/// Quiet time between PINGs, as ztunnel and Istio's Envoy have it on both sides.
const INTERVAL: Duration = Duration::from_secs(10);
/// The longest wait for an answer. A stopped peer of 10 s passes; a dead one is gone within 30 s.
const ANSWER: Duration = Duration::from_secs(20);

/// Pings the peer until it no longer answers, and then returns.
///
/// Without `pings` (h2 gives them out once per connection) it waits for ever.
pub async fn lost(pings: Option<PingPong>) {
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
