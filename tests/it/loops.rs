//! Gateways whose routes lead to each other. A ClientHello passes through them only a few times.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::passthrough::client_hello;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, broken, identities, run, until};

/// Port of the TLS listener, which is the target port of the mesh's service.
const TLS: u16 = 9000;

/// Starts a gateway with a `*` route to a service whose endpoint is at host 1 of `to`.
async fn leading_to(net: Net, to: Net) -> Gateway {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let (from, to) = (net.ip(11).to_string(), to.ip(1).to_string());
    settings.mesh = settings.mesh.replace(&from, &to);
    settings.listeners = format!(
        "  - {{name: any, bind: \"{}\", protocol: tls, routes: [{{sni: [\"*\"], to: \
         \"{ECHO}\"}}]}}\n",
        net.address(1, TLS)
    );
    Gateway::start(&settings).await
}

/// Starts two gateways whose routes lead to each other.
async fn pair() -> [(Net, Gateway); 2] {
    let (here, there) = (Net::new(), Net::new());
    let first = leading_to(here, there).await;
    [(here, first), (there, leading_to(there, here).await)]
}

/// Waits until the loop is detected. Returns the number of connections accepted by each gateway.
async fn found(gateways: &[(Net, Gateway); 2]) -> [f64; 2] {
    let [(_, first), (_, second)] = gateways;
    let loops = async || first.tunnels("loop").await + second.tunnels("loop").await;
    until("a loop is found", loops, |&loops| loops > 0.0).await;
    until("all have ended", loops, |&loops| loops == 1.0).await;
    let all = "strait_connections_total";
    [first.metric(all).await, second.metric(all).await]
}

#[test]
fn one_hello_takes_at_most_four_connections_of_two_gateways_in_a_loop() {
    run(async {
        let gateways = pair().await;
        let mut stream =
            TcpStream::connect(gateways[0].0.address(1, TLS)).await.expect("a connection");
        let hello = client_hello("any.example", &[]);
        stream.write_all(&hello).await.expect("a hello");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        // The rejection of the last gateway comes back through all of them.
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 40]);
        drop(stream);
        let connections = found(&gateways).await;
        assert_eq!(connections, [4.0, 3.0], "three, and the one that is refused");
        for (_, gateway) in &gateways {
            gateway.wait_until_open(0, 0).await;
        }
        gateways[0].1.logged("a route that leads back").await;
    });
}

#[test]
fn a_hello_inside_a_tunnel_that_leads_into_a_loop_goes_round_no_more() {
    run(async {
        let gateways = pair().await;
        let client = gateways[0].1.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        let hello = client_hello("any.example", &[]);
        tunnel.write_all(&hello).await.expect("a hello");
        let mut answer = [0; 7];
        tunnel.read_exact(&mut answer).await.expect("an alert");
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 40]);
        // The first gateway has the tunnel too, so two of its own connections are enough.
        let [first, second] = found(&gateways).await;
        assert!(first <= 4.0 && second <= 3.0, "{first} and {second}");
    });
}

#[test]
fn the_fourth_tunnel_with_one_hello_is_reset_and_a_new_hello_is_not() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let (go, goes) = tokio::sync::watch::channel(false);
        let hellos = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&hellos);
        let _endpoint = Endpoint::new(net.listen(11, TLS).await, move |mut stream| {
            let (mut goes, counted) = (goes.clone(), Arc::clone(&counted));
            async move {
                let mut all = vec![0; 64];
                // The rejected tunnel sends none.
                if stream.read_exact(&mut all).await.is_err() {
                    return;
                }
                counted.fetch_add(1, Ordering::Relaxed);
                goes.wait_for(|&go| go).await.expect("the test's word");
                let _ = stream.write_all(b"!").await;
                let _ = stream.read_to_end(&mut all).await;
            }
        });
        let client = gateway.client(identities()).await;
        let hello = |name| client_hello(name, &[]);
        let (same, other) = (hello("a.example"), hello("a.example"));
        let mut held = Vec::new();
        for _ in 0..3 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            tunnel.write_all(&same).await.expect("a hello");
            held.push(tunnel);
        }
        let received = async || {
            let (_, metrics) = gateway.http(15020, "GET", "/metrics").await;
            let mut counts = metrics.lines().filter_map(|line| {
                let line = line.strip_prefix("istio_tcp_received_bytes_total{")?;
                line.rsplit(' ').next()?.parse::<f64>().ok()
            });
            counts.next().unwrap_or(0.0)
        };
        let all = 3.0 * same.len() as f64;
        until("three hellos", received, |&bytes| bytes >= all).await;
        let mut fourth = client.tunnel(ECHO).await.expect("a tunnel");
        fourth.write_all(&same).await.expect("a hello");
        let reset = timeout(Duration::from_secs(5), broken(&mut fourth)).await;
        let reset = reset.expect("a reset at once");
        assert_eq!(reset, Some(h2::Reason::INTERNAL_ERROR));
        assert_eq!(hellos.load(Ordering::Relaxed), 3, "the fourth is not sent");
        assert_eq!(gateway.tunnels("loop").await, 1.0);
        let mut fifth = client.tunnel(ECHO).await.expect("a tunnel");
        fifth.write_all(&other).await.expect("a hello");
        held.push(fifth);
        go.send_replace(true);
        for tunnel in &mut held {
            assert_eq!(tunnel.read_u8().await.expect("an answer"), b'!');
        }
        // Tunnels whose endpoint has answered are no longer in flight.
        let mut sixth = client.tunnel(ECHO).await.expect("a tunnel");
        sixth.write_all(&same).await.expect("a hello");
        assert_eq!(sixth.read_u8().await.expect("an answer"), b'!');
    });
}
