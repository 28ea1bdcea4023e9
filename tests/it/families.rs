//! Address families: IPv6 alone, and workloads with an address of each.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use strait::grpc::workload::{NetworkAddress, address};
use strait::tools::hbone::Client;
use strait::xds::store::ADDRESS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::istio::spawn_with;
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{SERVICE, bytes, service, workload};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, identities, run, until,
};

const LOCALHOST: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// An endpoint that sends a byte.
fn says(listener: TcpListener, byte: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(byte).await;
        let _ = stream.shutdown().await;
    })
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind((LOCALHOST, 0)).expect("a listener");
    listener.local_addr().expect("an address").port()
}

/// Returns the byte that answers a tunnel.
async fn answered(client: &Client, authority: &str) -> Option<u8> {
    let mut tunnel = client.tunnel(authority).await.ok()?;
    let byte = tunnel.read_u8().await.ok();
    let _ = tunnel.shutdown().await;
    byte
}

#[test]
fn every_address_of_a_dual_stack_workload_is_an_endpoint() {
    run(async {
        let net = Net::new();
        let v6 = TcpListener::bind((LOCALHOST, 0)).await.expect("a listener");
        let port = v6.local_addr().expect("an address").port();
        let v4 = says(net.listen(11, port).await, 4);
        let v6 = says(v6, 6);
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.allow = "[\"127.0.0.0/8\", \"::1/128\"]";
        let both = format!("workloadIps: [\"{}\", \"::1\"]", net.ip(11));
        let only = format!("workloadIps: [\"{}\"]", net.ip(11));
        settings.mesh = settings.mesh.replace(&only, &both);
        settings.mesh = settings.mesh.replace("{80: 9000}", &format!("{{80: {port}}}"));
        assert!(settings.mesh.contains(&both) && !settings.mesh.contains("9000}"));
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        for byte in [4, 6] {
            let answer = async || answered(&client, ECHO).await;
            until("an answer", answer, |answer| *answer == Some(byte)).await;
        }
        // If one family cannot be reached, the other remains.
        drop(v4);
        // The listener is closed by its task, and until then the kernel accepts.
        let closed = async || tokio::net::TcpStream::connect(net.address(11, port)).await.is_err();
        until("a closed listener", closed, |&closed| closed).await;
        for _ in 0..8 {
            assert_eq!(answered(&client, ECHO).await, Some(6));
        }
        assert!(v6.accepted() >= 9);
        let (_, text, _) = gateway.run_command(&["explain", "--from", CLIENT, "--to", ECHO]).await;
        for address in [net.address(11, port), SocketAddr::new(LOCALHOST, port)] {
            assert!(text.contains(&address.to_string()), "{address} in {text}");
        }
    });
}

#[test]
fn where_there_is_only_ipv6_tunnels_reach_what_istiod_tells() {
    run(async {
        let net = Net::new();
        // Every HBONE endpoint has this port, and all tests of a machine this address.
        let bind = async || TcpListener::bind((LOCALHOST, 15008)).await;
        let listener = until("the port", bind, Result::is_ok).await;
        let _endpoint = says(listener.expect("a listener"), 6);
        let istiod = Istiod::default();
        let mut of_vip = service();
        let vip = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
        if let Some(address::Type::Service(service)) = &mut of_vip.r#type {
            service.addresses = vec![NetworkAddress {
                network: "east".into(),
                address: bytes(vip.into()).into(),
                ..NetworkAddress::default()
            }];
        }
        istiod.put(ADDRESS, SERVICE, &of_vip);
        istiod.put(ADDRESS, "a", &workload("a", bytes(LOCALHOST)));
        let [plane, own] = [free_port(), free_port()].map(|port| SocketAddr::new(LOCALHOST, port));
        let _serving = istiod.serve(plane, identities()).await;
        let mut settings = Settings::new(net, identities());
        settings.allow = "[\"::1/128\"]";
        let mut gateway = spawn_with(&settings, NAME, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let text = text.replace(&net.address(2, 15012).to_string(), &plane.to_string());
            let text = text.replace(&net.address(1, 15008).to_string(), &own.to_string());
            std::fs::write(file, text).expect("a configuration");
        });
        gateway.ready().await;
        let tls = identities().client(CLIENT, GATEWAY);
        let client = Client::connect(own, &tls).await.expect("a connection");
        assert_eq!(answered(&client, ECHO).await, Some(6));
        let by_vip = answered(&client, &format!("[{vip}]:80")).await;
        assert_eq!(by_vip, Some(6));
    });
}
