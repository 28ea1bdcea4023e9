//! PROXY protocol: peers behind load balancers, and endpoints that get the addresses of peers.

use std::net::SocketAddr;

use strait::tools::hbone::Client;
use strait::wire::proxy_protocol::header;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::passthrough::client_hello;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, bytes, echoes, identities,
    raise_descriptor_limit, replace, run, try_echo, until,
};

const HBONE: u16 = 15010;
const TLS: u16 = 15012;
/// Hosts: a load balancer, and one that is none.
const BALANCER: u8 = 2;
const OTHER: u8 = 3;
/// Header of a health check (LOCAL).
const LOCAL: &[u8] = b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
const MIB: u64 = 1 << 20;

/// A gateway with listeners for peers behind a load balancer.
async fn start(net: Net, more: &str, descriptors: u32) -> Gateway {
    raise_descriptor_limit();
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let balancers = format!("balancers: [\"{}/32\"]", net.ip(BALANCER));
    settings.listeners = format!(
        "  - {{name: hbone, bind: \"{}\", sources: [192.0.2.0/24], {balancers}}}
  - {{name: tls, bind: \"{}\", protocol: tls, {balancers},
     routes: [{{sni: [any.example], to: \"{ECHO}\"}}]}}
",
        net.address(1, HBONE),
        net.address(1, TLS),
    );
    settings.more += more;
    settings.descriptors = descriptors;
    Gateway::start(&settings).await
}

/// Connects from a host, and sends these bytes.
async fn send(net: Net, from: u8, port: u16, first: &[u8]) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(net.address(from, 0)).expect("a free address");
    let mut stream = socket.connect(net.address(1, port)).await?;
    stream.write_all(first).await?;
    Ok(stream)
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Opens an HBONE connection after this header.
async fn client(net: Net, header: &[u8]) -> std::io::Result<Client> {
    let stream = send(net, BALANCER, HBONE, header).await?;
    let tls = identities().client(CLIENT, GATEWAY);
    Client::connect_over(stream, &tls).await.map_err(std::io::Error::other)
}

#[test]
fn the_address_of_a_peer_is_the_one_that_a_listed_balancer_states() {
    run(async {
        let net = Net::new();
        let gateway = start(net, "", 4096).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let v1 = b"PROXY TCP4 192.0.2.7 198.51.100.9 40007 15008\r\n";
        let v2 = header(address("192.0.2.8:40008"), address("198.51.100.9:15008"));
        let mut kept = Vec::new();
        for (header, source) in [(&v1[..], "192.0.2.7:40007"), (&v2, "192.0.2.8:40008")] {
            let client = client(net, header).await.expect("a connection");
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut tunnel).await;
            tunnel.shutdown().await.expect("our end");
            gateway.logged(&format!("src.addr={source}")).await;
            let mut open = client.tunnel(ECHO).await.expect("a tunnel");
            echoes(&mut open).await;
            kept.push((client, open));
        }
        let outside = header(address("198.51.100.7:1"), address("198.51.100.9:15008"));
        client(net, &outside).await.expect_err("not in `sources`");
        let shed =
            "strait_connections_shed_total{limit=\"not_in_sources\",source_cluster=\"unknown\"}";
        assert_eq!(gateway.metric(shed).await, 1.0);
        // A health check is served from anywhere, and has no tunnels from outside of `sources`.
        let check = client(net, LOCAL).await.expect("a connection");
        check.tunnel(ECHO).await.expect_err("a rejection");
        assert_eq!(gateway.tunnels("not_for_peer").await, 1.0);

        let path = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&path).expect("a file");
        let balancer = format!("{}/32", net.ip(BALANCER));
        replace(&path, &text.replace(&balancer, "192.0.2.200/32"));
        for (_, tunnel) in &mut kept {
            let mut byte = [0];
            tunnel.read_exact(&mut byte).await.expect_err("the balancer is not trusted any more");
        }
        assert_eq!(gateway.tunnels("revoked").await, 2.0);
        gateway.logged("or its `balancers` the load balancer").await;
    });
}

#[test]
fn a_header_is_required_of_balancers_and_refused_from_others() {
    run(async {
        let net = Net::new();
        let gateway = start(net, "", 4096).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let hello = client_hello("any.example", &[]);
        let header = header(address("192.0.2.8:40008"), address("198.51.100.9:15008"));
        let headed = [&header[..], &hello].concat();
        for (from, first, refusal) in
            [(BALANCER, &hello, "no_proxy_header"), (OTHER, &headed, "other")]
        {
            if let Ok(mut stream) = send(net, from, TLS, first).await {
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer).await;
                assert!(answer.is_empty() || answer[0] == 21, "an alert at most: {answer:?}");
            }
            let refused = async || gateway.refused_handshakes(refusal).await;
            until(refusal, refused, |&count| count == 1.0).await;
        }
        for (from, first) in [(BALANCER, &headed), (OTHER, &hello)] {
            let mut stream = send(net, from, TLS, first).await.expect("a connection");
            let mut echo = vec![0; hello.len()];
            stream.read_exact(&mut echo).await.expect("an echo");
            assert_eq!(echo, hello, "the endpoint gets no header");
        }
    });
}

#[test]
fn an_endpoint_gets_the_addresses_of_the_peer_if_its_service_asks_for_them() {
    run(async {
        let net = Net::new();
        let traffic = format!(
            "traffic: [{{service: {}, proxy_protocol: v2}}]\n",
            ECHO.split_once(':').expect("a port").0
        );
        let gateway = start(net, &traffic, 4096).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let hello = client_hello("any.example", &[]);
        let stated = header(address("[2001:db8::8]:40008"), address("[2001:db8::9]:443"));
        let headed = [&stated[..], &hello].concat();
        for (from, first) in [(BALANCER, &headed), (OTHER, &hello)] {
            let mut stream = send(net, from, TLS, first).await.expect("a connection");
            let direct = header(stream.local_addr().expect("an address"), net.address(1, TLS));
            let header = if from == BALANCER { &stated } else { &direct };
            let want = [&header[..], &hello].concat();
            let mut got = vec![0; want.len()];
            stream.read_exact(&mut got).await.expect("an echo");
            assert_eq!(got, want);
            // Enough to pass through a pipe.
            let (mut read, mut write) = stream.split();
            let send = bytes::send(&mut write, 1, 0, 4 * MIB);
            tokio::try_join!(send, bytes::expect(&mut read, 1, 0, 4 * MIB)).expect("all bytes");
        }
        let (_, text, error) = gateway.run_command(&["explain", "--sni", "any.example"]).await;
        assert!(error.is_empty(), "{error}");
        assert!(text.contains("the endpoint gets a PROXY header"), "{text}");
    });
}

#[test]
fn peers_behind_one_balancer_have_shares_of_their_own() {
    run(async {
        let net = Net::new();
        let _gateway = start(net, "", 400).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let hello = client_hello("any.example", &[]);
        let open = async |peer: &str| {
            let header = header(address(peer), address("198.51.100.9:443"));
            let first = [&header[..], &hello].concat();
            let mut stream = send(net, BALANCER, TLS, &first).await.ok()?;
            let mut echo = vec![0; hello.len()];
            stream.read_exact(&mut echo).await.ok()?;
            try_echo(&mut stream).await.ok()?;
            Some(stream)
        };
        let mut held = Vec::new();
        while let Some(stream) = open("192.0.2.1:1").await {
            held.push(stream);
        }
        // Two descriptors each, of 272 with a reserve for each of the other listeners.
        assert!((40..=90).contains(&held.len()), "{}", held.len());
        for host in 2..6 {
            let other = open(&format!("192.0.2.{host}:1")).await;
            held.push(other.expect("another peer behind the balancer"));
        }
    });
}
