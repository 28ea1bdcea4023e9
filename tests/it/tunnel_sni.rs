//! SNI inside a tunnel: routed by the ClientHello after 200, or held until it agrees with the
//! authority.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::passthrough::client_hello;
use crate::support::oracle::{self, Oracle, Plan};
use crate::support::{
    CLIENT, ECHO, ENDPOINT, Endpoint, GATEWAY, Gateway, Net, Settings, broken, identities, replace,
    run, until,
};

/// Listener that routes by the server name inside, beside the default one.
const BY_NAME: u16 = 15009;
/// Service that is exposed without an endpoint. Only its authority is used.
const WITHOUT_ENDPOINT: &str = "door.app.svc.cluster.local:80";
/// Service whose tunnels are checked by the server name inside.
const STRICT: &str = "strict.app.svc.cluster.local:80";
const CONNECT_ERROR: Option<h2::Reason> = Some(h2::Reason::CONNECT_ERROR);

fn settings(net: Net) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let service = |name: &str| {
        format!(
            "  - {{name: {name}, namespace: app, hostname: {name}.app.svc.cluster.local, vips: [],
     ports: {{80: 9000}}}}\n"
        )
    };
    let services = ["door", "strict", "north"].map(service).concat();
    let text = settings.mesh.replace("policies:", &format!("{services}policies:"));
    let echo = "services: {app/echo";
    let strict = "services: {app/strict.app.svc.cluster.local: {80: 9000}, app/echo";
    settings.mesh = text.replace(echo, strict);
    settings.exposure += &format!(
        "    - {{service: \"{WITHOUT_ENDPOINT}\", to: [{{cluster: west}}], route_by: sni}}
    - {{service: \"{STRICT}\", to: [{{cluster: west}}], names: [\"other.name:8080\"],
       route_by: strict}}
    - {{service: \"north.app.svc.cluster.local:80\", to: [{{cluster: east}}]}}\n"
    );
    settings.listeners = format!(
        "  - {{name: by-name, bind: \"{}\", protocol: hbone, route_by: sni}}\n",
        net.address(1, BY_NAME)
    );
    settings
}

async fn ended(gateway: &Gateway, reason: &str, count: f64) {
    until(reason, async || gateway.tunnels(reason).await, |&now| now == count).await;
}

/// Opens a tunnel and sends these bytes.
async fn sent(client: &Client, authority: &str, bytes: &[u8]) -> Tunnel {
    let mut tunnel = client.tunnel(authority).await.expect("a tunnel");
    tunnel.write_all(bytes).await.expect("an open tunnel");
    tunnel
}

/// Returns all echoed bytes after our end.
async fn echoed(mut tunnel: Tunnel) -> Vec<u8> {
    tunnel.shutdown().await.expect("our end");
    let mut echoed = Vec::new();
    tunnel.read_to_end(&mut echoed).await.expect("a clean end");
    echoed
}

#[test]
fn the_name_inside_routes_a_tunnel_and_its_tls_ends_at_the_endpoint() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let acceptor = TlsAcceptor::from(identities().server(ENDPOINT));
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let mut tls = acceptor.accept(stream).await.expect("a handshake");
                let mut requested = String::new();
                tls.read_to_string(&mut requested).await.expect("a question");
                let answer = requested.to_uppercase();
                tls.write_all(answer.as_bytes()).await.expect("an answer");
                tls.shutdown().await.expect("an end");
            }
        });
        let by_entry = gateway.client(identities()).await;
        let tls = identities().client(CLIENT, GATEWAY);
        let by_listener = Client::connect(net.address(1, BY_NAME), &tls).await;
        let by_listener = by_listener.expect("a connection");
        let mut inner = (*identities().client(CLIENT, ENDPOINT)).clone();
        inner.enable_sni = true;
        let inner = TlsConnector::from(Arc::new(inner));
        let cases = [
            (&by_entry, WITHOUT_ENDPOINT, "echo.app.svc.cluster.local"),
            (&by_entry, WITHOUT_ENDPOINT, "outbound_.80_._.echo.app.svc.cluster.local"),
            (&by_entry, WITHOUT_ENDPOINT, "echo.global"),
            (&by_listener, ECHO, "echo.app.svc.cluster.local"),
            (&by_entry, STRICT, "strict.app.svc.cluster.local"),
        ];
        for (count, (client, authority, name)) in (1..).zip(cases) {
            let tunnel = client.tunnel(authority).await.expect("200 comes first");
            let connecting = inner.connect(name.to_owned().try_into().expect("a name"), tunnel);
            let mut tls = connecting.await.expect("a handshake with the endpoint");
            tls.write_all(b"who is there").await.expect("a question");
            tls.shutdown().await.expect("our end");
            let mut answer = String::new();
            tls.read_to_string(&mut answer).await.expect("an answer");
            assert_eq!(answer, "WHO IS THERE");
            ended(&gateway, "completed", f64::from(count)).await;
            gateway.logged(&format!("dst.sni=\"{name}\"")).await;
        }
        let log = gateway.log();
        let both = |line: &&str| {
            line.contains("connection complete")
                && line.contains(&format!("dst.hbone_addr=\"{WITHOUT_ENDPOINT}\""))
                && line.contains("dst.sni=\"echo.global\"")
                && line.contains("dst.service=\"echo.app.svc.cluster.local\"")
        };
        assert!(log.lines().any(|line| both(&line)), "{log}");
        assert_eq!(gateway.metric("strait_buffered_bytes").await, 0.0);
    });
}

#[test]
fn a_hello_in_frames_of_one_byte_is_replayed_and_every_byte_after_it_arrives() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let hello = client_hello("echo.app.svc.cluster.local", &["h2"]);
        let oracle = Oracle::new();
        let (answers, wanted) = (oracle.clone(), hello.clone());
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let (answers, wanted) = (answers.clone(), wanted.clone());
            async move {
                let mut replayed = vec![0; wanted.len()];
                stream.read_exact(&mut replayed).await.expect("a hello");
                assert!(replayed == wanted, "the hello is replayed as it was");
                answers.answer(stream).await;
            }
        });
        let client = gateway.client(identities()).await;
        for (id, slice) in [(1, 1), (2, 100), (3, hello.len())] {
            let mut tunnel = client.tunnel(WITHOUT_ENDPOINT).await.expect("a tunnel");
            for piece in hello.chunks(slice) {
                let piece = Bytes::copy_from_slice(piece);
                tunnel.send(piece).await.expect("an open tunnel");
            }
            let plan = Plan::both(id, 2 << 20);
            oracle.whole(plan, oracle::drive(tunnel, plan).await).await;
        }
        ended(&gateway, "completed", 3.0).await;
    });
}

#[test]
fn what_a_peer_may_not_reach_by_name_is_refused_alike() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let cases = [
            ("no.app", "unknown_service"),
            ("outbound_.81_._.echo.app.svc.cluster.local", "unknown_service"),
            ("secret.app.svc.cluster.local", "not_exposed"),
            ("north.app.svc.cluster.local", "not_for_peer"),
            ("outbound_.80_.v1_.echo.app.svc.cluster.local", "unknown_sni"),
            // Like Istio's clients of double HBONE: without a server name.
            ("10.0.0.1", "unknown_sni"),
            // Exposed, and without an endpoint.
            ("door.app.svc.cluster.local", "no_endpoint"),
        ];
        for (name, reason) in cases {
            let before = gateway.tunnels(reason).await;
            let mut tunnel = sent(&client, WITHOUT_ENDPOINT, &client_hello(name, &["h2"])).await;
            assert_eq!(broken(&mut tunnel).await, CONNECT_ERROR, "{name}");
            ended(&gateway, reason, before + 1.0).await;
        }
        // The authority itself must be known and exposed, or there is no 200.
        for authority in ["no.app:80", "secret.app.svc.cluster.local:80"] {
            let refused = client.tunnel(authority).await.expect_err("no tunnel");
            assert!(refused.to_string().contains("503"), "{refused}");
        }
        assert_eq!(endpoint.accepted(), 0);
    });
}

#[test]
fn double_hbone_without_a_name_needs_a_tunnel_by_authority() {
    run(async {
        let net = Net::new();
        let mut settings = settings(net);
        settings.mesh = settings.mesh.replace("protocol: TCP", "protocol: HBONE");
        let gateway = Gateway::start(&settings).await;
        let server = TlsAcceptor::from(identities().server(ENDPOINT));
        let _endpoint = Endpoint::new(net.listen(11, 15008).await, move |stream| {
            let server = server.clone();
            async move {
                let tls = server.accept(stream).await.expect("a handshake");
                let mut connection = h2::server::handshake(tls).await.expect("HTTP/2");
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let answer = http::Response::new(());
                    respond.send_response(answer, true).expect("an answer");
                }
            }
        });
        let client = gateway.client(identities()).await;
        let inner = identities().client(CLIENT, ENDPOINT);
        let outer = client.tunnel(ECHO).await.expect("a tunnel");
        let double = Client::connect_over(outer, &inner).await.expect("HBONE inside");
        double.tunnel(ECHO).await.expect("a tunnel in the tunnel");
        let outer = client.tunnel(WITHOUT_ENDPOINT).await.expect("200 comes first");
        let refused = Client::connect_over(outer, &inner).await;
        assert!(refused.is_err(), "it asks for no name");
        ended(&gateway, "unknown_sni", 1.0).await;
    });
}

#[test]
fn what_begins_with_no_hello_is_reset_and_silence_after_five_seconds() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let start = Instant::now();
        let mut silent = client.tunnel(WITHOUT_ENDPOINT).await.expect("a tunnel");
        let mut slow = sent(&client, STRICT, &client_hello("echo.global", &[])[..100]).await;
        // Bytes held by a reader are charged to the tunnel.
        let held = async || gateway.metric("strait_buffered_bytes").await;
        until("held", held, |&held| held >= 16.0 * 1024.0).await;
        let mut count = 0.0;
        for authority in [WITHOUT_ENDPOINT, STRICT] {
            let mut plain = sent(&client, authority, b"GET / HTTP/1.1\r\n\r\n").await;
            assert_eq!(broken(&mut plain).await, CONNECT_ERROR);
            let mut left = client.tunnel(authority).await.expect("a tunnel");
            left.shutdown().await.expect("our end");
            assert_eq!(broken(&mut left).await, CONNECT_ERROR);
            // A record of 16 KiB that begins a ClientHello of 20 KiB.
            let mut long = vec![22, 3, 1, 0x40, 0, 1, 0, 0x50, 0, 3, 3];
            long.resize(5 + 0x4000, 7);
            let mut long = sent(&client, authority, &long).await;
            assert_eq!(broken(&mut long).await, CONNECT_ERROR);
            count += 3.0;
            ended(&gateway, "no_hello", count).await;
        }
        assert!(start.elapsed() < Duration::from_secs(4), "nobody waited");
        for tunnel in [&mut silent, &mut slow] {
            assert_eq!(broken(tunnel).await, CONNECT_ERROR);
        }
        let time = start.elapsed();
        assert!((5..8).contains(&time.as_secs()), "{time:?}");
        ended(&gateway, "no_hello", count + 2.0).await;
        assert_eq!(endpoint.accepted(), 4, "those of the strict service");
        until("nothing is held", held, |&held| held == 0.0).await;
    });
}

#[test]
fn a_strict_tunnel_waits_for_a_name_of_its_service_and_sends_nothing_before() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let (tell, mut received) = tokio::sync::mpsc::channel(16);
        let _endpoint = Endpoint::new(net.listen(11, 9000).await, move |mut stream| {
            let tell = tell.clone();
            async move {
                let mut got = Vec::new();
                let end = stream.read_to_end(&mut got).await;
                let _ = tell.send((got.len(), end.is_ok())).await;
                let _ = stream.write_all(&got).await;
            }
        });
        let client = gateway.client(identities()).await;
        let good = [
            (STRICT, "strict.app.svc.cluster.local"),
            (STRICT, "Strict.app.svc.cluster.local."),
            (STRICT, "outbound_.80_._.strict.app.svc.cluster.local"),
            ("other.name:8080", "other.name"),
            ("other.name:8080", "strict.app.svc.cluster.local"),
        ];
        for (authority, name) in good {
            // rustls would not send a trailing dot.
            let hello = client_hello(name.trim_end_matches('.'), &[]);
            let tunnel = sent(&client, authority, &hello).await;
            assert_eq!(echoed(tunnel).await, hello, "{authority} {name}");
            assert_eq!(received.recv().await, Some((hello.len(), true)));
        }
        let bad = [
            "echo.app.svc.cluster.local",
            "outbound_.81_._.strict.app.svc.cluster.local",
            "outbound_.80_.v1_.strict.app.svc.cluster.local",
            "no.app",
            "10.0.0.1",
        ];
        for (count, name) in (1..).zip(bad) {
            let mut tunnel = sent(&client, STRICT, &client_hello(name, &[])).await;
            assert_eq!(broken(&mut tunnel).await, CONNECT_ERROR, "{name}");
            assert_eq!(received.recv().await, Some((0, false)), "RST, not one byte");
            ended(&gateway, "sni_mismatch", f64::from(count)).await;
        }
    });
}

#[test]
fn an_open_tunnel_is_judged_anew_by_what_its_name_asked_for() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net)).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let hello = client_hello("echo.global", &[]);
        let mut tunnel = sent(&client, WITHOUT_ENDPOINT, &hello).await;
        let mut first = vec![0; hello.len()];
        tunnel.read_exact(&mut first).await.expect("an echo");
        // An alias is added, and then only that one stays: this tunnel did not request it.
        let path = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&path).expect("a file");
        let names = "names: [\"echo.global:80\"]";
        assert!(text.contains(names));
        let both = "names: [\"echo.global:80\", \"echo.other:80\"]";
        replace(&path, &text.replace(names, both));
        gateway.logged("reloaded").await;
        tunnel.write_all(b"more").await.expect("an open tunnel");
        tunnel.read_exact(&mut first[..4]).await.expect("an echo");
        replace(&path, &text.replace(names, "names: [\"echo.other:80\"]"));
        let code = broken(&mut tunnel).await;
        assert_eq!(code, Some(h2::Reason::INTERNAL_ERROR));
        ended(&gateway, "revoked", 1.0).await;
        gateway.wait_until_open(1, 0).await;
    });
}
