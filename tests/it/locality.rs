//! Locality of a gateway in a pod: istiod's record of the pod, the pod's variables and labels, and
//! the configuration.

use strait::grpc::workload::load_balancing::{Mode, Scope};
use strait::grpc::workload::{Address, LoadBalancing, Locality, address};
use strait::xds::store::{ADDRESS, CLUSTER};

use crate::istio::asks;
use crate::support::istiod::Istiod;
use crate::support::wds::{HOSTNAME, SERVICE, bytes, changed, service};
use crate::support::{Endpoint, Gateway, Net, identities, pod, run, until};

/// The uid that istiod gives the pods of these tests.
const OWN: &str = "east//Pod/istio-system/eastwest-7d9f";
/// Number of sequential tunnels. All reach one of two endpoints by chance once in a million runs.
const TUNNELS: usize = 20;

fn locality(zone: &str) -> Locality {
    Locality { region: "us-east".into(), zone: zone.into(), subzone: String::new() }
}

/// Returns an istiod with a service that prefers close endpoints, and one in each of two zones.
fn istiod(net: Net) -> Istiod {
    let istiod = Istiod::default();
    let mut service = service();
    if let Some(address::Type::Service(service)) = &mut service.r#type {
        service.load_balancing = Some(LoadBalancing {
            routing_preference: [Scope::Network, Scope::Region, Scope::Zone].map(i32::from).into(),
            mode: Mode::Failover.into(),
            ..LoadBalancing::default()
        });
    }
    istiod.put(ADDRESS, SERVICE, &service);
    for (host, zone) in [(11, "a"), (12, "b")] {
        let workload = changed(zone, bytes(net.ip(host)), |workload| {
            workload.locality = Some(locality(zone));
        });
        istiod.put(ADDRESS, zone, &workload);
    }
    istiod.put(CLUSTER, &format!("inbound-vip|80|tcp|{HOSTNAME}"), &());
    istiod
}

/// Returns the record of the gateway's pod in a zone.
fn record(zone: &str) -> Address {
    changed(OWN, vec![10, 0, 0, 9], |workload| {
        workload.services.clear();
        workload.locality = Some(locality(zone));
    })
}

async fn is_in(gateway: &Gateway, reported: &str) {
    let status = async || gateway.run_command(&["status"]).await.1;
    until(reported, status, |page| page.contains(reported)).await;
}

/// Returns the number of [`TUNNELS`] tunnels that reach the endpoint in zone a.
async fn to_first(gateway: &Gateway, endpoints: &[Endpoint; 2]) -> usize {
    let before = endpoints[0].accepted();
    for _ in 0..TUNNELS {
        asks(gateway).await.expect("a tunnel");
    }
    endpoints[0].accepted() - before
}

async fn endpoints(net: Net) -> [Endpoint; 2] {
    [Endpoint::echo(net.listen(11, 15008).await), Endpoint::echo(net.listen(12, 15008).await)]
}

#[test]
fn a_pod_prefers_the_zone_of_its_record_over_that_of_its_variables() {
    run(async {
        let net = Net::new();
        let endpoints = endpoints(net).await;
        let istiod = istiod(net);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let variables = [("ISTIO_META_LOCALITY", "us-east.b")];
        let mut gateway = pod::spawn_with(net, "", &variables);
        gateway.ready().await;
        is_in(&gateway, "locality us-east/b (ISTIO_META_LOCALITY)").await;
        assert_eq!(to_first(&gateway, &endpoints).await, 0);

        istiod.put(ADDRESS, OWN, &record("a"));
        is_in(&gateway, "locality us-east/a (istiod's record of this pod)").await;
        assert_eq!(to_first(&gateway, &endpoints).await, TUNNELS);
        istiod.put(ADDRESS, OWN, &record("b"));
        is_in(&gateway, "locality us-east/b (istiod's record of this pod)").await;
        assert_eq!(to_first(&gateway, &endpoints).await, 0);
    });
}

#[test]
fn a_dual_stack_pod_prefers_the_zone_of_its_record() {
    run(async {
        let net = Net::new();
        let endpoints = endpoints(net).await;
        let istiod = istiod(net);
        let mut own = record("a");
        if let Some(address::Type::Workload(own)) = &mut own.r#type {
            let second: std::net::Ipv6Addr = "fd00::9".parse().expect("an address");
            own.addresses.push(second.octets().to_vec().into());
        }
        istiod.put(ADDRESS, OWN, &own);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let variables = [("ISTIO_META_LOCALITY", "us-east.b")];
        let mut gateway = pod::spawn_with(net, "", &variables);
        gateway.ready().await;
        is_in(&gateway, "locality us-east/a (istiod's record of this pod)").await;
        assert_eq!(to_first(&gateway, &endpoints).await, TUNNELS);
    });
}

#[test]
fn the_locality_of_the_configuration_wins() {
    run(async {
        let net = Net::new();
        let endpoints = endpoints(net).await;
        let istiod = istiod(net);
        istiod.put(ADDRESS, OWN, &record("a"));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let variables = [("ISTIO_META_LOCALITY", "us-east/a/rack")];
        let file = "gateway: {locality: {region: us-east, zone: b}}\n";
        let mut gateway = pod::spawn_with(net, file, &variables);
        gateway.ready().await;
        is_in(&gateway, "locality us-east/b (gateway.locality)").await;
        assert_eq!(to_first(&gateway, &endpoints).await, 0);
    });
}
