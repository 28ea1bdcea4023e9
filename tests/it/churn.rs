//! Endpoints that come and go continually, under tunnels that must not notice.

use std::collections::BTreeSet;
use std::time::Duration;

use strait::xds::envoy::ENDPOINT;
use strait::xds::store::CLUSTER;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::support::eds::{CLUSTER_NAME, assignment, cluster, endpoint, zone};
use crate::support::istiod::{Istiod, NAME, programmed};
use crate::support::oracle::{self, Oracle, Plan};
use crate::support::{ECHO, Net, Settings, endpoint_port, identities, run, until};

/// A hundred changes per second, for two and a half: each replaces an endpoint.
const PERIOD: Duration = Duration::from_millis(10);
const CHANGES: u8 = 250;
/// Hosts with an endpoint, and the number of them in each assignment.
const HOSTS: u8 = 8;
const HOSTS_PER_ASSIGNMENT: u8 = 3;
const FIRST_HOST: u8 = 11;

const LONG_TUNNELS: u64 = 20;
/// Rest of long tunnels, which move 16 KiB each way and rest: 5 s at least, longer than the
/// changes.
const LONG_REST: Duration = Duration::from_millis(100);
const LONG_BYTES: u64 = 50 * 16 * 1024;

fn push_assignment(control: &Istiod, net: Net, turn: u8) {
    let hosts = (0..HOSTS_PER_ASSIGNMENT).map(|at| FIRST_HOST + (turn + at) % HOSTS);
    let endpoints = hosts.map(|host| endpoint(net.address(host, endpoint_port())));
    let zones = vec![zone("a", None, 0, endpoints.collect())];
    control.put(ENDPOINT, CLUSTER_NAME, &assignment(CLUSTER_NAME, zones));
}

/// Returns the number of assignments that the gateway has accepted.
fn taken(control: &Istiod) -> usize {
    let requests = control.requests().into_iter();
    let answers = requests.filter(|one| one.type_url == ENDPOINT);
    answers.filter(|one| !one.response_nonce.is_empty()).count()
}

#[test]
fn endpoint_churn_at_100_a_second_drops_no_tunnel() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities());
        let keys = format!("roots: root.crt, token: token, san: {NAME}");
        let mut gateway = programmed(&settings, "envoy", &keys, |_| {});
        let oracle = Oracle::new();
        let mut endpoints = Vec::new();
        for host in FIRST_HOST..FIRST_HOST + HOSTS {
            endpoints.push(oracle.endpoint(net.listen(host, endpoint_port()).await));
        }
        let control = Istiod::envoy_dialect();
        control.put(CLUSTER, CLUSTER_NAME, &cluster(CLUSTER_NAME, ""));
        push_assignment(&control, net, 0);
        let _serving = control.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;

        let client = gateway.client(identities()).await;
        let mut long = JoinSet::new();
        for id in 0..LONG_TUNNELS {
            let plan = Plan { rest: LONG_REST, ..Plan::both(id, LONG_BYTES) };
            let tunnel = client.tunnel(ECHO).await.expect("a long tunnel");
            long.spawn(async move { (plan, oracle::drive(tunnel, plan).await) });
        }
        let start = Instant::now();
        let changes = async {
            for turn in 1..=CHANGES {
                // deadline: the rate of changes is what is tested.
                sleep_until(start + PERIOD * u32::from(turn)).await;
                push_assignment(&control, net, turn);
            }
        };
        let new = async {
            let mut tunnels = Vec::new();
            while start.elapsed() < PERIOD * u32::from(CHANGES) {
                let id = LONG_TUNNELS + tunnels.len() as u64;
                let plan = Plan::both(id, 2_000);
                tunnels.push((plan, oracle::tunnel(&client, plan).await));
            }
            tunnels
        };
        let ((), new) = tokio::join!(changes, new);
        let ended = long.try_join_next();
        assert!(ended.is_none(), "a long tunnel has ended: {ended:?}");
        let all = async || taken(&control);
        until("the changes", all, |taken| *taken > usize::from(CHANGES)).await;

        let mut met = BTreeSet::new();
        for (plan, side) in &new {
            oracle.whole(*plan, *side).await;
            met.insert(oracle.ended(plan.id).await.0.ip());
        }
        assert_eq!(met.len(), usize::from(HOSTS), "tunnels follow the changes");
        for (plan, side) in long.join_all().await {
            oracle.whole(plan, side).await;
        }
        assert_eq!(control.rejections(), [""; 0]);
    });
}
