//! `strait load` against Envoy as the gateway: its counts match those of Envoy.

use std::path::PathBuf;

use crate::command::{Load, Serve};
use crate::process::{self, Envoy};
use crate::support::{ECHO, GATEWAY, Net, endpoint_port, identities, run};

/// Starts Envoy with the configuration of the floods.
async fn gateway(program: &PathBuf, net: Net) -> Envoy {
    let names = [("AUTHORITY", ECHO.to_owned()), ("APPLICATION", net.ip(11).to_string())];
    let yaml = (include_str!("../../benches/floods/envoy.yaml"), &names[..]);
    Envoy::start(program, net, 1, &identities().leaf(GATEWAY), yaml).await
}

#[test]
fn requests_churn_and_handshakes_through_envoy_are_those_that_it_counted() {
    run(async {
        let Some(program) = process::program("a load through Envoy") else {
            return;
        };
        let net = Net::new();
        let _endpoint = Serve::plain(net.address(11, endpoint_port()), "echo").await;
        let envoy = gateway(&program, net).await;
        let load = Load::new(net.address(1, 15008));

        let requests = load.run(ECHO, "rr --streams 8 --seconds 0.5").await.expect_success();
        let churn = load.run(ECHO, "churn --streams 4 --seconds 0.5").await.expect_success();
        let handshakes = load.run(ECHO, "handshake --seconds 0.5").await.expect_success();

        let all = [&requests, &churn, &handshakes];
        let sum = |name| all.iter().map(|done| done.number(name)).sum::<u64>();
        let tunnels = envoy.stat("http.hbone.downstream_rq_total").await;
        assert_eq!(tunnels, sum("opened_tunnels"));
        let connections = envoy.stat("http.hbone.downstream_cx_total").await;
        assert_eq!(connections, sum("opened_connections"));
        assert_eq!(churn.number("opened_tunnels"), churn.number("operations"));
        process::print_uncaptured(&format!(
            "load through envoy {}: {} requests, {} tunnels and {} connections each half a second",
            process::version(&program).await,
            requests.number("operations"),
            churn.number("operations"),
            handshakes.number("operations"),
        ));
    });
}
