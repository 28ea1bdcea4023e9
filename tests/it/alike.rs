//! Rejections that a peer must not be able to distinguish: of services that are unknown, not
//! exposed, exposed to others, and without endpoints. The operator sees a reason for each.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::passthrough::client_hello;
use crate::support::raw::{DATA, HEADERS, PING, RST_STREAM, RawPeer, frame, headers};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, run, until};

/// A frame of a stream: its type, its flags and its payload.
type Frame = (u8, u8, Vec<u8>);

const ISTIO: u16 = 15443;
const ROUTES: u16 = 15012;
/// Service whose tunnels are routed by the server name inside them.
const ROUTED_BY_SNI: &str = "door.app.svc.cluster.local:80";

/// Requested services, with the reason that the operator sees.
const KINDS: [(&str, &str); 5] = [
    ("nowhere.app.svc.cluster.local", "unknown_service"),
    ("secret.app.svc.cluster.local", "not_exposed"),
    ("echo.app.svc.cluster.local", "not_for_peer"),
    ("empty.app.svc.cluster.local", "no_endpoint"),
    ("behind.app.svc.cluster.local", "no_waypoint"),
];

async fn gateway(net: Net) -> Gateway {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let door = "  - {name: door, namespace: app, hostname: door.app.svc.cluster.local, vips: [],
     ports: {80: 9000}}
  - {name: empty, namespace: app, hostname: empty.app.svc.cluster.local, vips: [],
     ports: {80: 9000}}
  - {name: behind, namespace: app, hostname: behind.app.svc.cluster.local, vips: [],
     ports: {80: 9000},
     waypoint: {destination: east/240.0.0.9, hboneMtlsPort: 15008}}\npolicies:";
    settings.mesh = settings.mesh.replace("policies:", door);
    settings.exposure = format!(
        "    - {{service: \"echo.app.svc.cluster.local:80\", to: [{{cluster: east}}]}}
    - {{service: \"empty.app.svc.cluster.local:80\", to: [{{anyone: true}}]}}
    - {{service: \"behind.app.svc.cluster.local:80\", to: [{{anyone: true}}]}}
    - {{service: \"{ROUTED_BY_SNI}\", to: [{{cluster: west}}], route_by: sni}}\n"
    );
    let ip = net.ip(1);
    settings.listeners = format!(
        "  - {{name: istio, bind: \"{ip}:{ISTIO}\", protocol: tls, routing: istio}}
  - name: routes
    bind: \"{ip}:{ROUTES}\"
    protocol: tls
    routes: [{{sni: [\"gone.example\"], to: \"gone.app.svc.cluster.local:80\"}}]\n"
    );
    Gateway::start(&settings).await
}

/// Returns all frames of the first stream, on a new connection, so that the encoder of headers is
/// in its initial state. The answer to a PING follows all of them.
async fn frames(gateway: &Gateway, authority: &str, inside: Option<&str>) -> Vec<Frame> {
    let mut peer = RawPeer::connect(gateway).await;
    let fields: [(&str, &[u8]); 2] =
        [(":method", b"CONNECT"), (":authority", authority.as_bytes())];
    peer.write(&headers(1, &fields)).await;
    let mut frames = Vec::new();
    let last = if inside.is_some() { RST_STREAM } else { HEADERS };
    let mut pinged = false;
    loop {
        let next = peer.next().await.expect("an open connection");
        if next.stream == 1 {
            if next.kind == last && !pinged {
                pinged = true;
                peer.write(&frame(PING, 0, 0, b"are done")).await;
            }
            // Like real clients: the reset of a ClientHello sent before 200 would overtake the 200.
            if let (HEADERS, Some(name)) = (next.kind, inside) {
                peer.write(&frame(DATA, 0, 1, &client_hello(name, &["h2"]))).await;
            }
            frames.push((next.kind, next.flags, next.payload));
        } else if next.kind == PING && next.payload == b"are done" {
            return frames;
        }
    }
}

/// Returns the whole answer of a TLS listener, to its clean end.
async fn answer(net: Net, port: u16, hello: &[u8]) -> Vec<u8> {
    let stream = TcpStream::connect(net.address(1, port)).await;
    let mut stream = stream.expect("a connection");
    stream.write_all(hello).await.expect("a hello");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("a clean end");
    answer
}

#[test]
fn unknown_unexposed_and_without_endpoint_are_the_same_bytes_and_other_reasons() {
    run(async {
        let net = Net::new();
        let gateway = gateway(net).await;
        let endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut by_authority = Vec::new();
        let mut by_name = Vec::new();
        let mut by_istio = Vec::new();
        for (host, reason) in KINDS {
            by_authority.push(frames(&gateway, &format!("{host}:80"), None).await);
            by_name.push(frames(&gateway, ROUTED_BY_SNI, Some(host)).await);
            let name = format!("outbound_.80_._.{host}");
            by_istio.push(answer(net, ISTIO, &client_hello(&name, &["istio"])).await);
            let refused = async || gateway.tunnels(reason).await;
            until(reason, refused, |&refused| refused == 3.0).await;
        }
        for (form, answers) in [("authority", &by_authority), ("name", &by_name)] {
            assert!(!answers[0].is_empty(), "{form}");
            assert!(answers.iter().all(|one| *one == answers[0]), "{form}: {answers:?}");
        }
        assert!(by_istio.iter().all(|one| *one == by_istio[0]), "{by_istio:?}");
        // A route to a missing service is like no route.
        let none = answer(net, ROUTES, &client_hello("nowhere.example", &[])).await;
        let lost = answer(net, ROUTES, &client_hello("gone.example", &[])).await;
        assert_eq!((&none, &lost), (&by_istio[0], &by_istio[0]));
        assert_eq!(endpoint.accepted(), 0);
    });
}
