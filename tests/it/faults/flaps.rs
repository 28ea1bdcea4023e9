//! Control plane that disconnects and changes ten times a second.

use std::time::Duration;

use strait::grpc::discovery::DeltaDiscoveryRequest;
use strait::tools::hbone::Client;
use strait::xds::store::ADDRESS;
use tokio::time::{Instant, sleep, sleep_until};

use super::{all_whole, start};
use crate::istio::gateway;
use crate::support::istiod::{Behaviour, Istiod, NAME, Serving};
use crate::support::oracle::{Oracle, Plan};
use crate::support::wds::{SERVICE, bytes, other_service, service, workload};
use crate::support::{Net, identities, print_uncaptured, run, until};

/// Time between two disconnects, and between two changes of an endpoint.
const PERIOD: Duration = Duration::from_millis(100);
const FLAPS: u32 = 50;
/// Services that do not change. Each full answer would send all of them.
const OTHERS: usize = 200;
/// Additional processor time that the flaps may cost, as a share of one core. An unoptimized build
/// beside compilers uses half of a tenth.
const SHARE_MAX: f64 = if cfg!(debug_assertions) { 0.2 } else { 0.1 };
/// Time in which every call is refused, and the first wait after a refusal, without its jitter.
const REFUSING: Duration = Duration::from_secs(3);
const WAIT_MIN: Duration = Duration::from_millis(8);

/// Control plane at host 2 with a service, its endpoints `a` and `b`, and others.
struct Flapping {
    net: Net,
    istiod: Istiod,
    serving: Serving,
}

impl Flapping {
    async fn start(net: Net) -> Self {
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        for index in 0..OTHERS {
            let (name, body) = other_service(&format!("s{index}"));
            istiod.put(ADDRESS, &name, &body);
        }
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let started = Self { net, istiod, serving };
        for host in [11, 12] {
            started.set(host, true);
        }
        started
    }

    /// Adds or removes the endpoint of a host.
    fn set(&self, host: u8, is_up: bool) {
        let name = format!("host-{host}");
        if is_up {
            self.istiod.put(ADDRESS, &name, &workload(&name, bytes(self.net.ip(host))));
        } else {
            self.istiod.remove(ADDRESS, &name);
        }
    }

    /// Returns the first requests for addresses of all streams so far.
    fn subscriptions(&self) -> Vec<DeltaDiscoveryRequest> {
        let requests = self.istiod.requests().into_iter();
        let is_first = |of: &DeltaDiscoveryRequest| of.type_url == ADDRESS && of.node.is_some();
        requests.filter(is_first).collect()
    }
}

/// Opens a short tunnel in each period, which is whole, and causes a flap if there is a control
/// plane. Returns the time.
async fn periods(oracle: &Oracle, client: &Client, ids: u64, flapping: Option<&Flapping>) -> f64 {
    let begun = Instant::now();
    for turn in 0..FLAPS {
        // deadline: the rate is what is tested.
        sleep_until(begun + PERIOD * turn).await;
        if let Some(flapping) = flapping {
            flapping.set(12, turn % 2 == 1);
        }
        // deadline: the change is pushed before the stream ends.
        sleep_until(begun + PERIOD * turn + PERIOD / 2).await;
        if let Some(flapping) = flapping {
            flapping.serving.disconnect();
        }
        let plan = Plan::both(ids + u64::from(turn), 1000);
        all_whole(oracle, start(client, &[plan]).await).await;
    }
    begun.elapsed().as_secs_f64()
}

#[test]
fn a_control_plane_that_flaps_ten_times_a_second_costs_no_tunnel_and_little_time() {
    run(async {
        let net = Net::new();
        let flapping = Flapping::start(net).await;
        let Flapping { istiod, .. } = &flapping;
        let mut gateway = gateway(net, NAME);
        let oracle = Oracle::new();
        let _endpoints = [
            oracle.endpoint(net.listen(11, 15008).await),
            oracle.endpoint(net.listen(12, 15008).await),
        ];
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        let rest = PERIOD;
        // Fifteen seconds: longer than all of what follows.
        let plans = [1, 2, 3, 4].map(|id| Plan { rest, ..Plan::both(id, 150 * 16 * 1024) });
        let tunnels = start(&client, &plans).await;

        let before = gateway.processor_time();
        let time = periods(&oracle, &client, 100, None).await;
        let quiet = gateway.processor_time();
        let quiet_share = (quiet - before).as_secs_f64() / time;
        let (streams, sent) = (flapping.subscriptions().len(), istiod.sent());
        let time = periods(&oracle, &client, 200, Some(&flapping)).await;
        let share = (gateway.processor_time() - quiet).as_secs_f64() / time;
        print_uncaptured(&format!(
            "{FLAPS} flaps in {time:.1} s: {:.1} % of a core, and {:.1} % without",
            100.0 * share,
            100.0 * quiet_share,
        ));
        assert!(share - quiet_share <= SHARE_MAX, "{share} after {quiet_share}");

        // One stream for each disconnect at most, which begins with all that is held.
        let new = flapping.subscriptions().split_off(streams);
        let count = new.len();
        assert!((FLAPS as usize / 10..=FLAPS as usize).contains(&count), "{count} streams");
        for first in new {
            let held = first.initial_resource_versions.len();
            assert!(held > OTHERS, "{held} are held");
        }
        // That endpoint alone, by pushes and to new streams: less than one full answer.
        let sent = istiod.sent() - sent;
        assert!(sent < OTHERS, "{sent} resources");

        let streams = flapping.subscriptions().len();
        refuses(&flapping).await;
        let again = async || flapping.subscriptions().len();
        until("a stream", again, |&now| now > streams).await;
        assert_eq!(gateway.readiness().await.0, 200);
        assert_eq!(istiod.rejections(), [""; 0]);
        all_whole(&oracle, tunnels).await;
    });
}

/// Refuses all calls for a time, in which the gateway backs off.
async fn refuses(Flapping { istiod, serving, .. }: &Flapping) {
    istiod.set_behaviour(Behaviour::Refusing);
    let (before, begun) = (istiod.calls().len(), Instant::now());
    serving.disconnect();
    // deadline: the number of calls in a time is what is tested.
    sleep(REFUSING).await;
    let calls = istiod.calls().len() - before;
    // Each wait is twice the one before: n of them take at least (2^n - 1) times the first.
    let waits = (begun.elapsed().as_secs_f64() / WAIT_MIN.as_secs_f64() + 1.0).log2();
    assert!(calls >= 2 && calls as f64 <= 2.0 + waits, "{calls} calls");
    istiod.set_behaviour(Behaviour::Normal);
}
