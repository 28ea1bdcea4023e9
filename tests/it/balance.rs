//! Which endpoint is dialled when some of them cannot be.

use tokio::io::AsyncReadExt;

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

/// Fifty tunnels over a good endpoint and one that leaves as `leave` does.
fn leaves_early<H>(leave: fn(tokio::net::TcpStream) -> H)
where
    H: Future<Output = ()> + Send + 'static,
{
    run(async {
        let net = Net::new();
        let endpoints = [(11, 1, "TCP"), (12, 1, "TCP")];
        let gateway = Gateway::start(&Settings::new(net, identities()).endpoints(&endpoints)).await;
        let _good = Endpoint::echo(net.listen(11, 9000).await);
        let bad = Endpoint::new(net.listen(12, 9000).await, leave);
        let client = gateway.client(identities()).await;
        for _ in 0..50 {
            // An endpoint that is quick to reset has failed the dial, and another is tried.
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            let _ = tokio::io::AsyncWriteExt::write_all(&mut tunnel, b"x").await;
            let _ = tunnel.read_u8().await;
        }
        assert!(gateway.metric("strait_endpoint_ejections_total").await >= 1.0);
        assert!(
            bad.accepted() < 10,
            "{} tunnels to a bad endpoint",
            bad.accepted()
        );
    });
}

#[test]
fn an_endpoint_that_resets_every_tunnel_early_is_ejected() {
    leaves_early(|mut stream| async move {
        let _ = stream.read_u8().await;
        reset(stream);
    });
}

#[test]
fn an_endpoint_that_ends_every_tunnel_at_once_is_ejected() {
    leaves_early(|mut stream| async move {
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut stream).await;
        while stream.read_u8().await.is_ok() {}
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
