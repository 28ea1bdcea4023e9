//! Real Envoys around a tunnel to another network: client → Envoy → the gateway → Envoy as the
//! gateway of that network → Envoy as the endpoint → application.

use tokio::task::JoinSet;

use crate::mesh;
use crate::process::{self, Envoy};
use crate::support::{CLIENT, ENDPOINT, Gateway, Net, Settings, identities, run};
use crate::traffic::{self, Moved, TransferRequest, start};

const REMOTE: &str = "spiffe://west.local/ns/istio-system/sa/eastwest";
const TUNNELS: u64 = 200;
const AT_ONCE: usize = 16;
const BODY_BYTES: u64 = 32 << 20;

/// Hosts of the Envoys: endpoint, gateway of network west, client.
const INSIDE: u8 = 11;
const THERE: u8 = 12;
const HERE: u8 = 21;

/// Settings of a gateway of network east whose service is behind the Envoy at [`THERE`].
fn settings<'a>(net: Net) -> Settings<'a> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(99, 1, "HBONE")]);
    settings.mesh =
        settings.mesh.replace("clusterId: east, network: east", "clusterId: west, network: west");
    let transit = "to: [{cluster: west}]\n      transit: always";
    settings.exposure = settings.exposure.replace("to: [{cluster: west}]", transit);
    let address = net.address(THERE, 15008);
    settings.more += &format!(
        "networks: [{{name: west, cluster: west, identities: [\"{REMOTE}\"], gateways: \
         [\"{address}\"]}}]\n"
    );
    settings
}

/// Returns the configuration of Envoy as a gateway, which forwards each CONNECT to the HBONE port
/// of the endpoint, for peers of cluster east.
fn gateway_yaml() -> String {
    let yaml = include_str!("endpoint.yaml");
    for text in ["spiffe://west.local/", "port_value: 9000"] {
        assert!(yaml.contains(text), "{text}");
    }
    yaml.replace("spiffe://west.local/", "spiffe://east.local/")
        .replace("port_value: 9000", "port_value: 15008")
}

/// Moves bytes through a tunnel, and checks them.
async fn transfer(net: Net, order: TransferRequest) {
    let started = start(net.address(HERE, 19001), order).await;
    let moved = started.expect("a tunnel").finish(&Moved::new(0)).await;
    moved.expect("the right answer");
}

#[test]
fn tunnels_of_an_envoy_reach_another_network_through_the_envoy_in_front_of_it() {
    run(async {
        let Some(program) = process::program("Envoy as the gateway of another network") else {
            return;
        };
        let net = Net::new();
        let _application = traffic::application(net).await;
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let to_endpoint = [("APPLICATION", net.ip(INSIDE).to_string())];
        let to_gateway = mesh::client_variables(net, ENDPOINT, mesh::Ends::Cleanly);
        let leaf = |id| identities().leaf(id);
        let (inside, there, here) = (leaf(ENDPOINT), leaf(REMOTE), leaf(CLIENT));
        let there_yaml = gateway_yaml();
        let endpoint = (include_str!("endpoint.yaml"), &to_application[..]);
        let remote = (&*there_yaml, &to_endpoint[..]);
        let client = (include_str!("client.yaml"), &to_gateway[..]);
        let settings = settings(net);
        let (gateway, _inside, there, _here) = tokio::join!(
            Gateway::start(&settings),
            Envoy::start(&program, net, INSIDE, &inside, endpoint),
            Envoy::start(&program, net, THERE, &there, remote),
            Envoy::start(&program, net, HERE, &here, client),
        );
        let mut running = JoinSet::new();
        for seed in 0..TUNNELS - 2 {
            if running.len() == AT_ONCE {
                running.join_next().await.expect("one").expect("a transfer");
            }
            let order = TransferRequest {
                seed,
                up_bytes: 701 * seed,
                down_bytes: 1301 * seed,
                client_ends_first: seed % 2 == 0,
            };
            running.spawn(transfer(net, order));
        }
        running.join_all().await;
        for (seed, up_bytes, down_bytes) in [(1001, BODY_BYTES, 0), (1002, 0, BODY_BYTES)] {
            let order = TransferRequest { seed, up_bytes, down_bytes, client_ends_first: true };
            transfer(net, order).await;
        }
        let ended = mesh::ended(&gateway, TUNNELS).await;
        assert_eq!((ended.tunnels(), ended.failed()), (TUNNELS, 0), "{ended}");
        let dials = gateway.metric("strait_dials_total{result=\"ok\"}").await;
        assert_eq!(dials, TUNNELS as f64, "dials");
        let requests = there.stat("http.hbone.downstream_rq_total").await;
        let connections = there.stat("http.hbone.downstream_cx_total").await;
        assert_eq!((requests, connections), (TUNNELS, 1));
        process::print_uncaptured(&format!("to another network through Envoy: {ended}"));
    });
}
