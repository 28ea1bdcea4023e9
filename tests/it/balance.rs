//! Selection of endpoints if some of them cannot be dialled.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::passthrough::client_hello;
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, reset, run};

/// Another client of the same cluster.
const OTHER: &str = "spiffe://west.local/ns/app/sa/other";

#[test]
fn a_dead_endpoint_costs_no_tunnel_and_is_soon_left_alone() {
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1, "TCP"), (12, 1, "TCP"), (13, 0, "TCP")];
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let alive = Endpoint::echo(net.listen(11, 9000).await);
        let drained = Endpoint::echo(net.listen(13, 9000).await);
        let client = gateway.client(identities()).await;
        for _ in 0..100 {
            client.tunnel(ECHO).await.expect("a tunnel, whichever endpoint was picked first");
        }
        assert_eq!((alive.accepted(), drained.accepted()), (100, 0));
        assert!(gateway.metric("strait_endpoint_ejections_total").await >= 1.0);
        let refused = gateway.metric("strait_dials_total{result=\"refused\"}").await;
        assert!((1.0..10.0).contains(&refused), "{refused} dials of a dead endpoint");
    });
}

#[test]
fn an_endpoint_that_resets_every_tunnel_before_a_byte_is_ejected() {
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1, "TCP"), (12, 1, "TCP")];
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let _good = Endpoint::new(net.listen(11, 9000).await, |mut stream| async move {
            let _ = stream.write_all(b"welcome").await;
        });
        let bad = Endpoint::new(net.listen(12, 9000).await, |stream| async move {
            reset(stream);
        });
        let client = gateway.client(identities()).await;
        for _ in 0..50 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            let _ = tunnel.read_to_end(&mut Vec::new()).await;
        }
        assert!(gateway.metric("strait_endpoint_ejections_total").await >= 1.0);
        let count = bad.accepted();
        assert!(count < 10, "{count} tunnels to a bad endpoint");
    });
}

/// Opens fifty tunnels over a good endpoint and one that closes early by `leave`. The peer sends a
/// byte, or only its end. The endpoint still gets its share.
fn stays<H>(leave: fn(TcpStream) -> H, byte: Option<u8>)
where
    H: Future<Output = ()> + Send + 'static,
{
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1, "TCP"), (12, 1, "TCP")];
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let _good = Endpoint::echo(net.listen(11, 9000).await);
        let strict = Endpoint::new(net.listen(12, 9000).await, leave);
        let client = gateway.client(identities()).await;
        for _ in 0..50 {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            let _ = match byte {
                Some(byte) => tunnel.write_all(&[byte]).await,
                None => tunnel.shutdown().await,
            };
            let _ = tunnel.read_u8().await;
        }
        let ejections = gateway.metric("strait_endpoint_ejections_total").await;
        assert_eq!(ejections, 0.0);
        let count = strict.accepted();
        assert!((10..=40).contains(&count), "{count} of 50 tunnels");
    });
}

#[test]
fn an_endpoint_that_closes_on_a_peers_bytes_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
        },
        Some(7),
    );
}

#[test]
fn an_endpoint_that_resets_on_a_peers_bytes_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
            reset(stream);
        },
        Some(7),
    );
}

#[test]
fn an_endpoint_that_resets_on_a_peers_fin_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
            reset(stream);
        },
        None,
    );
}

#[test]
fn idle_tunnels_of_one_peer_on_endpoints_that_reset_them_remove_none_for_others() {
    run(async {
        let net = Net::new();
        let endpoints = [11, 12, 13, 14].map(|from| (from, 1, "TCP"));
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let mut listening = Vec::new();
        for (from, ..) in endpoints {
            listening.push(Endpoint::new(net.listen(from, 9000).await, |mut stream| async move {
                match timeout(Duration::from_millis(100), stream.read_u8()).await {
                    Ok(Ok(byte)) => drop(stream.write_u8(byte).await),
                    _ => reset(stream),
                }
            }));
        }
        let neighbour = gateway.client_as(identities(), OTHER).await;
        for _ in 0..40 {
            let mut tunnel = neighbour.tunnel(ECHO).await.expect("a tunnel");
            tunnel.write_u8(7).await.expect("a byte");
            assert_eq!(tunnel.read_u8().await.expect("an echo"), 7);
        }
        let client = gateway.client(identities()).await;
        let mut idle = Vec::new();
        for _ in 0..48 {
            idle.push(client.tunnel(ECHO).await.expect("a tunnel"));
        }
        for mut tunnel in idle {
            tunnel.read_u8().await.expect_err("a reset");
        }
        assert_eq!(gateway.metric("strait_endpoint_ejections_total").await, 0.0);
        // Two sources are trusted.
        let mut tunnels = Vec::new();
        for _ in 0..48 {
            tunnels.push(neighbour.tunnel(ECHO).await.expect("a tunnel"));
        }
        for mut tunnel in tunnels {
            tunnel.read_u8().await.expect_err("a reset");
        }
        assert!(gateway.metric("strait_endpoint_ejections_total").await >= 1.0);
    });
}

#[test]
fn an_endpoint_that_never_answers_a_client_hello_is_named_and_ejected() {
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1, "TCP"), (12, 1, "TCP")];
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let _good = Endpoint::echo(net.listen(11, 9000).await);
        let silent = Endpoint::new(net.listen(12, 9000).await, |mut stream| async move {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let client = gateway.client(identities()).await;
        let record = |part: &[u8]| {
            let length = u8::try_from(part.len()).expect("a short part");
            [&[22, 3, 1, 0, length], part].concat()
        };
        // In one record, in several, and in several segments. Each has a random of its own.
        let ask = async |form: usize| {
            let hello = client_hello("any.example", &[]);
            let records = hello[5..].chunks(30).flat_map(record).collect::<Vec<_>>();
            let (hello, segment) = match form % 3 {
                0 => (&hello, hello.len()),
                1 => (&records, records.len()),
                _ => (&records, 7),
            };
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            for part in hello.chunks(segment) {
                tunnel.write_all(part).await.expect("a part of a hello");
            }
            tunnel
        };
        let mut tunnels = Vec::new();
        for index in 0..12 {
            tunnels.push(ask(index).await);
        }
        let (mut answered, mut failed) = (0, 0);
        for tunnel in &mut tunnels {
            match timeout(Duration::from_secs(15), tunnel.read_u8()).await {
                Ok(Ok(_)) => answered += 1,
                Ok(Err(_)) => failed += 1,
                Err(_) => panic!("the endpoint owes an answer"),
            }
        }
        assert_eq!(failed, silent.accepted());
        assert!(answered > 0 && failed > 0, "{answered} and {failed}");
        assert_eq!(gateway.tunnels("endpoint_silent").await, failed as f64);
        gateway.logged("no byte within 5 s of the ClientHello").await;
        for _ in 0..20 {
            let answer = timeout(Duration::from_secs(4), ask(0).await.read_u8()).await;
            assert_eq!(answer.expect("no wait").expect("an echo"), 22);
        }
        assert_eq!(gateway.metric("strait_endpoint_ejections_total").await, 1.0);
    });
}

#[test]
fn what_is_on_the_deny_list_is_never_dialled() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.allow = "[]";
        let gateway = Gateway::start(&settings).await;
        let trap = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("dial_denied").await, 1.0);
        assert_eq!(trap.accepted(), 0);
        gateway.logged("a loopback address, which is never dialled").await;
    });
}

#[test]
fn reserved_addresses_and_those_that_embed_a_denied_one_are_never_dialled() {
    run(async {
        let net = Net::new();
        let denied = [
            "fd00:ec2::253",
            "::ffff:0:127.0.0.1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "240.0.0.2",
            "64:ff9b:1:7f00:0:100::",
        ];
        let endpoints: Vec<_> = (11..).zip(denied).map(|(host, _)| (host, 1, "TCP")).collect();
        let mut settings = Settings::new(net, identities()).endpoints(&endpoints);
        settings.allow = "[]";
        for (host, address) in (11..).zip(denied) {
            settings.mesh = settings.mesh.replace(&net.ip(host).to_string(), address);
        }
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("dial_denied").await, 1.0);
        let dials = gateway.metric("strait_dials_total{result=\"denied\"}").await;
        assert_eq!(dials, denied.len() as f64);
    });
}

#[test]
fn the_gateway_never_dials_itself() {
    run(async {
        let net = Net::new();
        // Host 1 is the gateway, and HBONE endpoints are dialled at its own port.
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(1, 1, "HBONE")])).await;
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("dial_denied").await, 1.0);
        assert_eq!(gateway.metric("strait_connections_total").await, 1.0);
    });
}
