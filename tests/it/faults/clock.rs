//! Wall clocks that are set while the gateway runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use strait::tools::hbone::Client;

use super::{all_whole, start};
use crate::support::clock::Clock;
use crate::support::oracle::{Oracle, Plan};
use crate::support::{
    CLIENT, ECHO, GATEWAY, Gateway, Net, Settings, endpoint_port, identities, run, until,
};

#[test]
fn a_clock_that_is_set_ends_no_open_tunnel_and_is_obeyed_by_new_ones() {
    let Some(clock) = Clock::new("clock jumps") else {
        return;
    };
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.inside = clock.enter();
        let gateway = Gateway::start(&settings).await;
        let oracle = Oracle::new();
        let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
        let before = gateway.client(identities()).await;
        let rest = Duration::from_millis(100);
        // Three quarters of a minute, during all of what follows.
        let plans = [1, 2].map(|id| Plan { rest, ..Plan::both(id, 450 * 16 * 1024) });
        let tunnels = start(&before, &plans).await;

        // Within the validity of all certificates nothing changes.
        for offset in ["+3h", "-30s"] {
            clock.set(offset);
            whole(&oracle, &before).await;
            whole(&oracle, &gateway.client(identities()).await).await;
        }
        // Past it, and before it, nobody is admitted, and the gateway is not ready.
        for offset in ["+40d", "-40d"] {
            clock.set(offset);
            let tls = identities().client(CLIENT, GATEWAY);
            // In TLS 1.3 a client learns after its handshake that its certificate is refused.
            if let Ok(client) = Client::connect(gateway.address, &tls).await {
                client.tunnel(ECHO).await.expect_err("certificates that are not valid");
            }
            let ready = async || gateway.readiness().await;
            until("an end of readiness", ready, |(status, _)| *status != 200).await;
            clock.set("+0");
            until("readiness", ready, |(status, _)| *status == 200).await;
            whole(&oracle, &gateway.client(identities()).await).await;
        }
        all_whole(&oracle, tunnels).await;
    });
}

/// Opens a tunnel with a few bytes, which arrive.
async fn whole(oracle: &Oracle, client: &Client) {
    static NEXT: AtomicU64 = AtomicU64::new(10);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    all_whole(oracle, start(client, &[Plan::both(id, 1000)]).await).await;
}
