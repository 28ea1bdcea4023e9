//! Process that is short of descriptors: open connections stay, and everything recovers.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, identities, raise_descriptor_limit, run, until,
};

const CLIENTS: u16 = 1000;
const SHED: &str = "strait_connections_shed_total{limit=\"source\",source_cluster=\"unknown\"}";

#[test]
fn a_thousand_clients_and_256_descriptors_hurt_nobody_who_is_connected() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.descriptors = 256;
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");

        let mut unverified = Vec::new();
        for _ in 0..CLIENTS {
            // The kernel rejects connections beyond its own queue.
            let connect = TcpStream::connect(gateway.address);
            if let Ok(Ok(stream)) = timeout(Duration::from_millis(100), connect).await {
                unverified.push(stream);
            }
        }
        let shed = async || gateway.metric(SHED).await;
        until("strangers are turned away", shed, |&shed| shed > 900.0).await;
        for _ in 0..100 {
            tunnel.write_all(b"?").await.expect("an open tunnel");
            assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
        }
        client.tunnel(ECHO).await.expect("a new tunnel of an old client");
        assert_eq!(gateway.http(15000, "GET", "/config_dump").await.0, 200);
        let _other = silent(net, 99, &gateway).await;
        let accepted = async || gateway.metric("strait_accept_pauses_total").await;
        assert_eq!(accepted().await, 0.0, "there is always room to accept");

        drop(unverified);
        let again = async || {
            let tls = identities().client(crate::support::CLIENT, crate::support::GATEWAY);
            let connect = strait::tools::hbone::Client::connect(gateway.address, &tls);
            match timeout(Duration::from_secs(5), connect).await {
                Ok(Ok(client)) => client.tunnel(ECHO).await.is_ok(),
                _ => false,
            }
        };
        until("a new client", again, |&served| served).await;
    });
}

/// Connects from a host of the test's own net, and sends nothing. Returns none if the gateway has
/// reset the connection already.
async fn silent(net: Net, from: u8, gateway: &Gateway) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(net.address(from, 0)).expect("a free address");
    socket.connect(gateway.address).await.ok()
}

#[test]
fn unverified_clients_of_many_sources_that_hold_every_handshake_keep_no_client_out() {
    run(async {
        raise_descriptor_limit();
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut unverified = Vec::new();
        // Eleven sources with a hundred each are more than the 1,024 places.
        for source in 100..111 {
            for _ in 0..100 {
                unverified.push(silent(net, source, &gateway).await);
            }
        }
        for _ in 0..10 {
            let client = gateway.client(identities()).await;
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            tunnel.write_all(b"?").await.expect("an open tunnel");
            assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
        }
        // The shares of these sources end before all places are taken, so none is evicted.
        assert!(gateway.metric(SHED).await > 76.0);
    });
}
