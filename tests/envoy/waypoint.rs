//! A real Envoy as the waypoint of a service that istiod programs.

use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{
    Address, GatewayAddress, NamespacedHostname, PortList, Service, TunnelProtocol, Workload,
    address,
};
use strait::xds::store::ADDRESS;

use crate::mesh;
use crate::process::{self, Envoy};
use crate::support::istiod::Istiod;
use crate::support::wds::{SERVICE, bytes, changed, service, waypoint_ports, workload};
use crate::support::{CLIENT, Net, identities, pod, run};
use crate::traffic::{self, Moved, TransferRequest, start};

const HOSTNAME: &str = "way.app.svc.cluster.local";
const NAME: &str = "app/way.app.svc.cluster.local";
const IDENTITY: &str = "spiffe://east.local/ns/app/sa/way";
const TUNNELS: u64 = 20;

/// Hosts of the service's own endpoint, where nothing listens, and of the waypoint.
const OWN: u8 = 11;
const WAYPOINT: u8 = 12;

fn received(net: Net) -> Istiod {
    let istiod = Istiod::default();
    let mut behind = service();
    if let Some(address::Type::Service(service)) = &mut behind.r#type {
        let hostname = NamespacedHostname { namespace: "app".into(), hostname: HOSTNAME.into() };
        service.waypoint = Some(GatewayAddress {
            destination: Some(Destination::Hostname(hostname)),
            hbone_mtls_port: 15008,
        });
    }
    istiod.put(ADDRESS, SERVICE, &behind);
    istiod.put(ADDRESS, "own", &workload("own", bytes(net.ip(OWN))));
    let waypoint = Service {
        name: "way".into(),
        namespace: "app".into(),
        hostname: HOSTNAME.into(),
        ports: waypoint_ports(),
        ..Service::default()
    };
    let waypoint = Address { r#type: Some(address::Type::Service(waypoint)) };
    istiod.put(ADDRESS, NAME, &waypoint);
    let pod = changed("way", bytes(net.ip(WAYPOINT)), |pod| {
        let ports = waypoint_ports();
        *pod = Workload {
            services: [(NAME.to_owned(), PortList { ports })].into(),
            service_account: "way".into(),
            tunnel_protocol: TunnelProtocol::None.into(),
            ..std::mem::take(pod)
        };
    });
    istiod.put(ADDRESS, "way", &pod);
    istiod.export(SERVICE);
    istiod
}

#[test]
fn an_envoy_is_the_waypoint_that_is_sent_without_hbone() {
    run(async {
        let Some(program) = process::program("an Envoy as the waypoint") else {
            return;
        };
        let net = Net::new();
        let _application = traffic::application(net).await;
        let istiod = received(net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn(net, "");
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let to_gateway = mesh::client_variables(net, IDENTITY, mesh::Ends::Cleanly);
        let (east, west) = (identities().leaf(IDENTITY), identities().leaf(CLIENT));
        let waypoint = (include_str!("endpoint.yaml"), &to_application[..]);
        let client = (include_str!("client.yaml"), &to_gateway[..]);
        let (waypoint, _client) = tokio::join!(
            Envoy::start(&program, net, WAYPOINT, &east, waypoint),
            Envoy::start(&program, net, 21, &west, client),
        );
        gateway.ready().await;
        for seed in 0..TUNNELS {
            let order = TransferRequest {
                seed,
                up_bytes: 7 * seed,
                down_bytes: 1000 * seed,
                client_ends_first: seed % 2 == 0,
            };
            let started = start(net.address(21, 19001), order).await.expect("a tunnel");
            started.finish(&Moved::new(0)).await.expect("an answer");
        }
        let ended = mesh::ended(&gateway, TUNNELS).await;
        assert_eq!((ended.tunnels(), ended.failed()), (TUNNELS, 0), "{ended}");
        let served = waypoint.stat("http.hbone.downstream_rq_total").await;
        assert_eq!(served, TUNNELS);
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}
