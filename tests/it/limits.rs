//! Limits of tunnels to exposed services: rejections and ends, each with its reason, and changes
//! while tunnels are open.

use std::time::Duration;

use h2::Reason;
use http::StatusCode;
use strait::tools::hbone::{Client, ConnectError, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::passthrough::client_hello;
use crate::support::loss::drop_syns;
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, broken, echoes, endpoint_port, identities,
    replace, run, until,
};

const TLS: u16 = 15443;
const OTHER: &str = "spiffe://west.local/ns/shop/sa/other";
const THIRD: &str = "spiffe://west.local/ns/shop/sa/third";

fn entry(limits: &str) -> String {
    format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}], limits: {limits}}}\n")
}

fn settings(net: Net, limits: &str) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    settings.exposure = entry(limits);
    settings.listeners = format!(
        "  - {{name: tls, bind: \"{}\", protocol: tls, routing: istio}}\n",
        net.address(1, TLS)
    );
    settings
}

/// Replaces the limits, and waits until the configuration is in force.
async fn limit(gateway: &Gateway, before: &str, after: &str) {
    let reloads = "strait_reload_total{what=\"config\",result=\"ok\"}";
    let earlier = gateway.metric(reloads).await;
    let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
    assert!(config.contains(&entry(before)));
    let config = config.replace(&entry(before), &entry(after));
    replace(&gateway.file("strait.yaml"), &config);
    let count = async || gateway.metric(reloads).await;
    until("a reload", count, |&now| now > earlier).await;
}

async fn ended(gateway: &Gateway, reason: &str, wanted: f64) {
    let count = async || gateway.tunnels(reason).await;
    until(reason, count, |&count| count == wanted).await;
}

async fn refused(client: &Client) {
    match client.tunnel(ECHO).await {
        Err(ConnectError::Status(StatusCode::SERVICE_UNAVAILABLE)) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_limit_of_tunnels_rejects_with_its_reason_and_follows_the_configuration() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, "{tunnels: 2}")).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        // One identity leaves places to others.
        let (one, other) =
            (gateway.client(identities()).await, gateway.client_as(identities(), OTHER).await);
        let mut first = one.tunnel(ECHO).await.expect("a tunnel");
        refused(&one).await;
        let second = other.tunnel(ECHO).await.expect("a tunnel");
        refused(&other).await;
        ended(&gateway, "tunnel_limit", 2.0).await;
        let question = ["explain", "--from", CLIENT, "--to", ECHO];
        let (_, text, _) = gateway.run_command(&question).await;
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains("tunnels 2 (2 open)"), "{text}");
        assert!(text.contains("tunnel_limit"), "{text}");

        drop(second);
        gateway.wait_until_open(2, 1).await;
        let mut second = other.tunnel(ECHO).await.expect("a tunnel");
        limit(&gateway, "{tunnels: 2}", "{tunnels: 1}").await;
        refused(&one).await;
        echoes(&mut first).await;
        echoes(&mut second).await;
        // The open tunnels still count.
        limit(&gateway, "{tunnels: 1}", "{tunnels: 3}").await;
        refused(&other).await;
        let last = gateway.client_as(identities(), THIRD).await;
        let mut third = last.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut third).await;
        ended(&gateway, "tunnel_limit", 4.0).await;
    });
}

/// Exchanges bytes until the tunnel breaks. Returns the code of its reset.
async fn echo_until_broken(mut tunnel: Tunnel) -> Option<Reason> {
    loop {
        if tunnel.write_all(b"hello").await.is_err() {
            return broken(&mut tunnel).await;
        }
        let mut answer = [0; 5];
        if let Err(error) = tunnel.read_exact(&mut answer).await {
            return Tunnel::reset_code(&error);
        }
    }
}

#[test]
fn open_tunnels_end_by_the_limits_of_time_of_a_changed_configuration() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, "{}")).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut idle = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut idle).await;
        let name = "outbound_.80_._.echo.app.svc.cluster.local";
        let hello = client_hello(name, &["istio"]);
        let mut tls = TcpStream::connect(net.address(1, TLS)).await.expect("a connection");
        tls.write_all(&hello).await.expect("a hello");
        let mut echoed = vec![0; hello.len()];
        tls.read_exact(&mut echoed).await.expect("an echo");
        let busy = client.tunnel(ECHO).await.expect("a tunnel");
        let busy = tokio::spawn(echo_until_broken(busy));

        limit(&gateway, "{}", "{idle_timeout: 1s}").await;
        assert_eq!(broken(&mut idle).await, Some(Reason::INTERNAL_ERROR));
        assert!(tls.read(&mut echoed).await.is_err(), "a reset");
        ended(&gateway, "idle_timeout", 2.0).await;
        assert!(!busy.is_finished(), "a busy tunnel goes on");

        limit(&gateway, "{idle_timeout: 1s}", "{max_duration: 1s}").await;
        let code = busy.await.expect("an end");
        assert_eq!(code, Some(Reason::INTERNAL_ERROR));
        ended(&gateway, "max_duration", 1.0).await;

        let mut new = client.tunnel(ECHO).await.expect("a tunnel");
        let opened = Instant::now();
        assert_eq!(broken(&mut new).await, Some(Reason::INTERNAL_ERROR));
        let after = opened.elapsed();
        assert!(after >= Duration::from_millis(900), "{after:?}");
        ended(&gateway, "max_duration", 2.0).await;
    });
}

#[test]
fn an_endpoint_that_does_not_answer_within_the_limit_is_a_reason_of_its_own() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, "{connect_timeout: 300ms}")).await;
        let _sockets = drop_syns(net.address(11, endpoint_port())).await;
        let client = gateway.client(identities()).await;
        let started = Instant::now();
        refused(&client).await;
        let after = started.elapsed();
        // A dial without the limit takes 2 s.
        let bounds = Duration::from_millis(300)..Duration::from_millis(1900);
        assert!(bounds.contains(&after), "{after:?}");
        ended(&gateway, "connect_timeout", 1.0).await;
    });
}
