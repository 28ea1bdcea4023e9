//! Selection of endpoints if some of them cannot be dialled.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, reset, run};

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
            client
                .tunnel(ECHO)
                .await
                .expect("a tunnel, whichever endpoint was picked first");
        }
        assert_eq!((alive.accepted(), drained.accepted()), (100, 0));
        assert!(gateway.metric("strait_endpoint_ejections_total").await >= 1.0);
        let refused = gateway
            .metric("strait_dials_total{result=\"refused\"}")
            .await;
        assert!(
            (1.0..10.0).contains(&refused),
            "{refused} dials of a dead endpoint"
        );
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
fn review_9_an_endpoint_that_closes_on_a_peers_bytes_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
        },
        Some(7),
    );
}

#[test]
fn review_9_an_endpoint_that_resets_on_a_peers_bytes_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
            reset(stream);
        },
        Some(7),
    );
}

#[test]
fn review_9_an_endpoint_that_resets_on_a_peers_fin_stays_for_everybody() {
    stays(
        |mut stream| async move {
            let _ = stream.read_u8().await;
            reset(stream);
        },
        None,
    );
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
        gateway
            .logged("a loopback address, which is never dialled")
            .await;
    });
}

#[test]
fn review_18_reserved_addresses_and_those_that_embed_a_denied_one_are_never_dialled() {
    run(async {
        let net = Net::new();
        let denied = [
            "fd00:ec2::253",
            "::ffff:0:127.0.0.1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "240.0.0.2",
            "64:ff9b:1:7f00:0:100::",
        ];
        let endpoints: Vec<_> = (11..)
            .zip(denied)
            .map(|(host, _)| (host, 1, "TCP"))
            .collect();
        let mut settings = Settings::new(net, identities()).endpoints(&endpoints);
        settings.allow = "[]";
        for (host, address) in (11..).zip(denied) {
            settings.mesh = settings.mesh.replace(&net.ip(host).to_string(), address);
        }
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("dial_denied").await, 1.0);
        let dials = gateway
            .metric("strait_dials_total{result=\"denied\"}")
            .await;
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
