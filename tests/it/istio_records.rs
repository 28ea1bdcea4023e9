//! Records that istiod sends and ztunnel accepts, even if they cannot be dialled.

use strait::grpc::security::{Action, Authorization, Clause, Match, Rule, Scope};
use strait::grpc::workload::{ApplicationTunnel, Port, TunnelProtocol, address};
use strait::xds::store::{ADDRESS, AUTHORIZATION};

use crate::istio::{asks, gateway};
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{SERVICE, bytes, changed, policy, service, split_horizon, workload};
use crate::support::{Endpoint, Net, identities, run, until};

#[test]
fn the_record_of_a_remote_service_with_a_named_port_is_held() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let (uid, record) = split_horizon();
        istiod.put(ADDRESS, &uid, &record);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(istiod.rejections(), [""; 0]);
        let dump = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("the record", dump, |dump| dump.contains(&uid)).await;
        let (_, page, _) = gateway.run_command(&["status", "app/echo"]).await;
        assert!(page.contains("the workload is in network west"), "{page}");
    });
}

#[test]
fn records_that_ztunnel_accepts_are_not_rejected() {
    run(async {
        let net = Net::new();
        let mut gateway = gateway(net, NAME);
        let istiod = Istiod::default();
        let mut odd = service();
        if let Some(address::Type::Service(service)) = &mut odd.r#type {
            let port =
                |service_port, target_port| Port { service_port, target_port, ..Port::default() };
            service.ports.extend([port(0, 80), port(81, 70_000), port(70_000, 80)]);
        }
        istiod.put(ADDRESS, SERVICE, &odd);
        let plain = changed("plain", bytes(net.ip(12)), |plain| {
            plain.tunnel_protocol = TunnelProtocol::None.into();
            plain.application_tunnel =
                Some(ApplicationTunnel { port: 70_000, ..ApplicationTunnel::default() });
            for list in plain.services.values_mut() {
                list.ports[0].target_port = 0;
            }
        });
        istiod.put(ADDRESS, "plain", &plain);
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let matches = vec![Match { destination_ports: vec![0, 70_000], ..Match::default() }];
        let rules = vec![Rule { clauses: vec![Clause { matches }] }];
        let policy =
            Authorization { rules, ..policy("ports", Scope::Namespace, Action::Deny, "shop") };
        istiod.put(AUTHORIZATION, "app/ports", &policy);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}
