//! Subsets of a service's endpoints, by server names and aliases, and shares of several.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::passthrough::client_hello;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};

const TLS: u16 = 15443;

/// Starts an endpoint that sends its number.
fn numbered(listener: TcpListener, number: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(number).await;
        let _ = stream.read(&mut [0; 4096]).await;
    })
}

fn settings(net: Net) -> Settings<'static> {
    let mut settings =
        Settings::new(net, identities()).endpoints(&[(11, 1, "TCP"), (12, 1, "TCP")]);
    for version in ["v1", "v2"] {
        let labelled =
            format!("labels: {{version: {version}, team: {version}}}, workloadName : echo");
        settings.mesh = settings.mesh.replacen("workloadName: echo", &labelled, 1);
    }
    settings.mesh = settings.mesh.replace("workloadName : echo", "workloadName: echo");
    settings.exposure = format!(
        "    - service: \"{ECHO}\"
      to: [{{anyone: true}}]
      subsets:
        - {{name: v1, labels: {{version: v1}}}}
        - {{name: v2, labels: {{team: v2}}}}
        - {{name: mix, split: [{{subset: v1, weight: 90}}, {{subset: v2, weight: 10}}]}}
"
    );
    settings.listeners = format!(
        "  - {{name: tls, bind: \"{}\", protocol: tls, routing: istio}}\n",
        net.address(1, TLS)
    );
    settings.more += "names:\n  aliases:\n    - {name: \"canary.global:80\", to: \
                      \"echo.app.svc.cluster.local:80\", subset: v2}\n";
    settings
}

/// Returns the first byte of the answer to a server name.
async fn answer(net: Net, subset: &str) -> u8 {
    let name = format!("outbound_.80_.{subset}_.echo.app.global");
    let mut stream = TcpStream::connect(net.address(1, TLS)).await.expect("a connection");
    let hello = client_hello(&name, &["istio"]);
    stream.write_all(&hello).await.expect("a hello");
    stream.read_u8().await.expect("an answer")
}

#[test]
fn a_subset_is_reached_by_its_server_name_and_by_an_alias() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let _first = numbered(net.listen(11, 9000).await, 1);
        let _second = numbered(net.listen(12, 9000).await, 2);
        let client = gateway.client(identities()).await;
        for _ in 0..8 {
            assert_eq!(answer(net, "v1").await, 1);
            assert_eq!(answer(net, "v2").await, 2);
            let mut tunnel = client.tunnel("canary.global:80").await.expect("a tunnel");
            assert_eq!(tunnel.read_u8().await.expect("a number"), 2);
        }
        let mut seen: BTreeMap<u8, u32> = BTreeMap::new();
        for _ in 0..300 {
            *seen.entry(answer(net, "mix").await).or_default() += 1;
        }
        // 30 are expected; the bounds are 4 standard deviations.
        assert!((9..=51).contains(&seen[&2]), "{seen:?}");
        assert_eq!(seen[&1] + seen[&2], 300);
        // An alert, as for an unknown service.
        assert_eq!(answer(net, "v9").await, 21);
        let unknown = async || gateway.tunnels("unknown_sni").await;
        until("unknown_sni", unknown, |&count| count == 1.0).await;
    });
}
