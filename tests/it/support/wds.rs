//! Messages of a control plane about one service, its workloads and who may reach them.

use std::net::IpAddr;

use strait::grpc::security::string_match::MatchType;
use strait::grpc::security::{Action, Authorization, Clause, Match, Rule, Scope, StringMatch};
use strait::grpc::workload::{
    Address, NetworkAddress, Port, PortList, Service, TunnelProtocol, Workload, address,
};

use super::endpoint_port;

pub const HOSTNAME: &str = "echo.app.svc.cluster.local";
pub const SERVICE: &str = "app/echo.app.svc.cluster.local";

/// An address as messages have it.
pub fn bytes(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().into(),
        IpAddr::V6(ip) => ip.octets().into(),
    }
}

/// Port 80 at the target port that plain endpoints of tests have.
pub fn ports() -> Vec<Port> {
    vec![Port {
        service_port: 80,
        target_port: endpoint_port().into(),
        ..Port::default()
    }]
}

/// The service of [`ECHO`](super::ECHO).
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
    Address {
        r#type: Some(address::Type::Service(service)),
    }
}

/// A healthy workload that serves it by HBONE.
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
    Address {
        r#type: Some(address::Type::Workload(workload)),
    }
}

/// The same workload, but for what `change` does to it.
pub fn changed(uid: &str, address: Vec<u8>, change: impl FnOnce(&mut Workload)) -> Address {
    let mut message = workload(uid, address);
    if let Some(address::Type::Workload(workload)) = &mut message.r#type {
        change(workload);
    }
    message
}

/// A policy `app/NAME` about peers of the namespace `of`.
pub fn policy(name: &str, scope: Scope, action: Action, of: &str) -> Authorization {
    let namespaces = vec![StringMatch {
        match_type: Some(MatchType::Exact(of.to_owned())),
    }];
    let matches = vec![Match {
        namespaces,
        ..Match::default()
    }];
    Authorization {
        name: name.to_owned(),
        namespace: "app".to_owned(),
        scope: scope.into(),
        action: action.into(),
        rules: vec![Rule {
            clauses: vec![Clause { matches }],
        }],
        ..Authorization::default()
    }
}
