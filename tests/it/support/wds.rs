//! Messages of a control plane about one service, its workloads and its policies.

use std::net::IpAddr;

use strait::grpc::security::string_match::MatchType;
use strait::grpc::security::{Action, Authorization, Clause, Match, Rule, Scope, StringMatch};
use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{
    Address, GatewayAddress, NetworkAddress, Port, PortList, Service, TunnelProtocol, Workload,
    WorkloadType, address,
};

use super::endpoint_port;

pub const HOSTNAME: &str = "echo.app.svc.cluster.local";
pub const SERVICE: &str = "app/echo.app.svc.cluster.local";

/// Returns an address as encoded in messages.
pub fn bytes(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().into(),
        IpAddr::V6(ip) => ip.octets().into(),
    }
}

/// Returns port 80 with the target port of the tests' plain endpoints.
pub fn ports() -> Vec<Port> {
    vec![Port { service_port: 80, target_port: endpoint_port().into(), ..Port::default() }]
}

/// Returns the ports of the Service that istiod creates for a waypoint: those of status and HBONE.
pub fn waypoint_ports() -> Vec<Port> {
    let same = |port| Port { service_port: port, target_port: port, ..Port::default() };
    vec![same(15021), same(15008)]
}

/// Returns the service of [`ECHO`](super::ECHO).
pub fn service() -> Address {
    let service = Service {
        name: "echo".into(),
        namespace: "app".into(),
        hostname: HOSTNAME.into(),
        addresses: vec![NetworkAddress {
            network: "east".into(),
            address: vec![240, 0, 0, 1].into(),
            ..NetworkAddress::default()
        }],
        ports: ports(),
        ..Service::default()
    };
    Address { r#type: Some(address::Type::Service(service)) }
}

/// Returns the name and the body of another service, which has no VIP.
pub fn other_service(name: &str) -> (String, Address) {
    let hostname = format!("{name}.app.svc.cluster.local");
    let key = format!("app/{hostname}");
    let service = Service {
        name: name.into(),
        namespace: "app".into(),
        hostname,
        ports: ports(),
        ..Service::default()
    };
    (key, Address { r#type: Some(address::Type::Service(service)) })
}

/// Returns a healthy workload that serves it by HBONE.
pub fn workload(uid: &str, address: Vec<u8>) -> Address {
    let services = [(SERVICE.to_owned(), PortList { ports: ports() })];
    let workload = Workload {
        uid: uid.into(),
        name: uid.into(),
        namespace: "app".into(),
        addresses: vec![address.into()],
        network: "east".into(),
        tunnel_protocol: TunnelProtocol::Hbone.into(),
        trust_domain: "east.local".into(),
        services: services.into_iter().collect(),
        ..Workload::default()
    };
    Address { r#type: Some(address::Type::Workload(workload)) }
}

/// Returns the same workload, modified by `change`.
pub fn changed(uid: &str, address: Vec<u8>, change: impl FnOnce(&mut Workload)) -> Address {
    let mut message = workload(uid, address);
    if let Some(address::Type::Workload(workload)) = &mut message.r#type {
        change(workload);
    }
    message
}

/// Returns the record for the pods of the service in network `west`, behind the gateway there. It
/// has the ports of the Service, so that a named target port is 0.
pub fn split_horizon() -> (String, Address) {
    let uid = format!("west/SplitHorizonWorkload/west//192.0.2.1/{SERVICE}");
    let record = changed(&uid, Vec::new(), |record| {
        let gateway = NetworkAddress {
            network: "west".into(),
            address: vec![192, 0, 2, 1].into(),
            ..NetworkAddress::default()
        };
        let mut ports = ports();
        ports.iter_mut().for_each(|port| port.target_port = 0);
        *record = Workload {
            addresses: Vec::new(),
            network: "west".into(),
            workload_type: WorkloadType::Pod.into(),
            capacity: Some(2),
            network_gateway: Some(GatewayAddress {
                destination: Some(Destination::Address(gateway)),
                hbone_mtls_port: 15008,
            }),
            cluster_id: "west".into(),
            services: [(SERVICE.to_owned(), PortList { ports })].into(),
            ..std::mem::take(record)
        };
    });
    (uid, record)
}

/// Returns a policy `app/NAME` about peers of the namespace `of`.
pub fn policy(name: &str, scope: Scope, action: Action, of: &str) -> Authorization {
    let namespaces = vec![StringMatch { match_type: Some(MatchType::Exact(of.to_owned())) }];
    let matches = vec![Match { namespaces, ..Match::default() }];
    Authorization {
        name: name.to_owned(),
        namespace: "app".to_owned(),
        scope: scope.into(),
        action: action.into(),
        rules: vec![Rule { clauses: vec![Clause { matches }] }],
        ..Authorization::default()
    }
}
