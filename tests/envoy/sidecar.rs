//! TLS listeners between two real Envoys, which are each other's sidecars: client → Envoy → the
//! gateway, with TLS passthrough of their mTLS → Envoy → application.

use crate::mesh::ended;
use crate::process::{self, Envoy};
use crate::support::{CLIENT, ENDPOINT, Gateway, Net, Settings, identities, run};
use crate::traffic::{self, Moved, TransferRequest, start};

const SNI: &str = "outbound_.80_._.echo.app.svc.cluster.local";
const REQUESTS: u64 = 200;
const BODY_BYTES: u64 = 100_000_000;

fn settings(net: Net) -> Settings<'static> {
    let ip = net.ip(1);
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.listeners = format!(
        "  - {{name: sidecars, bind: \"{ip}:15443\", protocol: tls, routing: istio}}
  - {{name: control, bind: \"{ip}:15012\", protocol: tls,
     routes: [{{sni: [\"*\"], to: \"echo.app.svc.cluster.local:80\"}}]}}
"
    );
    settings.exposure =
        "    - {service: \"echo.app.svc.cluster.local:80\", to: [{anyone: true}]}\n".to_owned();
    settings
}

#[test]
fn sidecars_reach_each_other_by_istios_name_and_the_control_plane_by_any() {
    run(async {
        let Some(program) = process::program("sidecars") else {
            return;
        };
        let net = Net::new();
        let _application = traffic::application(net).await;
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let to_gateway = [
            ("GATEWAY", net.ip(1).to_string()),
            ("ENDPOINT_ID", ENDPOINT.to_owned()),
            ("SNI", SNI.to_owned()),
        ];
        let (east, west) = (identities().leaf(ENDPOINT), identities().leaf(CLIENT));
        let server = (include_str!("sidecar_server.yaml"), &to_application[..]);
        let client = (include_str!("sidecar_client.yaml"), &to_gateway[..]);
        let settings = settings(net);
        let (gateway, _server, _client) = tokio::join!(
            Gateway::start(&settings),
            Envoy::start(&program, net, 11, &east, server),
            Envoy::start(&program, net, 21, &west, client),
        );
        let order = |seed, up_bytes, down_bytes| TransferRequest {
            seed,
            up_bytes,
            down_bytes,
            client_ends_first: seed % 2 == 0,
        };
        for port in [19001, 19002] {
            let address = net.address(21, port);
            for seed in 0..REQUESTS {
                let order = order(seed, 7 * seed, 13 * seed);
                let started = start(address, order).await.expect("a connection");
                started.finish(&Moved::new(0)).await.expect("an answer");
            }
            for order in [order(1000, BODY_BYTES, 0), order(1001, 0, BODY_BYTES)] {
                let started = start(address, order).await.expect("a connection");
                started.finish(&Moved::new(0)).await.expect("equal SHA-256");
            }
        }
        let all = 2 * (REQUESTS + 2);
        let ended = ended(&gateway, all).await;
        process::print_uncaptured(&format!("envoy {}: {ended}", process::version(&program).await));
        assert_eq!((ended.tunnels(), ended.failed()), (all, 0), "{ended}");
        gateway.logged(&format!("dst.sni=\"{SNI}\"")).await;
    });
}
