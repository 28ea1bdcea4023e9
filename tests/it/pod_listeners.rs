//! TLS listeners of a gateway as Istio starts it: for sidecars at 15443, and to istiod at 15012.

use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use strait::grpc::workload::{Port, PortList, Service, TunnelProtocol, address};
use strait::xds::store::ADDRESS;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::istio::asks;
use crate::passthrough::client_hello;
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, changed, service};
use crate::support::{Endpoint, Net, endpoint_port, identities, pod, run};

const ISTIOD: &str = "istiod.istio-system.svc.cluster.local";

/// The keys of `deploy/kubernetes/README.md`, at addresses of the test.
fn overlay(net: Net) -> String {
    let ip = net.ip(1);
    let listeners = format!(
        "{{name: cross-network, bind: \"{ip}:15008\"}},
  {{name: sidecars, bind: \"{ip}:15443\", protocol: tls, routing: istio}},
  {{name: istiod, bind: \"{ip}:15012\", protocol: tls, sources: [\"127.0.0.0/8\"],
    routes: [{{sni: [\"*\"], to: \"{ISTIOD}:15012\"}}]}}"
    );
    let own = format!("{{name: cross-network, bind: \"{ip}:15008\"}}");
    let addresses = pod::addresses(net);
    assert!(addresses.contains(&own));
    addresses.replace(&own, &listeners)
        + &format!("exposure: {{services: [{{service: {HOSTNAME}, to: [{{anyone: true}}]}}]}}\n")
}

/// Istiod's own Service, and its pod at host 2.
fn put_istiod(istiod: &Istiod, net: Net) {
    let ports = vec![Port { service_port: 15012, target_port: 15012, ..Port::default() }];
    let mut of_istiod = service();
    if let Some(address::Type::Service(service)) = &mut of_istiod.r#type {
        *service = Service {
            name: "istiod".into(),
            namespace: "istio-system".into(),
            hostname: ISTIOD.into(),
            ports: ports.clone(),
            ..Service::default()
        };
    }
    let name = format!("istio-system/{ISTIOD}");
    istiod.put(ADDRESS, &name, &of_istiod);
    let pod = changed("istiod", bytes(net.ip(2)), |workload| {
        workload.tunnel_protocol = TunnelProtocol::None.into();
        workload.services = [(name.clone(), PortList { ports })].into();
    });
    istiod.put(ADDRESS, "istiod", &pod);
}

#[test]
fn the_tls_listeners_of_a_pod_lead_to_sidecars_and_to_istiod() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        // A sidecar is dialled at its target port, and has no HBONE.
        let sidecar = changed("a", bytes(net.ip(11)), |workload| {
            workload.tunnel_protocol = TunnelProtocol::None.into();
        });
        istiod.put(ADDRESS, "a", &sidecar);
        let captured = changed("b", bytes(net.ip(12)), |_| ());
        istiod.put(ADDRESS, "b", &captured);
        put_istiod(&istiod, net);
        let _sidecar = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let captured = Endpoint::echo(net.listen(12, 15008).await);
        let plane = net.address(2, 15012);
        let _serving = istiod.serve(plane, identities()).await;
        let mut gateway = pod::spawn_file(net, &overlay(net));
        gateway.ready().await;

        // HBONE goes to the workload that supports it, as without TLS listeners.
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(captured.accepted(), 1);

        // A refused dial of the other workload, which has nothing at its target port, is retried.
        // Half of the first picks lead there.
        let hello = client_hello("outbound_.80_._.echo.app.svc.cluster.local", &["istio"]);
        let refused = async || gateway.metric("strait_dials_total{result=\"refused\"}").await;
        let mut connections = 0;
        while refused().await < 1.0 {
            connections += 1;
            assert!(connections <= 64, "the other workload was never picked");
            let connected = TcpStream::connect(net.address(1, 15443)).await;
            let mut stream = connected.expect("a connection");
            stream.write_all(&hello).await.expect("a hello");
            let mut echoed = vec![0; hello.len()];
            let read = stream.read_exact(&mut echoed).await;
            read.expect("the sidecar's answer");
            assert_eq!(echoed, hello);
        }

        // The certificate is istiod's own, so no proxy has terminated TLS.
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_slice(identities().root.as_bytes());
        roots.add(root.expect("a root")).expect("a root");
        let tls = ClientConfig::builder().with_root_certificates(roots);
        let tls = Arc::new(tls.with_no_client_auth());
        let connected = TcpStream::connect(net.address(1, 15012)).await;
        let name = NAME.try_into().expect("a name");
        let connecting = TlsConnector::from(tls).connect(name, connected.expect("TCP"));
        connecting.await.expect("TLS with istiod");
        let ends = gateway.tunnels_by_reason().await;
        assert!(ends.keys().all(|reason| reason != "no_endpoint"), "{ends:?}");
    });
}
