//! Fault matrix of docs/faults.md: rows that no other test proves. Every byte is compared, and no
//! break looks clean. Only `make faults` runs the rows of `long`, which wait for half a minute.

mod clock;
mod disks;
mod flaps;
mod long;
mod network;
mod relays;
mod stops;

use strait::tools::hbone::Client;
use tokio::task::JoinSet;

use crate::support::lab::{ENDPOINT_HOST, Lab};
use crate::support::oracle::{self, End, Oracle, Plan, SideResult};
use crate::support::{ECHO, Endpoint, Gateway, endpoint_port, identities};

/// Gateway of a lab, between a client and an endpoint that compares every byte.
struct LabPath {
    gateway: Gateway,
    oracle: Oracle,
    _endpoint: Endpoint,
    client: Client,
}

impl LabPath {
    async fn start(lab: &Lab) -> Self {
        let gateway = lab.gateway().await;
        let oracle = Oracle::new();
        let endpoint = oracle.endpoint(lab.net.listen(ENDPOINT_HOST, endpoint_port()).await);
        let client = gateway.client(identities()).await;
        Self { gateway, oracle, _endpoint: endpoint, client }
    }
}

/// Opens these tunnels, all before the first byte, and drives them to their ends.
async fn start(client: &Client, plans: &[Plan]) -> JoinSet<(Plan, SideResult)> {
    let mut opened = Vec::new();
    for &plan in plans {
        opened.push((plan, client.tunnel(ECHO).await.expect("a tunnel")));
    }
    let mut tunnels = JoinSet::new();
    for (plan, tunnel) in opened {
        tunnels.spawn(async move { (plan, oracle::drive(tunnel, plan).await) });
    }
    tunnels
}

/// Returns plans of tunnels with this many bytes in each direction.
fn plans(ids: std::ops::Range<u64>, bytes: u64) -> Vec<Plan> {
    ids.map(|id| Plan::both(id, bytes)).collect()
}

/// Asserts that all of these tunnels are whole.
async fn all_whole(oracle: &Oracle, tunnels: JoinSet<(Plan, SideResult)>) {
    for (plan, side) in tunnels.join_all().await {
        oracle.whole(plan, side).await;
    }
}

/// Asserts that each of these tunnels has broken.
async fn all_broken(tunnels: JoinSet<(Plan, SideResult)>) {
    for (_, side) in tunnels.join_all().await {
        assert!(matches!(side.end, End::Broken(_)), "{side:?}");
    }
}
