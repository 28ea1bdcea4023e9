//! Gateway whose memory is limited by a real cgroup. No peer can get it killed.

use std::time::Duration;

use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::budget::{STREAMS, WIDEST, ask_for_more};
use crate::support::cgroup::{Cgroup, enter};
use crate::support::raw::RawPeer;
use crate::support::{
    ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, print_uncaptured,
    raise_descriptor_limit, run, until,
};

/// Limit in bytes, in the type of metrics.
const LIMIT: f64 = 128.0 * 1024.0 * 1024.0;
/// Tunnels of a connection: under the gateway's 256, so that none waits for another.
const TUNNELS: usize = 250;

/// Timeout, because a gateway that is killed may leave its clients without an answer.
const PATIENCE: Duration = Duration::from_secs(10);

async fn start(net: Net, cgroup: &Cgroup) -> Gateway {
    raise_descriptor_limit();
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.descriptors = 19_000;
    settings.inside = enter(&cgroup.path);
    Gateway::start(&settings).await
}

/// Opens tunnels until one is refused; returns those that are open.
async fn fill(client: &Client) -> Vec<strait::tools::hbone::Tunnel> {
    let mut tunnels = Vec::new();
    while tunnels.len() < TUNNELS {
        match timeout(PATIENCE, client.tunnel(ECHO)).await {
            Ok(Ok(tunnel)) => tunnels.push(tunnel),
            _ => break,
        }
    }
    tunnels
}

async fn connect(gateway: &Gateway, account: usize) -> Option<Client> {
    let id = format!("spiffe://west.local/ns/shop/sa/s{account}");
    let tls = identities().client(&id, GATEWAY);
    let connect = timeout(PATIENCE, Client::connect(gateway.address, &tls));
    connect.await.ok()?.ok()
}

async fn survives(gateway: &mut Gateway, cgroup: &Cgroup) {
    assert!(gateway.is_running(), "the gateway was killed");
    assert_eq!(cgroup.kills(), 0);
    assert_eq!(gateway.readiness().await.0, 200);
}

#[test]
fn idle_tunnels_of_many_identities_are_refused_before_memory_ends() {
    // With twice as much, 15,000 tunnels would be needed, more than a process may have here.
    let Some(cgroup) = Cgroup::new("strait (tunnels)", LIMIT / 2.0) else {
        return;
    };
    run(async {
        let net = Net::new();
        let mut gateway = start(net, &cgroup).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut held = Vec::new();
        for index in 0..70 {
            let Some(client) = connect(&gateway, index / 4).await else {
                break;
            };
            let tunnels = fill(&client).await;
            held.push((client, tunnels));
            assert!(gateway.is_running(), "killed at connection {index}");
        }
        survives(&mut gateway, &cgroup).await;
        let open: usize = held.iter().map(|(_, tunnels)| tunnels.len()).sum();
        let ends = gateway.tunnels_by_reason().await;
        let used = gateway.metric("strait_memory_used_bytes").await;
        print_uncaptured(&format!("{open} tunnels, {used} bytes used, {ends:?}"));
        assert!(open > 2000, "{open} tunnels");
        let refused = ["over_share", "memory_full"].map(|reason| ends.get(reason));
        assert!(refused.iter().any(Option::is_some), "{ends:?}");
        let (_, tunnels) = held.first_mut().expect("a connection");
        let tunnel = tunnels.first_mut().expect("a tunnel");
        tunnel.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
    });
}

#[test]
fn peers_that_read_nothing_do_not_fill_the_memory() {
    let Some(cgroup) = Cgroup::new("strait (buffers)", LIMIT) else {
        return;
    };
    run(async {
        let net = Net::new();
        let mut gateway = start(net, &cgroup).await;
        let _endpoint = Endpoint::echo_or_endless(net.listen(11, 9000).await);
        let mut peers = Vec::new();
        for _ in 0..4 {
            peers.push(RawPeer::with_window(&gateway, WIDEST).await);
        }
        for peer in &mut peers {
            ask_for_more(peer).await;
        }
        let open = async || {
            assert!(gateway.is_running(), "the gateway was killed");
            gateway.metric("strait_tunnels_open").await
        };
        // The memory of kernel buffers may not suffice for the tunnels of all peers.
        let first = f64::from(STREAMS);
        until("tunnels", open, |&count| count >= first).await;
        // deadline: unlimited growth shows within some rounds of a second.
        tokio::time::sleep(Duration::from_secs(5)).await;
        survives(&mut gateway, &cgroup).await;
    });
}

#[test]
fn a_limit_that_changes_while_the_gateway_runs_counts() {
    let Some(cgroup) = Cgroup::new("strait (changes)", LIMIT) else {
        return;
    };
    run(async {
        let net = Net::new();
        let mut gateway = start(net, &cgroup).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let limit = gateway.metric("strait_memory_limit_bytes").await;
        assert!((1.0..=LIMIT).contains(&limit), "{limit}");
        let client = connect(&gateway, 0).await.expect("a connection");
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        // The kernel first has to reclaim page cache, and may report that it is busy.
        let lowered = async || {
            let used = gateway.metric("strait_memory_used_bytes").await;
            cgroup.set(used * 1.25)
        };
        until("the kernel takes the limit", lowered, |&taken| taken).await;
        let refused = async || {
            let refused = client.tunnel(ECHO).await.is_err();
            refused && gateway.tunnels("memory_full").await > 0.0
        };
        until("a refusal", refused, |&refused| refused).await;
        gateway.logged("memory is three quarters full").await;
        tunnel.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
        assert!(cgroup.set(LIMIT));
        let again = async || client.tunnel(ECHO).await.is_ok();
        until("new tunnels", again, |&served| served).await;
        survives(&mut gateway, &cgroup).await;
    });
}
