//! Times of the stages of tunnels in the metrics, by tier and source cluster.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::support::{
    CLIENT, ECHO, ENDPOINT, Endpoint, Gateway, Net, Settings, identities, run, try_echo, until,
};

const STAGES: [&str; 4] = ["pick", "dial", "first_byte", "tunnel"];

/// Settings of a gateway in zone a of us-east, with endpoints there, in zone b, and in us-west.
fn settings(net: Net) -> Settings<'static> {
    let endpoints = [(11, 1, "TCP"), (12, 1, "TCP"), (13, 1, "TCP")];
    let mut settings = Settings::new(net, identities()).endpoints(&endpoints);
    let mut located = String::new();
    let places = ["us-east, zone: a", "us-east, zone: b", "us-west, zone: a"];
    for (part, place) in
        settings.mesh.split("workloadIps").zip([None].into_iter().chain(places.map(Some)))
    {
        if let Some(place) = place {
            located += &format!("locality: {{region: {place}}}, workloadIps");
        }
        located += part;
    }
    settings.mesh = located;
    settings
}

async fn start(settings: &Settings<'_>) -> Gateway {
    let mut gateway = Gateway::spawn(settings, |folder| {
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a file");
        let own = "network: east, locality: {region: us-east, zone: a}}";
        std::fs::write(file, text.replacen("network: east}", own, 1)).expect("a file");
    });
    gateway.ready().await;
    gateway
}

/// Returns the number of times of a stage in a tier.
async fn count(gateway: &Gateway, stage: &str, tier: &str) -> f64 {
    let labels = format!("{{tier=\"{tier}\",source_cluster=\"west\"}}");
    gateway.metric(&format!("strait_{stage}_seconds_count{labels}")).await
}

#[test]
fn each_stage_of_a_tunnel_is_timed_by_the_distance_of_its_endpoint() {
    run(async {
        let net = Net::new();
        let gateway = start(&settings(net)).await;
        let mut endpoints = Vec::new();
        for host in [11, 12, 13] {
            endpoints.push(Endpoint::echo(net.listen(host, 9000).await));
        }
        let client = gateway.client(identities()).await;
        const TUNNELS: usize = 60;
        for _ in 0..TUNNELS {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            try_echo(&mut tunnel).await.expect("an open tunnel");
        }
        until(
            "all ends",
            async || gateway.metric("strait_tunnels_open").await,
            |&open| open == 0.0,
        )
        .await;
        for (endpoint, tier) in endpoints.iter().zip(["zone", "region", "network"]) {
            assert_ne!(endpoint.accepted(), 0, "{tier}");
            for stage in STAGES {
                let timed = count(&gateway, stage, tier).await;
                assert_eq!(timed, endpoint.accepted() as f64, "{stage} {tier}");
            }
        }
        let handshakes = "strait_handshake_seconds_count{source_cluster=\"west\"}";
        assert_eq!(gateway.metric(handshakes).await, 1.0);
        assert_eq!(gateway.metric("strait_accept_seconds_count").await, 1.0);
        assert_eq!(count(&gateway, "inner_handshake", "zone").await, 0.0, "no ClientHello");
    });
}

#[test]
fn the_answer_to_a_client_hello_inside_a_tunnel_is_timed() {
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let acceptor = TlsAcceptor::from(identities().server(ENDPOINT));
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let mut tls = acceptor.accept(stream).await.expect("a handshake");
                tls.write_all(b"hello").await.expect("an answer");
                tls.shutdown().await.expect("an end");
            }
        });
        let client = gateway.client(identities()).await;
        let tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        let inner = TlsConnector::from(Arc::clone(&identities().client(CLIENT, ENDPOINT)));
        let name = "echo.app.svc.cluster.local".try_into().expect("a name");
        let mut tls = inner.connect(name, tunnel).await.expect("a handshake with the endpoint");
        let mut answer = Vec::new();
        tls.read_to_end(&mut answer).await.expect("an answer");
        assert_eq!(answer, b"hello");
        assert_eq!(count(&gateway, "inner_handshake", "network").await, 1.0);
        let answers = "strait_inner_handshakes_total{alpn=\"h2\",version=\"1.3\"}";
        assert_eq!(gateway.metric(answers).await, 1.0);
    });
}
