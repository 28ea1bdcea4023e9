//! Resources of tests, as a control plane sends them.

use prost::Message;

use crate::grpc::{security, workload as proto};
use crate::xds::client::Resource;
use crate::xds::store::{ADDRESS, AUTHORIZATION};

pub(crate) fn resource(type_url: &str, name: &str, version: &str, body: &impl Message) -> Resource {
    Resource {
        name: name.into(),
        version: version.into(),
        body: Some(body.encode_to_vec().into()),
        body_type: type_url.into(),
    }
}

/// Returns a workload of `app/echo.app`, whose node is its version.
pub(crate) fn workload(uid: &str, version: &str) -> Resource {
    let ports = vec![proto::Port { service_port: 80, target_port: 8080, app_protocol: 0 }];
    let workload = proto::Workload {
        uid: uid.into(),
        namespace: "app".into(),
        node: version.into(),
        services: [("app/echo.app".to_owned(), proto::PortList { ports })].into(),
        ..proto::Workload::default()
    };
    let message = proto::Address { r#type: Some(proto::address::Type::Workload(workload)) };
    resource(ADDRESS, uid, version, &message)
}

/// Returns a service, named by its namespace and hostname.
pub(crate) fn service(from: proto::Service) -> Resource {
    let name = format!("{}/{}", from.namespace, from.hostname);
    let message = proto::Address { r#type: Some(proto::address::Type::Service(from)) };
    resource(ADDRESS, &name, "1", &message)
}

/// Returns the policy `app/p` about a port. An invalid port gives it an unknown action.
pub(crate) fn policy(scope: i32, port: u32, version: &str) -> Resource {
    named_policy("p", scope, port, version)
}

/// Returns a [`policy`] of namespace `app` with this name.
pub(crate) fn named_policy(name: &str, scope: i32, port: u32, version: &str) -> Resource {
    let one = security::Match { destination_ports: vec![port], ..security::Match::default() };
    let clause = security::Clause { matches: vec![one] };
    let message = security::Authorization {
        name: name.into(),
        namespace: "app".into(),
        scope,
        rules: vec![security::Rule { clauses: vec![clause] }],
        dry_run: port == 0,
        action: if (1..=65535).contains(&port) { 0 } else { 9 },
        ..security::Authorization::default()
    };
    resource(AUTHORIZATION, &format!("app/{name}"), version, &message)
}
