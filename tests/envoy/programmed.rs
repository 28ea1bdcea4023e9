//! Pod that istiod programs, between real Envoys, while everything that can change changes. Its
//! certificate, services, export set and policies come only from the control plane.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use strait::grpc::security::{Action, Scope};
use strait::grpc::workload::{Address, WorkloadStatus};
use strait::xds::store::{ADDRESS, AUTHORIZATION};
use tokio::task::JoinSet;

use crate::mesh;
use crate::process::{self, Envoy};
use crate::support::istiod::Istiod;
use crate::support::wds::{SERVICE, bytes, changed, policy, service};
use crate::support::{CLIENT, ENDPOINT, GATEWAY, Net, identities, pod, run};
use crate::traffic::{self, Moved, TransferRequest, start};

/// Hosts of the two endpoints.
const HOSTS: [u8; 2] = [11, 12];
/// Number of changes of an endpoint, and their interval.
const CHANGES: usize = 100;
const BETWEEN: Duration = Duration::from_millis(50);
const TUNNELS_AT_ONCE: usize = 16;

fn workload(net: Net, host: u8, capacity: u32, status: WorkloadStatus) -> Address {
    changed(&uid(host), bytes(net.ip(host)), |workload| {
        workload.capacity = Some(capacity);
        workload.status = status.into();
    })
}

fn uid(host: u8) -> String {
    format!("east//Pod/app/echo-{host}")
}

/// Changes one endpoint at a time, while the other one is healthy.
async fn change(istiod: &Istiod, net: Net) {
    let good = |host| workload(net, host, 1, WorkloadStatus::Healthy);
    let mut random = fastrand::Rng::with_seed(5);
    for turn in 0..CHANGES {
        // Before the roles change, the changed endpoint is restored.
        let host = HOSTS[turn / 10 % 2];
        let other = HOSTS[1 - turn / 10 % 2];
        istiod.put(ADDRESS, &uid(other), &good(other));
        match random.u8(..5) {
            0 => istiod.remove(ADDRESS, &uid(host)),
            1 => {
                let unhealthy = workload(net, host, 1, WorkloadStatus::Unhealthy);
                istiod.put(ADDRESS, &uid(host), &unhealthy);
            }
            2 => {
                let drained = workload(net, host, 0, WorkloadStatus::Healthy);
                istiod.put(ADDRESS, &uid(host), &drained);
            }
            3 => {
                let heavy = workload(net, host, 5, WorkloadStatus::Healthy);
                istiod.put(ADDRESS, &uid(host), &heavy);
            }
            _ => istiod.put(ADDRESS, &uid(host), &good(host)),
        }
        // deadline: tunnels have to meet each of the states.
        tokio::time::sleep(BETWEEN).await;
    }
}

/// Opens one tunnel after the other until signalled. Each has to return the correct answer.
async fn load(client: std::net::SocketAddr, stop: Arc<AtomicBool>) -> u64 {
    let mut running = JoinSet::new();
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        if running.len() == TUNNELS_AT_ONCE {
            let request: Option<Result<(), _>> = running.join_next().await;
            request.expect("a request").expect("the right answer");
        }
        let order = TransferRequest {
            seed: count,
            up_bytes: 7 * count,
            // Every tenth outlives the state of its endpoint.
            down_bytes: if count % 10 == 0 { 2 << 20 } else { 13 * count },
            client_ends_first: count % 2 == 0,
        };
        count += 1;
        running.spawn(async move {
            let started = start(client, order).await.expect("a tunnel");
            started.finish(&Moved::new(0)).await.expect("an answer");
        });
    }
    while let Some(request) = running.join_next().await {
        request.expect("the right answer");
    }
    count
}

#[test]
fn endpoints_come_go_sicken_and_change_weight_and_no_tunnel_fails() {
    run(async {
        let Some(program) = process::program("a pod that istiod programs") else {
            return;
        };
        let net = Net::new();
        let _application = traffic::application(net).await;
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.export(SERVICE);
        for (namespace, name) in [("shop", "shops"), ("bank", "banks")] {
            let allow = policy(name, Scope::Namespace, Action::Allow, namespace);
            istiod.put(AUTHORIZATION, &format!("app/{name}"), &allow);
        }
        for host in HOSTS {
            let good = workload(net, host, 1, WorkloadStatus::Healthy);
            istiod.put(ADDRESS, &uid(host), &good);
        }
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn(net, "policy: {istio: enforce}\n");
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let to_gateway = mesh::client_variables(net, ENDPOINT, mesh::Ends::Cleanly);
        let (east, west) = (identities().leaf(ENDPOINT), identities().leaf(CLIENT));
        let endpoint = (include_str!("endpoint.yaml"), &to_application[..]);
        let client = (include_str!("client.yaml"), &to_gateway[..]);
        let (first, second, _client) = tokio::join!(
            Envoy::start(&program, net, HOSTS[0], &east, endpoint),
            Envoy::start(&program, net, HOSTS[1], &east, endpoint),
            Envoy::start(&program, net, 21, &west, client),
        );
        gateway.ready().await;

        let stop = Arc::<AtomicBool>::default();
        let loading = tokio::spawn(load(net.address(21, 19001), Arc::clone(&stop)));
        change(&istiod, net).await;
        // The rest of the load runs without a control plane.
        serving.stop().await;
        // deadline: tunnels have to meet that state too.
        tokio::time::sleep(20 * BETWEEN).await;
        stop.store(true, Ordering::Relaxed);
        let tunnels = loading.await.expect("every answer");

        let ended = mesh::ended(&gateway, tunnels).await;
        let served = [
            first.stat("http.hbone.downstream_rq_total").await,
            second.stat("http.hbone.downstream_rq_total").await,
        ];
        process::print_uncaptured(&format!(
            "envoy {}: {CHANGES} changes of two endpoints that served {served:?}, {ended}",
            process::version(&program).await
        ));
        assert_eq!((ended.tunnels(), ended.failed()), (tunnels, 0), "{ended}");
        assert!(served.iter().all(|&count| count > tunnels / 10), "{served:?}");
        assert_eq!(istiod.rejections(), [""; 0]);
        let names = gateway.http(15000, "GET", "/status?format=json").await.1;
        assert!(names.contains(GATEWAY), "its certificate is the authority's: {names}");
        assert_eq!(gateway.readiness().await.0, 200);
    });
}
